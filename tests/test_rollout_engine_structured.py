"""Structured output, forced tool calls and penalties through `/generate` and unmodified SDKs, of a random model."""

import asyncio
import json
import re
from typing import Literal

import anthropic
import jsonschema
import openai
import parrot
import pydantic
import pytest
import servers

from areax.rollout import client as clients
from areax.rollout.scheduling import executor

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAME = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
NAME |= {"additionalProperties": False}
SCHEMAS = {"add": ADD, "name": NAME}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
FLAT = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
CLAUDE = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
SAID = [{"role": "user", "content": "#"}]


class Colour(pydantic.BaseModel):
    name: Literal["red", "green"]
    part: int = pydantic.Field(ge=0, le=9)


class Picture(pydantic.BaseModel):
    title: str = pydantic.Field(max_length=4)
    colours: list[Colour] = pydantic.Field(max_length=2)
    frame: Colour | None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = parrot.model(tmp_path_factory.mktemp("parrot"), ["#", "a"])
    with servers.embedded(path, slots=4, context=1024) as remote:
        yield remote


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def generate(server, more=200, **params):
    params = {"max_new_tokens": more, "sampling_seed": 3, **params}
    return server.ok("/generate", {"text": "#", "sampling_params": params, "return_logprob": True})


# -- /generate ---------------------------------------------------------------------------------------


def test_generate(server):
    for seed in range(2):
        made = generate(server, json_schema=json.dumps(ADD), sampling_seed=seed)
        jsonschema.validate(json.loads(made["text"]), ADD)
        assert made["meta_info"]["finish_reason"]["type"] == "stop" and made["meta_info"]["constrained"] is True
    assert re.fullmatch("[ab]{3}-x", generate(server, regex="[ab]{3}-x")["text"])
    assert re.fullmatch("(xy)+", generate(server, ebnf='root ::= "xy" root?')["text"])
    assert generate(server, choice=["left", "right"])["text"] in ("left", "right")
    plain = generate(server, more=3)
    assert plain["meta_info"]["constrained"] is False
    for filters in ({"top_p": 0.9}, {"top_k": 3}, {"min_new_tokens": 1}, {"presence_penalty": 0.1}):
        assert generate(server, more=3, **filters)["meta_info"]["constrained"] is True


def test_samples_of_one_body_share_a_grammar(server):
    body = {"text": ["#", "a"], "sampling_params": [{"n": 3, "regex": "a{2,9}"}, {"n": 3, "regex": "b{2,9}"}]}
    texts = [one["text"] for one in server.ok("/generate", body)]
    assert all(re.fullmatch("a{2,9}", text) for text in texts[:3])
    assert all(re.fullmatch("b{2,9}", text) for text in texts[3:])


def test_log_probabilities_are_those_of_the_whole_distribution(server):
    """The parrot is sure that each text ends; what it was made to say has a probability of nearly none."""
    made = generate(server, regex="[b-y]{20}")
    logp = [row[0] for row in made["meta_info"]["output_token_logprobs"]]
    assert len(logp) == 21 and logp[:20] == pytest.approx([logp[0]] * 20) and logp[0] < -50
    assert logp[20] == pytest.approx(0)


WRONG = [
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": {"type": "object"}}, "json_schema: must be a string"),
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "json_schema: Unimplemented keys"),
    ({"regex": "("}, "regex"),
    ({"ebnf": "x"}, "ebnf"),
    ({"choice": "left"}, "choice: must be a list"),
    ({"choice": ["a", ""]}, "choice: must be a list of strings, none empty"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "must be the only one of json_schema, regex, ebnf, choice"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"structural_tag": "{}"}, "structural_tag: give a json_schema"),
    ({"frequency_penalty": 2.1}, "frequency_penalty: must be in [-2, 2]"),
    ({"presence_penalty": "x"}, "presence_penalty: must be a finite number"),
    ({"repetition_penalty": 0}, "repetition_penalty: must be in (0, 2]"),
    ({"logit_bias": {"x": 1}}, "logit_bias: must map token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias: its values must be in [-100, 100]"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias: must not name a token twice"),
    ({"logit_bias": {"999999": 1}}, "logit_bias: token ids must be"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias: must have at most 1024 tokens"),
]


@pytest.mark.parametrize("params, words", WRONG, ids=lambda x: str(x)[:40])
def test_what_cannot_be_honoured_is_refused(server, params, words):
    status, answer = server.post("/generate", {"text": "#", "sampling_params": params})
    assert status == 400 and words in answer["message"] and "\n" not in answer["message"], answer


def test_penalties_in_every_api(server, client):
    a = server.ok("/tokenize", {"prompt": "b"})["tokens"][0]
    banned, forced = {str(a): -100}, {str(a): 100}
    assert generate(server, logit_bias=forced, more=4, ignore_eos=True)["text"] == "bbbb"
    chat = client.chat.completions.create(model="m", messages=SAID, logit_bias=forced, max_tokens=4)
    plain = client.completions.create(model="m", prompt="#", logit_bias=forced, max_tokens=4)
    assert chat.choices[0].message.content == plain.choices[0].text == "bbbb"
    assert "b" not in generate(server, logit_bias=banned, more=60)["text"]
    once = client.completions.create(
        model="m", prompt="#", max_tokens=200, presence_penalty=2, frequency_penalty=2, temperature=0,
        extra_body={"repetition_penalty": 1.5, "ignore_eos": True},
    )  # fmt: skip
    assert once.choices[0].finish_reason == "length"
    ids = generate(server, more=60, temperature=0, presence_penalty=2, frequency_penalty=2, ignore_eos=True)
    assert len({*ids["output_ids"]}) > 10  # a parrot without penalties says one thing for ever
    assert len({*generate(server, more=60, temperature=0, ignore_eos=True)["output_ids"]}) < 4


# -- documents ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # SGLang's metadata has a list, OpenAI's has none
def test_parse_with_pydantic(client):
    titles = set()
    for seed in range(4):
        made = client.chat.completions.parse(model="m", messages=SAID, response_format=Picture, seed=seed)
        assert isinstance(made.choices[0].message.parsed, Picture) and made.choices[0].finish_reason == "stop"
        titles.add(made.choices[0].message.parsed.title)
    assert len(titles) > 1
    with client.chat.completions.stream(model="m", messages=SAID, response_format=Picture, seed=1) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Picture)
    made = client.responses.parse(model="m", input="#", text_format=Picture)
    assert isinstance(made.output_parsed, Picture) and made.status == "completed"


def test_json_in_every_api(server, client, claude):
    chat = lambda form, **more: client.chat.completions.create(model="m", messages=SAID, response_format=form, **more)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD, "strict": False}}
    jsonschema.validate(json.loads(chat(form).choices[0].message.content), ADD)
    ends = {str(server.ok("/tokenize", {"prompt": "}"})["tokens"][0]): 3.0}
    free = chat({"type": "json_object"}, logit_bias=ends).choices[0].message.content
    assert isinstance(json.loads(free), dict)
    body = {"prompt": "#", "response_format": form, "max_tokens": 200}
    jsonschema.validate(json.loads(server.ok("/v1/completions", body)["choices"][0]["text"]), ADD)
    flat = {"type": "json_schema", "name": "n", "schema": ADD}
    made = client.responses.create(model="m", input="#", text={"format": flat})
    jsonschema.validate(json.loads(made.output_text), ADD)
    config = {"format": {"type": "json_schema", "schema": ADD}}
    message = claude.messages.create(model="m", max_tokens=200, messages=SAID, extra_body={"output_config": config})
    jsonschema.validate(json.loads(message.content[0].text), ADD)
    regex = client.chat.completions.create(model="m", messages=SAID, extra_body={"regex": "[xy]{4}"})
    assert re.fullmatch("[xy]{4}", regex.choices[0].message.content)
    assert chat({"type": "text"}, max_tokens=2).choices[0].finish_reason in ("length", "stop")


# -- calls -------------------------------------------------------------------------------------------


def test_forced_calls_in_a_chat(client):
    ask = lambda choice, **more: client.chat.completions.create(
        model="m", messages=SAID, tools=TOOLS, tool_choice=choice, **more
    )
    names = set()
    for seed in range(4):
        (choice,) = ask("required", seed=seed).choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        for call in choice.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            names.add(call.function.name)
    assert names == {"add", "name"}
    named = {"type": "function", "function": {"name": "name"}}
    (call,) = ask(named).choices[0].message.tool_calls
    assert call.function.name == "name"
    (call,) = ask("required", parallel_tool_calls=False).choices[0].message.tool_calls
    got = client.chat.completions.create(model="m", messages=SAID, tools=TOOLS, tool_choice=named, stream=True)
    assert [call.function.name for chunk in got for call in chunk.choices[0].delta.tool_calls or []] == ["name"]


def test_forced_calls_of_responses_and_messages(client, claude):
    made = client.responses.create(model="m", input="#", tools=FLAT, tool_choice="required")
    assert made.output and {item.type for item in made.output} == {"function_call"}
    made = client.responses.create(model="m", input="#", tools=FLAT, tool_choice={"type": "function", "name": "add"})
    assert [item.name for item in made.output] == ["add"]
    ask = lambda choice: claude.messages.create(
        model="m", max_tokens=300, messages=SAID, tools=CLAUDE, tool_choice=choice
    )
    made = ask({"type": "any", "disable_parallel_tool_use": True})
    assert made.stop_reason == "tool_use" and [block.type for block in made.content] == ["tool_use"]
    made = ask({"type": "tool", "name": "add"})
    assert [block.name for block in made.content] == ["add"]
    jsonschema.validate(made.content[0].input, ADD)
    counted = claude.messages.count_tokens(model="m", messages=SAID, tools=CLAUDE, tool_choice={"type": "any"})
    assert counted.input_tokens == made.usage.input_tokens


ODD = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}
REFUSED = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [ODD], "tool_choice": "required"}, "tools"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, None),
]


@pytest.mark.parametrize("body, name", REFUSED, ids=lambda x: str(x)[:60])
def test_refusals_name_the_field(server, body, name):
    status, answer = server.post("/v1/chat/completions", {"messages": SAID, **body})
    assert status == 400 and answer["error"]["param"] == name and "\n" not in answer["message"], answer


# -- runs --------------------------------------------------------------------------------------------


def test_the_client_passes_everything_on_and_training_refuses_it(server):
    options = [
        ({"json_schema": json.dumps(ADD)}, lambda text: jsonschema.validate(json.loads(text), ADD)),
        ({"regex": "[ab]{4}"}, lambda text: re.fullmatch("[ab]{4}", text)),
        ({"ebnf": 'root ::= "a"'}, lambda text: text == "a"),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}, lambda text: True),
        ({"logit_bias": {5: -1.0}}, lambda text: True),
    ]

    async def main():
        async with clients.connect([server.url]) as fleet:
            for given, holds in options:
                done = await fleet.generate([5, 6], max_new_tokens=60, **given)
                assert holds(done.text) is not False and done.info["constrained"] is True
                with pytest.raises(ValueError, match=f"training needs samples .* got {next(iter(given))}="):
                    executor._undistorted(fleet.generate, [5, 6], **given)
            done = await executor._undistorted(
                fleet.generate, [5, 6], max_new_tokens=2, repetition_penalty=1.0, logit_bias={}, regex=""
            )
            assert done.info["constrained"] is False

    asyncio.run(main())


@pytest.mark.slow
def test_an_aborted_text_begins_anew(server):
    async def main():
        async with clients.connect([server.url]) as fleet:
            begun = asyncio.Event()
            more = {"regex": "[a-z]{300}", "on_tokens": lambda tokens: len(tokens) > 20 and begun.set()}
            task = asyncio.create_task(fleet.generate([5, 6], max_new_tokens=400, **more))
            await begun.wait()
            await asyncio.to_thread(server.ok, "/pause_generation", {"mode": "abort"})
            await asyncio.to_thread(server.ok, "/continue_generation", {})
            return await task

    done = asyncio.run(main())
    assert done.info["resumed"] >= 1 and len(done.tokens) == 301 and done.finish == "stop"
