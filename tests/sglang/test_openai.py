"""OpenAI's routes on the embedded server and on the real SGLang: the same text, scores and errors as /generate."""

import json

import pytest

PROMPT = [5, 17, 42, 100, 61]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
FIXED = {"model": "tiny", "temperature": 0, "max_tokens": 6, "ignore_eos": True}


def test_models(server, versions):
    (model,) = server.ok("/v1/models")["data"]
    assert model["max_model_len"] == 4096 and model["object"] == "model"
    assert server.ok(f"/v1/models/{model['id']}")["id"] == model["id"]
    status, answer = server.get("/v1/models/nobody")
    assert status == 404 and answer["error"]["code"] == "model_not_found"


def test_completion(server, versions):
    text = "What is 3 + 4?"
    ids = versions.tokenizer.encode(text)
    same = server.generate(ids, max_new_tokens=6)
    for prompt in (text, ids):
        answer = server.ok(COMPLETIONS, {**FIXED, "prompt": prompt})
        (choice,) = answer["choices"]
        assert answer["object"] == "text_completion" and answer["model"] == "tiny"
        assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (same["text"], "length", None)
        assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == 6
        assert answer["usage"]["total_tokens"] == len(ids) + 6
        told = answer["metadata"]["weight_versions"]  # SGLang's is a list, where OpenAI's clients expect a text
        assert (json.loads(told) if isinstance(told, str) else told) == same["meta_info"]["weight_versions"]


def test_completions_of_several_prompts_and_samples(server):
    answer = server.ok(COMPLETIONS, {**FIXED, "prompt": [PROMPT, [7, 8]], "n": 2})
    alone = [server.generate(p, max_new_tokens=6)["text"] for p in (PROMPT, [7, 8])]
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 24


def test_echo_scores_the_prompt(server, versions):
    answer = server.ok(COMPLETIONS, {**FIXED, "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 3})
    (choice,) = answer["choices"]
    whole = server.generate(PROMPT, max_new_tokens=3)
    assert choice["text"] == versions.tokenizer.decode(PROMPT) + whole["text"]
    ids = PROMPT + whole["output_ids"]
    logp_TV = versions.logp(0, ids)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) == len(ids)
    assert logprobs["token_logprobs"][1:] == pytest.approx(
        [logp_TV[i - 1, ids[i]] for i in range(1, len(ids))], abs=1e-4
    )
    assert logprobs["top_logprobs"][0] is None
    for i in range(1, len(ids)):
        assert sorted(logprobs["top_logprobs"][i].values())[-1] == pytest.approx(logp_TV[i - 1].max(), abs=1e-4)


def test_streamed_completion(server):
    body = {**FIXED, "prompt": PROMPT, "stream_options": {"include_usage": True}, "logprobs": 1}
    with server.stream(COMPLETIONS, body) as events:
        *chunks, usage = list(events)
    whole = server.ok(COMPLETIONS, body)["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    said = [logp for chunk in chunks for logp in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert said == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-5)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6


def test_chat(server, versions):
    ids = versions.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    same = server.generate(ids, max_new_tokens=6)
    body = {**FIXED, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "return_meta_info": True}
    answer = server.ok(CHAT, body)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len(ids)
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == same["text"]
    assert choice["finish_reason"] == "length" and choice["matched_stop"] is None
    meta = choice["meta_info"]
    assert [row[1] for row in meta["output_token_logprobs"]] == same["output_ids"]
    assert meta["weight_versions"] == same["meta_info"]["weight_versions"]
    rows = choice["logprobs"]["content"]
    theirs = [row[0] for row in same["meta_info"]["output_token_logprobs"]]
    assert [row["logprob"] for row in rows] == pytest.approx(theirs, abs=1e-5)
    assert all(len(row["top_logprobs"]) == 2 and row["top_logprobs"][0]["logprob"] == row["logprob"] for row in rows)


def test_chat_with_text_parts_and_several_samples(server):
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    plain = server.ok(CHAT, {**FIXED, "messages": MESSAGES})["choices"][0]["message"]["content"]
    answer = server.ok(CHAT, {**FIXED, "messages": parts, "n": 2, "max_completion_tokens": 6})
    assert [choice["message"]["content"] for choice in answer["choices"]] == [plain, plain]


def test_a_stop_string_in_a_chat(server):
    body = {**FIXED, "messages": MESSAGES, "max_tokens": 40}
    text = server.ok(CHAT, body)["choices"][0]["message"]["content"]
    word = next(c for c in text if c.isascii() and c.isprintable() and text.index(c) > 0)
    (choice,) = server.ok(CHAT, {**body, "stop": [word]})["choices"]
    assert choice["message"]["content"] == text[: text.index(word)]
    assert choice["finish_reason"] == "stop" and choice["matched_stop"] == word


def test_streamed_chat(server):
    body = {**FIXED, "messages": MESSAGES, "stream_options": {"include_usage": True}}
    with server.stream(CHAT, body) as events:
        *chunks, usage = list(events)
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == server.ok(CHAT, body | {"stream_options": None})["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    "path, body",
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 5000}),
        (COMPLETIONS, {"prompt": "x", "temperature": -1, "stream": True}),
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "x"}),
        (CHAT, {"messages": [{"role": "user"}]}),
        (CHAT, {"messages": MESSAGES, "top_p": 0}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5000}),
    ],
    ids=json.dumps,
)
def test_bad_bodies_are_400(server, path, body):
    status, answer = server.post(path, {"model": "tiny", **body})
    assert status == 400 and answer["object"] == "error" and answer["code"] == 400 and answer["message"]
