"""What a gateway refuses and what it passes on, and how its failures appear in the SDKs."""

import json

import anthropic
import openai
import pytest
from gateways import CHAT, INPUT, MESSAGE, PROMPT, SCHEMA, USER, served

from areax.rollout.workflows.agents import session_variables

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
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
        (CHAT | {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAT | {"repetition_penalty": 1.1}, "repetition_penalty"),
        (CHAT | {"ignore_eos": True}, "ignore_eos"),
        (CHAT | {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT | {"return_token_ids": 1}, "return_token_ids"),
        (CHAT | {"reasoning_effort": "lo"}, "reasoning_effort"),
        (CHAT | {"verbosity": "low"}, "verbosity"),
        (CHAT | {"seed": 1}, "seed"),
        (CHAT | {"model": ["m"]}, "model"),
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
        (PROMPT | {"logprobs": 1}, "logprobs"),  # this gateway cannot score prompts
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
        (INPUT | {"reasoning": {"effort": "highest"}}, "reasoning.effort"),
        (INPUT | {"reasoning": {"summary": "concise"}}, "summary"),
        (INPUT | {"text": {"verbosity": "low"}}, "text.verbosity"),
        (INPUT | {"include": ["message.output_text.logprobs"]}, "include"),
    ],
    "messages": [
        ({"messages": USER}, "max_tokens"),
        (MESSAGE | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        (MESSAGE | {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGE | {"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages"),
        (MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        (MESSAGE | {"thinking": {"type": "between_tools"}}, "thinking"),
        (MESSAGE | {"output_config": {"effort": "highest"}}, "output_config.effort"),
        (MESSAGE | {"container": "c"}, "container"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_unsupported_fields_are_refused_by_name(path):
    async def test(place):
        for body, name in REFUSED[path]:
            status, answer = await place.request("POST", f"/v1/{path}", json=body)
            assert status == 400, body
            error = answer["error"]
            assert error["type"] == "invalid_request_error" and error["message"].startswith(f"{name}:")
            assert answer["type"] == "error" if path == "messages" else error["param"] == name
        assert not place.engine.prompts

    served(test)


NOTHING = {
    "top_logprobs": 0, "repetition_penalty": 1.0, "ignore_eos": False, "add_generation_prompt": True,
    "prompt_logprobs": 0, "skip_special_tokens": True, "frequency_penalty": 0, "return_token_ids": False,
    "cache_salt": "x", "session_id": "a", "priority": 1,
}  # fmt: skip


def test_values_that_ask_for_nothing_are_taken():
    async def test(place):
        place.engine.say("a", "b")
        others = {
            name: value for name, value in NOTHING.items() if name not in ("top_logprobs", "add_generation_prompt")
        }
        for path, body in (("chat/completions", CHAT | NOTHING), ("completions", PROMPT | others)):
            status, answer = await place.request("POST", f"/v1/{path}", json=body)
            assert status == 200, answer
            assert "token_ids" not in str(answer)

    served(test)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_that_are_trained_on(stream):
    """In the fields that vLLM has; streamed, in the last chunk of a choice."""

    async def test(place):
        place.engine.say("ab", "cd")
        async with place.openai() as client:
            wanted = dict(model="m", stream=stream, extra_body={"return_token_ids": True})
            done = await client.chat.completions.create(messages=USER, **wanted)
            *_, chat = [chunk async for chunk in done if chunk.choices] if stream else [done]
            done = await client.completions.create(prompt="x", **wanted)
            *_, text = [chunk async for chunk in done if chunk.choices] if stream else [done]
        asked, written = place.session.interactions
        for answer, choice, x in ((chat, chat.choices[0], asked), (text.choices[0], text.choices[0], written)):
            assert answer.prompt_token_ids == list(x.prompt) and choice.token_ids == list(x.completion.tokens)

    served(test)


def test_a_json_schema_is_passed_to_the_engine():
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


def test_the_sdks_find_a_session_through_environment_variables(monkeypatch):
    async def test(place):
        for name, value in session_variables(f"{place.gateway.url}/v1", place.key).items():
            monkeypatch.setenv(name, value)
        place.engine.say("one", "two")
        async with openai.AsyncOpenAI() as client, anthropic.AsyncAnthropic() as other:
            one = await client.chat.completions.create(model="m", messages=USER)
            two = await other.messages.create(model="m", messages=USER, max_tokens=5)
        assert (one.choices[0].message.content, two.content[0].text) == ("one", "two")

    served(test)


@pytest.mark.parametrize("stream", [False, True])
def test_failures_raise_the_exception_types_of_the_sdks(stream):
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


def test_a_failure_during_streaming_ends_the_stream_with_an_error():
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
