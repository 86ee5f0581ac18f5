"""The metrics of each step, compared with the same quantities computed afterwards from the events."""

import asyncio
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from areax.adapters.tracking import metric_catalog, run_dir
from areax.rollout import client, events, loop
from areax.rollout.errors import ServerError
from areax.rollout.fleet import step_metrics
from areax.rollout.fleet.push import push_weights
from areax.rollout.scheduling import executor
from areax.rollout.servers import gauges, server
from areax.rollout.servers.sglang import SGLang
from areax.rollout.servers.sglang_answers import slots
from areax.rollout.simulation import clock
from areax.rollout.simulation import server as rates
from areax.rollout.types import Completion, sampled


def close(a, b):
    assert a == pytest.approx(b, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------- a run under the virtual clock


STEPS, GROUPS, SIZE, ETA, SLOTS = 6, 3, 2, 2, (4, 4)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(metrics of each step, when each ended, events); an update takes 1.5 s, a save 0.25 s."""
    path = tmp_path_factory.mktemp("figures")
    folder = path / "version"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"bytes": 1024}')
    lengths = np.random.default_rng(3).integers(5, 200, 10_000).tolist()
    told, ends = [], []

    async def main():
        now = asyncio.get_running_loop().time
        speed = rates.Rates(slots=4, step_s=0.01, request_s=0.001, load_s=0.2)
        network = clock.Network({f"http://{i}": rates.Server(speed) for i in range(2)})
        servers = [server.Server(SGLang(url, network), ["default"], slots=4) for url in network.servers]
        fleet = client.assemble(servers, timeout_s=float("inf"))
        draws = iter(lengths)

        async def workflow(generate, row):
            done = await generate([0] * 7, max_new_tokens=next(draws))
            return sampled([0] * 7, done, temperature=1.0, reward=1.0)

        async with executor.Executor(
            workflow, fleet.generate, executor.Prompts([{}] * 50), group_size=SIZE, groups_per_batch=GROUPS, eta=ETA,
            max_concurrent=16, seed=None, batches=STEPS,
        ) as rollout:  # fmt: skip
            own = step_metrics.Figures(fleet, lambda: {"failed": rollout.counts["failed"]})
            ends.append(now())

            def on_step(v, result, seconds):
                told.append(own.step(seconds))
                ends.append(now())

            with events.watching(own.see):
                await loop.run(
                    rollout.batch, lambda groups: clock.spend(1.5),
                    lambda v: functools.partial(push_weights, fleet, folder, f"{v}-{v:08x}"),
                    lambda v, at: clock.spend(0.25), eta=ETA, steps=STEPS, admit=rollout.admit, save_every=2,
                    on_step=on_step,
                )  # fmt: skip
        await fleet.close()

    with events.writing(path / "events.jsonl"):
        clock.run(main())
    return told, ends, list(run_dir.read_lines(path / "events.jsonl"))


def by_step(lines):
    """The events of each step, up to that of its update."""
    parts = [[]]
    for line in lines:
        parts[-1].append(line)
        if line["kind"] == "part" and line["name"] == "update":
            parts.append([])
    return parts[:STEPS]


def overlap(spans, start, end):
    return [max(0.0, min(at, end) - max(begun, start)) for begun, at in spans]


def test_the_idle_share_of_the_trainer_is_what_its_phases_leave(played):
    told, ends, lines = played
    work = [(x["begun"], x["at"]) for x in lines if x["kind"] == "part" and x["name"] in ("update", "save", "publish")]
    for one, (start, end) in zip(told, itertools.pairwise(ends), strict=True):
        close(one["trainer_idle"], 1 - sum(overlap(work, start, end)) / (end - start))
    assert 0.1 < told[0]["trainer_idle"] < 1 and min(one["trainer_idle"] for one in told) < 0.1


def test_server_occupancy_follows_from_the_completions(played):
    """Busy time (at least one completion runs) and summed durations, on the grid of all starts and ends."""
    told, ends, lines = played
    calls = [x for x in lines if x["kind"] == "call"]
    spans = {url: [(x["begun"], x["at"]) for x in calls if x["url"] == url] for url in ("http://0", "http://1")}
    assert all(spans.values())
    for one, (start, end) in zip(told, itertools.pairwise(ends), strict=True):
        busy = total = 0.0
        for own in spans.values():
            grid = sorted({start, end, *(t for span in own for t in span if start < t < end)})
            middles = [((a + b) / 2, b - a) for a, b in itertools.pairwise(grid)]
            busy += sum(length for t, length in middles if any(begun < t < at for begun, at in own))
            total += sum(overlap(own, start, end))
        close(one["server_busy"], busy / (2 * (end - start)))
        close(one["requests_in_flight"], total / (end - start))
        close(one["slot_load"], total / (8 * (end - start)))
    assert len({round(one["server_busy"], 3) for one in told}) >= 4 and all(0 <= x["server_busy"] <= 1 for x in told)


def test_tokens_groups_and_pushes_equal_those_of_the_events(played):
    told, ends, lines = played
    ended = {x["prompt"]: x for x in lines if x["kind"] == "group"}
    for one, part, (start, end) in zip(told, by_step(lines), itertools.pairwise(ends), strict=True):
        tokens = sum(x["tokens"] for x in part if x["kind"] == "call")
        assert one["generated_tokens"] == tokens
        close(one["rollout_tokens_per_second"], tokens / (end - start))
        [batch] = [x for x in part if x["kind"] == "batch"]
        waits = [batch["at"] - ended[prompt]["at"] for prompt in batch["prompts"]]
        ages = [batch["version"] - ended[prompt]["admitted"] for prompt in batch["prompts"]]
        close((one["group_wait_s"], one["group_wait_s_max"]), (sum(waits) / GROUPS, max(waits)))
        close((one["group_staleness"], one["group_staleness_max"]), (sum(ages) / GROUPS, max(ages)))
        shape = one["group_staleness_hist"]
        assert shape["edges"] == list(range(max(ages) + 2))
        assert shape["counts"] == [ages.count(age) for age in range(max(ages) + 1)]
        pushes = [x for x in part if x["kind"] == "push"]
        for name in ("pause_s", "load_s", "stage_s", "total_s", "stage_bytes"):
            assert pushes == [] or one[f"push_{name}"] == pytest.approx(sum(x[name] for x in pushes))
        assert one.get("push_bytes", 0) == 1024 * len(pushes) and ("push_bytes" in one) == bool(pushes)
    assert sum(len(p) for p in by_step(lines)) > 50 and max(one["group_staleness_max"] for one in told) == ETA
    assert max(one["group_wait_s_max"] for one in told) > 0.5 and sum("push_bytes" in one for one in told) >= 4


def test_every_metric_is_documented(played):
    """In the report page and in the documentation."""
    told, _, _ = played
    page = (Path(__file__).parent.parent / "docs/metrics.md").read_text()
    names = {name.removesuffix("_max").removesuffix("_hist") for one in told for name in one}
    assert len(names) > 15 and names - set(metric_catalog.METRICS) == set()
    assert [name for name in names if f"`{name}`" not in page] == []


# ---------------------------------------------------------------- queues, drops, retries


def alone(concurrency, *urls, rate=None):
    """A fleet of simulated servers that generate 100 tokens a second per request, whatever their load."""
    speed = rate or rates.Rates(slots=8, step_s=0.01, request_s=0.0, read_tokens_s=float("inf"))
    network = clock.Network({url: rates.Server(speed) for url in urls})
    servers = [server.Server(SGLang(url, network), ["default"]) for url in urls]
    return client.assemble(servers, concurrency=concurrency, timeout_s=float("inf"))


SECONDS = dict.fromkeys((*loop.PARTS, *loop.BACKGROUND), 0.0)


def test_time_that_requests_wait_for_a_server():
    """Three requests of 1 s each, one at a time: the second waits for 1 s, the third for 2 s."""

    async def main():
        fleet = alone(1, "http://a")
        own = step_metrics.Figures(fleet, dict)
        await asyncio.gather(*(fleet.generate([1], max_new_tokens=100) for _ in range(3)))
        await asyncio.sleep(1.0)
        first = own.step({**SECONDS, "step_s": 4.0, "update_s": 1.0})
        await asyncio.sleep(1.0)
        return first, own.step({**SECONDS, "step_s": 1.0})

    first, second = clock.run(main())
    close((first["request_wait_s"], first["request_wait_s_max"]), (1.0, 2.0))
    close((first["server_busy"], first["requests_in_flight"], first["trainer_idle"]), (0.75, 0.75, 0.75))
    assert "request_wait_s" not in second and second["server_busy"] == 0 and second["trainer_idle"] == 1
    assert "slot_load" not in first and "group_wait_s" not in first and "push_total_s" not in first


def test_a_server_counts_from_the_time_it_joined():
    async def main():
        fleet = alone(8, "http://a", "http://b")
        fleet.servers, [late] = fleet.servers[:1], fleet.servers[1:]
        own = step_metrics.Figures(fleet, dict)
        await asyncio.sleep(3.0)
        late.held = gauges.Level()
        fleet.servers.append(late)
        late.load += 2
        await asyncio.sleep(1.0)
        return own.step({**SECONDS, "step_s": 4.0})

    told = clock.run(main())
    close((told["server_busy"], told["requests_in_flight"]), (1 / 5, 2 / 4))


def test_drops_by_cause_and_retries():
    """Of each ten prompts one is rejected by its workflow, one refused, one fails twice, one every time."""
    tries = {}

    async def workflow(generate, row):
        i = row["i"]
        tries[i] = tries.get(i, 0) + 1
        if i % 10 == 4 or (i % 10 == 3 and tries[i] < 3):
            raise ServerError("its server failed")
        await asyncio.sleep(0.01)
        if i % 10 == 5:
            events.emit("left_out", tokens=99)
        done = Completion([2], [-1.0], [-1], "stop")
        return None if i % 10 == 1 else sampled([1], done, temperature=1.0, reward=float(i % 10))

    async def main():
        fleet = alone(1, "http://a")
        told = []
        async with executor.Executor(
            workflow, None, executor.Prompts([{"i": i} for i in range(30)], shuffle=False), group_size=1,
            groups_per_batch=6, eta=0, max_concurrent=10, seed=None, accept=lambda samples: samples[0].reward != 2.0,
        ) as rollout:  # fmt: skip
            names = "rejected", "refused", "failed", "retries"
            own = step_metrics.Figures(fleet, lambda: {name: rollout.counts[name] for name in names})
            with events.watching(own.see):
                for v in range(3):
                    rollout.admit(v)
                    await rollout.batch(v)
                    fleet.counts.update(busy=1, broken=2, tokens=7, undone=1)
                    told.append(own.step({**SECONDS, "step_s": 1.0}))
            return told, rollout.counts

    told, counts = clock.run(main())
    for name in ("rejected", "refused", "failed", "retries"):
        assert sum(one[name] for one in told) == counts[name] > 0
    ran = [i for i, n in tries.items()]
    assert counts["rejected"] == sum(i % 10 == 1 for i in ran) and counts["refused"] == sum(i % 10 == 2 for i in ran)
    assert counts["retries"] == sum(n - 1 for n in tries.values())
    assert sum(one["too_long"] for one in told) == sum(i % 10 == 5 for i in ran) > 0
    assert [one["request_retries"] for one in told] == [3, 3, 3]


def test_live_metrics():
    async def main():
        fleet = alone(8, "http://a", "http://b")
        own = step_metrics.Figures(fleet, dict)
        running = [asyncio.create_task(fleet.generate([1], max_new_tokens=100)) for _ in range(3)]
        await asyncio.sleep(0.5)
        fleet.servers[1].state = "dead"
        now = own.live()
        await asyncio.gather(*running)
        return now, own.live()

    now, after = clock.run(main())
    assert now == {"fleet_servers": 2, "fleet_healthy": 1, "fleet_in_flight": 3, "fleet_requests_total": 3}
    assert after["fleet_in_flight"] == 0 and after["fleet_tokens_total"] == 300


@pytest.mark.parametrize(
    "info, wanted",
    [
        ({"max_running_requests": 16, "internal_states": [{"slots": 16}]}, 16),  # areax serve
        ({"max_running_requests": None, "internal_states": [{"effective_max_running_requests_per_dp": 48}] * 2}, 96),
        ({"max_running_requests": None, "internal_states": [{}]}, 0),
        ({}, 0),
    ],
)
def test_slots_are_read_from_the_server_info(info, wanted):
    assert slots(info) == wanted


def test_watchers_receive_events_without_a_file():
    seen = []
    with events.watching(seen.append):
        with events.watching(lambda event: seen.append("inner")):
            events.emit("push", label="1")
        events.emit("push", label="2")
    events.emit("push", label="3")
    assert [one if one == "inner" else one["label"] for one in seen] == ["1", "inner", "2"]
