"""Simulated servers, compared with a naive model of the same rates; and their virtual clock."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.simulation import clock
from areax.rollout.simulation.server import Rates, Server


def ends(rates, requests):
    """End times of [(arrival, prompt, tokens)], by stepping from event to event and recomputing everything."""
    left = [float(tokens) for _, _, tokens in requests]
    prompts = [prompt for _, prompt, _ in requests]
    waiting, running, found, now, reading = [], [], {}, 0.0, 0.0
    coming = sorted(range(len(requests)), key=lambda i: requests[i][0])
    while len(found) < len(requests):
        while waiting and len(running) < rates.slots:
            running.append(waiting.pop(0))
            reading += prompts[running[-1]] / rates.read_tokens_s
        step = rates.step_s + len(running) * rates.request_s
        until = [requests[coming[0]][0] - now] if coming else []
        if running:
            until.append(reading + min(left[i] for i in running) * step)
        passed = min(until)
        now += passed
        decoding = max(0.0, passed - reading)
        reading = max(0.0, reading - passed)
        for i in running:
            left[i] -= decoding / step
        for i in [i for i in running if left[i] < 1e-6]:
            running.remove(i)
            found[i] = now
        while coming and requests[coming[0]][0] <= now + 1e-9:
            waiting.append(coming.pop(0))
    return [found[i] for i in range(len(requests))]


def ask(tokens, prompt=1):
    return {"input_ids": [0] * prompt, "sampling_params": {"max_new_tokens": tokens}}


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 50).map(lambda x: x / 7), st.integers(1, 30), st.integers(1, 40)),
        min_size=1,
        unique_by=lambda request: request[0],
    ),
    slots=st.integers(1, 5),
    request_s=st.sampled_from([0.0, 0.03]),
    read_tokens_s=st.sampled_from([20.0, 1e9]),
)
def test_requests_end_at_the_times_the_rates_imply(requests, slots, request_s, read_tokens_s):
    rates = Rates(slots=slots, step_s=0.1, request_s=request_s, read_tokens_s=read_tokens_s)

    async def main():
        server = Server(rates)

        async def one(at, prompt, tokens):
            await asyncio.sleep(at)
            answer = await server.reply("/generate", ask(tokens, prompt))
            assert len(answer["output_ids"]) == tokens and answer["meta_info"]["finish_reason"]["type"] == "length"
            return asyncio.get_running_loop().time()

        times = await asyncio.gather(*(one(*request) for request in requests))
        return times, server.tokens, server.busy()

    times, tokens, busy = clock.run(main())
    np.testing.assert_allclose(times, ends(rates, requests), atol=1e-4)
    assert tokens == sum(request[2] for request in requests)
    assert busy <= max(times)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_pause_keeps_sampled_tokens_and_spans_name_both_versions(mode):
    async def main():
        server = Server(Rates(slots=2, step_s=0.1, request_s=0.0, read_tokens_s=10.0, load_s=1.0), "old")
        asked = [asyncio.create_task(server.answer("/generate", ask(10, 5))) for _ in range(3)]
        await asyncio.sleep(1.0 + 0.45)  # two prompts are prefilled in 1 s, then 0.1 s per token
        await server.answer("/pause_generation", {"mode": mode})
        await server.answer("/update_weights_from_disk", {"weight_version": "new"})
        assert json.loads((await server.answer("/model_info", None))[1]) == {"weight_version": "new"}
        await server.answer("/continue_generation", {})
        answers = [json.loads(text)["meta_info"] for _, text in await asyncio.gather(*asked)]
        return answers, asyncio.get_running_loop().time()

    answers, end = clock.run(main())
    spans = [[(s["version"], s["end"] - s["start"]) for s in answer["weight_versions"]] for answer in answers]
    if mode == "abort":
        assert spans == [[("old", 4)], [("old", 4)], []]
        assert {answer["finish_reason"]["type"] for answer in answers} == {"abort"} and end == pytest.approx(2.45)
        return
    assert spans == [[("old", 4), ("new", 6)]] * 2 + [[("new", 10)]]
    # 1 s paused; two contexts of 9 tokens are prefilled again, 6 tokens follow; then the third, whose prompt has 5
    assert end == pytest.approx(1.45 + 1.0 + 1.8 + 0.6 + 0.5 + 1.0)


def test_a_cached_prompt_is_not_prefilled_again_before_a_push():
    async def main():
        server = Server(Rates(slots=4, step_s=0.1, request_s=0.0, read_tokens_s=100.0, load_s=0.0))
        now, took = asyncio.get_running_loop().time, []
        first = [1] * 200
        second = [*first, *[0] * 60, *[2] * 40]  # generated tokens are cached, too, in whole blocks
        for ids, tokens in ((first, 60), (first, 10), (second, 10), ([3] * 200, 10), (None, 0), (first, 10)):
            begun = now()
            if ids is None:
                await server.answer("/update_weights_from_disk", {"weight_version": "new"})
                continue
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens}}
            meta = (await server.reply("/generate", body))["meta_info"]
            took.append((meta["cached_tokens"], round(now() - begun - 0.1 * tokens, 6)))
        return took

    expected = [(0, 2.0), (192, 0.08), (256, 0.44), (0, 2.0), (0, 2.0)]
    assert clock.run(main()) == expected


def test_a_full_memory_preempts_the_latest_request():
    """By hand: 20 + 20 tokens and two more per step; full after 30 steps, then the first runs 30 more steps alone."""

    async def main():
        server = Server(Rates(slots=8, step_s=0.1, request_s=0.0, read_tokens_s=1e9, memory=100))
        now = asyncio.get_running_loop().time
        one = lambda: server.reply("/generate", ask(60, 20))
        tasks = [asyncio.create_task(one()) for _ in range(2)]
        await asyncio.sleep(1.0)
        assert server.load() == {
            "num_running_reqs": 2, "num_waiting_reqs": 0, "max_running_requests": 8, "token_usage": pytest.approx(0.6)
        }  # fmt: skip
        await asyncio.sleep(2.1)
        assert server.load()["num_waiting_reqs"] == 1
        ends = []
        for task in tasks:
            meta = (await task)["meta_info"]
            ends.append((round(now(), 3), meta["num_retractions"], meta["weight_versions"][-1]["end"]))
        return ends, server.retractions

    assert clock.run(main()) == ([(6.0, 0, 60), (9.0, 1, 60)], 1)


@given(
    wanted=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(0, 30)), min_size=1, max_size=25),
    memory=st.integers(100, 400),
)
def test_memory_is_never_exceeded_and_every_request_ends(wanted, memory):
    async def main():
        server = Server(Rates(slots=8, step_s=0.1, request_s=0.01, read_tokens_s=500.0, memory=memory))

        async def watch():
            while True:
                load = server.load()
                assert load["token_usage"] <= 1 + 1e-6 or load["num_running_reqs"] == 1
                await asyncio.sleep(0.37)

        async def one(prompt, tokens, at):
            await asyncio.sleep(at)
            answer = await server.reply("/generate", ask(tokens, prompt))
            assert len(answer["output_ids"]) == tokens

        watching = asyncio.create_task(watch())
        await asyncio.wait_for(asyncio.gather(*(one(*request) for request in wanted)), 1000.0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert watching.cancelled()
        load = server.load()
        assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0 and load["token_usage"] == pytest.approx(0)
        assert server.tokens == sum(tokens for _, tokens, _ in wanted)

    clock.run(main())


def test_a_cancelled_request_frees_its_slot():
    async def main():
        server = Server(Rates(slots=1, step_s=0.1, request_s=0.0, read_tokens_s=1e9))
        first, second = (asyncio.create_task(server.reply("/generate", ask(n))) for n in (100, 3))
        await asyncio.sleep(1.0)
        first.cancel()
        await second
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == pytest.approx(1.3)


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(slots=0), "slots must be at least 1, got 0"),
        (dict(memory=-1), "memory must be at least 0, got -1"),
        (dict(load_s=-1.0), "load_s must be at least 0"),
        (dict(step_s=0.0, request_s=0.0), "must be above 0, got 20000.0, 0.0 and 0.0"),
        (dict(step_s=float("nan")), "step_s must be at least 0, got nan"),
    ],
)
def test_impossible_rates_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Rates(**given)


# ---------------------------------------------------------------- the clock


def test_time_advances_while_all_tasks_wait():
    async def main():
        loop = asyncio.get_running_loop()

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            return loop.time()

        def work(seconds):
            clock.spend(seconds)
            return seconds

        times = await asyncio.gather(*(sleeper(s) for s in (3600.0, 10.0, 10.5)), asyncio.to_thread(work, 100.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.to_thread(work, 6.0)
        return times, loop.time()

    times, end = clock.run(main())
    assert times == pytest.approx([3600.0, 10.0, 10.5, 100.0]) and end == pytest.approx(3605.0)


def test_an_exception_in_a_thread_is_raised_after_its_simulated_duration():
    async def main():
        def fails():
            clock.spend(7.0)
            raise OSError("no disk")

        with pytest.raises(OSError, match="no disk"):
            await asyncio.to_thread(fails)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == pytest.approx(7.0)


def test_a_deadlock_raises_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        clock.run(main())
