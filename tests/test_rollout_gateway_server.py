"""The gateway over real sockets: the SDKs of OpenAI and Anthropic, unchanged, talk to sessions of a scripted engine."""

import asyncio
import contextlib
import json
import logging
import signal

import agents
import aiohttp
import anthropic
import openai
import pytest

from areax.adapters import tokenizer
from areax.rollout.agents import environment
from areax.rollout.conversation import Session
from areax.rollout.gateway.server import serve
from areax.rollout.gateway.sessions import Limits
from areax.rollout.server import Part
from areax.rollout.types import Completion

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '') }}
{%- endif %}"""
TOKENS = tokenizer.byte_level()
TOKENS.chat_template = TEMPLATE
END = TOKENS.eos_token_id
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>'
USER = [{"role": "user", "content": "Hello?"}]


class Engine:
    """Generates what it is told, one token a byte, and keeps what it was asked."""

    def __init__(self):
        self.script, self.prompts, self.asked = [], [], []
        self.cancelled, self.info = 0, {}
        self.hold = None  # an event to wait for before the last token

    def say(self, *texts, finish="stop"):
        self.script += [(TOKENS.encode(text) + [END] * (finish == "stop"), finish) for text in texts]

    async def __call__(self, prompt, *, on_tokens=None, **sampling):
        out, finish = self.script.pop(0) if self.script else ([], "length")
        self.prompts.append(prompt)
        self.asked.append(sampling)
        try:
            for count in range(1, len(out)) if on_tokens else ():
                on_tokens(out[:count])
                await asyncio.sleep(0)
            if self.hold:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if "refuse" in TOKENS.decode(prompt):
            raise ValueError("the prompt is longer than the context")
        if "break" in TOKENS.decode(prompt):
            raise RuntimeError("the server is gone")
        logp = [-(i + 1) / 8 for i in range(len(out))]
        return Completion(tokens=out, logp=logp, version=[3] * len(out), finish=finish, info=self.info)

    @property
    def texts(self):
        return [TOKENS.decode(prompt) for prompt in self.prompts]


class Place:
    """A gateway, an engine, and a session of it with its key."""

    def __init__(self, gateway, engine):
        self.gateway, self.engine = gateway, engine
        self.session = Session(engine, TOKENS)
        self.key = gateway.open(self.session)

    def openai(self, key=None):
        return openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key=key or self.key, max_retries=0)

    def anthropic(self, key=None):
        return anthropic.AsyncAnthropic(base_url=self.gateway.url, api_key=key or self.key, max_retries=0)

    async def request(self, method, path, key=None, **more):
        """(status, body) of one request; the key is the session's unless another is given."""
        headers = {"authorization": f"Bearer {self.key if key is None else key}"}
        async with aiohttp.ClientSession() as http:
            async with http.request(method, self.gateway.url + path, headers=headers, **more) as reply:
                return reply.status, await reply.json(content_type=None)


def served(test, **options):
    """Runs the coroutine function `test` with a Place."""

    async def run():
        engine = Engine()
        async with serve(TOKENS, **options) as gateway:
            await test(Place(gateway, engine))

    asyncio.run(asyncio.wait_for(run(), 60))


def extends(place):
    """Whether each prompt has all tokens that were read and sampled before it, as they were."""
    done = place.session.interactions
    return all(y.extends and y.prompt[: len(x.tokens)] == x.tokens for x, y in zip(done, done[1:], strict=False))


# -- OpenAI: chat completions ----------------------------------------------------------------------


def test_chat():
    async def test(place):
        place.engine.say("<think>\nHm.\n</think>\n\nHi, you.", "Again.", "no", "yes")
        async with place.openai() as client:
            messages = [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
            ]
            first = await client.chat.completions.create(
                model="gpt-x", messages=messages, temperature=0.5, max_completion_tokens=99, stop="###", logprobs=True,
                metadata={"a": "b"}, user="me", store=False, service_tier="auto", extra_body={"top_k": 5},
            )  # fmt: skip
            (choice,) = first.choices
            assert choice.message.content == "Hi, you."
            assert choice.message.reasoning_content == "Hm."
            assert (choice.finish_reason, first.model) == ("stop", "gpt-x")
            x = place.session.interactions[0]
            n = len(x.completion.tokens)
            assert first.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
                "prompt_tokens": len(x.prompt), "completion_tokens": n, "total_tokens": len(x.prompt) + n,
            }  # fmt: skip
            assert [t.logprob for t in choice.logprobs.content] == x.completion.logp
            assert "".join(t.token for t in choice.logprobs.content).startswith("<think>\nHm.")
            assert place.engine.texts[0].startswith(
                "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOne\ntwo"
            )
            assert place.engine.asked[0] == {"temperature": 0.5, "max_new_tokens": 99, "stop": ("###",), "top_k": 5}
            place.session.set_reward(2, first.id)
            assert x.score.value == 2

            messages += [choice.message, {"role": "user", "content": "Once more."}]
            await client.chat.completions.create(model="m", messages=messages, temperature=0.5, max_tokens=9)
            assert extends(place)

            both = await client.chat.completions.create(model="m", messages=USER, n=2)
            assert sorted(c.message.content for c in both.choices) == ["no", "yes"]
            place.engine.say("cut o", finish="length")
            cut = await client.chat.completions.create(model="m", messages=USER, seed=1, temperature=0)
            assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", "cut o")

    served(test)


def test_chat_tools():
    async def test(place):
        place.engine.say(f"I add.{CALL}{CALL}", "It is 3.5.", CALL)
        tools = [{"type": "function", "function": FUNCTION | {"strict": True}}]
        async with place.openai() as client:
            first = await client.chat.completions.create(model="m", messages=USER, tools=tools)
            message = first.choices[0].message
            assert (message.content, first.choices[0].finish_reason) == ("I add.", "tool_calls")
            a, b = message.tool_calls
            assert a.id != b.id and a.function.name == "add" and json.loads(a.function.arguments) == {"a": 1, "b": 2.5}
            assert json.dumps({"type": "function", "function": FUNCTION}) in place.engine.texts[0]
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3.5"} for call in (a, b)]
            second = await client.chat.completions.create(
                model="m", messages=[*USER, message.model_dump(), *results], tools=tools, tool_choice="auto"
            )
            assert second.choices[0].message.content == "It is 3.5."
            assert extends(place) and place.engine.texts[1].count("<|im_start|>tool\n3.5") == 2
            third = await client.chat.completions.create(model="m", messages=USER, tools=tools, tool_choice="none")
            assert (third.choices[0].message.tool_calls, third.choices[0].message.content) == (None, CALL)
            assert "add" not in place.engine.texts[2]

    served(test)


def test_chat_streamed():
    async def test(place):
        place.engine.say(f"<think>Hm…</think>Hi 😀 you{CALL}")
        place.engine.hold = asyncio.Event()
        async with place.openai() as client:
            stream = await client.chat.completions.create(
                model="m", messages=USER, tools=[{"type": "function", "function": FUNCTION}], stream=True,
                stream_options={"include_usage": True}, logprobs=True,
            )  # fmt: skip
            thought, said, calls, last = "", "", [], None
            async for chunk in stream:
                if not chunk.choices:
                    assert chunk.usage.completion_tokens == len(place.session.interactions[0].completion.tokens)
                    continue
                (last,) = chunk.choices
                thought += getattr(last.delta, "reasoning_content", None) or ""
                said += last.delta.content or ""
                calls += last.delta.tool_calls or []
                if said == "Hi 😀 you":
                    place.engine.hold.set()  # had nothing come before the end, this would never be
            assert (thought, last.finish_reason, chunk.id) == ("Hm…", "tool_calls", place.session.interactions[0].id)
            assert [call.function.arguments for call in calls] == ['{"a": 1, "b": 2.5}']
            assert len(last.logprobs.content) == len(place.session.interactions[0].completion.tokens)
            place.session.set_reward(1, chunk.id)

            place.engine.say("no", "yes")
            async with client.chat.completions.stream(model="m", messages=USER, n=2) as stream:
                both = await stream.get_final_completion()
            assert sorted(choice.message.content for choice in both.choices) == ["no", "yes"]

    served(test)


# -- OpenAI: responses -----------------------------------------------------------------------------

TOOL = {"type": "function", **FUNCTION, "strict": True}


def test_responses():
    async def test(place):
        place.engine.say(f"<think>Hm.</think>I add.{CALL}", "It is 3.5.")
        async with place.openai() as client:
            first = await client.responses.create(
                model="m", input="1 + 2.5?", instructions="Add.", tools=[TOOL], max_output_tokens=50,
                include=["reasoning.encrypted_content"], store=False,
            )  # fmt: skip
            reasoning, message, call = first.output
            assert reasoning.content[0].text == "Hm." and first.output_text == message.content[0].text == "I add."
            assert json.loads(call.arguments) == {"a": 1, "b": 2.5} and first.status == "completed"
            x = place.session.interactions[0]
            assert (first.id, first.usage.input_tokens, first.usage.output_tokens_details.reasoning_tokens) == (
                x.id, len(x.prompt), 3,
            )  # fmt: skip
            assert (
                place.engine.texts[0].startswith("<|im_start|>system\n[{") and "system\nAdd." in place.engine.texts[0]
            )
            items = [
                {"role": "user", "content": [{"type": "input_text", "text": "1 + 2.5?"}]},
                *(item.model_dump(exclude_none=True) for item in first.output),
                {"type": "function_call_output", "call_id": call.call_id, "output": "3.5"},
            ]
            second = await client.responses.create(model="m", input=items, instructions="Add.", tools=[TOOL])
            assert second.output_text == "It is 3.5." and extends(place)
            place.engine.say("cut o", finish="length")
            cut = await client.responses.create(model="m", input="x", text={"format": {"type": "text"}})
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    served(test)


def test_responses_streamed():
    async def test(place):
        place.engine.say(f"<think>Hm.</think>I add.{CALL}")
        async with place.openai() as client:
            async with client.responses.stream(model="m", input="1 + 2.5?", tools=[TOOL]) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
            assert final.output_text == "I add." and final.id == place.session.interactions[0].id
            assert [event.sequence_number for event in events] == list(range(len(events)))
            joined = lambda kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
            assert (joined("reasoning_text"), joined("output_text")) == ("Hm.", "I add.")
            assert json.loads(joined("function_call_arguments")) == {"a": 1, "b": 2.5}
            assert events[-1].type == "response.completed" and events[-1].response.usage.total_tokens > 0

            place.engine.say(f"<think>Hm.</think>I add.{CALL}")
            whole = await client.responses.parse(model="m", input="1 + 2.5?", tools=[TOOL])
            names = {"id", "call_id", "parsed_arguments"}
            plain = lambda response: [item.model_dump(exclude=names, exclude_none=True) for item in response.output]
            assert plain(final) == plain(whole)

    served(test)


# -- Anthropic -------------------------------------------------------------------------------------


def test_messages():
    async def test(place):
        place.engine.say(f"Hm.\n</think>\n\nI add.{CALL}{CALL}", "It is 3.5.")
        tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
        asked = {
            "model": "claude-x", "max_tokens": 2000, "system": [{"type": "text", "text": "Add."}], "tools": tools,
            "messages": USER, "thinking": {"type": "enabled", "budget_tokens": 1024},
        }  # fmt: skip
        async with place.anthropic() as client:
            count = await client.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
            first = await client.messages.create(**asked, stop_sequences=["###"], metadata={"user_id": "me"})
            thinking, text, a, b = first.content
            assert (thinking.thinking, text.text, a.input, first.stop_reason) == (
                "Hm.", "I add.", {"a": 1, "b": 2.5}, "tool_use",
            )  # fmt: skip
            x = place.session.interactions[0]
            assert (first.id, first.usage.output_tokens) == (x.id, len(x.completion.tokens))
            assert first.usage.input_tokens == count.input_tokens == len(x.prompt)
            assert place.engine.texts[0].endswith("<think>\n") and "system\nAdd." in place.engine.texts[0]
            assert place.engine.asked[0] == {"max_new_tokens": 2000, "stop": ("###",)}
            results = [
                {"type": "tool_result", "tool_use_id": a.id, "content": "3.5"},
                {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "3.5"}]},
                {"type": "text", "text": "And?"},
            ]
            asked |= {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": first.content},
                    {"role": "user", "content": results},
                ]
            }
            second = await client.messages.create(**asked | {"thinking": {"type": "disabled"}})
            assert second.content[0].text == "It is 3.5." and second.stop_reason == "end_turn"
            assert (
                "<|im_start|>tool\n3.5<|im_end|>\n<|im_start|>tool\n3.5<|im_end|>\n<|im_start|>user\nAnd?"
                in (place.engine.texts[1])
            )
            place.engine.say("cut o", finish="length")
            cut = await client.messages.create(model="m", max_tokens=5, messages=USER)
            assert (cut.stop_reason, place.session.interactions[-1].parent) == ("max_tokens", None)
            place.engine.info = {"finish_reason": {"type": "stop", "matched": "##"}}
            place.engine.say("so##")
            ended = await client.messages.create(model="m", max_tokens=5, messages=USER, stop_sequences=["##"])
            assert (ended.content[0].text, ended.stop_reason, ended.stop_sequence) == ("so", "stop_sequence", "##")

    served(test)


def test_messages_go_on_from_each_other():
    async def test(place):
        place.engine.say(f"<think>\nHm.\n</think>\n\nI add.{CALL}", "It is 3.5.")
        tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
        async with place.anthropic() as client:
            first = await client.messages.create(model="m", max_tokens=50, messages=USER, tools=tools)
            result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "3.5"}
            messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            await client.messages.create(model="m", max_tokens=50, messages=messages, tools=tools)
        assert len(place.session.interactions) == 2 and extends(place)

    served(test)


def test_messages_streamed():
    async def test(place):
        place.engine.say(f"<think>Hm.</think>I add.{CALL}{CALL}")
        tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
        async with place.anthropic() as client:
            async with client.messages.stream(model="m", max_tokens=50, messages=USER, tools=tools) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (final.content[0].thinking, final.content[1].text) == ("Hm.", "I add.")
        assert final.content[3].input == {"a": 1, "b": 2.5}
        x = place.session.interactions[0]
        assert (final.id, final.stop_reason) == (x.id, "tool_use")
        assert (final.usage.input_tokens, final.usage.output_tokens) == (len(x.prompt), len(x.completion.tokens))
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4

    served(test)


# -- openai-agents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
def test_an_agent_of_openai_agents(kind, streamed):
    agents.set_tracing_disabled(True)
    seen = []

    @agents.function_tool
    def add(a: float, b: float) -> str:
        """Adds two numbers."""
        seen.append(("add", a, b))
        return str(a + b)

    @agents.function_tool
    def lookup(word: str) -> str:
        """Looks a word up."""
        seen.append(("lookup", word))
        return f"{word} is a word"

    async def test(place):
        look = '<tool_call>\n{"name": "lookup", "arguments": {"word": "été"}}\n</tool_call>'
        place.engine.say(f"<think>\nHm.\n</think>\n\nFirst.{CALL}\n{look}", look, "All done.")
        async with place.openai() as client:
            agent = agents.Agent("a", instructions="Use tools.", tools=[add, lookup], model=kind("m", client))
            if streamed:
                result = agents.Runner.run_streamed(agent, "Go.")
                assert [event async for event in result.stream_events()]
            else:
                result = await agents.Runner.run(agent, "Go.")
        assert result.final_output == "All done."
        assert seen == [("add", 1, 2.5), ("lookup", "été"), ("lookup", "été")]
        assert len(place.session.interactions) == 3 and extends(place)
        place.session.set_reward(1)
        (row,) = place.session.samples()
        assert row.mask.sum() == sum(len(x.completion.tokens) for x in place.session.interactions)

    served(test)


# -- OpenAI: completions ---------------------------------------------------------------------------


async def reading(tokens, *, top_k=0):
    """Says of token t at place i that its log-probability is -(t + i) / 1000, and that token 40 is likelier."""
    inputs = [[None if i == 0 else -(t + i) / 1000, t, None] for i, t in enumerate(tokens)]
    tops = [None if i == 0 else [[-0.01, 40, None], [-9.0, 41, None]][:top_k] for i in range(len(tokens))]
    return "url", Part([], [], [], "length", "", {}, inputs=inputs, input_top=tops if top_k else ())


def test_completions():
    async def test(place):
        place.engine.say(" there", "a", "b", "c", "streamed 😀")
        async with place.openai() as client:
            one = await client.completions.create(model="m", prompt="Hello", stop=["\n"], max_tokens=7)
            assert (one.choices[0].text, one.choices[0].finish_reason) == (" there", "stop")
            assert place.engine.asked[0] == {"max_new_tokens": 7, "stop": ("\n",)}
            prompts = [[5, 6], [7, 8]]
            two = await client.completions.create(model="m", prompt=prompts, logprobs=0, echo=False)
            assert [choice.text for choice in two.choices] == ["a", "b"] and place.engine.prompts[1:] == prompts
            assert two.choices[0].logprobs.token_logprobs == [-1 / 8, -2 / 8]
            assert two.usage.prompt_tokens == 4
            await client.completions.create(model="m", prompt="x", seed=0, temperature=0)
            stream = await client.completions.create(model="m", prompt="x", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "streamed 😀"

    served(test)


@pytest.mark.parametrize("most", [0, 1])
def test_loglikelihoods_of_a_prompt(most):
    """As lm-eval's local-completions asks for them."""

    async def test(place):
        place.engine.say("c")
        prompt = TOKENS.encode("abc")
        async with place.openai() as client:
            done = await client.completions.create(
                model="m", prompt=[prompt], temperature=0, max_tokens=most, logprobs=1, seed=1234, echo=True
            )
        found = done.choices[0].logprobs
        sampled = place.session.interactions[0].completion.tokens if most else []
        ids = [*prompt, *sampled]
        assert found.token_logprobs == [None] + [-(t + i) / 1000 for i, t in enumerate(ids)][1:]
        assert found.top_logprobs == [None] + [{TOKENS.decode([40]): -0.01}] * (len(ids) - 1)
        assert found.tokens == [TOKENS.decode([t]) for t in ids]
        assert done.choices[0].text == TOKENS.decode(prompt) + ("c" if most else "")
        assert len(place.session.interactions) == most

    served(test, read=reading)


# -- what is refused -------------------------------------------------------------------------------

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
CHAT, PROMPT = {"model": "m", "messages": USER}, {"model": "m", "prompt": "x"}
INPUT, MESSAGE = {"model": "m", "input": "x"}, {"model": "m", "messages": USER, "max_tokens": 5}
NAMED = [{"type": "function", "function": {"name": "f"}}]


REFUSED = {
    "chat/completions": [
        ({}, "messages"),
        (CHAT | {"messages": []}, "messages"),
        (CHAT | {"messages": [{"role": "wizard", "content": ""}]}, "messages"),
        (CHAT | {"messages": IMAGE}, "messages"),
        (CHAT | {"messages": [{"role": "user", "content": [1]}]}, "messages"),
        (CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (CHAT | {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        (CHAT | {"messages": [{"role": "assistant", "content": "", "audio": {"id": "x"}}]}, "audio"),
        (CHAT | {"tool_choice": "required", "tools": NAMED}, "tool_choice"),
        (CHAT | {"tool_choice": NAMED[0], "tools": NAMED}, "tool_choice"),
        (CHAT | {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        (CHAT | {"tools": NAMED, "parallel_tool_calls": False}, "parallel_tool_calls"),
        (CHAT | {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAT | {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT | {"seed": 1}, "seed"),
        (CHAT | {"n": 0}, "n"),
        (CHAT | {"n": 10**6}, "n"),
        (CHAT | {"temperature": "hot"}, "temperature"),
        (CHAT | {"stop": [""]}, "stop"),
        (CHAT | {"stream": "yes"}, "stream"),
        (CHAT | {"stream_options": {"odd": 1}}, "odd"),
        (CHAT | {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT | {"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format"),
        (CHAT | {"unheard_of": 1}, "unheard_of"),
        *(
            (CHAT | {"chat_template_kwargs": bad}, "chat_template_kwargs")
            for bad in (
                3,
                {"chat_template": "{{ 1 }}"},
                {"tokenize": True},
                {"tools": []},
                {"x": ["y"]},
            )
        ),
        ([1], "body"),
    ],
    "completions": [
        ({}, "prompt"),
        *(
            (PROMPT | {"prompt": bad}, "prompt")
            for bad in ("", [], [1, 2.5], [10**9], [["a"]], [[]], ["a", 1], [[1], 1], 3)
        ),
        (PROMPT | {"logprobs": 1}, "logprobs"),  # this gateway reads no prompts
        (PROMPT | {"echo": True, "logprobs": 0}, "logprobs"),
        (PROMPT | {"echo": True, "stream": True}, "stream"),
        (PROMPT | {"max_tokens": 0}, "max_tokens"),
        (PROMPT | {"best_of": 3}, "best_of"),
        (PROMPT | {"suffix": "x"}, "suffix"),
    ],
    "responses": [
        ({}, "input"),
        (INPUT | {"previous_response_id": "resp_1"}, "previous_response_id"),
        (INPUT | {"background": True}, "background"),
        (INPUT | {"tools": [{"type": "web_search"}]}, "tools"),
        (INPUT | {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (INPUT | {"reasoning": {"effort": "high"}}, "reasoning"),
        (INPUT | {"include": ["message.output_text.logprobs"]}, "include"),
    ],
    "messages": [
        ({"messages": USER}, "max_tokens"),
        (MESSAGE | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        (MESSAGE | {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGE | {"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages"),
        (MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        (MESSAGE | {"thinking": {"type": "between_tools"}}, "thinking"),
        (MESSAGE | {"output_config": {"effort": "high"}}, "effort"),
        (MESSAGE | {"container": "c"}, "container"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_name(path):
    async def test(place):
        for body, name in REFUSED[path]:
            status, answer = await place.request("POST", f"/v1/{path}", json=body)
            assert status == 400, body
            error = answer["error"]
            assert error["type"] == "invalid_request_error" and error["message"].startswith(f"{name}:")
            assert answer["type"] == "error" if path == "messages" else error["param"] == name
        assert not place.engine.prompts

    served(test)


def test_a_schema_is_passed_on():
    async def test(place):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        flat = {"type": "json_schema", "name": "n", "schema": SCHEMA}
        for path, body in (
            ("chat/completions", CHAT | {"response_format": form}),
            ("responses", INPUT | {"text": {"format": flat}}),
            ("messages", MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ):
            assert (await place.request("POST", f"/v1/{path}", json=body))[0] == 200
        assert [json.loads(asked["json_schema"]) for asked in place.engine.asked] == [SCHEMA] * 3

    served(test)


def test_the_sdks_find_a_session_by_their_environment(monkeypatch):
    async def test(place):
        for name, value in environment(f"{place.gateway.url}/v1", place.key).items():
            monkeypatch.setenv(name, value)
        place.engine.say("one", "two")
        async with openai.AsyncOpenAI() as client, anthropic.AsyncAnthropic() as other:
            one = await client.chat.completions.create(model="m", messages=USER)
            two = await other.messages.create(model="m", messages=USER, max_tokens=5)
        assert (one.choices[0].message.content, two.content[0].text) == ("one", "two")

    served(test)


@pytest.mark.parametrize("stream", [False, True])
def test_failures_have_the_sdks_own_types(stream):
    async def test(place):
        async with place.openai() as client, place.anthropic() as other:
            create, write = client.chat.completions.create, other.messages.create
            for word, theirs, status in (("refuse", "BadRequestError", 400), ("break", "InternalServerError", 500)):
                said = {"model": "m", "messages": [{"role": "user", "content": word}], "stream": stream}
                with pytest.raises(getattr(openai, theirs)) as failed:
                    await create(**said)
                assert failed.value.status_code == status
                with pytest.raises(getattr(anthropic, theirs)):
                    await write(**said, max_tokens=5)
        async with place.openai("wrong") as client, place.anthropic("wrong") as other:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=USER)
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(model="m", messages=USER, max_tokens=5)

    served(test)


def test_a_failure_on_the_way_ends_the_stream_with_an_error():
    async def test(place):
        said = [{"role": "user", "content": "break"}]
        async with place.openai() as client, place.anthropic() as other:
            place.engine.say("some text", "some text", "some text")
            with pytest.raises(openai.APIError, match="the server is gone"):
                async for _ in await client.chat.completions.create(model="m", messages=said, stream=True):
                    pass
            events = [event async for event in await client.responses.create(model="m", input=said, stream=True)]
            assert events[-1].type == "response.failed" and "is gone" in events[-1].response.error.message
            with pytest.raises(anthropic.APIStatusError, match="the server is gone"):
                async for _ in await other.messages.create(model="m", messages=said, stream=True, max_tokens=5):
                    pass

    served(test)


# -- connections and sessions ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_connection_ends_the_generation(stream):
    async def test(place):
        place.engine.say("some text")
        place.engine.hold = asyncio.Event()
        async with place.openai() as client:
            asked = client.chat.completions.create(model="m", messages=USER, stream=stream)
            if stream:
                await (await asked).close()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asked, 0.2)
        while not place.engine.cancelled:
            await asyncio.sleep(0.01)
        place.engine.hold = None
        assert (await place.request("POST", "/v1/chat/completions", json=CHAT))[0] == 200
        assert len(place.session.interactions) == 1

    served(test)


def test_a_closed_session_ends_what_runs_in_it():
    async def test(place):
        place.engine.hold = asyncio.Event()
        running = asyncio.create_task(place.request("POST", "/v1/chat/completions", json=CHAT))
        while not place.engine.prompts:
            await asyncio.sleep(0.01)
        await place.gateway.close(place.key)
        assert (await running)[0] == 409 and place.engine.cancelled == 1
        assert (await place.request("POST", "/v1/chat/completions", json=CHAT))[0] == 401
        await place.gateway.close(place.key)

    served(test)


def test_limits_of_sessions():
    async def test(place):
        place.engine.hold = asyncio.Event()
        running = [asyncio.create_task(place.request("POST", "/v1/completions", json=PROMPT)) for _ in range(2)]
        while len(place.engine.prompts) < 2:
            await asyncio.sleep(0.01)
        assert (await place.request("POST", "/v1/completions", json=PROMPT))[0] == 429
        place.engine.hold.set()
        assert [(await one)[0] for one in running] == [200, 200]
        with pytest.raises(ValueError, match="already open"):
            place.gateway.open(place.session)
        place.gateway.open(Session(place.engine, TOKENS))
        with pytest.raises(RuntimeError, match="at most 2 sessions"):
            place.gateway.open(Session(place.engine, TOKENS))

    served(test, limits=Limits(generations=2, sessions=2))


def online(**options):
    """Options of `serve` for sessions that are started over HTTP; those that ended are in `ended`."""
    engine, ended = Engine(), []

    async def on_start(wanted):
        if wanted.get("task") == "odd":
            raise ValueError("task: no such task")
        if wanted.get("task") == "later":
            raise RuntimeError("no capacity")
        return Session(engine, TOKENS)

    async def on_end(session):
        ended.append(session)

    return engine, ended, {"admin_key": "the admin's", "on_start": on_start, "on_end": on_end, **options}


def test_sessions_over_http():
    engine, ended, options = online()

    async def test(place):
        admin = "the admin's"
        for task, status in (("odd", 400), ("later", 503)):
            assert (await place.request("POST", "/sessions", admin, json={"task": task}))[0] == status
        _, started = await place.request("POST", "/sessions", admin, json={"task": "sum"})
        key, path = started["api_key"], f"/sessions/{started['id']}"
        engine.say("One.", "Two.")
        async with openai.AsyncOpenAI(base_url=started["base_url"], api_key=key, max_retries=0) as client:
            one = await client.chat.completions.create(model="m", messages=USER)
            await client.chat.completions.create(model="m", messages=USER)
            assert [model.id async for model in client.models.list()] == ["areax"]
        for body in (
            {"value": 1, "interaction": "other"},
            {"value": "good"},
            {},
            {"value": 10**400},
            {"value": 1, "x": 2},
        ):
            assert (await place.request("POST", f"{path}/reward", key, json=body))[0] == 400
        assert (await place.request("POST", f"{path}/reward", key, json={"value": 1, "interaction": one.id}))[0] == 200
        assert (await place.request("POST", f"{path}/reward", key, json={"value": {"style": 0.5}}))[0] == 200
        _, export = await place.request("GET", f"{path}/trajectories?style=interactions&discount=0.5", key)
        first, second = export["rows"]
        assert (first["rewards"][0][1], second["rewards"][0][1]) == (1, 0.5)
        assert (
            TOKENS.decode([t for t, m in zip(first["tokens"], first["mask"], strict=True) if m])
            == f"One.{TOKENS.eos_token}"
        )
        assert {v for v, m in zip(first["version"], first["mask"], strict=True) if m} == {3}
        await place.request("POST", f"{path}/reward", admin, json={"value": None})
        _, export = await place.request("GET", f"{path}/trajectories", admin)
        assert export["rows"][0]["rewards"][0][1] is None
        for query in ("style=odd", "discount=x", "discount=nan", "discount=0.5"):
            assert (await place.request("GET", f"{path}/trajectories?{query}", key))[0] == 400
        assert await place.request("DELETE", path, key) == (200, {"id": started["id"], "ended": True})
        assert [session.id for session in ended] == [started["id"]]
        assert (await place.request("DELETE", path, key))[0] == 401
        assert (await place.request("DELETE", path, admin))[0] == 404

    served(test, **options)


def test_sessions_expire():
    engine, ended, options = online(limits=Limits(idle_s=0.2, total_s=0.6))

    async def test(place):
        start = time_of()
        ids = []
        for _ in range(2):
            _, started = await place.request("POST", "/sessions", "the admin's")
            ids.append(started["id"])
        engine.hold = asyncio.Event()
        busy = await place.request("POST", "/v1/completions", started["api_key"], json=PROMPT)  # ended by total_s
        assert busy[0] == 409 and time_of() - start > 0.6
        assert [session.id for session in ended] == ids
        assert (await place.request("GET", "/v1/models"))[0] == 200  # what was opened in the process stays

    served(test, **options)


def time_of():
    return asyncio.get_running_loop().time()


# -- security --------------------------------------------------------------------------------------


async def good(place):
    """The gateway still serves."""
    place.engine.say("fine")
    status, answer = await place.request("POST", "/v1/chat/completions", json=CHAT)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "fine"


def test_no_session_reaches_another():
    engine, ended, options = online()

    async def test(place):
        _, mine = await place.request("POST", "/sessions", "the admin's")
        _, other = await place.request("POST", "/sessions", "the admin's")
        engine.say("secret")
        await place.request("POST", "/v1/chat/completions", other["api_key"], json=CHAT)
        for method, tail, more in (
            ("GET", "/trajectories", {}),
            ("POST", "/reward", {"json": {"value": 1}}),
            ("DELETE", "", {}),
        ):
            for key, status in (
                (mine["api_key"], 404),
                (place.key, 404),
                ("", 401),
                ("guess", 401),
                (other["id"], 401),
            ):
                assert (await place.request(method, f"/sessions/{other['id']}{tail}", key, **more))[0] == status
            unknown = await place.request(method, f"/sessions/{'0' * 16}{tail}", mine["api_key"], **more)
            assert unknown == await place.request(method, f"/sessions/{other['id']}{tail}", mine["api_key"], **more)
        for key in (mine["api_key"], "", "the admin'", "the admin's ", "The admin's"):
            status, _ = await place.request("POST", "/sessions", key)
            assert status == (
                200 if key == "the admin's " else 401
            )  # white space around a header's value is none of it
        assert not ended and not place.session.interactions
        await good(place)

    served(test, **options)


def test_nobody_is_admin_without_an_admin_key():
    async def test(place):
        for key in ("", place.key):
            assert (await place.request("POST", "/sessions", key))[0] == 401
        await good(place)

    served(test)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_open_address_needs_an_admin_key(host):
    async def run():
        async with serve(TOKENS, host=host):
            pass

    with pytest.raises(ValueError, match="needs an admin_key"):
        asyncio.run(run())


def test_signals_stay_with_the_program():
    before = signal.getsignal(signal.SIGTERM)

    async def test(place):
        assert signal.getsignal(signal.SIGTERM) == before

    served(test)


def test_bad_choices():
    async def run(**options):
        async with serve(TOKENS, **options) as gateway:
            async with serve(TOKENS, port=int(gateway.url.rpartition(":")[2])):
                pass

    for options, words in (
        ({"style": "odd"}, "style must be"),
        ({"port": -1}, "port must be"),
        ({}, "cannot listen"),
    ):
        with pytest.raises(ValueError, match=words):
            asyncio.run(run(**options))


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb(declared, caplog):
    async def pieces():
        for _ in range(1600):
            yield b" " * 65536

    async def test(place):
        size = {"content-length": str(1600 * 65536)} if declared else {}
        async with aiohttp.ClientSession() as http:
            with contextlib.suppress(aiohttp.ClientOSError, ConnectionError):  # it may be cut off while it sends
                headers = {"authorization": f"Bearer {place.key}", **size}
                url = f"{place.gateway.url}/v1/chat/completions"
                async with http.post(url, data=pieces(), headers=headers) as reply:
                    assert reply.status == 413
        await good(place)
        refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert refused == ["refused: POST '/v1/chat/completions': 413 HTTPException"]

    with caplog.at_level(logging.WARNING):
        served(test, limits=Limits(body_bytes=2**20))


async def raw(place, sent, *, wait=5.0):
    """What comes back for bytes on a connection of its own, until the server closes it."""
    reader, writer = await asyncio.open_connection(*place.gateway.url.removeprefix("http://").split(":"))
    try:
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), wait)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_slow_requests(caplog):
    async def test(place):
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {place.key}\r\n".encode()
        late = await raw(place, head + b"content-length: 100\r\n\r\n{")
        assert late.startswith(b"HTTP/1.1 408")
        assert await raw(place, head) == b""  # headers that never end
        assert await raw(place, b"") == b""
        assert place.key not in caplog.text
        await good(place)

    with caplog.at_level(logging.WARNING):
        served(test, limits=Limits(body_s=0.2, head_s=0.2))


def test_a_body_that_comes_after_the_end_of_its_session_is_refused():
    async def test(place):
        reader, writer = await asyncio.open_connection(*place.gateway.url.removeprefix("http://").split(":"))
        body = json.dumps({"model": "m", "prompt": [5], "max_tokens": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {place.key}\r\n"
        writer.write(head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        await writer.drain()
        await asyncio.sleep(0.2)
        await place.gateway.close(place.key)
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 409")
        writer.close()
        assert place.session.interactions == []

    served(test)


def test_header_floods():
    async def test(place):
        line = b"GET /health HTTP/1.1\r\nhost: x\r\n"
        many = await raw(place, line + b"".join(b"x-%d: y\r\n" % i for i in range(150)) + b"\r\n")
        assert many.startswith(b"HTTP/1.1 431")
        long = await raw(place, line + b"x: " + b"y" * 70_000 + b"\r\n\r\n")
        assert long.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        endless = await raw(place, line + b"x: " + b"y" * 5_000_000)
        assert not endless or endless.startswith(b"HTTP/1.1 400")
        assert (await raw(place, b"\x00\xff\r\n\r\n")).startswith(b"HTTP/1.1 400")
        await good(place)

    served(test)


def test_path_tricks():
    async def test(place):
        for id in (
            "../../etc/passwd",
            "%2e%2e%2fetc%2fpasswd",
            "%00",
            "a" * 5000,
            "%ff",
            "*",
            "..",
            f"{place.session.id}/..",
        ):
            line = f"GET /sessions/{id}/trajectories HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            answer = await raw(place, f"{line}authorization: Bearer {place.key}\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 404"), id
        for bad in (b"{", b"\xff", b'{"a": NaN}', b"[" * 200_000, b'{"messages": "\\ud800"}'):
            status, answer = await place.request("POST", "/v1/chat/completions", data=bad)
            assert status == 400 and answer["error"]["param"] == "body"
        assert (await place.request("GET", "/v1/chat/completions"))[0] == 405
        await good(place)

    served(test)
