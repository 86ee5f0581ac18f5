"""The client and the push against servers on real sockets that are scripted to misbehave on cue."""

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import email.utils
import functools
import gzip
import itertools
import json
import math
import re

import aiohttp.web
import numpy as np
import pytest
from scripted import (
    V0,
    V1,
    V2,
    answers,
    check,
    controls,
    hangs_up,
    logp_at,
    reply,
    run,
    serving,
    states,
    token_at,
    until,
)

from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.fleet import fleet as fleet_module
from areax.rollout.fleet.push import push_weights
from areax.rollout.processes import http_answers
from areax.rollout.servers import labels
from areax.rollout.types import sampled

# ---------------------------------------------------------------- one request


def test_generate_returns_tokens_with_logprobs_and_versions():
    async def main():
        async with serving(V2) as a, client.connect([a.url + "/"]) as fleet:
            done = await fleet.generate([5, 6], max_new_tokens=4, temperature=0.5, stop_token_ids=[9], ignore_eos=True)
        check(done, [5, 6], 4)
        assert (done.version, done.finish, done.text) == ([2] * 4, "length", "text")
        assert done.info["cached_tokens"] == 0 and done.info["url"] == a.url
        (body,) = a.generated()
        assert body["input_ids"] == [5, 6] and body["return_logprob"] is True
        assert body["sampling_params"] == {
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_new_tokens": 4,
            "min_new_tokens": 0,
            "ignore_eos": True,
            "stop_token_ids": [9],
        }
        assert fleet.counts == {"requests": 1, "tokens": 4}

    run(main)


def test_completions_end_at_the_ends_of_the_tokenizer_whatever_servers_know():
    async def main():
        async with serving(V2) as a, client.connect([a.url], ends=(7, 9)) as fleet:
            for asked in ({}, {"stop_token_ids": [9, 3]}, {"ignore_eos": True}):
                await fleet.generate([5], max_new_tokens=2, **asked)
        sent = [body["sampling_params"].get("stop_token_ids") for body in a.generated()]
        assert sent == [[7, 9], [9, 3, 7], None]

    run(main)


def test_weights_without_a_version_number_are_version_minus_one():
    async def main():
        async with serving("default") as a, client.connect([a.url]) as fleet:
            assert fleet.version == -1
            assert (await fleet.generate([1], max_new_tokens=2)).version == [-1, -1]

    run(main)


def test_a_refused_request_raises_a_value_error_with_the_message_of_the_server():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [answers(400, {"error": {"message": "longer than the context (1024)"}})]
            with pytest.raises(ValueError, match=r"/generate: HTTP 400: longer than the context"):
                await fleet.generate([1])
            assert len(a.generated()) == 1
            with pytest.raises(ValueError, match="stop must be a list"):
                await fleet.generate([1], stop="ab")

    run(main)


def test_a_server_error_names_url_path_status_and_body():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [answers(500, {"oh": "dear"})]
            with pytest.raises(RuntimeError) as error:
                await fleet.generate([1])
            assert str(error.value) == f'{a.url}/generate: HTTP 500: {{"oh": "dear"}}'

    run(main)


def logp_is(value):
    return lambda meta: meta["output_token_logprobs"][1].__setitem__(0, value)


def finish_is(value):
    return lambda meta: meta["finish_reason"].update(type=value)


def bad(change):
    whole = reply([1, 2], [-1.0, -2.0], [V0, V0], "stop")
    change(whole["meta_info"])
    return whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.pop("weight_versions"), "has no weight_versions"),
        (lambda meta: meta["weight_versions"].pop(), "cover each token once"),
        (lambda meta: meta["output_token_logprobs"].pop(), "logprobs of 1 tokens do not belong"),
        (lambda meta: meta["output_token_logprobs"][0].__setitem__(1, 7), "do not belong"),
        (lambda meta: meta["output_token_logprobs"][1].__setitem__(0, None), "a number from -10000 to 0, got None"),
        (lambda meta: meta.pop("finish_reason"), "lacks what a single request returns"),
        *((logp_is(x), "must be a number from -10000") for x in (0.5, math.nan, -math.inf, -3.4e38, -1e5, "x", True)),
        *((finish_is(x), "the finish must be one of stop, length") for x in ("tired", 7, None)),
        (lambda meta: meta.update(finish_reason="stop"), "lacks what a single request returns"),
        (lambda meta: meta["weight_versions"][0].update(version=5), "a version must be a string, got 5"),
        (lambda meta: meta["weight_versions"][0].update(end=10**12), "without gap or overlap, up to 2 tokens"),
        (lambda meta: meta["weight_versions"][0].update(end="2"), "lacks what a single request returns"),
        (lambda meta: meta.update(lora_path=5), "a text must be a string, got 5"),
        (lambda meta: meta.update(id="of-another"), "must be to request '[0-9a-f]{32}', got one to 'of-another'"),
        (lambda meta: meta.update(id=5), "got one to 5"),
    ],
)
def test_an_inconsistent_answer_is_refused(change, message):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [answers(200, bad(change))]
            with pytest.raises(RuntimeError, match=message) as error:
                await fleet.generate([1])
            assert str(error.value).startswith(f"{a.url}/generate: ") and "\n" not in str(error.value)

    run(main)


@pytest.mark.parametrize(
    "ids, finish, words",
    [
        ([1, 2], {"type": "stop", "matched": 3}, "must end in the stop token, 3, got 2"),
        ([1, 2], {"type": "stop"}, r"must end in the stop token, \[9\], got 2"),
        ([1, 9, 2], {"type": "abort", "message": ""}, "must end at the first stop token, got tokens after 9"),
        ([1, 2], {"type": "stop", "matched": "NaN happened"}, "must end in the stop token, NaN happened, got 2"),
        ([], {"type": "stop", "matched": 9}, "must have a token or more, got none, and the finish stop"),
        ([], {"type": "length", "length": 0}, "must have a token or more"),
        ([1], {"type": "error", "message": "out of memory"}, "must be one of stop, length, abort, got .*out of memory"),
    ],
)
def test_an_answer_that_cannot_end_as_it_says_is_refused(ids, finish, words):
    async def main():
        async with serving() as a, client.connect([a.url], ends=[9]) as fleet:
            whole = reply(ids, [-1.0] * len(ids), [V0] * len(ids), "stop")
            whole["meta_info"]["finish_reason"] = finish
            a.script = [answers(200, whole)]
            with pytest.raises(RuntimeError, match=words):
                await fleet.generate([1])

    run(main)


def test_an_answer_to_a_prompt_of_another_length_is_refused():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            whole = reply([1], [-1.0], [V0], "length")
            whole["meta_info"]["prompt_tokens"] = 3
            a.script = [answers(200, whole)]
            with pytest.raises(RuntimeError, match="must be to a prompt of 2 tokens, got one to 3"):
                await fleet.generate([1, 2])

    run(main)


def test_tokens_after_a_stop_token_are_refused():
    async def main():
        async with serving() as a, client.connect([a.url], ends=[9]) as fleet:
            for stops, ids in (({}, [1, 9, 2]), ({"stop_token_ids": [7]}, [7, 7])):
                whole = reply(ids, [-1.0] * len(ids), [V0] * len(ids), "length")
                a.script = [answers(200, whole)] * 2
                with pytest.raises(
                    RuntimeError, match=f"must end at the first stop token, got tokens after {max(ids)}"
                ):
                    await fleet.generate([1], **stops)
                assert (await fleet.generate([1], ignore_eos=True, **stops)).tokens == ids

    run(main)


def test_each_request_has_a_name_of_its_own_and_takes_no_answer_to_another():
    async def named(request, body):
        new = [7] * body["sampling_params"]["max_new_tokens"]
        answer = reply(new, [-1.0] * len(new), [V0] * len(new), "length")
        answer["meta_info"] |= {"id": body["rid"], "input_token_logprobs": [[None, 5, None]]}
        return aiohttp.web.json_response(answer)

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            other = reply([], [], [], "length")
            other["meta_info"]["id"] = "of-another"
            a.script = [answers(200, other), named, named]
            with pytest.raises(RuntimeError, match="got one to 'of-another'"):
                await fleet.read([5])
            await fleet.read([5])
            await fleet.generate([5], max_new_tokens=1)
            assert len({body["rid"] for body in a.generated()}) == 3
            a.script = [answers(200, reply([7], [-1.0], [V0], "length"))]
            with pytest.raises(RuntimeError, match="must be to request '[0-9a-f]{32}', got one to None"):
                await fleet.generate([5], max_new_tokens=1)

    run(main)


@pytest.mark.parametrize("token", [-7, 50, 2**40, 5.5, "5", None, True, [5]])
def test_a_token_that_the_model_does_not_have_is_refused_streamed_or_not(token):
    async def main():
        async with serving() as a, client.connect([a.url], vocabulary=50) as fleet:
            for on_tokens in (None, lambda tokens: None):
                body = reply([1, token], [-1.0, -2.0], [V0, V0], "stop")
                a.script = [streamed(body) if on_tokens else answers(200, body)]
                with pytest.raises(RuntimeError, match=f"^{a.url}/generate: .*from 0 on, below the vocabulary size 50"):
                    await fleet.generate([1], on_tokens=on_tokens)

    run(main)


@pytest.mark.parametrize("body", ["<html>Forbidden", "RBAC: Forbidden"])
@pytest.mark.parametrize("status", [403, 404, 413, 451])
def test_a_page_of_a_proxy_is_an_error_of_the_server_and_its_own_words_a_refusal(status, body):
    page = aiohttp.web.Response(text=body, status=status)

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [lambda *_: asyncio.sleep(0, page), answers(status, {"error": "no"})]
            with pytest.raises(ServerError, match=f"/generate: HTTP {status}: {body}"):
                await fleet.generate([1])
            with pytest.raises(ValueError, match=f"/generate: HTTP {status}: no"):
                await fleet.generate([1])

    run(main)


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"text": "\xff"}', "the answer is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1, 2]", "must be a JSON object"),
        (b"<html>\x1b[31m" + b"x" * 10**6, "must be JSON, got a page: <html>"),
        (b'{"output_ids": 3, "meta_info": {}}', "output_ids must be a list"),
        (b'{"output_ids": [3], "meta_info": null}', "lacks what a single request returns"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_any_kind_are_an_error_of_the_server(body, message, stream):
    async def handler(request, _):
        return aiohttp.web.Response(body=b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else body)

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [handler]
            with pytest.raises(RuntimeError) as error:
                await fleet.generate([1], on_tokens=(lambda tokens: None) if stream else None)
            said = str(error.value)
            assert said.startswith(f"{a.url}/generate: ") and len(said) < 600 and said.isprintable()
            assert stream or re.search(message, said), said

    run(main)


@pytest.mark.parametrize("card", [{"id": 7, "root": "there", "parent": "x"}, {"id": "a", "root": 7, "parent": "x"}, 7])
def test_a_wrong_list_of_adapters_is_an_error_of_the_server(card):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.refuse["/v1/models"] = answers(200, {"data": [card]})
            with pytest.raises(RuntimeError, match="/v1/models: not a list of models"):
                await fleet.servers[0].api.adapters()

    run(main)


def test_broken_compression_is_an_error_in_one_line():
    async def handler(request, _):
        return aiohttp.web.Response(body=b"no gzip", headers={"Content-Encoding": "gzip"})

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.refuse["/flush_cache"] = handler
            with pytest.raises(RuntimeError, match="/flush_cache: connection broke .*gzip") as error:
                await fleet.servers[0].api.flush_cache()
            assert str(error.value).isprintable()

    run(main)


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_an_answer_has_bytes_for_the_tokens_that_were_asked_for(coding):
    data = gzip.compress(b" " * 2**24) if coding == "gzip" else b" " * 2**24

    async def handler(request, _):
        return aiohttp.web.Response(body=data, headers={"Content-Encoding": coding})

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [handler, handler]
            with pytest.raises(RuntimeError, match="/generate: the answer has more than 10[0-9]{5} bytes"):
                await fleet.generate([1], max_new_tokens=4)
            with pytest.raises(RuntimeError, match="/generate: the answer has more than 10[0-9]{5} bytes"):
                await fleet.read([1, 2, 3])

    run(main)


@pytest.mark.parametrize(
    "first, last, words",
    [([5, 5], [1, 2], "must have the tokens of those before it"), ([1, 2, 3], [1, 2], "3 tokens were streamed")],
)
def test_a_stream_whose_end_is_another_is_refused(first, last, words):
    async def handler(request, _):
        stream = aiohttp.web.StreamResponse()
        await stream.prepare(request)
        for ids, finish in ((first, None), (last, "length")):
            event = reply(ids, [-1.0] * len(ids), [V0] * len(ids), finish)
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [handler]
            with pytest.raises(ServerError, match=words):
                await fleet.generate([1], max_new_tokens=3, on_tokens=lambda _: None)

    run(main)


def test_an_answer_that_claims_its_length_too_early_is_refused():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            short = reply([1], [-1.0], [V0], "length")
            a.script = [answers(200, short)] * 2
            done = await fleet.generate([1], max_new_tokens=8)  # of a server that reports no context
            assert (done.tokens, done.finish) == ([1], "length")
            fleet.servers[0].api.context = 1000
            with pytest.raises(ServerError, match="must have the 8 tokens asked for, got 1"):
                await fleet.generate([1], max_new_tokens=8)
            a.script = [answers(200, short)]
            assert (await fleet.generate([1] * 900, max_new_tokens=8)).tokens == [1]  # it is full

    run(main)


def test_an_abort_that_comes_with_the_stop_token_ends_the_answer():
    async def main():
        async with serving() as a, client.connect([a.url], ends=[9]) as fleet:
            a.script = [answers(200, reply([1, 9], [-1.0] * 2, [V0] * 2, "abort"))]
            done = await fleet.generate([1], max_new_tokens=8)
            assert done.tokens == [1, 9] and done.finish == "stop" and len(a.generated()) == 1

    run(main)


def test_a_first_push_that_fails_once_is_repeated(tmp_path):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:

            async def once(request, body):
                del a.refuse["/update_weights_from_disk"]
                return aiohttp.web.Response(text="404 page not found", status=404)

            a.refuse["/update_weights_from_disk"] = once
            report = await push_weights(fleet, tmp_path, V1)
            assert report.loaded == (a.url,) and fleet.version == 1
            check(await fleet.generate([1], max_new_tokens=2), [1], 2)

    run(main)


@pytest.mark.parametrize("counts", [[0], [2], [2, 1], [2, 3, 4, 5]])
def test_a_stream_without_new_tokens_makes_no_progress(counts):
    async def handler(request, _):
        stream = aiohttp.web.StreamResponse()
        await stream.prepare(request)
        for n in itertools.cycle(counts):
            await stream.write(b"data: " + json.dumps(reply([1] * n, [-1.0] * n, [V0] * n, None)).encode() + b"\n\n")
            await asyncio.sleep(0.02)

    async def main():
        async with serving() as a, client.connect([a.url], timeout_s=0.5) as fleet:
            a.script = [handler]
            words = "at most 4 tokens were asked for, got 5" if 5 in counts else "generate: not done in 0.5 s"
            with pytest.raises(RuntimeError, match=words):
                await fleet.generate([1], max_new_tokens=4, on_tokens=lambda _: None)

    run(main)


@pytest.mark.parametrize("status", [408, 425, 429, 503])
def test_a_server_that_asks_to_come_later_is_asked_later(status):
    async def later(request, _):
        return aiohttp.web.Response(status=status, headers={"Retry-After": "0.3"})

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [later]
            begun = asyncio.get_running_loop().time()
            check(await fleet.generate([1], max_new_tokens=3), [1], 3)
            assert asyncio.get_running_loop().time() - begun >= 0.3 and len(a.generated()) == 2
            a.refuse["/model_info"] = later
            begun = asyncio.get_running_loop().time()
            with pytest.raises(
                http_answers.Unreached, match=f"HTTP {status}"
            ):  # at once: it would take longer than that
                await fleet.servers[0].api.reported_weights(timeout_s=9, reach_s=0.25)
            assert asyncio.get_running_loop().time() - begun < 0.25

    run(main)


def test_how_long_a_server_asks_to_wait():
    soon = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30))
    assert http_answers.wait_s("7") == 7 and 25 < http_answers.wait_s(soon) <= 30
    assert http_answers.wait_s("1e9") == http_answers.LONGEST_WAIT_S
    assert [http_answers.wait_s(x) for x in ("", "soon", "-5", "nan", "inf", "Wed, 21 Oct 2015 07:28:00 GMT")] == [
        0
    ] * 6


def test_a_redirect_is_not_followed():
    async def away(request, _):
        raise aiohttp.web.HTTPTemporaryRedirect("http://127.0.0.1:9/secret?key=1")

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [away]
            with pytest.raises(RuntimeError, match="HTTP 307: it redirects to .*give the server's own address"):
                await fleet.generate([1])

    run(main)


def test_scoring_a_prompt_ignores_an_output_logprob():
    """SGLang adds one if it prefills the request together with generating ones."""
    answer = reply([], [], [], "length")
    answer["meta_info"] |= {
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None]],
        "output_token_logprobs": [[-1.0, 9, None]],
    }

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [answers(200, answer), answers(200, reply([9], [-1.0], [V0], "length"))]
            url, part = await fleet.read([5, 6])
            assert url == a.url and (part.tokens, part.logp, part.labels) == ([], [], [])
            assert [row[0] for row in part.inputs] == [None, -0.5]
            with pytest.raises(RuntimeError, match="logprobs of 0 tokens do not belong to the 1 ids"):
                await fleet.read([5, 6])

    run(main)


def test_the_deadline_covers_queueing_and_retries():
    async def main():
        async with serving() as a, client.connect([a.url], timeout_s=0.2) as fleet:
            a.going.clear()
            with pytest.raises(RuntimeError, match=rf"not done in 0.2 s \({a.url}: still waiting"):
                await fleet.generate([1])
            a.script = [answers(503, {"no": "room"})] * 100
            with pytest.raises(RuntimeError, match=r"not done in 0.2 s .*HTTP 503"):
                await fleet.generate([1])
            a.script.clear()
            a.going.set()
            check(await fleet.generate([1], max_new_tokens=3), [1], 3)  # both slots are free again

    run(main)


def test_a_completion_that_makes_progress_may_take_longer_than_its_limit():
    """Five parts of 0.4 s each, between which the server aborts, and a limit of 1.5 s."""

    async def main():
        async with serving() as a, client.connect([a.url], timeout_s=1.5) as fleet:

            async def part(request, body):
                await asyncio.sleep(0.4)
                left = body["sampling_params"]["max_new_tokens"]
                return aiohttp.web.json_response(reply([9], [-1.0], [V0], "length" if left == 1 else "abort"))

            a.script = [part] * 5
            done = await fleet.generate([1], max_new_tokens=5)
            assert done.tokens == [9] * 5 and done.info["resumed"] == 4

    run(main)


def test_seeds_need_a_server_that_honours_them():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            assert not fleet.seeded
            with pytest.raises(ValueError, match="seed needs servers that honour it, got 7"):
                await fleet.generate([1], seed=7)
        async with serving(seeded=True) as a, client.connect([a.url]) as fleet:
            assert fleet.seeded
            for seed in (7, None, None):
                await fleet.generate([1], seed=seed)
            sent = [body["sampling_params"]["sampling_seed"] for body in a.generated()]
            assert sent[0] == 7 and len(set(sent)) == 3  # without a seed: a new one each

    run(main)


# ---------------------------------------------------------------- many requests


def test_requests_go_to_the_least_loaded_server_up_to_its_limit():
    async def main():
        async with (
            serving() as a,
            serving() as b,
            client.connect([a.url, b.url], concurrency=2) as fleet,
        ):
            a.going.clear()
            b.going.clear()
            tasks = [asyncio.create_task(fleet.generate([i])) for i in range(2)]
            await until(lambda: a.load == b.load == 1)
            tasks += [asyncio.create_task(fleet.generate([i])) for i in range(2, 6)]
            await until(lambda: a.load == b.load == 2)
            await asyncio.sleep(0.05)
            assert len(a.generated()) == len(b.generated()) == 2  # two are queued in the client
            b.going.set()  # b frees its slots, so both go there
            await until(lambda: len(b.generated()) == 4)
            assert len(a.generated()) == 2
            a.going.set()
            for i, task in enumerate(tasks):
                check(await task, [i], 64)

    run(main)


def test_concurrency_is_reached_and_never_exceeded():
    async def main():
        async with (
            serving() as a,
            serving() as b,
            client.connect([a.url, b.url], concurrency=3) as fleet,
        ):
            a.going.clear()
            b.going.clear()
            tasks = [asyncio.create_task(fleet.generate([i], max_new_tokens=i % 5)) for i in range(60)]
            await until(lambda: a.load == b.load == 3)
            a.going.set()
            b.going.set()
            for i, task in enumerate(tasks):
                check(await task, [i], i % 5)
            assert a.most == b.most == 3
            assert fleet.counts == {"requests": 60, "tokens": 120}

    run(main)


def test_cancelled_requests_free_their_slots():
    async def main():
        async with serving() as a, client.connect([a.url], concurrency=1) as fleet:
            a.going.clear()
            tasks = [asyncio.create_task(fleet.generate([i])) for i in range(4)]
            await until(lambda: a.load == 1)
            for task in tasks[:3]:  # one on the server, two in the queue
                task.cancel()
            await until(lambda: len(a.generated()) == 2)
            a.going.set()
            check(await tasks[3], [3], 64)

    run(main)


def test_a_request_whose_server_fails_before_sending_goes_to_another():
    async def main():
        async with serving() as a, serving() as b, client.connect([a.url, b.url]) as fleet:
            task = asyncio.create_task(fleet.generate([1], max_new_tokens=3))
            await asyncio.sleep(0)  # a server is assigned, but the task that calls it has not started
            [server] = [one for one in fleet.servers if one.load]
            fleet.fail(server, "stale", "taken out of traffic")
            check(await task, [1], 3)
            assert fleet.counts["rerouted"] == 1 and len(a.generated()) + len(b.generated()) == 1

    run(main)


def test_a_slot_granted_to_a_cancelled_request_goes_to_the_next():
    async def main():
        async with serving() as a, client.connect([a.url], concurrency=1) as fleet:
            a.going.clear()
            tasks = [asyncio.create_task(fleet.generate([i])) for i in range(3)]
            await until(lambda: a.load == 1)
            tasks[0].cancel()
            await asyncio.sleep(0)  # its slot is granted to tasks[1], which has not run since
            tasks[1].cancel()
            await until(lambda: len(a.generated()) == 2)
            a.going.set()
            check(await tasks[2], [2], 64)

    run(main)


# ---------------------------------------------------------------- interrupted requests


def test_an_aborted_request_resumes_with_the_tokens_so_far():
    async def main():
        async with serving(step_s=0.002, seeded=True) as a, client.connect([a.url]) as fleet:
            task = asyncio.create_task(fleet.generate([5, 6, 7], max_new_tokens=60, min_new_tokens=50, seed=11))
            for _ in range(2):
                await asyncio.sleep(0.03)
                await fleet.servers[0].api.pause("abort")
                await fleet.servers[0].api.resume()
            done = await task
            check(done, [5, 6, 7], 60)
            assert (done.finish, done.text, done.info["resumed"]) == ("length", "", 2)
            for body in a.generated():
                sampling, so_far = body["sampling_params"], len(body["input_ids"]) - 3
                assert body["input_ids"][3:] == done.tokens[:so_far]
                assert sampling["max_new_tokens"] == 60 - so_far
                assert sampling["min_new_tokens"] == max(0, 50 - so_far)
                assert sampling["sampling_seed"] == 11
            assert fleet.counts == {"requests": 1, "tokens": 60, "resumed": 2}

    run(main)


def test_sampling_masks_are_checked():
    def masked(*masks, logp=(-0.5, 0.0)):
        body = reply([3, 4], [-1.0, -2.0], [V0] * 2, "length")
        body["meta_info"] |= {"output_token_sampling_mask": [*masks], "output_token_sampling_logprobs": [*logp]}
        return answers(200, body)

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            ask = functools.partial(fleet.generate, [1, 2], max_new_tokens=2, top_p=0.9, top_k=3, sampling_mask=True)
            a.script = [masked([9, 3], [4])]
            done = await ask()
            assert done.sampling_mask.tolist() == [[3, 9, -1], [4, -1, -1]] and done.logp == [-0.5, 0.0]
            assert all(
                body["return_sampling_mask"] and "sampling_mask" not in body["sampling_params"]
                for body in a.generated()
            )
            for wrong, words in (
                (
                    answers(200, reply([3, 4], [-1.0, -2.0], [V0] * 2, "length")),
                    "sampling masks were asked for, got None",
                ),
                (masked([3]), "sampling masks of 1 tokens do not belong to the 2 ids"),
                (masked([3], [1, 2]), "a sampling mask must have the token that was drawn, 4, got"),
                (
                    masked([3], [4, 1, 2, 5]),
                    "a sampling mask must have at most top_k 3 tokens, got 4, of which some tie",
                ),
                (masked([3], [4], logp=[-0.5]), "sampling log-probabilities of 1 tokens do not belong to the 2 ids"),
            ):
                a.script = [wrong]
                with pytest.raises(RuntimeError, match=words):
                    await ask()
            with pytest.raises(ValueError, match="sampling_mask needs a top_k, the most tokens of a mask, got -1"):
                await ask(top_k=-1)

    run(main)


def test_likeliest_tokens_are_checked_and_joined():
    def likely(ids, *rows, finish="length"):
        body = reply(ids, [-1.0] * len(ids), [V0] * len(ids), finish)
        body["meta_info"] |= {
            "output_top_logprobs": [[[-0.5 * i, id, None] for i, id in enumerate(row)] for row in rows]
        }
        return answers(200, body)

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            ask = functools.partial(fleet.generate, [1, 2], max_new_tokens=2, top_logprobs=2)
            a.script = [likely([3], [3, 9], finish="abort"), likely([4], [5, 6])]
            done = await ask()
            assert done.tokens == [3, 4] and done.top[0].tolist() == [[3, 9], [5, 6]]
            assert done.top[1].tolist() == [[0.0, -0.5]] * 2
            assert all(body["top_logprobs_num"] == 2 for body in a.generated())
            assert all("top_logprobs" not in body["sampling_params"] for body in a.generated())
            for wrong, words in (
                (
                    answers(200, reply([3, 4], [-1.0] * 2, [V0] * 2, "length")),
                    "at 2 places were asked for, got those at 0",
                ),
                (likely([3, 4], [3, 9], [5]), r"the 2 likeliest tokens, which differ, .* got 1: \[5\]"),
                (likely([3, 4], [3, 3], [5, 6]), r"the 2 likeliest tokens, which differ, .* got 2: \[3, 3\]"),
                (likely([3, 4], [3, 9, 3], [5, 6]), r"the 2 likeliest tokens, which differ, .* got 3: \[3, 9, 3\]"),
            ):
                a.script = [wrong]
                with pytest.raises(RuntimeError, match=words):
                    await ask()

    run(main)


def test_resuming_keeps_the_routed_experts_of_tokens_already_sampled():
    """A resumed request prefills its tokens again, maybe under new weights; the experts reported first are kept."""

    def routed(ids, asked, value, finish):
        body = reply(ids, [0.0] * len(ids), [V0] * len(ids), finish)
        experts = np.full((asked + len(ids) - 1, 2, 2), value, np.int32)  # layers, top_k
        body["meta_info"] |= {"prompt_tokens": asked, "routed_experts": base64.b64encode(experts.tobytes()).decode()}
        return answers(200, body)

    async def main():
        async with serving() as a, client.connect([a.url], experts_per_token=2) as fleet:
            nothing = reply([], [], [], "abort")
            a.script = [answers(200, nothing), routed([3, 4, 5], 2, 1, "abort"), routed([6, 7], 5, 2, "length")]
            done = await fleet.generate([1, 2], max_new_tokens=5, routed_experts=True)
            assert done.tokens == [3, 4, 5, 6, 7] and all(body["return_routed_experts"] for body in a.generated())
            np.testing.assert_array_equal(done.routed, np.repeat(np.full((2, 2, 2), [[[1]], [[2]]]), [4, 2], 0))
            kind, rows = sampled([1, 2], done, temperature=1.0).arrays["routed_experts"]
            assert kind == "input"
            np.testing.assert_array_equal(rows, [*done.routed, [[-1] * 2] * 2])
            # tokens dropped for a stop string lose their experts, too
            a.script = [routed([3, 4, 5], 2, 1, "abort"), routed([8, 9], 3, 2, "stop")]
            done = await fleet.generate([1, 2], max_new_tokens=5, routed_experts=True, stop=["abc"])
            assert done.tokens == [3, 8, 9]
            np.testing.assert_array_equal(done.routed[:, 0, 0], [1, 1, 1, 2])
            with pytest.raises(RuntimeError, match="got none; start SGLang with --enable-return-routed-experts"):
                await fleet.generate([1], max_new_tokens=2, routed_experts=True)
        async with serving() as a, client.connect([a.url], experts_per_token=3) as fleet:
            a.script = [routed([3, 4], 2, 1, "length")]
            with pytest.raises(RuntimeError, match="must be 3 per layer for 3 tokens, got 12 in all"):
                await fleet.generate([1, 2], max_new_tokens=2, routed_experts=True)
        async with serving() as a, client.connect([a.url]) as fleet:
            with pytest.raises(ValueError, match="routed_experts needs a model with experts, got experts_per_token 0"):
                await fleet.generate([1], max_new_tokens=2, routed_experts=True)

    run(main)


def test_resuming_drops_tokens_that_could_be_part_of_a_stop_string():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            ids, logp = [token_at(1 + i) for i in range(9)], [logp_at(1 + i) for i in range(9)]
            a.script = [answers(200, reply(ids, logp, [V0] * 9, "abort"))]
            done = await fleet.generate([1], max_new_tokens=20, stop=["é.", "x"])  # 3 bytes
            check(done, [1], 20)
            assert [len(body["input_ids"]) for body in a.generated()] == [1, 1 + 9 - 2]
            assert fleet.counts["dropped"] == 2

    run(main)


def test_an_abort_at_max_new_tokens_finishes_by_length():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [answers(200, reply([1, 2], [-1.0, -2.0], [V0, V0], "abort"))]
            done = await fleet.generate([1], max_new_tokens=2)
            assert (done.tokens, done.finish) == ([1, 2], "length")
            assert len(a.generated()) == 1

    run(main)


def test_repeated_aborts_without_new_tokens_are_an_error(monkeypatch):
    monkeypatch.setattr(http_answers, "FIRST_DELAY_S", 0.001)

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [answers(200, reply([], [], [], "abort"))] * 20
            with pytest.raises(RuntimeError, match="aborted 9 times in a row without a new token"):
                await fleet.generate([1])
            assert len(a.generated()) == 9

    run(main)


def test_a_truncated_answer_is_requested_again_and_counted_once():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:

            async def cut_off(request, body):
                response = aiohttp.web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b'{"output_ids": [1, 2')
                request.transport.close()
                return response

            a.script = [cut_off, hangs_up]
            check(await fleet.generate([1], max_new_tokens=5), [1], 5)
            assert fleet.counts == {"requests": 1, "tokens": 5, "broken": 2, "suspect": 2}
            a.script = [hangs_up] * 10
            with pytest.raises(RuntimeError, match="/generate: connection broke .* 2 attempts"):
                await fleet.generate([1])
            assert len(a.script) == 7

    run(main)


def test_requests_that_are_still_waiting_for_a_busy_server_say_so(monkeypatch, caplog):
    monkeypatch.setattr(fleet_module, "BUSY_S", 0.2)

    async def main():
        async with serving(V0) as a, client.connect([a.url]) as fleet:
            a.script = [answers(503, {"no": "room"})] * 8
            await asyncio.gather(*(fleet.generate([1, 2], max_new_tokens=2) for _ in range(2)))

    run(main)
    said = [message for message in caplog.messages if "still waiting" in message]
    assert 1 <= len(said) <= 3 and re.match(r"still waiting, for \d+ s by now: http.*/generate: HTTP 503: ", said[0])


def test_requests_to_a_busy_server_are_retried():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script = [answers(503, {"no": "room"})]
            check(await fleet.generate([1], max_new_tokens=5), [1], 5)
            assert fleet.counts == {"requests": 1, "tokens": 5, "busy": 1}

    run(main)


# ---------------------------------------------------------------- servers that disappear


def test_requests_of_a_dead_server_are_rerouted():
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            a = await stack.enter_async_context(serving())
            async with serving() as b:
                fleet = await stack.enter_async_context(
                    client.connect([a.url, b.url], concurrency=4, timeouts=client.Timeouts(lost_s=0.3))
                )
                b.going.clear()
                tasks = [asyncio.create_task(fleet.generate([i])) for i in range(8)]
                await until(lambda: b.load == 4)
            for i, task in enumerate(tasks):
                check(await task, [i], 64)
            assert fleet.counts["broken"] == 4
            dead = next(server for server in fleet.servers if server.url == b.url)
            await until(lambda: dead.state == "dead")
            assert "cannot connect" in dead.why and "gave up after 0.3 s" in dead.why
            assert [server.url for server in fleet.healthy] == [a.url]

    run(main)


def test_the_death_of_the_last_server_ends_the_run_with_the_reason():
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            async with serving() as a:
                fleet = await stack.enter_async_context(client.connect([a.url], timeouts=client.Timeouts(lost_s=0.2)))
            with pytest.raises(RuntimeError, match="no usable generation server is left .*connect"):
                await fleet.generate([1])
            assert fleet.counts["refused"] == 1

    run(main)


@pytest.mark.parametrize("label", [V0, "default"])
def test_a_server_that_comes_back_must_have_the_same_weights(label):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            async with serving() as a:
                port = int(a.url.rsplit(":", 1)[1])
                fleet = await stack.enter_async_context(client.connect([a.url]))
            task = asyncio.create_task(fleet.generate([1], max_new_tokens=3))
            await until(lambda: fleet.counts["refused"])
            await stack.enter_async_context(serving(label, port=port))
            if label == V0:
                check(await task, [1], 3)
            else:
                with pytest.raises(RuntimeError, match="came back with weights 'default'"):
                    await task

    run(main)


def test_tokens_sampled_with_unknown_weights_are_not_used():
    async def main():
        async with (
            serving() as a,
            serving() as b,
            client.connect([a.url, b.url], concurrency=1) as fleet,
        ):
            a.label = "default"  # restarted unnoticed
            for done in await asyncio.gather(*(fleet.generate([i]) for i in range(4))):
                assert done.version == [0] * 64 and done.info["url"] == b.url
            assert fleet.counts["strange"] == 1
            assert "'default'" in fleet.servers[0].why

    run(main)


def test_every_request_has_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAX_SERVER_KEY", "secret")

    async def main():
        async with serving(key="secret") as a, serving(key="secret") as b, client.connect([a.url]) as fleet:
            check(await fleet.generate([1, 2], max_new_tokens=3), [1, 2], 3)
            await push_weights(fleet, tmp_path, V1)
            await fleet.join(b.url)
            await until(lambda: states(fleet) == ["healthy", "healthy"])
            assert (a.label, b.label) == (V1, V1) and "secret" not in repr(fleet.servers)

    run(main)


def test_a_missing_or_wrong_key_is_reported_at_once(monkeypatch):
    async def connected(url, **options):
        async with client.connect([url], **options):
            pass

    async def main():
        async with serving(key="secret") as a:
            for key, words in ((None, "missing"), ("secrets", "wrong")):
                monkeypatch.delenv("AREAX_SERVER_KEY", raising=False)
                if key:
                    monkeypatch.setenv("AREAX_SERVER_KEY", key)
                line = (
                    f"^{a.url}/model_info: HTTP 401: the key is {words}; set AREAX_SERVER_KEY to the right one, or "
                    "AREAX_SERVER_KEY_FILE to a file with it$"
                )
                with pytest.raises(ValueError, match=line):
                    await connected(a.url)
            monkeypatch.setenv("AREAX_SERVER_KEY", "secret")
            with pytest.raises(ValueError, match="the key is missing; set ANOTHER_KEY"):  # the first is not sent
                await connected(a.url, key_variable="ANOTHER_KEY")
            monkeypatch.setenv("ANOTHER_KEY", "secret")
            await connected(a.url, key_variable="ANOTHER_KEY")

    run(main)


def test_a_prompt_whose_reading_another_program_aborts_is_read_again():
    aborted = reply([0], [-1.0], [V0], "abort") | {"output_ids": [0]}
    whole = reply([], [], [], "length")
    whole["meta_info"]["input_token_logprobs"] = [[None, 1, None], [-1.0, 2, None]]

    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.script += [answers(200, aborted), answers(200, whole)]
            _, part = await fleet.read([1, 2])
            assert [row[1] for row in part.inputs] == [1, 2]
            a.script += [answers(200, aborted)] * 3
            with pytest.raises(ServerError, match="aborted 3 requests to read a prompt; is another run, or program"):
                await fleet.read([1, 2])

    run(main)


def test_addresses_with_passwords_are_refused():
    async def main():
        async with serving() as a:
            secret = a.url.replace("//", "//ann:hush@")
            for urls, stagers in (([secret], []), ([a.url], [secret])):
                with pytest.raises(ValueError, match="connect: an address must have no user, password"):
                    async with client.connect(urls, stagers=stagers):
                        pass
            async with client.connect([a.url]) as fleet:
                with pytest.raises(ValueError, match="join: an address must have no user, password"):
                    await fleet.join(secret)

    run(main)


def test_connect_names_an_unreachable_server():
    async def main():
        async with serving() as a:
            pass
        with pytest.raises(RuntimeError, match=rf"{a.url}/model_info: cannot connect \(Connect call failed.*0.1 s"):
            async with client.connect([a.url], ready_s=0.1):
                pass
        for urls in ([], [a.url, a.url + "/"]):
            with pytest.raises(ValueError, match="one or more different servers"):
                async with client.connect(urls):
                    pass
        with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
            async with client.connect([a.url], concurrency=0):
                pass

    run(main)


def test_control_calls_have_deadlines_and_descriptive_errors():
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            (server,) = fleet.servers
            assert await server.api.health()
            await server.api.flush_cache()
            await server.api.abort("some")
            await server.api.abort()
            assert [body for path, body in a.calls if path == "/abort_request"] == [
                {"rid": "some", "abort_all": False},
                {"rid": "", "abort_all": True},
            ]
            assert await server.api.checksums() == []
            a.going.clear()
            assert not await server.api.health()
            a.refuse["/flush_cache"] = answers(503, "starting")
            with pytest.raises(RuntimeError, match="/flush_cache: HTTP 503.*gave up after 0.2 s"):
                await server.api.flush_cache(timeout_s=0.2)

    run(main)


# ---------------------------------------------------------------- push


PUSH = [
    "/model_info",  # whether something else has loaded weights
    "/pause_generation",
    "/update_weights_from_disk",
    "/model_info",
    "/continue_generation",
]
ASKED = ["/weights_checker"] * 2  # by the first push to a server that has none


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_a_push_during_generation(tmp_path, mode):
    async def main():
        async with (
            serving(step_s=0.002) as a,
            serving(step_s=0.002) as b,
            client.connect([a.url, b.url]) as fleet,
        ):
            tasks = [asyncio.create_task(fleet.generate([1] * n, max_new_tokens=60)) for n in range(1, 7)]
            await until(lambda: a.load + b.load == 6)
            await asyncio.sleep(0.02)  # each has tokens, and none is complete
            report = await push_weights(fleet, tmp_path, V1, mode=mode)
            assert fleet.version == 1 and fleet.labels == {V1}
            for server in (a, b):
                assert controls(server) == [*PUSH, *ASKED]
                bodies = dict(server.calls)
                assert bodies["/pause_generation"] == {"mode": mode}
                assert bodies["/update_weights_from_disk"] == {
                    "model_path": str(tmp_path),
                    "weight_version": V1,
                    "flush_cache": mode != "in_place",
                }
                assert all(body["extra_key"] == V0 for body in server.generated()[:3])  # part of its cache key
            for n, task in enumerate(tasks, 1):
                done = await task
                check(done, [1] * n, 60)
                assert done.version == sorted(done.version) and set(done.version) == {0, 1}
            assert (report.label, report.failed) == (V1, {})
            assert set(report.loaded) == {a.url, b.url}
            assert 0 < report.load_s < report.pause_s < report.total_s
            assert fleet.counts["resumed"] == (6 if mode == "abort" else 0)

    run(main)


def test_a_server_started_with_the_pushed_version_is_only_verified(tmp_path):
    """All servers report the version before its push; only those that this run started are known to have loaded it."""
    (tmp_path / "manifest.json").write_text('{"tensors": {"norm": {"xxh3_128": "ab"}}}')
    holds = lambda digest: answers(200, {"success": True, "ranks": [{"checksums": {"norm": digest}}]})

    async def main():
        async with serving(V1) as a, serving(V1) as b, serving(V1) as c:
            async with client.connect([a.url, b.url, c.url]) as fleet:
                a.refuse["/weights_checker"], c.refuse["/weights_checker"] = holds("ab"), holds("cd")
                fleet.servers[0].fresh = fleet.servers[2].fresh = True
                report = await push_weights(fleet, tmp_path, V1)
                assert controls(a) == ["/weights_checker", "/model_info"] and controls(b) == [*PUSH, *ASKED]
                assert report.loaded == (a.url, b.url) and fleet.published.label == V1
                assert "differ from the manifest, first norm" in report.failed[c.url]
                c.refuse["/weights_checker"] = holds("ab")
                await until(lambda: states(fleet) == ["healthy"] * 3)
                assert "/update_weights_from_disk" in controls(c)
                await push_weights(fleet, tmp_path, V1)
                assert controls(a) == ["/weights_checker", "/model_info", *PUSH, "/weights_checker", "/model_info"]

    run(main)


@pytest.mark.parametrize(
    "now, dtype, stored, taken",
    [
        ({"norm": "b", "o": "y"}, "float32", "F32", True),
        ({"norm": "b", "o": "x"}, "float32", "F32", False),  # half of it was loaded
        ({"norm": "a", "o": "x"}, "auto", "BF16", False),  # nothing
        ({"norm": "a", "o": "x"}, "bfloat16", "F32", True),  # which it rounds
        ({"norm": "a"}, "float32", "F32", False),
        ({}, "float32", "F32", True),
    ],
)
def test_tensors_that_a_push_changed_must_have_changed_on_the_server(tmp_path, now, dtype, stored, taken):
    """A server with fused tensors has nothing else to be compared with if it is the only one."""
    holds = lambda sums: answers(200, {"success": True, "ranks": [{"checksums": {"qkv": "0", **sums}}]})
    for v, sums in enumerate(({"q": "0", "norm": "1", "o": "2"}, {"q": "3", "norm": "4", "o": "5"})):
        (tmp_path / str(v)).mkdir()
        tensors = {name: {"dtype": stored, "shape": [1], "xxh3_128": x} for name, x in sums.items()}
        (tmp_path / str(v) / "manifest.json").write_text(json.dumps({"tensors": tensors}))

    async def main():
        async with serving(V1) as a:
            a.refuse["/server_info"] = answers(200, {"dtype": dtype, "quantization": None})
            async with client.connect([a.url], timeouts=dataclasses.replace(client.TIMEOUTS, push_attempts=1)) as fleet:
                a.refuse["/weights_checker"] = holds({"norm": "a", "o": "x"} if now else {})
                await push_weights(fleet, tmp_path / "0", V1)
                a.refuse["/weights_checker"] = holds(now)
                if taken:
                    await push_weights(fleet, tmp_path / "1", V2)
                    return
                kept = [name for name in ("norm", "o") if now.get(name) in ("a", "x")]
                wanted = f"reports {V2}, but {len(kept)} tensors are those of .*, first {kept[0]}: it answered"
                with pytest.raises(RuntimeError, match=wanted):
                    await push_weights(fleet, tmp_path / "1", V2)

    run(main)


@pytest.mark.parametrize(
    "wrong",
    [
        answers(404, {"detail": "Not Found"}),
        answers(200, None),
        answers(200, {"ranks": []}),
        answers(200, {"ranks": [{"checksums": {}}]}),
        answers(200, {"ranks": [{"checksums": 3}]}),
        answers(200, {"message": "no JSON"}),
    ],
)
def test_one_wrong_answer_does_not_end_the_comparison_of_checksums(tmp_path, wrong):
    holds, quick = answers(200, {"ranks": [{"checksums": {"qkv": "0"}}]}), client.Timeouts(retry_s=0.01)

    async def main():
        async with serving() as a, client.connect([a.url], timeouts=quick) as fleet:
            asked = 0

            async def once(request, body):
                nonlocal asked
                asked += 1
                return await (wrong if asked == 1 else holds)(request, body)

            a.refuse["/weights_checker"] = once
            await push_weights(fleet, tmp_path, V1)
            assert asked == 2 and [*fleet.published.checksums.values()] == [[{"qkv": "0"}]]
            a.refuse["/weights_checker"] = wrong  # of a server that has reported some
            with pytest.raises(RuntimeError, match="/weights_checker: .*(as it did before|not a list of checksums)"):
                await push_weights(fleet, tmp_path, V2)

    run(main)


def test_a_server_without_checksums_is_named_once(tmp_path, caplog):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            for label in (V1, V2):
                await push_weights(fleet, tmp_path, label)
            [said] = caplog.messages
            assert said.startswith(f"{a.url} reports no checksums") and "HTTP 404" in said
            assert controls(a) == [*PUSH, *ASKED, *PUSH]

    run(main)


def test_weights_that_another_run_loads_during_the_proof_prove_nothing(tmp_path):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:

            async def sums(request, body):
                if a.label == V2 and not fleet.counts["undone"]:
                    a.label = "2-cccccccc"
                return await answers(200, {"success": True, "ranks": [{"checksums": {"qkv": a.label}}]})(request, body)

            a.refuse["/weights_checker"] = sums
            await push_weights(fleet, tmp_path, V1)
            await push_weights(fleet, tmp_path, V2)
            assert fleet.counts["undone"] == 1 and [*fleet.published.checksums.values()] == [[{"qkv": V2}]]

    run(main)


@pytest.mark.parametrize(
    ("path", "handler", "reason"),
    [
        (
            "/update_weights_from_disk",
            answers(400, {"success": False, "message": "Failed to get weights iterator"}),
            "HTTP 400: Failed to get weights iterator",
        ),
        ("/update_weights_from_disk", answers(200, {"success": False, "message": "no"}), ": no"),
        ("/update_weights_from_disk", hangs_up, "connection broke"),
        ("/model_info", answers(200, {"weight_version": V0}), "reports weights '0-00000000'"),
        ("/pause_generation", answers(400, {"message": "bad mode"}), "bad mode"),
        ("/continue_generation", answers(500, {}), "HTTP 500"),
    ],
)
def test_requests_of_a_server_that_fails_a_push_are_rerouted(tmp_path, path, handler, reason):
    async def main():
        async with serving() as a, serving() as b, client.connect([a.url, b.url]) as fleet:
            a.going.clear()
            task = asyncio.create_task(fleet.generate([1]))
            await until(lambda: a.load)
            a.refuse[path] = handler
            report = await push_weights(fleet, tmp_path, V1)
            done = await task  # it ran on server a, whatever state a is in now
            check(done, [1], 64)
            assert done.info["url"] == b.url and set(done.version) == {1}
            assert (fleet.counts["rerouted"], report.loaded) == (1, (b.url,))
            assert list(report.failed) == [a.url] and reason in report.failed[a.url]
            expected = PUSH[: PUSH.index(path) + 1]
            assert controls(a)[: len(expected)] == expected and controls(b) == [*PUSH, *ASKED]
            assert fleet.version == 1

    run(main)


def test_a_push_that_fails_on_all_servers_is_an_error(tmp_path):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            a.refuse["/update_weights_from_disk"] = answers(400, {"message": "no such file"})
            with pytest.raises(RuntimeError, match="generation server is left .*HTTP 400: no such file"):
                await push_weights(fleet, tmp_path, V1)
            with pytest.raises(RuntimeError, match="no usable generation server is left"):
                await push_weights(fleet, tmp_path, V1)
            with pytest.raises(RuntimeError, match="no usable generation server is left"):
                await fleet.generate([1])

    run(main)


def test_an_interrupted_push_leaves_no_server_routable(tmp_path):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:

            async def hangs(request, body):
                await asyncio.sleep(60)

            a.refuse["/update_weights_from_disk"] = hangs
            task = asyncio.create_task(push_weights(fleet, tmp_path, V1))
            await until(lambda: PUSH[2] in controls(a))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fleet.servers[0].why == f"{a.url}: the push of {V1} was interrupted"

    run(main)


def test_bad_push_arguments_are_refused_before_pausing(tmp_path):
    async def main():
        async with serving() as a, client.connect([a.url]) as fleet:
            with pytest.raises(ValueError, match="directory to push must exist"):
                await push_weights(fleet, tmp_path / "none", V1)
            with pytest.raises(ValueError, match="a label must be .* got 'default'"):
                await push_weights(fleet, tmp_path, "default")
            with pytest.raises(ValueError, match="mode must be .* got 'kill'"):
                await push_weights(fleet, tmp_path, V1, mode="kill")
            assert controls(a) == []

    run(main)


def streamed(*answers, end=b"data: [DONE]\n\n"):
    """A streamed answer, sent in chunks that ignore event boundaries."""

    async def handler(request, body):
        assert body["stream"] is True
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        data = b"".join(b"data: " + json.dumps(answer).encode() + b"\n\n" for answer in answers) + end
        for i in range(0, len(data), 37):
            await response.write(data[i : i + 37])
        return response

    return handler


def grown(n, first=2):
    """Streamed answers with 1, 2, ... n tokens."""
    ids, logp = [token_at(first + i) for i in range(n)], [logp_at(first + i) for i in range(n)]
    return [reply(ids[:k], logp[:k], [V0] * k, "length" if k == n else None) for k in range(1, n + 1)]


def test_a_stream_reports_its_tokens_as_it_grows_and_is_retried_if_it_breaks():
    async def main():
        seen = []
        async with serving() as server, client.connect([server.url]) as fleet:
            server.script = [streamed(*grown(2), end=b""), streamed(*grown(4))]
            done = await fleet.generate([1, 2], max_new_tokens=4, on_tokens=lambda tokens: seen.append(list(tokens)))
            return done, seen, fleet.counts["broken"]

    done, seen, broken = asyncio.run(main())
    check(done, [1, 2], 4)
    assert broken == 1 and [len(tokens) for tokens in seen] == [1, 2, 1, 2, 3, 4]
    assert all(done.tokens[: len(tokens)] == tokens for tokens in seen)


@pytest.mark.parametrize("code, kind", [(400, ValueError), (500, RuntimeError)])
def test_a_stream_that_ends_with_an_error_raises_it(code, kind):
    async def main():
        async with serving() as server, client.connect([server.url]) as fleet:
            server.script = [streamed({"error": {"message": "too long", "code": code}})]
            with pytest.raises(kind, match="/generate: too long"):
                await fleet.generate([1, 2], max_new_tokens=4, on_tokens=lambda _: None)

    asyncio.run(main())


def test_two_runs_on_one_server_do_not_take_it_from_each_other_for_ever(tmp_path):
    async def main():
        async with serving() as server, client.connect([server.url]) as one, client.connect([server.url]) as other:
            await push_weights(one, tmp_path, V1)
            await push_weights(other, tmp_path, V2)
            with pytest.raises(RuntimeError, match="no usable .*another run has given it weights"):
                for _ in range(10):
                    await one.generate([1], max_new_tokens=1)
                    await other.generate([1], max_new_tokens=1)

    run(main)


def test_a_label_of_any_length_is_read():
    assert labels.version_of("12-0123abcd") == 12
    assert [labels.version_of(x) for x in ("9" * 5000 + "-0123abcd", "20240612093000-1a2b3c4d", "\u0663-0123abcd")] == [
        -1
    ] * 3
