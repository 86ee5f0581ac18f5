"""Clients that were not written for this server use its tools, streams and refusals."""

import asyncio
from typing import Literal

import litellm
import openai
import pydantic
import pydantic_ai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = [{"role": "user", "content": "#add"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]


class Colour(pydantic.BaseModel):
    name: Literal["red", "green"]
    part: int


class Picture(pydantic.BaseModel):
    """A picture."""

    title: str
    colours: list[Colour]
    frame: Colour | None


def add(a: float, b: float) -> float:
    """Adds two numbers."""
    return a + b


# -- langchain-openai --------------------------------------------------------------------------------


def langchain(url, **more):
    return ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none", max_retries=0, **more)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_calls_a_tool(url, responses):
    model = langchain(url, use_responses_api=responses).bind_tools([add])
    first = model.invoke([HumanMessage("#add")])
    [call] = first.tool_calls
    assert first.text == "I add." and (call["name"], call["args"]) == ("add", {"a": 1, "b": 2.5})
    second = model.invoke([HumanMessage("#add"), first, ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])])
    assert second.text == "It is 3.5." and not second.tool_calls


def test_langchain_streams(url):
    chunks = list(langchain(url, stream_usage=True).bind_tools([add]).stream([HumanMessage("#add")]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == "I add." and whole.tool_calls[0]["args"] == {"a": 1, "b": 2.5}
    assert whole.response_metadata["finish_reason"] == "tool_calls" and whole.usage_metadata["output_tokens"] == 5
    texts = [chunk.text for chunk in langchain(url).stream([HumanMessage("#add")])]
    assert [text for text in texts if text][:2] == ["I add.", " <tool_call>"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("responses", [False, True])
def test_langchain_gets_structured_output(url, method, responses):
    model = langchain(url, use_responses_api=responses)
    made = model.with_structured_output(Picture, method=method).invoke("#add")
    assert isinstance(made, Picture)
    if not responses:
        assert isinstance(model.with_structured_output(Picture.model_json_schema(), method=method).invoke("#add"), dict)


def test_langchain_forces_a_tool(url):
    made = langchain(url).bind_tools([add], tool_choice="any").invoke("anything")
    assert {call["name"] for call in made.tool_calls} == {"add"} and made.tool_calls[0]["args"].keys() == {"a", "b"}
    assert langchain(url, presence_penalty=0.5, max_tokens=3).invoke("#add").response_metadata["finish_reason"]


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_asks_for_one_call_and_gets_cut_ones(url, responses):
    model = langchain(url, use_responses_api=responses)
    calls = [
        model.bind_tools([add], parallel_tool_calls=several).invoke("#twice").tool_calls for several in (False, True)
    ]
    assert [[call["args"] for call in made] for made in calls] == [
        [{"a": 3, "b": 4}],
        [{"a": 3, "b": 4}, {"a": 5, "b": 6}],
    ]
    cut = langchain(url, use_responses_api=responses, max_tokens=7).bind_tools([add]).invoke("#twice")
    assert cut.text == "Twice." and len(cut.tool_calls) == 1
    results = [ToolMessage("?", tool_call_id=call["id"]) for call in [*cut.tool_calls, *cut.invalid_tool_calls]]
    again = model.bind_tools([add]).invoke([HumanMessage("#twice"), cut, *results])
    assert again.text == "It is 3.5."


def test_langchain_continues_by_the_ids_of_responses(url):
    model = langchain(url, use_responses_api=True, use_previous_response_id=True).bind_tools([add])
    first = model.invoke([HumanMessage("#add")])
    result = ToolMessage("3.5", tool_call_id=first.tool_calls[0]["id"])
    assert model.invoke([HumanMessage("#add"), first, result]).text == "It is 3.5."


def test_langchain_hears_what_cannot_be_had(url):
    with pytest.raises(openai.BadRequestError, match="presence_penalty: must be in"):
        langchain(url, presence_penalty=2.5).invoke([HumanMessage("#add")])
    schema = {"title": "odd", "type": "array", "items": {"not": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "odd", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="response_format: Unimplemented keys"):
        langchain(url).bind(response_format=form).invoke("#add")


# -- pydantic-ai -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai_runs_an_agent(url, kind):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = pydantic_ai.Agent(kind("m", provider=provider), tools=[add])

    async def main():
        done = await agent.run("#add")
        async with agent.run_stream("#add") as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        return done, pieces

    done, pieces = asyncio.run(main())
    assert done.output == "It is 3.5." and done.usage.requests == 2 and done.usage.tool_calls == 1
    assert "".join(pieces) == "I add."  # the first answer with text


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
@pytest.mark.parametrize("output", [pydantic_ai.ToolOutput, pydantic_ai.NativeOutput])
def test_pydantic_ai_gets_its_output_type(url, kind, output):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = pydantic_ai.Agent(kind("m", provider=provider), output_type=output(Picture))
    done = asyncio.run(agent.run("anything"))
    assert isinstance(done.output, Picture) and done.usage.requests == 1


# -- litellm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_calls_a_tool(url, provider):
    base = f"{url}/v1" if provider == "openai" else url
    ask = lambda messages, **more: litellm.completion(
        model=f"{provider}/m", api_base=base, api_key="none", messages=messages, tools=TOOLS, max_tokens=20, **more
    )
    message = ask(ASKED).choices[0].message
    [call] = message.tool_calls
    assert message.content == "I add." and call.function.name == "add"
    result = {"role": "tool", "tool_call_id": call.id, "content": "3.5"}
    second = ask([*ASKED, message.model_dump(exclude_none=True), result]).choices[0]
    assert (second.message.content, second.finish_reason) == ("It is 3.5.", "stop")
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(ASKED, stream=True)]
    assert "".join(pieces) == "I add."
