"""What areax requires of a generation server: the same tests on the embedded server and on the real SGLang.

Every log-probability is compared with our own forward pass under the weights that the server reports for that token.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import time

import numpy as np
import pytest
import servers

from areax.rollout import client
from areax.rollout.fleet import offload
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.types import Published

PROMPT = [5, 17, 42, 100, 61]
CONTEXT = 4096  # of the servers
OTHER = [200, 7, 7, 31]
TOLERANCE = 1e-4


def spans_cover(answer):
    spans = answer["meta_info"]["weight_versions"]
    edges = [0, *(span["end"] for span in spans)]
    assert [span["start"] for span in spans] == edges[:-1] and edges[-1] == len(answer["output_ids"])
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


def exact(versions, prompt, answer, temperature=1.0):
    """Asserts that each token has its log-probability under the version it is labelled with; returns the labels."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    rows = meta["output_token_logprobs"]
    assert [row[1] for row in rows] == ids and meta["completion_tokens"] == len(ids)
    assert meta["output_token_logprobs_length"] == len(ids) and meta["prompt_tokens"] == len(prompt)
    labels = spans_cover(answer)
    for label in set(labels):
        logp_TV = versions.logp(versions.labels.index(label), [*prompt, *ids], temperature)
        for i, id in enumerate(ids):
            if labels[i] == label:
                assert rows[i][0] == pytest.approx(logp_TV[len(prompt) + i - 1, id], abs=TOLERANCE)
    return labels


def load(server, versions, v, **fields):
    body = {"model_path": str(versions.paths[v]), "weight_version": versions.labels[v], **fields}
    return server.ok("/update_weights_from_disk", body)


names = (f"long-{i}" for i in itertools.count())  # SGLang aborts the request id of a stream 2 s after its end


@contextlib.contextmanager
def long_request(server):
    """Yields the id of a request that runs until it is aborted, and its events after the first few tokens."""
    params = {"temperature": 1.0, "max_new_tokens": 4000, "ignore_eos": True}
    body = {"input_ids": PROMPT, "rid": next(names), "sampling_params": params, "return_logprob": True}
    with server.stream("/generate", body) as events:
        first = next(event for event in events if len(event["output_ids"]) >= 4)
        yield body["rid"], itertools.chain([first], events)


def grow(events, more):
    """Reads events until there are `more` tokens beyond those of the next event."""
    goal = None
    for event in events:
        goal = goal or len(event["output_ids"]) + more
        if len(event["output_ids"]) >= goal:
            return
    raise AssertionError(f"the stream ended early: {event['meta_info']['finish_reason']}, {goal} tokens wanted")


def last(events):
    *_, end = events
    return end


# -- generation ----------------------------------------------------------------------------------


def test_greedy_tokens_and_their_metadata(server, versions):
    answer = server.generate(PROMPT, max_new_tokens=12)
    assert answer["output_ids"] == versions.greedy(0, PROMPT, 12)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["weight_version"] == versions.labels[0]
    assert meta["input_token_logprobs"] == [] and meta["num_retractions"] == 0
    assert answer["text"] == versions.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    assert set(exact(versions, PROMPT, answer)) == {versions.labels[0]}


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_scaled_distribution(server, versions, temperature):
    exact(versions, PROMPT, server.generate(PROMPT, temperature=temperature, max_new_tokens=12), temperature)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.5}])
def test_sampling_filters_do_not_change_logprobs(server, versions, filters):
    answer = server.generate(PROMPT, temperature=1.0, max_new_tokens=12, **filters)
    exact(versions, PROMPT, answer)
    logp_TV = versions.logp(0, [*PROMPT, *answer["output_ids"]])[len(PROMPT) - 1 :]
    for logp_V, id in zip(logp_TV, answer["output_ids"], strict=False):
        p_V = np.exp(logp_V)
        above = p_V[p_V > p_V[id] * (1 + 1e-5)]  # tokens more likely than the one drawn
        assert len(above) < filters.get("top_k", len(p_V))
        assert above.sum() <= filters.get("top_p", 1.0) + 1e-5
        assert p_V[id] >= filters.get("min_p", 0.0) * p_V.max() * (1 - 1e-5)


PENALTIES = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"logit_bias": {"7": 30.0, "9": 29.0}, "presence_penalty": 1.0},
    # without repetition_penalty, which SGLang may apply before the others, in the order of a set of classes
    {"frequency_penalty": 0.5, "presence_penalty": -0.3, "logit_bias": {"11": 3.0}},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_count_generated_tokens(server, versions, penalties):
    """SGLang, which schedules a step before it knows the last token, may count one less, and the prompt's last one."""
    made = server.generate(PROMPT, max_new_tokens=16, **penalties)["output_ids"]
    behind = not str(server.ok("/server_info")["version"]).startswith("areax")
    factor = penalties.get("repetition_penalty", 1)
    for i, token in enumerate(made):
        logits_V = np.asarray(versions.logits(0, [*PROMPT, *made[:i]])[len(PROMPT) + i - 1], np.float64)
        short = []
        for seen in [made[:i], [PROMPT[-1], *made[: i - 1]][: i * behind]]:
            x_V = logits_V.copy()
            for id in {*seen}:
                x_V[id] -= penalties.get("frequency_penalty", 0) * seen.count(id) + penalties.get("presence_penalty", 0)
                x_V[id] *= factor if x_V[id] < 0 else 1 / factor
            for id, bias in penalties.get("logit_bias", {}).items():
                x_V[int(id)] += bias
            short.append(x_V.max() - x_V[token])
        assert min(short[: 1 + behind]) <= 1e-4, i
    assert made != versions.greedy(0, PROMPT, 16)


def test_grammars(server):
    free = {"ignore_eos": False, "temperature": 1.0, "max_new_tokens": 60}
    schema = {"enum": ["x y", 12]}  # in anything longer SGLang allows white space without end
    made = server.generate(PROMPT, json_schema=json.dumps(schema), **free)
    assert made["text"] in ('"x y"', "12") and made["meta_info"]["finish_reason"]["type"] == "stop"
    assert re.fullmatch("[ab]{5}-(x|y)", server.generate(PROMPT, regex="[ab]{5}-(x|y)", **free)["text"])
    assert re.fullmatch("(ab)+c", server.generate(PROMPT, ebnf='root ::= "ab" root | "abc"', **free)["text"])
    status, answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": {"regex": "a", "ebnf": "b"}})
    assert status == 400 and "regex" in answer["error"]["message"]


@pytest.mark.parametrize("start", [0, 2, 4, 5])
def test_input_logprobs_begin_with_null(server, versions, start):
    fields = {"logprob_start_len": start, "top_logprobs_num": 3}
    meta = server.generate(PROMPT, max_new_tokens=2, fields=fields)["meta_info"]
    rows, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert [row[1] for row in rows] == PROMPT[start:]
    if not rows:
        assert tops == []
        return
    assert rows[0][0] is None and tops[0] is None
    logp_TV = versions.logp(0, PROMPT)
    for i in range(start + 1, len(PROMPT)):
        assert rows[i - start][0] == pytest.approx(logp_TV[i - 1, PROMPT[i]], abs=TOLERANCE)
        best = np.argsort(-logp_TV[i - 1])[:3]
        assert [row[1] for row in tops[i - start]] == best.tolist()
        np.testing.assert_allclose([row[0] for row in tops[i - start]], logp_TV[i - 1, best], atol=TOLERANCE)


def test_top_logprobs_with_text(server, versions):
    fields = {"top_logprobs_num": 4, "return_text_in_logprobs": True}
    answer = server.generate(PROMPT, temperature=0.7, max_new_tokens=5, fields=fields)
    logp_TV = versions.logp(0, [*PROMPT, *answer["output_ids"]], 0.7)
    for i, rows in enumerate(answer["meta_info"]["output_top_logprobs"]):
        best = np.argsort(-logp_TV[len(PROMPT) + i - 1])[:4]
        assert [row[1] for row in rows] == best.tolist()
        assert [row[2] for row in rows] == [versions.tokenizer.decode([id]) for id in best]
        np.testing.assert_allclose([r[0] for r in rows], logp_TV[len(PROMPT) + i - 1, best], atol=TOLERANCE)
    assert [row[2] for row in answer["meta_info"]["output_token_logprobs"]] == [
        versions.tokenizer.decode([id]) for id in answer["output_ids"]
    ]


def test_logprobs_are_returned_only_on_request(server):
    meta = server.generate(PROMPT, logprobs=False, fields={"logprob_start_len": 0})["meta_info"]
    assert "output_token_logprobs" not in meta and "input_token_logprobs" not in meta


def test_a_batch_is_answered_in_order(server, versions):
    prompts = [PROMPT, OTHER, [9]]
    params = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in (3, 5, 7)]
    body = {"input_ids": prompts, "sampling_params": params, "rid": ["a", "b", "c"], "return_logprob": True}
    answers = server.ok("/generate", body)
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
    for prompt, answer, n in zip(prompts, answers, (3, 5, 7), strict=True):
        assert answer["output_ids"] == versions.greedy(0, prompt, n)
        exact(versions, prompt, answer)


def test_a_list_of_one_prompt_is_answered_with_a_list(server):
    (answer,) = server.generate([PROMPT])
    assert answer["output_ids"] == server.generate(PROMPT)["output_ids"]


def test_samples_of_one_prompt_are_adjacent(server, versions):
    answers = server.generate([PROMPT, OTHER], n=3, temperature=1.0, max_new_tokens=16)
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [5, 5, 5, 4, 4, 4]
    for answer, prompt in zip(answers, [PROMPT] * 3 + [OTHER] * 3, strict=True):
        exact(versions, prompt, answer)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 6
    assert len({answer["meta_info"]["id"] for answer in answers}) == 6


def test_request_ids(server):
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    assert server.ok("/generate", {"input_ids": PROMPT, "rid": "mine", **body})["meta_info"]["id"] == "mine"
    answers = server.ok("/generate", {"input_ids": [PROMPT, OTHER], "rid": "ours", **body})
    assert [answer["meta_info"]["id"] for answer in answers] == ["ours_0", "ours_1"]


def test_text_prompts_are_encoded_as_the_tokenizer_does(server, versions):
    params = {"temperature": 0, "max_new_tokens": 6}
    text = server.ok("/generate", {"text": "What is 3 + 4?", "sampling_params": params})
    ids = server.ok("/generate", {"input_ids": versions.tokenizer.encode("What is 3 + 4?"), "sampling_params": params})
    assert text["output_ids"] == ids["output_ids"] and text["text"] == ids["text"]
    pair = server.ok("/generate", {"text": ["What is 3 + 4?", "x"], "sampling_params": params})
    assert pair[0]["output_ids"] == ids["output_ids"] and len(pair) == 2


# -- stopping ------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_request_and_is_reported(server, versions):
    ids = versions.greedy(0, PROMPT, 12)
    place = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    answer = server.generate(PROMPT, max_new_tokens=12, stop_token_ids=[ids[place]], ignore_eos=False)
    assert answer["output_ids"] == ids[: place + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[place]}
    assert answer["text"] == versions.tokenizer.decode(ids[:place], skip_special_tokens=True)
    exact(versions, PROMPT, answer)


def test_the_stop_tokens_of_the_model_apply_unless_ignored(server, versions):
    ids = versions.greedy(0, versions.ending, 12)
    end = next(i for i, id in enumerate(ids) if id in versions.config.eos)
    answer = server.generate(versions.ending, max_new_tokens=12, ignore_eos=False)
    assert answer["output_ids"] == ids[: end + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[end]}
    exact(versions, versions.ending, answer)
    assert server.generate(versions.ending, max_new_tokens=12)["output_ids"] == ids  # ignore_eos


def test_a_stop_string_may_span_tokens(server, versions):
    decode = lambda ids: versions.tokenizer.decode(ids, skip_special_tokens=True)
    for first in range(100, 200):  # a prompt whose continuation has two adjacent ASCII tokens
        ids = versions.greedy(0, [first], 12)
        at = [i for i in range(1, 11) if all(decode([id]).isascii() and decode([id]) for id in ids[i : i + 2])]
        if at and (word := decode(ids[at[0] : at[0] + 2])) not in decode(ids[: at[0] + 1]):
            break
    answer = server.generate([first], max_new_tokens=12, stop=[word, "never this"])
    assert answer["output_ids"] == ids[: at[0] + 2]
    assert answer["text"] == decode(ids[: at[0] + 2])[: -len(word)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    exact(versions, [first], answer)


def test_no_stop_before_min_new_tokens(server, versions):
    stop = versions.greedy(0, PROMPT, 3)[2]
    answer = server.generate(PROMPT, max_new_tokens=6, min_new_tokens=5, stop_token_ids=[stop], ignore_eos=False)
    assert len(answer["output_ids"]) >= 5 and stop not in answer["output_ids"][:5]


def test_zero_new_tokens_scores_the_prompt(server, versions):
    answer = server.generate(PROMPT, max_new_tokens=0, fields={"logprob_start_len": 0})
    assert answer["output_ids"] == [] and answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["completion_tokens"] == 0 and spans_cover(answer) == []
    logp_TV = versions.logp(0, PROMPT)
    for i, (logp, id, _) in enumerate(answer["meta_info"]["input_token_logprobs"][1:], 1):
        assert id == PROMPT[i] and logp == pytest.approx(logp_TV[i - 1, id], abs=TOLERANCE)


# -- bad requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": 2},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"min_new_tokens": 9},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"ignore_eos": "yes"},
        {"sampling_seed": "x"},
        {"sampling_seed": 2**63},
        {"no_such_parameter": 1},
        {"max_new_tokens": 4095},
    ],
    ids=str,
)
def test_bad_sampling_parameters_are_400(server, sampling):
    params = {"temperature": 1.0, "max_new_tokens": 8, **sampling}
    status, answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 400 and answer["error"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": "x"},
        {"input_ids": [1.5]},
        {"input_ids": [5] * 5000},
        {"input_ids": [PROMPT, OTHER], "rid": ["a", "a"]},
        {"input_ids": [PROMPT, OTHER], "sampling_params": [{"n": 1}, {"n": 2}]},
        {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 9},
        {"input_ids": PROMPT, "sampling_params": 5},
        [1],
        b"{not json",
    ],
    ids=lambda body: str(body)[:60],
)
def test_bad_bodies_are_400(server, body):
    status, answer = server.post("/generate", body)
    assert status == 400 and (answer.get("error") or answer.get("object") == "error")


def test_a_rejected_batch_leaves_nothing_running(server):
    params = {"temperature": 0, "max_new_tokens": 900}
    assert server.post("/generate", {"input_ids": [PROMPT, [5] * 5000], "sampling_params": params})[0] == 400
    time.sleep(0.1)
    assert server.ask("POST", "/flush_cache")[0] == 200  # only an idle server flushes its cache


# -- streams, seeds ------------------------------------------------------------------------------


def test_a_stream_grows_to_the_full_answer(server):
    params = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    with server.stream("/generate", body) as events:
        events = list(events)
    whole = server.ok("/generate", body)
    for before, after in itertools.pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["output_token_logprobs_length"] == len(before["output_ids"])
    assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert events[-1]["meta_info"]["weight_versions"] == whole["meta_info"]["weight_versions"]


def test_events_of_a_streamed_batch_carry_request_ids(server):
    params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    with server.stream("/generate", {"input_ids": [PROMPT, OTHER], "sampling_params": params}) as events:
        ends = {event["index"]: event["output_ids"] for event in events if event["meta_info"]["finish_reason"]}
    assert ends == {i: server.generate(p, max_new_tokens=4)["output_ids"] for i, p in enumerate([PROMPT, OTHER])}


def test_seeds_are_honoured_where_determinism_is_declared(server, versions):
    """A server that declares determinism honours seeds; our client sends none to other servers."""
    declared = server.ok("/server_info")["enable_deterministic_inference"]

    async def run():
        async with client.connect([server.url]) as fleet:
            assert fleet.seeded == declared
            return await fleet.generate(PROMPT, max_new_tokens=24, ignore_eos=True, seed=7)

    if not declared:
        with pytest.raises(ValueError, match="seed"):
            asyncio.run(run())
        return
    draw = lambda seed, **fields: server.generate(
        PROMPT, temperature=1.0, max_new_tokens=24, sampling_seed=seed, fields=fields
    )
    one, two, other = draw(7), draw(7), draw(8)
    assert one["output_ids"] == two["output_ids"] == asyncio.run(run()).tokens != other["output_ids"]
    resumed = server.generate(
        PROMPT + one["output_ids"][:10], temperature=1.0, max_new_tokens=14, sampling_seed=7
    )  # a resumed request continues the stream of its seed
    assert resumed["output_ids"] == one["output_ids"][10:]


# -- pauses and aborts ---------------------------------------------------------------------------


def test_an_abort_returns_the_tokens_so_far(server, versions):
    with long_request(server) as (rid, events):
        server.ok("/abort_request", {"rid": rid})
        answer = last(events)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 4 <= len(answer["output_ids"]) < 4000
    exact(versions, PROMPT, answer)


def test_aborting_an_unknown_request_is_no_error(server):
    server.ok("/abort_request", {"rid": "nobody"})
    server.ok("/abort_request", {"rid": ""})


def test_pause_in_abort_mode_returns_running_requests_and_holds_new_ones(server, versions):
    with long_request(server) as (_, events):
        assert server.ok("/pause_generation", {"mode": "abort"})["status"] == "ok"
        answer = last(events)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    exact(versions, PROMPT, answer)
    held = servers.Later(lambda: server.generate(PROMPT))
    time.sleep(0.3)
    assert not held.done and server.get("/ready")[0] == 503
    assert server.ok("/continue_generation", {})["status"] == "ok"
    exact(versions, PROMPT, held.result())
    assert server.get("/ready")[0] == 200


@pytest.mark.parametrize("mode, retractions", [("retract", 1), ("in_place", 0)])
def test_other_pauses_keep_running_requests(server, versions, mode, retractions):
    with long_request(server) as (rid, events):
        server.ok("/pause_generation", {"mode": mode})
        time.sleep(0.3)
        server.ok("/continue_generation", {})
        grow(events, 8)
        server.ok("/abort_request", {"rid": rid})
        answer = last(events)
    assert answer["meta_info"]["num_retractions"] == retractions
    exact(versions, PROMPT, answer)


def test_health_and_readiness(server):
    assert server.get("/health")[0] == server.get("/health_generate")[0] == server.get("/ready")[0] == 200
    server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/pause_generation", {"mode": "retract"})  # pausing twice is pausing once
    assert server.get("/ready")[0] == 503
    server.ok("/continue_generation", {})
    server.ok("/continue_generation", {})
    assert server.get("/health")[0] == 200


def test_a_pause_needs_a_valid_mode(server):
    assert server.post("/pause_generation", {"mode": "sometimes"})[0] == 400
    assert server.ask("POST", "/pause_generation")[0] == 400
    assert server.get("/ready")[0] == 200


# -- weights -------------------------------------------------------------------------------------


def test_push_from_disk(server, versions):
    before = server.ok("/weights_checker", {"action": "checksum"})
    answer = load(server, versions, 1)
    assert answer["success"] is True
    info = server.ok("/model_info")
    assert info["weight_version"] == versions.labels[1] and info["model_path"] == str(versions.paths[1])
    new = server.generate(PROMPT, max_new_tokens=12)
    assert new["output_ids"] == versions.greedy(1, PROMPT, 12)
    assert set(exact(versions, PROMPT, new)) == {versions.labels[1]}
    assert server.ok("/weights_checker", {"action": "checksum"}) != before
    load(server, versions, 0)
    exact(versions, PROMPT, server.generate(PROMPT))
    assert server.ok("/weights_checker", {"action": "checksum"}) == before


def test_weight_version_spans_show_a_push_during_a_pause(server, versions):
    with long_request(server) as (rid, events):
        server.ok("/pause_generation", {"mode": "retract"})
        load(server, versions, 1)
        server.ok("/continue_generation", {})
        grow(events, 16)
        server.ok("/abort_request", {"rid": rid})
        answer = last(events)
    labels = exact(versions, PROMPT, answer)  # each part under its own weights, the second with a new KV cache
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == versions.labels[:2]
    assert labels.count(versions.labels[0]) >= 4 and labels.count(versions.labels[1]) >= 8


def test_a_push_without_a_pause_waits_for_running_requests(server, versions):
    running = servers.Later(lambda: server.generate(PROMPT, temperature=1.0, max_new_tokens=60))
    time.sleep(0.05)
    load(server, versions, 1)
    labels = exact(versions, PROMPT, running.result())
    assert len(set(labels)) == 1
    assert server.ok("/model_info")["weight_version"] == versions.labels[1]


def test_a_failed_push_changes_nothing(server, versions, tmp_path):
    before = server.ok("/weights_checker", {"action": "checksum"})
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty"):
        status, answer = server.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": "x"})
        assert status == 400 and answer["success"] is False and answer["message"]
    assert server.post("/update_weights_from_disk", {})[0] == 400
    assert server.ok("/model_info")["weight_version"] == versions.labels[0]
    assert server.ok("/weights_checker", {"action": "checksum"}) == before
    exact(versions, PROMPT, server.generate(PROMPT))


def test_the_version_label_can_be_changed_without_new_weights(server):
    answer = server.ok("/update_weight_version", {"new_version": "renamed", "abort_all_requests": False})
    assert answer["success"] is True and answer["new_version"] == "renamed"
    assert server.ok("/model_info")["weight_version"] == "renamed"
    assert server.generate(PROMPT)["meta_info"]["weight_versions"][0]["version"] == "renamed"
    assert server.post("/update_weight_version", {})[0] == 400


def test_flushing_the_cache_changes_no_answer(server, versions):
    prompt = list(range(60, 160))
    exact(versions, prompt, server.generate(prompt))
    exact(versions, prompt, server.generate(prompt))  # this time from the prefix cache, if the server has one
    assert server.ask("POST", "/flush_cache")[0] == 200 and server.get("/flush_cache")[0] == 200
    exact(versions, prompt, server.generate(prompt))


# -- with our client -----------------------------------------------------------------------------


def test_servers_report_their_load(server, versions):
    from areax.rollout.servers.sglang_answers import load_report

    idle = load_report(server.ok("/v1/loads"))
    assert idle is not None and idle.running == idle.waiting == 0 and idle.usage < 0.1
    with long_request(server):
        busy = []
        for _ in range(100):
            busy.append(load_report(server.ok("/v1/loads")))
            if busy[-1].running:
                break
            time.sleep(0.05)
        assert busy[-1].running == 1 and busy[-1].waiting == 0 and 0 < busy[-1].usage < 1


def test_streaming_through_our_client(server, versions):
    """Tokens arrive incrementally, and the answer equals that of a request without streaming."""
    load(server, versions, 0)

    async def main():
        async with client.connect([server.url]) as fleet:
            seen = []
            ask = lambda **more: fleet.generate(PROMPT, temperature=0.0, max_new_tokens=200, ignore_eos=True, **more)
            streamed, whole = await ask(on_tokens=lambda tokens: seen.append(list(tokens))), await ask()
            long = [3] * (CONTEXT + 1)
            with pytest.raises(ValueError, match="(?i)context|long"):
                await fleet.generate(long, max_new_tokens=4, on_tokens=seen.append)
            return seen, streamed, whole

    seen, streamed, whole = asyncio.run(main())
    assert (streamed.tokens, streamed.finish, streamed.version) == (whole.tokens, "length", [0] * 200)
    np.testing.assert_allclose(streamed.logp, whole.logp, atol=TOLERANCE)
    assert len(seen[0]) < 200 and seen[-1] == whole.tokens
    assert all(whole.tokens[: len(part)] == part for part in seen)


@functools.cache
def pace(server):
    """The number of tokens that four concurrent requests generate in about a second."""
    prompts = [[*OTHER, i] for i in range(4)]

    def seconds(length):
        begin = time.monotonic()
        server.generate(prompts, max_new_tokens=length)
        return time.monotonic() - begin

    quickest = min(seconds(32) for _ in range(3))  # the first one compiles, which a push would wait for
    length = int(min(2000, max(64, 32 / quickest)))
    seconds(length)
    return length


def ways():
    """Each transport in each mode on SGLang. The embedded server takes no tensors, and one
    mode with deltas is enough for it, which is the one in `make test`."""
    for server in ("embedded", "sglang") if os.environ.get("AREAX_SGLANG_PYTHON") else ("embedded",):
        for way, mode in itertools.product(("disk", "delta", "tensors"), ("abort", "retract", "drain", "in_place")):
            if server == "sglang" or way == "disk" or (way, mode) == ("delta", "retract"):
                slow = server == "embedded" and way == "disk"
                yield pytest.param(server, way, mode, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("server", "way", "mode"), list(ways()), indirect=["server"])
def test_client_requests_survive_a_push(server, versions, tmp_path, way, mode):
    """From version 0 to another: read from disk, fetched as a delta by a stager, or handed over as tensors."""
    prompts, length = [[*PROMPT, i] for i in range(4)], pace(server)
    new = 2 if way == "delta" else 1
    handover, handed = (versions.handover, versions.params[new]) if way == "tensors" else (None, None)
    known = versions.probe(new)

    async def run(stagers):
        async with client.connect([server.url], stagers=stagers, handover=handover) as fleet:
            ask = lambda p, n=length, **more: fleet.generate(p, max_new_tokens=n, ignore_eos=True, **more)
            if stagers:
                whole = await push_weights(fleet, versions.paths[0], versions.labels[0])
                # staged first: on a busy machine the requests might end before it arrives
                part = await fleet.servers[0].stager.stage(Published(str(versions.paths[new]), versions.labels[new]))
                assert 0 < part.bytes < 0.5 * whole.stage_bytes
            begun = asyncio.Event()
            running = [asyncio.create_task(ask(prompt)) for prompt in prompts[:3]]
            running.append(asyncio.create_task(ask(prompts[3], on_tokens=lambda _: begun.set())))
            await begun.wait()
            report = await push_weights(
                fleet, versions.paths[new], versions.labels[new], mode=mode, arrays=handed, probe=known
            )
            assert report.loaded == (server.url,) and fleet.version == new and report.stage_bytes == 0
            assert report.probe_diff <= TOLERANCE
            done = await asyncio.gather(*running)
            return done, [await ask(OTHER, 32), await ask(prompts[0], 32)], fleet.counts

    with servers.stager(tmp_path / "staged") if way == "delta" else contextlib.nullcontext() as url:
        done, after, counts = asyncio.run(run([url] if url else []))
    assert all(set(one.version) == {new} for one in after)
    switched = 0
    for prompt, one in zip([*prompts, OTHER, prompts[0]], [*done, *after], strict=True):
        assert len(one.tokens) == (32 if one in after else length) and one.finish == "length"
        assert one.version == sorted(one.version)
        mixed = len(set(one.version)) == 2
        for v in set(one.version):
            logp_TV = versions.logp(v, [*prompt, *one.tokens])[len(prompt) - 1 :]
            ours = [logp_TV[i, id] for i, id in enumerate(one.tokens) if one.version[i] == v]
            theirs = [logp for logp, its in zip(one.logp, one.version, strict=True) if its == v]
            if mixed and mode == "in_place" and v == new:  # computed over the old version's KV cache
                assert np.abs(np.subtract(theirs, ours)).max() > TOLERANCE
            else:
                np.testing.assert_allclose(theirs, ours, atol=TOLERANCE)
        switched += mixed
    assert switched == 0 if mode == "drain" else switched > 0
    assert counts["resumed"] >= switched if mode == "abort" else counts["resumed"] == 0
    assert not counts["preempted"]  # retractions by a push say nothing about the server's memory


def test_weights_replaced_under_their_label_are_loaded_again(server, versions):
    async def main():
        timeouts = client.Timeouts(heartbeat_s=0.2)
        async with client.connect([server.url], timeouts=timeouts) as fleet:
            await push_weights(fleet, versions.paths[1], versions.labels[1], probe=versions.probe(1))
            await asyncio.sleep(1)
            assert fleet.counts["stale"] == 0
            await asyncio.to_thread(load, server, versions, 2, weight_version=versions.labels[1])
            while not fleet.counts["recovered"]:
                await asyncio.sleep(0.1)
            assert fleet.counts["stale"] == 1
            return await fleet.generate(PROMPT, max_new_tokens=12, temperature=0.0, ignore_eos=True)

    done = asyncio.run(asyncio.wait_for(main(), 60))
    assert done.tokens == versions.greedy(1, PROMPT, 12) and set(done.version) == {1}


def test_offloading_and_the_push_that_ends_it(server, versions):
    """Running requests are retracted, new ones wait, and both continue under the pushed weights."""
    push = lambda fleet, v: push_weights(fleet, versions.paths[v], versions.labels[v])

    async def main():
        async with client.connect([server.url]) as fleet:
            begun = asyncio.Event()
            running = asyncio.create_task(
                fleet.generate(PROMPT, max_new_tokens=1000, ignore_eos=True, on_tokens=lambda _: begun.set())
            )
            await begun.wait()
            await offload.offload(fleet)
            assert fleet.servers[0].state == "offloaded" and fleet.servers[0].released
            waiting = asyncio.create_task(fleet.generate(OTHER, max_new_tokens=20, ignore_eos=True))
            assert (await asyncio.to_thread(server.ok, "/model_info"))["weight_version"] == versions.labels[0]
            assert not waiting.done() and (await push(fleet, 1)).failed == {}
            done = [(PROMPT, await running), (OTHER, await waiting)]
            await offload.offload(fleet)  # with nothing running
            await push(fleet, 2)
            done.append((OTHER, await fleet.generate(OTHER, max_new_tokens=20, ignore_eos=True)))
            await offload.offload(fleet)
        async with client.connect([server.url]) as fleet:  # the next run
            await push(fleet, 1)
            done.append((OTHER, await fleet.generate(OTHER, max_new_tokens=20, ignore_eos=True)))
        return done

    done = asyncio.run(main())
    assert [sorted(set(one.version)) for _, one in done] == [[0, 1], [1], [2], [1]]
    for prompt, one in done:
        ids = [*prompt, *one.tokens]
        logp_VTV = {v: versions.logp(v, ids) for v in set(one.version)}
        for i, (logp, v) in enumerate(zip(one.logp, one.version, strict=True), len(prompt)):
            assert logp == pytest.approx(logp_VTV[v][i - 1, ids[i]], abs=TOLERANCE)
