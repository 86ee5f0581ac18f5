"""The OpenAI chat completions, responses and completions APIs of the gateway, used through unmodified SDKs."""

import asyncio
import functools
import json

import pytest
from gateways import CALL, FUNCTION, TEMPLATE, TOKENS, USER, extends, served
from openai import BadRequestError

from areax.rollout.servers.types import Part


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
            assert place.engine.texts[0].startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOnetwo")
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


def test_tool_calls_are_read_in_the_format_of_the_chat_template(monkeypatch):
    llama = TEMPLATE.replace("tool_call>", "python>") + """{# <|start_header_id|> <|eot_id|> "parameters": #}"""
    monkeypatch.setattr(TOKENS, "chat_template", llama)

    async def test(place):
        place.engine.say('{"name": "add", "parameters": {"a": 1, "b": 2.5}}')
        async with place.openai() as client:
            tools = [{"type": "function", "function": FUNCTION}]
            answer = await client.chat.completions.create(model="m", messages=USER, tools=tools)
            [call] = answer.choices[0].message.tool_calls
            assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2.5}

    served(test)


@pytest.mark.parametrize("style", ["unknown", "gpt_oss"])
def test_what_cannot_be_forced_or_read_in_a_format_is_refused(monkeypatch, style):
    channels = "{# <|start|><|channel|><|message|><|end|> #}" if style == "gpt_oss" else ""
    monkeypatch.setattr(TOKENS, "chat_template", TEMPLATE.replace("tool_call>", "call>") + channels)

    async def test(place):
        async with place.openai() as client:
            ask = functools.partial(client.chat.completions.create, model="m", messages=USER)
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
            with pytest.raises(BadRequestError, match=f"response_format: cannot be forced here.* got {style}"):
                await ask(response_format=form)
            tools = [{"type": "function", "function": FUNCTION}]
            if style == "gpt_oss":
                place.engine.say('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}')
                [call] = (await ask(tools=tools)).choices[0].message.tool_calls
                assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
            else:
                with pytest.raises(BadRequestError, match="tools: the format of this model's calls is not known"):
                    await ask(tools=tools)
                place.engine.say("<think>Hm.</think>Yes.")
                message = (await ask()).choices[0].message
                assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")

    served(test)


def test_chat_with_tools():
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


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_one_call_ends_behind_it(stream):
    async def test(place):
        place.engine.say(f"I add.{CALL}{CALL} And more.", "It is 3.5.")
        tools = [{"type": "function", "function": FUNCTION}]
        async with place.openai() as client:
            ask = {"model": "m", "tools": tools, "parallel_tool_calls": False}
            if stream:
                async with client.chat.completions.stream(messages=USER, **ask) as events:
                    first = await events.get_final_completion()
            else:
                first = await client.chat.completions.create(messages=USER, **ask)
            (choice,) = first.choices
            [call] = choice.message.tool_calls
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
            x = place.session.interactions[0]
            assert TOKENS.decode(x.completion.tokens) == x.text == f"I add.{CALL}" and x.completion.finish == "stop"
            assert len(x.completion.logp) == len(x.completion.version) == len(x.completion.tokens)
            said = {"role": "assistant", "content": "I add.", "tool_calls": [call.model_dump(exclude={"index"})]}
            result = {"role": "tool", "tool_call_id": call.id, "content": "3.5"}
            second = await client.chat.completions.create(messages=[*USER, said, result], **ask)
            assert second.choices[0].message.content == "It is 3.5." and extends(place)
            assert place.engine.texts[1].count("<tool_call>") == 1

    served(test)


def test_a_call_that_is_cut():
    async def test(place):
        text = f"I add.{CALL}"
        for end, arguments in ((-12, '{"a": 1, "b": 2.5}'), (-17, '{"a": 1, "b": 2'), (-34, "")):
            place.engine.say(text[:end], text[:end], finish="length")
            async with place.openai() as client:
                tools = [{"type": "function", "function": FUNCTION}]
                (choice,) = (await client.chat.completions.create(model="m", messages=USER, tools=tools)).choices
                assert (choice.finish_reason, choice.message.content) == ("length", "I add.")
                assert [call.function.arguments for call in choice.message.tool_calls] == [arguments]
                async with client.responses.stream(model="m", input="x", tools=[TOOL | {"strict": False}]) as stream:
                    final = [event async for event in stream][-1].response
                kinds = [(item.type, item.status) for item in final.output]
                whole = "completed" if arguments[-1:] == "}" else "incomplete"
                assert kinds == [("message", "completed"), ("function_call", whole)] and final.status == "incomplete"
                assert final.output[1].arguments == arguments

    served(test)


def test_streamed_chat():
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
                    place.engine.hold.set()  # never reached if nothing arrived before the end
            assert (thought, last.finish_reason, chunk.id) == ("Hm…", "tool_calls", place.session.interactions[0].id)
            assert [call.function.arguments for call in calls] == ['{"a": 1, "b": 2.5}']
            assert len(last.logprobs.content) == len(place.session.interactions[0].completion.tokens)
            place.session.set_reward(1, chunk.id)

            place.engine.say("no", "yes")
            async with client.chat.completions.stream(model="m", messages=USER, n=2) as stream:
                both = await stream.get_final_completion()
            assert sorted(choice.message.content for choice in both.choices) == ["no", "yes"]

    served(test)


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


def test_responses_that_refer_to_earlier_ones():
    async def test(place):
        place.engine.say(f"<think>Hm.</think>I add.{CALL}", "It is 3.5.", "It is 3.5.", "Yes.")
        async with place.openai() as client:
            ask = {"model": "m", "instructions": "Add.", "tools": [TOOL]}
            first = await client.responses.create(input="1 + 2.5?", **ask)
            result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "3.5"}
            items = [{"type": "item_reference", "id": item.id} for item in first.output]
            user = {"role": "user", "content": "1 + 2.5?"}
            await client.responses.create(input=[user, *items, result], **ask)
            second = await client.responses.create(input=[result], previous_response_id=first.id, **ask)
            third = await client.responses.create(input="Sure?", previous_response_id=second.id, store=False, **ask)
            assert third.output_text == "Yes." and not third.store
            assert place.engine.prompts[1] == place.engine.prompts[2]
            assert [x.parent for x in place.session.interactions] == [None, *place.session.interactions[:1] * 2,
                                                                      place.session.interactions[2]]  # fmt: skip
            assert all(x.extends for x in place.session.interactions[1:])
            status, answer = await place.request(
                "POST", "/v1/responses", json={"input": "x", "previous_response_id": third.id}
            )
            assert status == 400 and answer["error"]["param"] == "previous_response_id"

    served(test)


def test_streamed_responses():
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


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_an_openai_agents_sdk_agent(kind, streamed):
    import agents  # not in workers without this test

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
            model = getattr(agents, kind)("m", client)
            agent = agents.Agent("a", instructions="Use tools.", tools=[add, lookup], model=model)
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


async def reading(tokens, *, top_k=0):
    """Scores token t at position i with log-probability -(t + i) / 1000, and reports token 40 as the likeliest."""
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
    """As requested by lm-eval's local-completions."""

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
