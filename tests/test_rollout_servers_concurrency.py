"""Adaptive concurrency limits: the rules one by one, then fleets of servers that run out of memory."""

import asyncio
import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import V0, V1, answers, check, reply, run, serving, until

from areax.rollout import client
from areax.rollout.fleet import health
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.concurrency import BACKOFF, MEMORY, Limit, Report
from areax.rollout.servers.server import Server
from areax.rollout.servers.sglang import SGLang
from areax.rollout.servers.sglang_answers import load_report
from areax.rollout.simulation import clock
from areax.rollout.simulation import server as rates

# ---------------------------------------------------------------- one limit

events = st.lists(
    st.one_of(
        st.tuples(st.just("sent"), st.integers(1, 50)),
        st.tuples(st.just("answered"), st.integers(1, 50)),
        st.tuples(st.just("preempted"), st.integers(1, 50)),
        st.tuples(st.just("refused"), st.integers(1, 50)),
        st.tuples(st.just("reported"), st.integers(0, 50), st.integers(0, 200), st.floats(0, 1)),
    ),
    max_size=60,
)


@given(events)
def test_a_limit_stays_positive_and_reports_its_changes(events):
    limit = Limit()
    for now, (what, *values) in enumerate(events):
        before = limit.most
        if what == "sent":
            limit.sent(now, *values)
            assert limit.most == before
        elif what == "reported":
            running, waiting, usage = values
            lower = limit.reported(Report(running, waiting, usage), 50, now)
            assert lower == (limit.most < before) and (not lower or limit.most >= 2 * running)
        elif what == "refused":
            assert limit.refused(now - 5, now) == (limit.most < before)
        else:
            moved = limit.answered(now - 5, *values, now, preempted=what == "preempted")
            assert moved == np.sign(limit.most - before if limit.most != before else 0)
        assert limit.most >= 1


def test_without_overload_there_is_no_limit():
    limit = Limit()
    for now in range(1000):
        limit.sent(now, 1 + now % 300)
        limit.answered(now, 300, now, preempted=now % 20 == 0)  # a few preemptions are normal when memory is full
        limit.reported(Report(running=200, waiting=100, usage=1.0), 300, now)
    assert limit.most == math.inf


def test_preemptions_lower_the_limit_once_for_all_requests_sent_before():
    limit = Limit()
    for load in range(1, 101):
        limit.sent(0.0, load)
    moves = [limit.answered(0.0, 100 - i, 1.0, preempted=True) for i in range(50)]
    assert moves.count(-1) == 1 and limit.most == pytest.approx(BACKOFF * 100)
    assert moves.index(-1) < MEMORY / 2
    limit.sent(2.0, 90)
    assert [limit.answered(2.0, 90, 3.0, preempted=True) for _ in range(9)].count(-1) == 1
    assert limit.most == pytest.approx(BACKOFF * 90)


def test_a_binding_limit_rises_by_a_request_or_a_32nd_per_turnover():
    for most in (4, 320):
        limit = Limit()
        limit.sent(0.0, int(most / BACKOFF + 0.5))
        assert limit.refused(0.0, 0.0)
        limit.most = most  # exactly
        for _ in range(most):
            assert limit.answered(1.0, 1, 1.0, preempted=False) == 0  # the limit does not bind
        for _ in range(most):
            limit.answered(1.0, int(limit.most), 1.0, preempted=False)
        assert limit.most == pytest.approx(most + max(1, most / 32), rel=0.05)
        limit.reported(Report(most, most, 0.5), most, 2.0)
        assert limit.answered(3.0, int(limit.most), 3.0, preempted=False) == 0  # requests are queued at the server
        limit.reported(None, most, 4.0)
        assert limit.answered(5.0, int(limit.most), 5.0, preempted=False) == 1


def test_a_long_queue_halves_the_limit_down_to_twice_the_running_requests():
    limit, long, none = Limit(), Report(running=16, waiting=1008, usage=0.1), Report(running=16, waiting=0, usage=0.1)
    assert not any(limit.reported(one, 1024, 0.0) for one in (long, none, long, None, long))  # never twice in a row
    assert limit.reported(long, 1024, 0.0)
    seen = [limit.most]
    while limit.reported(Report(running=16, waiting=int(limit.most) - 16, usage=0.1), int(limit.most), 1.0):
        seen.append(limit.most)
    assert seen == [512, 256, 128, 64, 32]
    assert not limit.reported(Report(running=0, waiting=32, usage=0.0), 32, 2.0)  # just after a push nothing runs yet


@pytest.mark.parametrize(
    "answer, found",
    [
        ({"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}]}, Report(3, 1, 0.5)),
        (
            {"loads": [{"num_running_reqs": n, "num_waiting_reqs": 2, "token_usage": n / 10} for n in (3, 4)]},
            Report(7, 4, 0.4),
        ),
        ({"loads": []}, None),
        ({"message": "done"}, None),
        ({"loads": [{"num_running_reqs": None, "num_waiting_reqs": 1, "token_usage": 0.5}]}, None),
    ],
)
def test_load_reports_are_parsed_or_ignored(answer, found):
    assert load_report(answer) == found


# ---------------------------------------------------------------- over sockets


def test_a_server_that_refuses_requests_gets_a_lower_limit():
    async def main():
        async with serving() as a, client.connect([a.url], concurrency=20) as fleet:
            a.going.clear()
            tasks = [asyncio.create_task(fleet.generate([i], max_new_tokens=3)) for i in range(20)]
            await until(lambda: a.load == 20)
            a.script = [answers(503, "full")] * 2
            tasks += [asyncio.create_task(fleet.generate([i], max_new_tokens=3)) for i in range(20, 40)]
            a.going.set()
            for i, task in enumerate(tasks):
                check(await task, [i], 3)
            assert fleet.counts["busy"] == 2 and fleet.counts["lowered"] == 1
            assert 18 <= fleet.room(fleet.servers[0]) < 20

    run(main)


def test_retractions_by_a_push_do_not_lower_the_limit(tmp_path):
    """Only retractions that no push explains indicate an overloaded server."""

    def put_back(times):
        body = reply([3], [0.0], [V0 if not times else V1], "length")
        body["meta_info"]["num_retractions"] = times
        return body

    async def main():
        async with serving() as a, client.connect([a.url], concurrency=20) as fleet:

            async def after_the_push(request, body):
                await a.going.wait()
                while a.label == V0:
                    await asyncio.sleep(0.001)
                return aiohttp_json(put_back(1))

            a.script = [after_the_push] * 20
            tasks = [asyncio.create_task(fleet.generate([1], max_new_tokens=1)) for _ in range(20)]
            await until(lambda: a.load == 20)
            await push_weights(fleet, tmp_path, V1)
            await asyncio.gather(*tasks)
            assert not fleet.counts["preempted"] and not fleet.counts["lowered"]
            a.script = [answers(200, put_back(1))] * 20
            await asyncio.gather(*(fleet.generate([1], max_new_tokens=1) for _ in range(20)))
            assert fleet.counts["preempted"] == 20 and fleet.counts["lowered"] == 1
            assert fleet.room(fleet.servers[0]) == 18

    from aiohttp.web import json_response as aiohttp_json

    run(main)


def test_queues_reported_to_the_heartbeat_lower_the_limit_except_during_a_push(tmp_path):
    queue = {"loads": [{"num_running_reqs": 4, "num_waiting_reqs": 60, "token_usage": 0.2}]}

    connect = functools.partial(client.connect, timeouts=client.Timeouts(heartbeat_s=0.05))

    async def hangs(request, body):
        await asyncio.sleep(60)

    async def main():
        async with serving() as a, serving() as b, connect([a.url, b.url], concurrency=64) as fleet:
            first, second = fleet.servers
            looks = lambda: sum(path == "/v1/loads" for path, _ in a.calls)
            await until(lambda: looks() > 2)
            assert first.limit.most == math.inf  # no load report
            a.refuse["/v1/loads"] = answers(200, queue)
            for _ in range(3):
                before = looks()
                await push_weights(fleet, tmp_path, V1)
                await until(lambda before=before: looks() > before)
            a.refuse["/v1/loads"] = answers(404, {"detail": "Not Found"})
            fleet.timeouts = client.Timeouts(heartbeat_s=0.05, load_report_s=0.05)
            b.refuse["/v1/loads"] = hangs
            before = looks()
            await until(lambda: looks() > before + 3)
            assert first.limit.most == second.limit.most == math.inf and fleet.healthy == (first, second)
            a.refuse["/v1/loads"] = answers(200, queue)
            await until(lambda: first.limit.most == 8)  # halved again and again, in steps
            assert fleet.counts["lowered"] >= 1 and second.limit.most == math.inf

    run(main)


# ---------------------------------------------------------------- what the limits gain


def stream(most, *, adapts, speeds, waves=1, requests=1200, mean=50, prompt=60):
    """(tokens per second, counts, preemptions) of a fleet that gets its requests in waves."""

    async def main():
        network = clock.Network({f"http://{i}": rates.Server(speed) for i, speed in enumerate(speeds)})
        servers = [Server(SGLang(url, network), ["default"]) for url in network.servers]
        fleet = client.assemble(servers, concurrency=most, timeout_s=math.inf)
        if not adapts:
            fleet._update_concurrency_limit = fleet.on_load_report = lambda *args, **kwargs: None
        watching = asyncio.create_task(health.watch(fleet))
        lengths = np.ceil(np.random.default_rng(0).lognormal(np.log(mean) - 0.35, 0.83, requests)).astype(int)
        ask = lambda i: fleet.generate([i] * prompt, max_new_tokens=int(min(lengths[i], 10 * mean)))
        done, each = [], requests // waves
        for first in range(0, requests, each):  # as batches at eta = 0
            done += await asyncio.gather(*(ask(i) for i in range(first, first + each)))
        took = asyncio.get_running_loop().time()
        watching.cancel()
        await fleet.close()
        preempted = sum(server.retractions for server in network.servers.values())
        return sum(len(one.tokens) for one in done) / took, fleet.counts, preempted

    return clock.run(main())


@pytest.mark.slow
def test_a_server_short_of_memory_is_kept_near_its_best_throughput(monkeypatch):
    """It admits every request and recomputes preempted ones: too many or too few requests are an eighth slower."""
    monkeypatch.setattr(rates, "AHEAD", 1)
    speed = [rates.Rates(slots=256, step_s=0.01, request_s=0.0001, read_tokens_s=1000.0, memory=5000)]
    fixed = {most: stream(most, adapts=False, speeds=speed) for most in (16, 32, 128)}
    best = max(tokens_s for tokens_s, _, _ in fixed.values())
    assert fixed[128][0] < 0.88 * best and fixed[16][0] < 0.88 * best
    tokens_s, counts, preempted = stream(128, adapts=True, speeds=speed)
    assert tokens_s > 0.93 * best and preempted < 0.6 * fixed[128][2]
    assert 2 <= counts["lowered"] < 20


def test_requests_do_not_queue_at_a_slow_server_while_a_fast_one_is_free():
    slow, fast = (rates.Rates(slots=slots, step_s=0.01, request_s=0.0, read_tokens_s=1e9) for slots in (4, 64))
    freely, _, _ = stream(150, adapts=False, speeds=[slow, fast], waves=4)
    tokens_s, counts, _ = stream(150, adapts=True, speeds=[slow, fast], waves=4)
    assert counts["lowered"] >= 1 and tokens_s > 1.5 * freely
