"""`areax serve` through unmodified SDKs: tools, streams token by token, refusals, and Anthropic's and OpenAI's APIs."""

import asyncio
import http.client
import json
import re
import time
from pathlib import Path

import anthropic
import openai
import parrot
import pytest
import servers
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from areax.rollout.chat.api import logprobs
from areax.rollout.engine.routes import openapi, request_parsing
from areax.rollout.engine.routes.openai_fields import TABLES

PAGE = (Path(__file__).parents[1] / "docs" / "serve.md").read_text()
CALL = ["#add", "I add. ", "<tool_call>", '\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n', "</tool_call>"]
SUM = ["<go on>", "It is ", "3.5", "."]
THINK = ["#think", "<think>", "\nHm.\n", "</think>", "\n\nYes"]
EURO = ["#euro", "1 ", "€ ".encode(), "or "]
STOP = ["#stop", "a", "b1", "b2", "c"]
TWICE = [
    "#twice", "Twice. ", "<tool_call>\n", '{"name": "add", "arguments": {"a": 3, ', '"b": 4}}', "\n</tool_call>\n",
    "<tool_call>\n ", '{"name": "add", ', '"arguments": {"a": 5, ', '"b": 6}}', "\n</tool_call>", " Both.",
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
CLAUDE_TOOLS = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
OFF = ["<off>", "no thought"]
NO = {"enable_thinking": False}


def say(word):
    return [{"role": "user", "content": word}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = parrot.TEMPLATE + "{#- <think> #}"  # the model may reason
    path = parrot.model(tmp_path_factory.mktemp("parrot"), CALL, SUM, TWICE, THINK, EURO, STOP, OFF, template=template)
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


def chunks(client, **body):
    return list(client.chat.completions.create(model="m", stream=True, temperature=0, **body))


# -- tools -----------------------------------------------------------------------------------------


def test_tools_in_a_chat(client):
    first = client.chat.completions.create(model="m", messages=say("#add"), tools=TOOLS, temperature=0)
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2.5}
    result = {"role": "tool", "tool_call_id": call.id, "content": "3.5"}
    messages = [*say("#add"), choice.message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0)
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It is 3.5.")
    assert second.usage.prompt_tokens > first.usage.prompt_tokens

    without = client.chat.completions.create(
        model="m", messages=say("#add"), tools=TOOLS, tool_choice="none", temperature=0
    )
    assert without.choices[0].message.content == "".join(CALL[1:]) and not without.choices[0].message.tool_calls
    assert without.usage.prompt_tokens < first.usage.prompt_tokens


def test_streamed_tool_calls(client):
    got = chunks(client, messages=say("#add"), tools=TOOLS)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in got)
    (call,) = [call for chunk in got for call in chunk.choices[0].delta.tool_calls or []]
    assert text == "I add." and call.function.name == "add"
    assert (
        json.loads(call.function.arguments) == {"a": 1, "b": 2.5} and got[-1].choices[0].finish_reason == "tool_calls"
    )


def test_tools_of_messages(claude):
    first = claude.messages.create(model="m", max_tokens=20, messages=say("#add"), tools=CLAUDE_TOOLS, system="Add.")
    text, use = first.content
    assert (first.stop_reason, text.text, use.name, use.input) == ("tool_use", "I add.", "add", {"a": 1, "b": 2.5})
    result = [{"type": "tool_result", "tool_use_id": use.id, "content": "3.5"}]
    messages = [*say("#add"), {"role": "assistant", "content": first.content}, {"role": "user", "content": result}]
    second = claude.messages.create(model="m", max_tokens=20, messages=messages, tools=CLAUDE_TOOLS)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 3.5.")
    with claude.messages.stream(model="m", max_tokens=20, messages=say("#add"), tools=CLAUDE_TOOLS) as events:
        final = events.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"] and final.content[1].input == use.input


def test_tools_of_responses(client):
    flat = [{"type": "function", **FUNCTION}]
    first = client.responses.create(model="m", input="#add", tools=flat, temperature=0)
    message, call = first.output
    assert first.output_text == "I add." and json.loads(call.arguments) == {"a": 1, "b": 2.5}
    back = [*say("#add"), *(item.model_dump(exclude_none=True) for item in first.output)]
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "3.5"})
    assert client.responses.create(model="m", input=back, tools=flat, temperature=0).output_text == "It is 3.5."
    with client.responses.stream(model="m", input="#add", tools=flat, temperature=0) as events:
        kinds = [event.type for event in events]
    assert kinds[-1] == "response.completed" and "response.function_call_arguments.done" in kinds


@pytest.mark.long
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_an_agent_of_the_agents_sdk(server, kind):
    import agents  # slow to import

    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def add(a: float, b: float) -> str:
        """Adds two numbers."""
        asked.append((a, b))
        return str(a + b)

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            model = getattr(agents, kind)("m", client)
            agent = agents.Agent("a", instructions="Use tools.", tools=[add], model=model)
            done = await agents.Runner.run(agent, "#add")
            streamed = agents.Runner.run_streamed(agent, "#add")
            async for _ in streamed.stream_events():
                pass
        return done.final_output, streamed.final_output

    assert asyncio.run(main()) == ("It is 3.5.", "It is 3.5.") and asked == [(1, 2.5)] * 2


@pytest.mark.slow
def test_a_marker_that_is_a_special_token_and_the_options_of_the_command(tmp_path):
    tag = "<|python_tag|>"
    call = ["#add", "Now.", tag, '{"name": "add", "parameters": {"a": 1, "b": 2}}']
    path = parrot.model(tmp_path / "m", call, THINK, special=[tag])
    with servers.command("areax", "serve", path, "--no-reasoning", "--style", "llama") as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            plain = client.completions.create(model="m", prompt="#add", temperature=0).choices[0]
            assert plain.text == call[1] + call[3]
            made = client.chat.completions.create(model="m", messages=say("#add"), tools=TOOLS, temperature=0)
            got = [chunk.choices[0].delta for chunk in chunks(client, messages=say("#add"), tools=TOOLS)]
            thought = client.chat.completions.create(model="m", messages=say("#think"), temperature=0).choices[0]
    assert made.choices[0].message.content == "".join(delta.content or "" for delta in got) == "Now."
    [one], [other] = made.choices[0].message.tool_calls, [call for delta in got for call in delta.tool_calls or []]
    assert one.function.model_dump() == other.function.model_dump()
    assert json.loads(one.function.arguments) == {"a": 1, "b": 2}
    assert thought.message.content == "".join(THINK[1:])


@pytest.mark.slow
def test_tools_that_have_no_effect_are_refused(tmp_path):
    with servers.embedded(parrot.model(tmp_path / "m", CALL, template="{{ messages[0].content }}")) as server:
        body = {"messages": say("#add")}
        status, answer = server.post("/v1/chat/completions", body | {"tools": TOOLS})
        assert status == 400 and "chat template does not show them" in answer["message"]
        status, answer = server.post("/tokenize", body | {"tools": TOOLS})
        assert status == 400 and "chat template does not show them" in answer["message"]
        assert server.ok("/v1/chat/completions", body)["choices"][0]["message"]["content"] == "".join(CALL[1:])


@pytest.mark.slow
def test_tools_and_formats_are_refused_where_the_format_of_answers_is_not_known(tmp_path):
    written = parrot.TEMPLATE.replace("tool_call>", "call>")
    with servers.embedded(parrot.model(tmp_path / "m", CALL, template=written)) as server:
        body = {"messages": say("#add")}
        asked = {
            "tools": {"tools": TOOLS},
            "response_format": {"response_format": {"type": "json_object"}},
            "regex": {"regex": "a+"},
        }
        for field, more in asked.items():
            status, answer = server.post("/v1/chat/completions", body | more)
            assert status == 400 and "not known" in answer["message"] and "--style" in answer["message"], answer
            assert answer["message"].startswith(f"{field}: ")
        assert server.ok("/v1/chat/completions", body)["choices"][0]["message"]["content"] == "".join(CALL[1:])


def calls_of(path, answer):
    """(text, [(name, arguments)], finish) of an answer of any API."""
    if path == "/v1/chat/completions":
        (choice,) = answer["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
        return choice["message"]["content"], [(c["name"], c["arguments"]) for c in calls], choice["finish_reason"]
    if path == "/v1/messages":
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        calls = [(b["name"], b["input"]) for b in answer["content"] if b["type"] == "tool_use"]
        return "".join(texts), calls, answer["stop_reason"]
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return "".join(texts), calls, answer["status"]


def asked(path, word="#twice", **more):
    """A request with the tool; `more` in the fields of each API."""
    budget = {"max_tokens": more.pop("budget", 40)}
    if path == "/v1/messages":
        return {"messages": say(word), "tools": CLAUDE_TOOLS, "temperature": 0, **budget, **more}
    if path == "/v1/chat/completions":
        return {"messages": say(word), "tools": TOOLS, "temperature": 0, **budget, **more}
    budget = {"max_output_tokens": budget["max_tokens"]}
    return {"input": word, "tools": [{"type": "function", **FUNCTION}], "temperature": 0, **budget, **more}


def streamed(server, path, body):
    status, answer = server.ask("POST", path, json.dumps({**body, "stream": True}).encode())
    assert status == 200
    return answer if isinstance(answer, str) else answer.decode()


CONVERSATIONS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
SINGLE = {"parallel_tool_calls": False}, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_an_answer_with_one_call_ends_behind_it(server, path):
    tokens = lambda answer: answer["usage"].get("completion_tokens") or answer["usage"]["output_tokens"]
    both = server.ok(path, asked(path))
    assert len(calls_of(path, both)[1]) == 2 and tokens(both) == len(TWICE)
    one = server.ok(path, asked(path, **SINGLE[path == "/v1/messages"]))
    text, [(name, arguments)], finish = calls_of(path, one)
    loaded = arguments if isinstance(arguments, dict) else json.loads(arguments)
    assert (text, name, loaded) == ("Twice.", "add", {"a": 3, "b": 4}) and tokens(one) == 5
    assert finish in ("tool_calls", "tool_use", "completed")
    events = streamed(server, path, asked(path, **SINGLE[path == "/v1/messages"]))
    assert '"a\\": 3' in events and '"a\\": 5' not in events and "Both" not in events
    wait(lambda: server.ok("/server_info")["internal_states"][0]["running"] == 0)


def test_several_answers_with_one_call_each(server):
    body = asked("/v1/chat/completions", n=3, logprobs=True, return_meta_info=True, **SINGLE[0])
    for choice in server.ok("/v1/chat/completions", body)["choices"]:
        assert len(choice["message"]["tool_calls"]) == 1 and len(choice["logprobs"]["content"]) == 5
        assert choice["meta_info"]["completion_tokens"] == choice["meta_info"]["weight_versions"][0]["end"] == 5


@pytest.mark.parametrize("path", CONVERSATIONS)
@pytest.mark.parametrize(
    "budget, calls", [(2, []), (3, ['{"a": 3, ']), (4, ['{"a": 3, "b": 4}']), (7, [..., ""]), (8, [..., '{"a": 5, '])]
)
def test_a_call_that_is_cut(server, path, budget, calls):
    answer = server.ok(path, asked(path, budget=budget))
    text, found, finish = calls_of(path, answer)
    assert text == "Twice." and finish in ("length", "incomplete", "max_tokens")
    got = [arguments for _, arguments in found]
    if path == "/v1/messages":  # inputs are objects: of those that are cut, what is complete
        objects = {"": {}, '{"a": 5, ': {"a": 5}, '{"a": 3, ': {"a": 3}}
        assert got == [objects.get(call, {"a": 3, "b": 4}) for call in calls]
    else:
        assert got == ['{"a": 3, "b": 4}' if call is ... else call for call in calls]
    if path == "/v1/responses":
        kinds = [(item["type"], item["status"]) for item in answer["output"]]
        cut = [("function_call", "completed" if call is ... or call[-1:] == "}" else "incomplete") for call in calls]
        assert kinds == [("message", "completed" if calls else "incomplete"), *cut]
        events = streamed(server, path, asked(path, budget=budget))
        last = json.loads(events.strip().rpartition("data: ")[2])["response"]
        plain = lambda items: [{k: v for k, v in item.items() if "id" not in k} for item in items]
        assert plain(last["output"]) == plain(answer["output"]) and last["status"] == "incomplete"


def test_a_call_that_is_cut_may_be_sent_back(server):
    answer = server.ok("/v1/responses", asked("/v1/responses", budget=3))
    items = [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]
    result = {"type": "function_call_output", "call_id": answer["output"][1]["call_id"], "output": "not JSON"}
    again = asked("/v1/responses") | {"input": [*say("#twice"), *items, result]}
    assert server.ok("/v1/responses", again)["output"][0]["content"][0]["text"] == "It is 3.5."


def test_a_text_that_is_cut_is_incomplete(server):
    answer = server.ok("/v1/responses", {"input": "#stop", "max_output_tokens": 2, "temperature": 0})
    (item,) = answer["output"]
    assert item["status"] == answer["status"] == "incomplete" and item["content"][0]["text"] == "ab1"


def test_a_forced_call_that_is_cut_has_no_markup(server):
    for budget in (1, 2, 5, 25, 26, 40):
        body = asked("/v1/chat/completions", "#forced", budget=budget, tool_choice="required", chat_template_kwargs=NO)
        text, calls, _ = calls_of("/v1/chat/completions", server.ok("/v1/chat/completions", body))
        assert text == "" and all(name == "add" for name, _ in calls)


def test_second_turns_refer_to_items(client):
    flat = [{"type": "function", **FUNCTION}]
    first = client.responses.create(model="m", input="#add", tools=flat, temperature=0)
    message, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3.5"}
    reference = lambda item: {"type": "item_reference", "id": item.id}
    whole = [*say("#add"), message.model_dump(), call.model_dump(), result]
    ways = [
        {"input": whole, "store": False},
        {"input": [*say("#add"), reference(message), call.model_dump(), result]},
        {"input": [*say("#add"), reference(message), reference(call), result]},
        {"input": [result], "previous_response_id": first.id},
    ]
    done = [client.responses.create(model="m", tools=flat, temperature=0, **way) for way in ways]
    assert {(x.output_text, x.usage.input_tokens) for x in done} == {("It is 3.5.", done[0].usage.input_tokens)}
    assert [x.store for x in done] == [False, True, True, True] and done[3].previous_response_id == first.id
    third = client.responses.create(model="m", input="#stop", previous_response_id=done[3].id, temperature=0)
    assert third.output_text == "ab1b2c"
    for gone, name in (
        ({"input": [reference(done[0].output[0])]}, "input"),
        ({"input": "x", "previous_response_id": done[0].id}, "previous_response_id"),
    ):
        with pytest.raises(openai.BadRequestError, match="is kept.* store: false") as refused:
            client.responses.create(model="m", **gone)
        assert refused.value.param == name


def test_a_streamed_response_is_kept(client):
    with client.responses.stream(model="m", input="#think", temperature=0) as events:
        final = events.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    references = [{"type": "item_reference", "id": item.id} for item in final.output]
    again = client.responses.create(model="m", input=[*say("x"), *references, *say("#stop")], temperature=0)
    assert again.output_text == "ab1b2c"


# -- streams ---------------------------------------------------------------------------------------


def test_each_token_is_a_chunk(server, client):
    got = chunks(client, messages=say("#think"), logprobs=True, top_logprobs=2, stream_options={"include_usage": True})
    *got, usage = got
    deltas = [chunk.choices[0].delta for chunk in got]
    assert [(d.content or "", getattr(d, "reasoning_content", None)) for d in deltas] == [
        ("", None), ("", None), ("", "Hm."), ("", None), ("Yes", None), ("", None), ("", None),
    ]  # fmt: skip
    rows = [row for chunk in got for row in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [row.token for row in rows] == [*THINK[1:], "<|im_end|>"] and len(rows[0].top_logprobs) == 2
    assert [len(chunk.choices[0].logprobs.content) for chunk in got if chunk.choices[0].logprobs] == [1] * 5
    whole = client.chat.completions.create(model="m", messages=say("#think"), logprobs=True, temperature=0)
    assert [row.logprob for row in whole.choices[0].logprobs.content] == [row.logprob for row in rows]
    assert (whole.choices[0].message.content, whole.choices[0].message.reasoning_content) == ("Yes", "Hm.")
    assert whole.usage.completion_tokens == usage.usage.completion_tokens == 5


def test_each_token_is_a_chunk_of_a_completion(server, client):
    body = {"model": "m", "prompt": "#stop", "logprobs": 1, "temperature": 0, "n": 2}
    got = list(client.completions.create(**body, stream=True))
    for i in range(2):
        mine = [chunk.choices[0] for chunk in got if chunk.choices[0].index == i]
        assert [choice.text for choice in mine] == [*STOP[1:], "", ""] and mine[-1].finish_reason == "stop"
        assert mine[-1].logprobs.tokens == []
        rows = [choice.logprobs for choice in mine[:-1]]
        whole = client.completions.create(**body).choices[i].logprobs
        assert [row.tokens[0] for row in rows] == whole.tokens == [*STOP[1:], "<|im_end|>"]
        assert [row.text_offset[0] for row in rows] == whole.text_offset == [0, 1, 3, 5, 6]


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_count_characters(server, client, echo):
    body = {"model": "m", "prompt": "é#euro", "logprobs": 0, "temperature": 0, "echo": echo, "max_tokens": 20}
    whole = client.completions.create(**body).choices[0]
    places = ([0, 0, 1] if echo else []) + [6 * echo + at for at in (0, 2, 2, 2, 3, 4, 7)]
    assert whole.logprobs.text_offset == places and whole.text == "é#euro" * echo + "1 € or "
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**body, stream=True)]
    assert [at for rows in chunks for at in (rows.text_offset if rows else [])] == places


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_text_never_splits_a_character(server, path):
    body = {"prompt": "#euro", "messages": say("#euro"), "temperature": 0, "max_tokens": 20}
    body.pop("messages" if "chat" not in path else "prompt")
    with server.stream(path, body) as events:
        choices = [event["choices"][0] for event in events]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    assert "".join(texts) == "1 € or " and any("€" in text for text in texts)
    assert len(texts) >= 7  # three bytes are three tokens


def test_log_probabilities_have_the_bytes_of_parts_of_characters(client):
    done = client.chat.completions.create(model="m", messages=say("#euro"), logprobs=True, temperature=0, max_tokens=20)
    rows = done.choices[0].logprobs.content
    assert b"".join(map(bytes, (row.bytes for row in rows[:-1]))).decode() == done.choices[0].message.content
    assert [list(b"\xe2"), list(b"\x82"), list(b"\xac")] == [row.bytes for row in rows if "\ufffd" in row.token]


def test_bytes_are_also_those_of_sentencepiece():
    inner = Tokenizer(BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[], byte_fallback=True))
    inner.decoder = decoders.ByteFallback()
    tokens = PreTrainedTokenizerFast(tokenizer_object=inner)
    rows = logprobs.chat([(byte, -1.0, {}) for byte in range(256)], tokens)["content"]
    assert [row["bytes"] for row in rows] == [[byte] for byte in range(256)]


@pytest.mark.parametrize("stop", [["b1b2"], ["b2c"], ["b1b2c", "b1bx"], ["c"]])
def test_stop_strings_never_leak(server, client, stop):
    got = chunks(client, messages=say("#stop"), stop=stop)
    texts = [chunk.choices[0].delta.content or "" for chunk in got]
    before = "ab1b2c".partition(stop[0])[0]
    assert "".join(texts) == before and got[-1].choices[0].matched_stop == stop[0]
    assert texts[1] == "a"  # what cannot begin a stop string is not held back
    done = client.chat.completions.create(model="m", messages=say("#stop"), stop=stop, temperature=0).choices[0]
    assert (done.message.content, done.finish_reason) == (before, "stop")


def test_what_only_began_a_stop_string_is_sent(client):
    got = chunks(client, messages=say("#stop"), stop=["b1b2x", "cd"])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in got) == "ab1b2c"
    assert got[-1].choices[0].matched_stop is not None  # the end of the turn, by its id


def test_streamed_messages_and_responses(client, claude):
    with claude.messages.stream(model="m", max_tokens=20, messages=say("#think")) as events:
        [start, *_] = [*events]
        final = events.get_final_message()
    assert start.message.usage.input_tokens == final.usage.input_tokens > 0
    assert [block.type for block in final.content] == ["thinking", "text"] and final.content[1].text == "Yes"
    assert final.usage.output_tokens == 5
    with client.responses.stream(model="m", input="#stop", temperature=0) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == STOP[1:]
    cut = claude.messages.create(model="m", max_tokens=2, messages=say("#stop"))
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "ab1")
    stopped = claude.messages.create(model="m", max_tokens=9, messages=say("#stop"), stop_sequences=["b2"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "b2")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_hanging_up_ends_a_stream(server, path):
    state = lambda: server.ok("/server_info")["internal_states"][0]
    begun = state()["aborted"]
    body = {**GOOD[path], "stream": True}
    body |= {"n": 6, "ignore_eos": True} if "completions" in path else {}
    body |= {"max_output_tokens" if "responses" in path else "max_tokens": 900}
    if "completions" not in path:  # nothing there keeps a request alive
        server.ok("/pause_generation", {"mode": "retract"})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    wait(lambda: state()["running"] + state()["queued"])
    connection.close()
    wait(lambda: state()["running"] + state()["queued"] == 0)
    server.ok("/continue_generation", {})
    assert state()["aborted"] > begun


def test_an_aborted_request(server, client, claude):
    server.ok("/pause_generation", {"mode": "retract"})
    ask = lambda path, **more: servers.Later(lambda: server.post(path, {**GOOD[path], **more}))
    asked = [ask(path) for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")]
    wait(lambda: server.ok("/server_info")["internal_states"][0]["queued"] == 3)
    server.ok("/abort_request", {"abort_all": True})
    server.ok("/continue_generation", {})
    (_, chat), (status, message), (other, _) = [one.result() for one in asked]
    assert chat["choices"][0]["finish_reason"] == "abort"
    assert status == other == 503 and message["error"]["type"] == "api_error"


def wait(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_tokens_of_a_conversation_are_counted(claude):
    counted = claude.messages.count_tokens(model="m", messages=say("#add"), tools=CLAUDE_TOOLS)
    made = claude.messages.create(model="m", messages=say("#add"), tools=CLAUDE_TOOLS, max_tokens=1)
    assert counted.input_tokens == made.usage.input_tokens


# -- fields ----------------------------------------------------------------------------------------


def test_a_request_without_a_model_means_the_served_one(server):
    for body in (CHAT, {**CHAT, "model": None}):
        status, answer = server.post("/v1/chat/completions", {**body, "max_tokens": 1})
        assert status == 200 and answer["model"] == server.ok("/v1/models")["data"][0]["id"]


def test_variables_of_the_chat_template(server, client):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    made = client.chat.completions.create(model="m", messages=say("#think"), temperature=0, extra_body=off)
    assert made.choices[0].message.content == "no thought"
    made = client.responses.create(model="m", input="#think", temperature=0, extra_body=off)
    assert made.output_text == "no thought"
    for bad in ({"enable_thinkin": False}, {"chat_template": "x"}, {"enable_thinking": []}):
        status, answer = server.post("/v1/chat/completions", {"messages": say("x"), "chat_template_kwargs": bad})
        assert status == 400 and answer["error"]["param"] == "chat_template_kwargs", answer


def test_efforts_of_reasoning(server):
    ask = lambda path, body: calls_of(path, server.ok(path, {"temperature": 0, **body}))[0]
    thinks, not_ = "Yes", "no thought"
    for effort, said in ((None, thinks), ("none", not_), ("minimal", not_), ("low", thinks), ("xhigh", thinks)):
        body = {"messages": say("#think"), "reasoning_effort": effort}
        assert ask("/v1/chat/completions", body) == said
        assert ask("/v1/responses", {"input": "#think", "reasoning": {"effort": effort, "summary": "auto"}}) == said
        tokens = server.ok("/tokenize", body)["tokens"]
        assert ("<off>" in server.ok("/detokenize", {"tokens": tokens})["text"]) == (said == not_)
    first = {"messages": say("#think"), "reasoning_effort": "high", "chat_template_kwargs": NO}
    assert ask("/v1/chat/completions", first) == not_


def test_nothing_is_asked_for_by_null(server):
    """Each optional field, however deep."""
    function = {"name": "add", "description": None, "parameters": None, "strict": None}
    format = {"type": "json_schema", "json_schema": {"name": "n", "description": None, "strict": None, "schema": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": None}}
    content = [{"type": "text", "text": "#think", "cache_control": None}]
    chat = {
        "messages": [
            {"role": "system", "content": "s", "name": None},
            {"role": "user", "content": content, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None,
             "function_call": None, "reasoning_content": None, "reasoning": None, "annotations": None, "name": None},
            {"role": "tool", "tool_call_id": "c", "content": None, "name": None},
        ],
        "tools": [{"type": "function", "function": function}],
        "stream_options": {"include_usage": None, "include_obfuscation": None}, "response_format": format,
        "chat_template_kwargs": {"enable_thinking": None},
    }  # fmt: skip
    text = {"type": "output_text", "text": "a", "annotations": None, "logprobs": None}
    responses = {
        "input": [
            {"type": None, "role": "user", "content": "#think", "id": None, "status": None},
            {"type": "reasoning", "id": None, "summary": [], "content": None, "encrypted_content": None},
            {"type": "message", "role": "assistant", "content": [text], "id": None, "status": None, "phase": None},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": None, "id": None, "status": None},
            {"type": "function_call_output", "call_id": "c", "output": "1", "id": None, "status": None},
        ],
        "tools": [{"type": "function", **function}],
        "text": {"format": None, "verbosity": None},
        "reasoning": {"effort": None, "summary": None, "generate_summary": None},
    }  # fmt: skip
    claude = {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": None, "citations": None}],
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": None}]},
        ],
        "tools": [{"name": "add", "description": None, "input_schema": {}, "type": None, "cache_control": None}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
        "output_config": {"format": None, "effort": None},
        "thinking": None,
    }  # fmt: skip
    for path, body in zip(CONVERSATIONS, (chat, responses, claude), strict=True):
        others = {name: None for name in TABLES[path] if name not in body}
        status, answer = server.post(path, {**others, **body})
        assert status == 200, (path, answer)


def test_reasoning_comes_before_a_document(client):
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    made = client.chat.completions.create(model="m", messages=say("#think"), temperature=0, response_format=form)
    (choice,) = made.choices
    said = choice.message.reasoning_content, choice.message.content, choice.finish_reason
    assert said == ("Hm.", '{"a": 7}', "stop")


CHAT, TEXT = {"messages": say("#stop")}, {"prompt": "#stop"}
GOOD = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "#stop"},
    "/v1/messages": {**CHAT, "max_tokens": 3},
    "/v1/messages/count_tokens": CHAT,
}
ADDRESS = {"url": "https://example.com/a.png", "detail": "low"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": ADDRESS}]}
REFUSED = [  # path, field, value, words of the error
    ("/v1/chat/completions", "response_format", {"type": "xml"}, "its type must be text, json_object or json_schema"),
    ("/v1/chat/completions", "presence_penalty", 2.5, "must be in [-2, 2]"),
    ("/v1/chat/completions", "logit_bias", {"5": 101}, "must be in [-100, 100]"),
    ("/v1/chat/completions", "store", True, "nothing is stored"),
    ("/v1/chat/completions", "temprature", 0, "did you mean temperature?"),
    ("/v1/chat/completions", "max_token", 5, "did you mean max_tokens?"),
    ("/v1/chat/completions", "best_of", 2, "unknown field"),
    ("/v1/chat/completions", "structured_outputs", {"regex": "a"}, "give a response_format, a json_schema, a regex"),
    ("/v1/completions", "guided_choice", ["a", "b"], "give a response_format, a json_schema, a regex or an ebnf"),
    ("/v1/chat/completions", "tool_choice", "required", "given tools"),
    ("/v1/chat/completions", "top_logprobs", 2, "needs logprobs"),
    ("/v1/chat/completions", "reasoning_effort", "lo", "must be one of none, minimal, low"),
    ("/v1/chat/completions", "verbosity", "low", "has no switch for it"),
    ("/v1/chat/completions", "max_tokens", 1024, "together longer than the model's context length"),
    ("/v1/chat/completions", "max_completion_tokens", 1024, "together longer"),
    ("/v1/chat/completions", "messages", [{"role": "user", "content": "x" * 1100}], "longer than the model's context"),
    ("/v1/completions", "max_tokens", 1024, "together longer"),
    ("/v1/completions", "prompt", [5] * 1100, "longer than the model's context"),
    ("/v1/responses", "max_output_tokens", 1024, "together longer"),
    ("/v1/messages", "max_tokens", 1024, "together longer"),
    ("/v1/messages", "messages", [IMAGE], "this model reads no images"),
    ("/v1/chat/completions", "messages", [IMAGE], "this model reads no images"),
    ("/v1/responses", "input", [IMAGE], "this model reads no images"),
    ("/v1/messages/count_tokens", "messages", [IMAGE], "this model reads no images"),
    ("/v1/chat/completions", "model", ["m"], "must be a string"),
    ("/v1/chat/completions", "seed", 1.5, "must be a whole number"),
    ("/v1/chat/completions", "seed", 2**64, "must be in [-2**63, 2**63)"),
    ("/v1/chat/completions", "min_tokens", 2**64, "must be from 0 to max_new_tokens"),
    ("/v1/completions", "model", {"m": 1}, "must be a string"),
    ("/v1/completions", "seed", "1", "must be a whole number"),
    ("/v1/completions", "best_of", 4, "use n"),
    ("/v1/completions", "suffix", "x", "only continued at its end"),
    ("/v1/completions", "tools", [], "unknown field"),
    ("/v1/completions", "top_kk", 5, "did you mean top_k?"),
    ("/v1/completions", "lora_path", "nobody", "not loaded"),
    ("/v1/responses", "model", 3, "must be a string"),
    ("/v1/responses", "previous_response_id", "r", "no such response is kept"),
    ("/v1/responses", "text", {"format": {"type": "json_schema", "schema": {"not": {}}}}, "Unimplemented keys"),
    ("/v1/responses", "instruction", "x", "did you mean instructions?"),
    ("/v1/messages", "model", [], "must be a string"),
    ("/v1/messages", "output_config", {"format": {"type": "json_schema"}}, "must have a schema"),
    ("/v1/messages", "stop_sequence", ["x"], "did you mean stop_sequences?"),
    ("/v1/messages/count_tokens", "sistem", "x", "did you mean system?"),
]


@pytest.mark.parametrize("path, name, value, words", REFUSED, ids=str)
def test_a_field_that_would_be_without_effect_is_refused(server, path, name, value, words):
    status, answer = server.post(path, {**GOOD[path], name: value})
    error = answer["error"]
    assert status == 400 and words in error["message"], answer
    assert error["message"].startswith(f"{name}: ") or name == "lora_path"
    if path.startswith("/v1/messages"):
        assert answer["type"] == "error" and error["type"] == "invalid_request_error"
    elif name != "lora_path":
        assert error["param"] == name


@pytest.mark.parametrize("path", GOOD)
def test_values_that_ask_for_nothing_are_taken(server, path):
    table = TABLES[path]
    neutral = {name: held.but[0] for name, held in table.items() if not isinstance(held, str) and held.but}
    ignored = {name: None for name in table}
    status, answer = server.post(path, {**ignored, **neutral, **GOOD[path]})
    assert status == 200, answer


def test_fields_without_effect_are_taken(client):
    made = client.chat.completions.create(
        model="m", messages=say("#stop"), temperature=0, user="me", metadata={"a": "b"}, service_tier="auto",
        store=False, presence_penalty=0, frequency_penalty=0, response_format={"type": "text"},
        tool_choice="auto", parallel_tool_calls=True, modalities=["text"], prompt_cache_key="k",
    )  # fmt: skip
    assert made.choices[0].message.content == "ab1b2c"


def test_errors_are_those_of_the_sdks(client, claude):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=say("x"), presence_penalty=3)
    assert refused.value.param == "presence_penalty"
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        claude.messages.create(model="m", max_tokens=3, messages=say("x"), extra_body={"top_k": -3})


# -- further routes --------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["", "/v1"])
def test_texts_and_conversations_are_tokenized(server, client, start):
    one, two = (server.ok(f"{start}/tokenize", {"prompt": text}) for text in ("#stop", "a€"))
    assert one["count"] == len(one["tokens"]) == 1 and one["max_model_len"] == 1024 and two["count"] == 4
    both = server.ok(f"{start}/tokenize", {"model": "m", "prompt": ["#stop", "a€"]})
    assert both["tokens"] == [one["tokens"], two["tokens"]] and both["count"] == [1, 4]
    assert server.ok(f"{start}/detokenize", {"tokens": both["tokens"]})["text"] == ["#stop", "a€"]
    assert server.ok(f"{start}/detokenize", {"tokens": two["tokens"]})["text"] == "a€"

    chat = {"messages": say("#think"), "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    counted = server.ok(f"{start}/tokenize", chat)
    made = server.ok("/v1/chat/completions", {**chat, "max_tokens": 1})
    assert counted["count"] == made["usage"]["prompt_tokens"]
    text = server.ok(f"{start}/detokenize", {"tokens": counted["tokens"], "skip_special_tokens": False})["text"]
    assert text.endswith("<|im_start|>#think<off>") and '"name": "add"' in text


@pytest.mark.sweep
@pytest.mark.parametrize(
    "path, body, words",
    [
        ("/tokenize", {}, "give either a prompt or messages"),
        ("/tokenize", {"prompt": 3}, "prompt: must be a text or a list of them"),
        ("/tokenize", {"prompt": "x", "add_special_token": False}, "did you mean add_special_tokens?"),
        ("/tokenize", {"prompt": "1" * 10**6}, "prompt: must have at most"),
        ("/tokenize", {"messages": []}, "messages: must not be empty"),
        ("/detokenize", {"tokens": [10**9]}, "tokens: must be numbers from 0 to"),
        ("/detokenize", {"tokens": "x"}, "tokens: must be a list"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens: must be numbers"),
    ],
    ids=str,
)
def test_what_cannot_be_tokenized_is_refused(server, path, body, words):
    status, answer = server.post(path, body)
    assert status == 400 and words in answer["message"], answer


def test_metrics_for_prometheus(server):
    def read():
        text = server.ok("/metrics")
        return {
            (family.name, sample.labels["model_name"] != ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in (family.name, f"{family.name}_total")
        }

    before = read()
    server.ok("/v1/completions", {"prompt": "#stop", "max_tokens": 3, "temperature": 0})
    after = read()
    new = {name: after[name, True] - before[name, True] for name, _ in after}
    assert new["sglang:generation_tokens"] == 3 and new["sglang:prompt_tokens"] == new["sglang:num_requests"] == 1
    assert after["sglang:num_running_reqs", True] == after["sglang:token_usage", True] == 0
    assert after["sglang:max_total_num_tokens", True] == 4 * 1024 and new["sglang:num_aborted_requests"] == 0


def test_openapi_names_every_route_and_field(server):
    document = server.ok("/openapi.json")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            status, _ = server.ask(method.upper(), path.replace("{model}", "x"), b"[")
            assert status != 405 and (status != 404 or "{" in path), path
    for path, table in TABLES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["properties"].keys() == table.keys()
    assert {"/generate", "/metrics", "/tokenize", "/health", "/openapi.json"} <= document["paths"].keys()


# -- docs/serve.md -----------------------------------------------------------------------------------


def quoted(text):
    return re.findall(r"`([^`]*)`", text)


def rows(text, head):
    """The cells of the table with this head."""
    table = text.partition(f"| {head} |\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


SECTIONS = {quoted(part)[0]: part for part in PAGE.split("\n### ")[1:]}


def test_the_page_has_every_table():
    routes = {path.removeprefix("/v1") if "tokenize" in path else path for path in openapi.TABLES}
    assert SECTIONS.keys() == {*routes, "sampling_params"}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_says_what_happens_to_every_field(name):
    table = openapi.TABLES.get(name, request_parsing.SAMPLING)
    used, _, rest = SECTIONS[name].partition("No effect: ")
    none = quoted(rest.partition("\n\n")[0])
    refused = [
        (field, (quoted(but), why))
        for names, but, why in rows(rest, "refused | unless | why")
        for field in quoted(names)
    ]
    said = [(field, "used") for names, _ in rows(used, "field |") for field in quoted(names)]
    said += [(field, "no effect") for field in none] + refused
    held = {
        field: way if isinstance(way, str) else ([json.dumps(value) for value in way.but], way.why)
        for field, way in table.items()
    }
    assert dict(said) == held and len(said) == len(held)


@pytest.mark.slow
def test_the_page_names_every_route(server):
    said = {
        (path, frozenset(methods.split(", "))): what
        for paths, methods, what in rows(PAGE, "route | methods |")
        for path in quoted(paths)
    }
    held = {
        (path, frozenset(map(str.upper, operations))): next(iter(operations.values()))["summary"]
        for path, operations in server.ok("/openapi.json")["paths"].items()
    }
    assert said == held
