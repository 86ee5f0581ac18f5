"""The embedded server on a real socket: errors, weight updates, start-up and shutdown, memory.

Behaviour that it shares with SGLang is tested in `sglang/`, on both.
"""

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import servers
import tiny
from safetensors.numpy import load_file, save_file

from areax.adapters import hf, peft, tokenizer
from areax.models import forward, lora, table
from areax.rollout.chat.api import chat, completions
from areax.rollout.chat.api.abilities import Abilities
from areax.rollout.engine import server as module
from areax.rollout.engine.checkpoint import read_weights
from areax.rollout.processes import http_process
from areax.rollout.servers.labels import label_of

PROMPT = [5, 6, 7]
LONG = {"temperature": 1.0, "max_new_tokens": 4000, "ignore_eos": True}
UPDATE, STAGE = "/update_weights_from_disk", "/stage_weights_from_disk"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one model, "a" and "b"."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        tiny.model(root / name, seed, max_position_embeddings=4096)
    return root


@pytest.fixture(scope="module")
def running(models):
    with servers.embedded(models / "a", context=4096, slots=4) as remote:
        yield remote
        remote.process.send_signal(signal.SIGINT)
        assert remote.process.wait(60) == 0


@pytest.fixture
def server(running, models):
    running.ok("/abort_request", {"abort_all": True})
    running.ok("/continue_generation", {})
    running.ok(UPDATE, {"model_path": str(models / "a"), "weight_version": "A"})
    return running


def state(server):
    return server.ok("/server_info")["internal_states"][0]


def held(server):
    """Everything that an update can change."""
    info = server.ok("/model_info")
    return (
        info["weight_version"],
        info["model_path"],
        server.ok("/weights_checker", {}),
        server.generate(PROMPT)["text"],
    )


def wait(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# -- requests ------------------------------------------------------------------------------------


def test_a_request_whose_logits_are_not_finite_fails_on_each_route(server, models, tmp_path):
    config, spec = hf.read_config(models / "a"), lora.Lora(rank=2, alpha=1e30)
    huge = peft.save(tmp_path / "huge", config, tiny.weights(lora.table(table(config), spec), 1.0), spec)
    server.ok("/load_lora_adapter", {"lora_name": "huge", "lora_path": str(huge)})
    why = "adapter 'huge' on weights 'A': the logits are not finite; load others"
    ids = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "lora_path": "huge"}
    talk = {"messages": [{"role": "user", "content": "1+"}], "max_tokens": 3, "model": "huge"}
    bodies = {
        "/generate": ids, "/v1/completions": {"prompt": "1+", "max_tokens": 3, "model": "huge"},
        "/v1/chat/completions": talk, "/v1/messages": talk,
        "/v1/responses": {"input": "1+", "max_output_tokens": 3, "model": "huge"},
    }  # fmt: skip
    before = server.generate(PROMPT)["text"]
    for path, body in bodies.items():
        status, answer = server.post(path, body)
        assert status == 500 and answer["error"]["message"] == why, path
        status, events = server.post(path, body | {"stream": True})
        assert status == 200 and "error" in events and why in events, path
    both = server.post("/generate", ids | {"input_ids": [PROMPT, PROMPT], "lora_path": [None, "huge"]})
    assert both[0] == 500 and both[1]["error"]["message"] == why
    assert server.generate(PROMPT)["text"] == before
    server.ok("/unload_lora_adapter", {"lora_name": "huge"})


@pytest.mark.parametrize(
    "body, words",
    [
        ({"input_ids": [5, 4000]}, "vocabulary"),  # this one and the next crash the real SGLang
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [4000]}}, "vocabulary"),
        ({"text": "1+§"}, "has tokens for"),
        ({"input_ids": PROMPT, "sampling_params": {"regex": "a"}}, "regex"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": -1}, "stream": True}, "temperature"),
        ({"input_ids": [4000], "stream": True}, "vocabulary"),
        ({"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs"),
    ],
    ids=str,
)
def test_requests_that_would_crash_or_mislead_a_server_are_refused(server, body, words):
    status, answer = server.post("/generate", body)
    assert status == 400 and words in answer["error"]["message"]
    assert len(server.generate(PROMPT)["output_ids"]) == 8


def test_a_request_id_in_use_is_refused(server):
    server.ok("/pause_generation", {"mode": "retract"})
    first = servers.Later(lambda: server.generate(PROMPT, fields={"rid": "same"}))
    wait(lambda: state(server)["queued"] == 1)
    status, answer = server.post("/generate", {"input_ids": [PROMPT, PROMPT], "rid": ["other", "same"]})
    assert status == 400 and "same" in answer["error"]["message"]
    wait(lambda: state(server)["queued"] == 1)  # the other request of the batch is withdrawn
    server.ok("/continue_generation", {})
    assert first.result()["meta_info"]["id"] == "same"


def test_a_held_request_can_be_aborted_with_all_its_samples(server):
    server.ok("/pause_generation", {"mode": "abort"})
    asked = servers.Later(lambda: server.generate(PROMPT, n=3, fields={"rid": "three"}))
    wait(lambda: state(server)["queued"] == 3)
    server.ok("/abort_request", {"rid": "three"})
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in asked.result()] == ["abort"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_while_queued_removes_the_request(server, stream):
    server.ok("/pause_generation", {"mode": "retract"})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"input_ids": PROMPT, "sampling_params": LONG, "stream": stream}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    wait(lambda: state(server)["queued"] == 1)
    connection.close()
    wait(lambda: state(server)["queued"] == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_ends_a_running_request(server, stream):
    connection, before = http.client.HTTPConnection("127.0.0.1", server.port), state(server)["tokens"]
    params = {**LONG, "n": 32}  # more than the number of slots, and seconds: clients are watched from the first one on
    body = {"input_ids": PROMPT, "sampling_params": params, "stream": stream}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    wait(lambda: state(server)["running"] == 4)
    connection.close()
    wait(lambda: state(server)["running"] == state(server)["queued"] == 0)
    assert state(server)["tokens"] - before < 32 * 4000


def test_logprobs_before_min_new_tokens_are_those_of_the_policy(server):
    """Before min_new_tokens stop tokens are not sampled, but the log-probabilities stay those of the policy."""
    free = server.generate(PROMPT, max_new_tokens=6, fields={"top_logprobs_num": 2})
    stop = free["output_ids"][0]
    answer = server.generate(PROMPT, max_new_tokens=6, min_new_tokens=6, stop_token_ids=[stop])
    runner_up = free["meta_info"]["output_top_logprobs"][0][1]
    assert answer["output_ids"][0] == runner_up[1]
    assert answer["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(runner_up[0], abs=1e-6)


def test_health_answers_503_immediately_while_paused(server):
    server.ok("/pause_generation", {"mode": "in_place"})
    assert server.get("/health")[0] == server.get("/health_generate")[0] == 503


@pytest.mark.parametrize(
    "path, body",
    [
        ("/abort_request", {"rid": 5}),
        ("/abort_request", [1]),
        ("/update_weight_version", {"new_version": 5}),
        ("/weights_checker", [1]),
        ("/continue_generation", b"{"),
    ],
)
def test_malformed_control_bodies_are_400(server, path, body):
    status, answer = server.post(path, body)
    assert status == 400 and answer["object"] == "error"


def test_unknown_routes_and_methods(server):
    for path, advice in (
        ("/no_such_route", "/openapi.json lists the routes"), ("/v1/embeddings", "/openapi.json lists the routes"),
        ("/chat/completions", "give OpenAI's clients the address with /v1"),
        ("/v1/v1/messages", "give Anthropic's clients the address without /v1"),
    ):  # fmt: skip
        status, answer = server.get(path)
        assert status == 404 and answer["error"]["message"] == f"there is no {path}; {advice}"
    assert server.get("/generate")[0] == 405


LONG_MESSAGE = [{"role": "user", "content": "1" * 100_000}]
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.sweep
@pytest.mark.parametrize(
    "path, body, words",
    [
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": 10**9}}, "n: must be from 1 to 1024"),
        ("/v1/completions", {"prompt": "1+1", "n": 10**9}, "n: must be from 1 to 1024"),
        ("/generate", {"input_ids": [PROMPT] * 20_000, "rid": [f"{i}" for i in range(20_000)]}, "at most 1024 samples"),
        ("/generate", {"input_ids": [PROMPT] * 100, "sampling_params": {"n": 100}}, "at most 1024 samples"),
        ("/v1/completions", {"prompt": ["1"] * 20_000}, "prompt: at most 1024"),
        ("/generate", {"input_ids": PROMPT, "rid": "r" * 1000}, "rid: must be a string of 1 to 256 characters"),
        ("/abort_request", {"rid": "r" * 1000}, "rid: must be a string of at most 256 characters"),
        ("/generate", {"text": "1" * 100_000}, "text: must have at most"),
        ("/v1/completions", {"prompt": "1" * 100_000}, "prompt: must have at most"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "1" * 100_000}]},
            "messages: must have at most",
        ),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"stop": ["a"] * 1000}}, "stop: must be at most 128"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"temperature": 10**400}}, "must be a finite number"),
        ("/v1/completions", {"prompt": "1", "top_p": 10**400}, "must be a finite number"),
        ("/generate", b'{"input_ids": ' + DEEP + b"}", "nested too deeply"),
        ("/pause_generation", b'{"mode": ' + DEEP + b"}", "nested too deeply"),
        ("/generate", b'{"input_ids": [' + b"[]," * 2**20 + b"[]]}", "at most 1048576 arrays"),
        ("/generate", b'{"input_ids": [5], "rid": "\\ud800"}', "must be Unicode"),
        ("/update_weight_version", b'{"new_version": "\\ud800"}', "must be Unicode"),
        ("/update_weight_version", {"new_version": "v" * 10_000}, "new_version: must be a string of 1 to 4096"),
        (UPDATE, {"model_path": "a\0b"}, "model_path: must be a string"),
        (UPDATE, {"model_path": "/" + "a" * 300}, "cannot be read (File name too long)"),
        (STAGE, {"model_path": "/" + "a/" * 2000}, "must be a directory that exists"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/" + "a" * 300}, "cannot be read (File name too long)"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_requests_that_would_take_long_or_break_are_refused(server, path, body, words):
    status, answer = server.post(path, body)
    said = answer.get("message") or answer.get("error_message")
    assert status == 400 and words in said, answer


def test_answers_of_several_samples_have_a_bounded_number_of_log_probabilities(server):
    body = {"input_ids": [[5] * 2000] * 20, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    status, answer = server.post("/generate", body)
    assert status == 400 and "at most 524288 log-probabilities" in answer["message"]
    alone = server.ok("/generate", body | {"input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 0}})
    assert len(alone["meta_info"]["input_top_logprobs"]) == 2000


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation"])
def test_memory_is_released_by_post_only(server, path):
    before = held(server)
    assert server.ask("GET", path, b"{}")[0] == 405
    assert held(server) == before


def test_the_engine_holds_a_bounded_number_of_requests(server):
    server.ok("/pause_generation", {"mode": "retract"})
    several = {"input_ids": [PROMPT] * 1024, "sampling_params": {"max_new_tokens": 1}, "return_logprob": False}
    waiting = [servers.Later(lambda: server.post("/generate", several)) for _ in range(17)]
    wait(lambda: any(one.done for one in waiting))
    refused = [one.result() for one in waiting if one.done]
    assert [status for status, _ in refused] == [503] and "try again later" in refused[0][1]["message"]
    server.ok("/abort_request", {"abort_all": True})
    assert sorted(one.result()[0] for one in waiting) == [200] * 16 + [503]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": "1+1", "suffix": "x"}),
        ("/v1/completions", {"prompt": "1+1", "best_of": 4}),
        ("/v1/completions", {"prompt": "1+1", "logit_bias": {"5": 101}}),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", {"presence_penalty": 3}),
    ],
    ids=str,
)
def test_unsupported_fields_of_openai_routes_are_400(server, path, body):
    status, answer = server.post(path, body if "prompt" in body else {"messages": SAID, **body})
    assert status == 400 and answer["object"] == "error"
    assert any(name in answer["message"] for name in (*body, "content"))


SAID = [{"role": "user", "content": "1+1"}]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": [1, [2]]}),
        ("/v1/completions", {"prompt": ["1", [2]]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [5], "echo": "yes"}),
        ("/v1/completions", {"prompt": [5], "logprobs": -1}),
        ("/v1/completions", {"prompt": [5], "stop": [""]}),
        ("/v1/completions", {"prompt": [5], "temperature": "hot"}),
        ("/v1/completions", {"prompt": [5], "max_tokens": 1.5}),
        ("/v1/completions", {"prompt": [5], "stream_options": {"odd": 1}}),
        ("/v1/completions", {"prompt": [5], "suffix": "x"}),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": [*SAID, {"role": "assistant", "tool_calls": [{}]}]}),
        ("/v1/chat/completions", {"messages": SAID, "max_completion_tokens": "5"}),
        ("/v1/chat/completions", {"messages": SAID, "function_call": {"name": "f"}}),
        ("/v1/chat/completions", {"messages": SAID, "modalities": ["audio"]}),
    ],
    ids=str,
)
def test_openai_routes_have_the_same_rules_as_the_gateway(server, path, body):
    with pytest.raises(ValueError) as refused:
        if "prompt" in body:
            completions.read(body, tokenizer.character("0123456789+"))
        else:
            chat.read(body, Abilities())
    status, answer = server.post(path, body)
    theirs = str(refused.value).replace("from 0 to 31", "from 0 on")  # the vocabulary is checked by the engine
    assert status == 400 and answer["message"] == theirs


# -- weights -------------------------------------------------------------------------------------


def drop(tensors, config):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors, config):
    tensors["model.layers.0.nope.weight"] = np.zeros(3, np.float32)


def reshape(tensors, config):
    tensors["model.norm.weight"] = np.zeros(16, np.float32)


def deepen(tensors, config):
    config["num_hidden_layers"] = 3


def retheta(tensors, config):  # every shape matches, but the outputs would be wrong
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 5e5


@pytest.mark.parametrize(
    "change, words",
    [(drop, "up_proj"), (add, "nope"), (reshape, "model.norm"), (deepen, "layers"), (retheta, "rope")],
)
@pytest.mark.parametrize("pause", [None, "retract"])
def test_an_update_with_another_architecture_changes_nothing(server, models, tmp_path, change, words, pause):
    shutil.copytree(models / "b", tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    file, config = tmp_path / "b" / "model.safetensors", json.loads((tmp_path / "b" / "config.json").read_text())
    tensors = dict(load_file(file))
    change(tensors, config)
    save_file(tensors, file)
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    before = held(server)
    if pause:
        server.ok("/pause_generation", {"mode": pause})
    status, answer = server.post(UPDATE, {"model_path": str(tmp_path / "b"), "weight_version": "B"})
    assert status == 400 and answer["success"] is False and words in answer["message"]
    server.ok("/continue_generation", {})
    assert held(server) == before


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 instead of 2"),
        ("config.json", {"vocab_size": 10**9}, "vocab 1000000000 instead of"),
        ("config.json", {"intermediate_size": 10**9}, "ffn 1000000000 instead of"),
        ("config.json", {"num_attention_heads": 0, "head_dim": None}, "must be a whole number above 0, got 0"),
        ("config.json", {"hidden_size": "x" * 2**20}, "must have at most 1048576 bytes"),
        ("manifest.json", {"tensors": []}, "must list the tensors"),
    ],
    ids=str,
)
def test_an_update_from_a_folder_made_to_harm_changes_nothing(server, models, tmp_path, name, content, words):
    folder = shutil.copytree(models / "b", tmp_path / "c")
    written = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(written | content))
    before, memory = held(server), resident(server)
    status, answer = server.post(UPDATE, {"model_path": str(folder), "weight_version": "C"})
    assert status == 400 and words in answer["message"]
    assert held(server) == before and resident(server) < memory + 100 * 2**20


def test_an_update_from_a_truncated_or_corrupt_file_changes_nothing(server, models, tmp_path):
    before = held(server)
    shutil.copytree(models / "b", tmp_path / "b")
    file = tmp_path / "b" / "model.safetensors"
    data = file.read_bytes()
    for damaged in (data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1])):  # flips a bit of the last tensor
        file.write_bytes(damaged)
        status, answer = server.post(UPDATE, {"model_path": str(tmp_path / "b"), "weight_version": "B"})
        assert status == 400 and "\n" not in answer["message"]
        assert held(server) == before


@pytest.mark.parametrize(
    "body",
    [
        {"model_path": 5},
        {"model_path": "x", "load_format": "dummy"},
        {"model_path": "x", "weight_version": ""},
        {"model_path": "x", "flush_cache": "no"},
    ],
)
def test_a_malformed_update_changes_nothing(server, body):
    before = held(server)
    assert server.post(UPDATE, body)[0] == 400
    assert held(server) == before


def test_weights_are_not_renamed_to_a_label_of_other_content(server, models):
    """A trainer's label is theirs under any version number; other names are free."""
    label = lambda name, version: label_of(
        hf.json_bytes(hf.read_json(models / name / "manifest.json") | {"version": version})
    )
    renamed = lambda name: server.post("/update_weight_version", {"new_version": name})
    now = lambda: server.ok("/model_info")["weight_version"]
    own = label("a", 7)
    for wrong in (label("b", 7), "7-00000000", own.replace("7-", "8-")):
        status, answer = renamed(wrong)
        said = f"new_version: a trainer's label must be that of the content served, got '{wrong}'"
        assert status == 400 and answer["message"] == said and now() == "A"
    for right in (own, own, "renamed", label("a", 8), "7-1f0c", "v7-1f0c3a9b"):
        assert renamed(right)[0] == 200 and now() == right
    server.ok(UPDATE, {"model_path": str(models / "b"), "weight_version": "B"})
    assert renamed(own)[0] == 400 and renamed(label("b", 0))[0] == 200


def test_an_update_without_a_label_gets_one(server, models):
    answer = server.ok(UPDATE, {"model_path": str(models / "b")})
    label = server.ok("/model_info")["weight_version"]
    assert label.startswith("unnamed-") and label in answer["message"]
    server.ok(UPDATE, {"model_path": str(models / "a")})
    assert server.ok("/model_info")["weight_version"] not in ("A", label)


def test_checksums_equal_those_of_the_manifest(server, models):
    server.ok(UPDATE, {"model_path": str(models / "b"), "weight_version": "B"})
    tensors = json.loads((models / "b" / "manifest.json").read_text())["tensors"]
    (rank,) = server.ok("/weights_checker", {"action": "checksum"})["ranks"]
    assert rank["checksums"] == {name: entry["xxh3_128"] for name, entry in tensors.items()}
    assert server.post("/weights_checker", {"action": "reset"})[0] == 400


def test_without_a_manifest_checksums_are_computed(models, tmp_path):
    shutil.copytree(models / "b", tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    _, _, computed = read_weights(tmp_path / "b", "float32")
    assert computed == read_weights(models / "b", "float32")[2]


def test_a_stream_has_an_event_for_so_many_tokens(server):
    params = LONG | {"max_new_tokens": 100, "stream_interval": 30}
    with server.stream("/generate", {"input_ids": PROMPT, "sampling_params": params}) as events:
        made = list(events)
    sizes = [len(event["output_ids"]) for event in made]
    assert 3 <= len(sizes) <= 5 and sizes[-1] == 100
    assert all(later - before >= 30 for before, later in zip(sizes[:-2], sizes[1:-1], strict=True))
    for event, size in zip(made, sizes, strict=True):
        assert [span["end"] for span in event["meta_info"]["weight_versions"]] == [size]


def test_an_update_during_an_in_place_pause(server, models):
    """With flush_cache it is refused and changes nothing; without, the old cache is used on purpose."""
    with server.stream("/generate", {"input_ids": PROMPT, "rid": "kept", "sampling_params": LONG}) as events:
        next(events)
        server.ok("/pause_generation", {"mode": "in_place"})
        body = {"model_path": str(models / "b"), "weight_version": "B"}
        status, answer = server.post(UPDATE, body)
        assert status == 400 and "in place" in answer["message"]
        assert server.ok("/model_info")["weight_version"] == "A"
        server.ok(UPDATE, body | {"flush_cache": False})
        assert server.ask("POST", "/flush_cache")[0] == 400
        server.ok("/continue_generation", {})
        assert any(event["meta_info"]["weight_version"] == "B" for event in events)
        server.ok("/abort_request", {"abort_all": True})
        *_, last = events
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["A", "B"]
    assert last["meta_info"]["num_retractions"] == 0


def test_an_update_may_abort_running_requests(server, models):
    with server.stream("/generate", {"input_ids": PROMPT, "sampling_params": LONG}) as events:
        next(events)
        body = {"model_path": str(models / "b"), "weight_version": "B", "abort_all_requests": True}
        server.ok(UPDATE, body)
        *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["A"]


def test_staging_changes_nothing_until_the_update(server, models, tmp_path):
    server.ok(UPDATE, {"model_path": str(models / "b"), "weight_version": "B"})
    under_b = held(server)
    server.ok(UPDATE, {"model_path": str(models / "a"), "weight_version": "A"})
    under_a = held(server)
    folder = tmp_path / "version"
    shutil.copytree(models / "b", folder)
    with server.stream("/generate", {"input_ids": PROMPT, "sampling_params": LONG}) as events:
        next(events)
        server.ok(STAGE, {"model_path": str(folder)})
        assert server.ok("/model_info")["weight_version"] == "A"
        server.ok("/abort_request", {"abort_all": True})
        *_, last = events
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["A"]
    assert held(server) == under_a
    server.ok(UPDATE, {"model_path": str(folder), "weight_version": "B"})
    assert held(server)[2:] == under_b[2:]
    server.ok(STAGE, {"model_path": str(folder)})
    for file in folder.iterdir():  # the folder no longer contains what was staged
        shutil.copyfile(models / "a" / file.name, file)
    server.ok(UPDATE, {"model_path": str(folder), "weight_version": "A"})
    assert held(server)[2:] == under_a[2:]


@pytest.mark.parametrize("body", [{}, {"model_path": 5}, {"model_path": "nowhere"}, {"load_format": "dummy"}])
def test_bad_staging_requests_are_refused(server, body):
    before = held(server)
    assert server.post(STAGE, body)[0] == 400
    assert held(server) == before


# -- start-up and shutdown -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_with_a_key_and_without_a_tokenizer(models, tmp_path):
    shutil.copytree(models / "a", tmp_path / "a")
    for file in (tmp_path / "a").glob("*token*"):
        file.unlink()
    with servers.embedded(tmp_path / "a", api_key="secret", slots=2, context=4096, version="7-00000000") as remote:
        assert "token ids only" in remote.line and "2 slots of 4096 tokens" in remote.line
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert remote.get("/ready")[0] == 200
        assert remote.get("/model_info")[0] == remote.post("/generate", body)[0] == 401
        remote.headers["Authorization"] = "Bearer secrets"
        assert remote.post("/generate", body)[0] == 401
        remote.headers["Authorization"] = "Bearer secret"
        answer = remote.ok("/generate", body)
        assert answer["text"] == "" and answer["meta_info"]["weight_version"] == "7-00000000"
        for path, body in (
            ("/generate", {"text": "1+1"}),
            ("/generate", {"input_ids": PROMPT, "sampling_params": {"stop": ["1"]}}),
            ("/v1/completions", {"prompt": "1+1"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1+1"}]}),
        ):
            status, answer = remote.post(path, body)
            assert status == 400 and "tokenizer" in str(answer)
        remote.ok("/v1/completions", {"prompt": PROMPT, "logprobs": 1, "echo": True, "max_tokens": 2})

        with remote.stream("/generate", {"input_ids": PROMPT, "sampling_params": {**LONG, "n": 4}}) as events:
            next(events)
            remote.process.terminate()
            ends = [event["meta_info"]["finish_reason"] for event in events if event["meta_info"]["finish_reason"]]
        assert len(ends) == 4 and "abort" in {end["type"] for end in ends}
        assert remote.process.wait(30) == 0
        with contextlib.closing(http_process.bind("127.0.0.1", remote.port)):
            pass  # the port is free again


def test_a_port_in_use_is_reported_before_loading_the_model(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use; choose another, or 0"):
            module.serve(str(tmp_path / "no such model"), port=port)


def test_small_answers_are_sent_without_delay():
    """With Nagle's algorithm each would wait 40 ms for the client's acknowledgement."""
    with http_process.bind("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("host, port", [("no.such.host.invalid", 0), ("192.0.2.1", 0), ("127.0.0.1", 70000)])
def test_an_unusable_address_is_an_error(host, port):
    with pytest.raises(ValueError, match=f"serve: .*({host}|{port})"):
        http_process.bind(host, port)


def test_a_folder_without_a_valid_checkpoint_is_refused(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="checkpoint"):
            module.serve(str(path), port=0)
    config, _ = hf.load(tiny.model(tmp_path / "model"))
    (tmp_path / "model" / "tokenizer.json").write_text('{"half')
    with pytest.raises(ValueError, match="damaged or half-written"):
        module.serve(str(tmp_path / "model"), port=0)


# -- memory ----------------------------------------------------------------------------------------


def resident(server):
    """Resident memory of the server's process, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024


@pytest.mark.long
def test_memory_is_released_and_resumed(models):
    """The caches of 160 MiB dominate the process size; requests that arrive meanwhile are answered afterwards."""
    with servers.embedded(models / "a", context=4096, slots=160) as server:
        assert len(server.generate(PROMPT)["output_ids"]) == 8
        before, own = resident(server), state(server)["bytes"]
        assert own >= 2**27
        server.ok("/pause_generation", {"mode": "retract"})
        assert server.post("/release_memory_occupation", {})[0] == 200
        assert before - resident(server) > 0.9 * own and state(server)["bytes"] == 0
        asked = servers.Later(lambda: server.generate(PROMPT, temperature=1.0, max_new_tokens=20))
        wait(lambda: state(server)["queued"] == 1)
        refused = server.post(UPDATE, {"model_path": str(models / "b"), "weight_version": "B"})
        assert refused[0] == 400 and "/resume_memory_occupation" in refused[1]["message"]
        server.ok("/continue_generation", {})
        for _ in range(2):  # repeating it is no error
            assert server.post("/resume_memory_occupation", {})[0] == 200
        assert server.get("/health")[0] == server.get("/ready")[0] == 503 and not asked.done
        assert server.post("/weights_checker", {})[0] == 400 and server.ok("/model_info")["weight_version"] == "default"
        server.ok(UPDATE, {"model_path": str(models / "b"), "weight_version": "B"})
        answer = asked.result()
        assert answer["meta_info"]["weight_versions"] == [{"version": "B", "start": 0, "end": 20}]
        assert server.get("/health")[0] == 200 and resident(server) > before - 0.1 * own
        config, params = hf.load(models / "b")
        ids = [*PROMPT, *answer["output_ids"]]
        logp_TV = jax.nn.log_softmax(forward(params, np.array(ids)[None], config=config)[0])
        for i, (logp, id, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
            assert logp == pytest.approx(float(logp_TV[len(PROMPT) + i - 1, id]), abs=1e-4)


@pytest.mark.parametrize("body", [{"tags": ["wieghts"]}, {"tags": "weights"}, {"tags": [1]}], ids=str)
def test_bad_release_tags_are_refused(server, body):
    status, answer = server.post("/release_memory_occupation", body)
    assert status == 400 and "tags" in answer["message"] and state(server)["released"] == []


@pytest.mark.slow
def test_memory_is_not_released_while_requests_run(server):
    with server.stream("/generate", {"input_ids": PROMPT, "sampling_params": LONG}) as events:
        next(events)
        status, answer = server.post("/release_memory_occupation", {})
        assert status == 400 and "no requests may be running" in answer["message"]
        assert state(server)["released"] == [] and len(next(events)["output_ids"]) > 0


def test_the_address_with_which_a_server_joins_is_one_that_the_run_reaches():
    assert module._seen_from("", "127.0.0.1", 7) == module._seen_from("http://localhost:9", "127.0.0.1", 7)
    assert module._seen_from("http://127.0.0.1:9", "0.0.0.0", 7) == "http://127.0.0.1:7"
    for run, host, why in (
        ("10.0.0.1:9000", "10.0.0.7", "join: must be an address such as"),
        ("http://ann:x@b:1", "10.0.0.7", "no user, password"),
        ("http://10.0.0.1:9000", "127.0.0.1", "join: http://10.0.0.1:9000 cannot reach 127.0.0.1; give --host"),
    ):
        with pytest.raises(ValueError, match=why):
            module._seen_from(run, host, 7)
