"""The events of a run: every event once, only complete lines, and the Chrome trace made from it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.adapters.report import chrome_trace
from areax.adapters.tracking import run_dir
from areax.rollout import events
from areax.rollout.errors import ServerError
from areax.rollout.scheduling import episodes, executor
from areax.rollout.simulation import clock, simulate
from areax.rollout.simulation.server import Rates
from areax.rollout.types import Completion, sampled


def lines(path):
    return list(run_dir.read_lines(path))


def test_without_a_file_events_are_ignored(tmp_path):
    events.emit("push", label="1")
    with events.writing(tmp_path / "a"):
        pass
    events.emit("push", label="2")
    assert [line["kind"] for line in lines(tmp_path / "a")] == ["open"]


def test_events_carry_the_context_of_their_episode(tmp_path):
    async def workflow(generate, row):
        done = await generate([1, 2])
        await asyncio.sleep(0)
        events.emit("mine", row=row["i"])
        return sampled([1, 2], done, temperature=1.0, reward=float("nan") if row["i"] else 0.5)

    async def generate(tokens, **_):
        await asyncio.sleep(0.001)
        return Completion([7, 8, 9], [-1.0, -0.123456789, -2.0], [3, 3, 4], "stop")

    async def main():
        with events.context(of="evaluation"):
            await episodes.rollouts(workflow, generate, [{"i": 0}, {"i": 1}], group_size=2)
        events.emit("after")

    with events.writing(tmp_path / "a"):
        asyncio.run(main())
    found = lines(tmp_path / "a")
    own = [line for line in found if line["kind"] == "mine"]
    assert sorted((line["prompt"], line["episode"], line["row"], line["of"]) for line in own) == [
        (i, k, i, "evaluation") for i in range(2) for k in range(2)
    ]
    assert "prompt" not in found[-1] and found[-1]["kind"] == "after"
    ended = [line for line in found if line["kind"] == "episode" and line["prompt"] == 1]
    assert len(ended) == 2 and all(line["begun"] <= line["at"] for line in ended)
    assert ended[0]["rows"] == [{"tokens": 5, "sampled": 3, "reward": None, "finish": "stop"}]


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=5), st.integers(0, 60))
def test_a_truncated_last_line_is_dropped_and_the_rest_kept(tmp_path_factory, words, cut):
    path = tmp_path_factory.mktemp("events") / "a"
    whole = b"".join(json.dumps({"word": word.hex()}).encode() + b"\n" for word in words)
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    kept = path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1]
    with events.writing(path):
        events.emit("next")
    data = path.read_bytes()
    assert data.startswith(kept) and [line.get("kind") for line in lines(path)][-2:] == ["open", "next"]
    assert len(lines(path)) == kept.count(b"\n") + 2


def test_events_of_a_killed_process_are_on_disk(tmp_path):
    program = (
        "import sys, time\n"
        "from areax.rollout import events\n"
        "with events.writing(sys.argv[1]):\n"
        "    for i in range(1000):\n"
        "        events.emit('step', i=i)\n"
        "    time.sleep(60)\n"
    )
    path, until = tmp_path / "a", time.monotonic() + 30
    with subprocess.Popen([sys.executable, "-c", program, path]) as process:
        while not path.exists() or path.read_bytes().count(b"\n") < 1001:  # the file is never closed
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert [line["i"] for line in lines(tmp_path / "a")[1:]] == list(range(1000))


def test_a_full_disk_loses_events_but_not_the_run(tmp_path, caplog):
    with events.writing("/dev/full"):
        events.emit("push", label="1")
    assert "events could not be written: [Errno 28]" in caplog.text
    with events.writing(tmp_path / "a"):
        events.emit("odd", what=object())
        events.emit("push", label="2")
    assert [line["kind"] for line in lines(tmp_path / "a")] == ["open", "push"] and "not JSON serial" in caplog.text


@pytest.fixture
def simulated(tmp_path):
    """The events of a simulated run, and what its executor and servers did."""
    config = simulate.Config(
        servers=2, server=Rates(slots=4, load_s=0.5), groups=2, group_size=2, new=50.0, steps=6, train_tokens_s=300.0
    )
    with events.writing(tmp_path / chrome_trace.EVENTS):
        simulate.simulate(config, 2)
    return tmp_path, lines(tmp_path / chrome_trace.EVENTS)


def test_the_events_of_a_run_are_complete_and_consistent(simulated):
    _, found = simulated
    of = lambda kind: [line for line in found if line["kind"] == kind]
    assert [line["version"] for line in of("batch")] == list(range(6))
    outcomes = {line["prompt"]: line for line in of("group")}
    for line in of("batch"):
        for prompt in line["prompts"]:
            assert outcomes[prompt]["outcome"] == "accepted"
            assert line["version"] - 2 <= outcomes[prompt]["admitted"] <= line["version"]
    calls = {(line["prompt"], line["episode"]): line for line in of("call")}
    for line in of("episode"):
        call = calls[line["prompt"], line["episode"]]
        assert line["begun"] <= call["begun"] <= call["at"] <= line["at"]
        [row] = line["rows"]
        assert row["sampled"] == call["tokens"] == sum(n for _, n in call["versions"])
    assert [line["label"][0] for line in of("push")] == list("0123456")
    assert all(line["pause_s"] >= 0.5 and len(line["loaded"]) == 2 for line in of("push"))
    updates = [line for line in of("part") if line["name"] == "update"]
    assert len(updates) == 6 and all(a["at"] <= b["begun"] for a, b in zip(updates, updates[1:], strict=False))


def test_the_trace_has_every_span(simulated):
    path, found = simulated
    events = json.loads(chrome_trace.write(path).read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(names.values()) == {"steps", "push", "pushes", "http://0", "http://1"}
    begun = {e["id"]: e for e in events if e["ph"] == "b"}
    ended = {e["id"]: e for e in events if e["ph"] == "e"}
    calls = [line for line in found if line["kind"] == "call"]
    assert begun.keys() == ended.keys() and len(begun) == len(calls)
    for line, one in zip(calls, begun.values(), strict=True):
        assert names[one["pid"], one["tid"]] == line["url"] and one["args"]["episode"] == line["episode"]
        length = ended[one["id"]]["ts"] - one["ts"]
        assert length == pytest.approx(1e6 * (line["at"] - line["begun"]), abs=2)
    spans = [e for e in events if e["ph"] == "X"]
    assert sum(e["name"] == "update" for e in spans) == 6 and all(e["dur"] >= 0 for e in spans)
    assert chrome_trace.write(path / "nowhere") is None
    (path / chrome_trace.EVENTS).rename(path / chrome_trace.FORMER)
    assert json.loads(chrome_trace.write(path).read_text())["traceEvents"] == events


def test_average_number_of_completions_in_flight():
    calls = [(0.0, 4.0), (0.0, 1.0), (2.0, 3.0)]
    events = [{"kind": "call", "url": "a", "begun": a, "at": b} for a, b in calls] + [{"kind": "part"}]
    assert chrome_trace.in_flight(events) == {"a": 6.0 / 4.0}


def test_a_resumed_run_stays_on_one_time_axis():
    """Each process has its own monotonic clock; the wall-clock time aligns them."""
    first = [
        {"kind": "open", "at": 100.0, "time": 1000.0},
        {"kind": "part", "name": "update", "begun": 101.0, "at": 102.0},
    ]
    second = [{"kind": "open", "at": 5.0, "time": 1060.0}, {"kind": "part", "name": "update", "begun": 6.0, "at": 8.0}]
    spans = [(e["ts"], e["dur"]) for e in chrome_trace.chrome(first + second) if e["ph"] == "X"]
    assert spans == [(1_000_000, 1_000_000), (61_000_000, 2_000_000)]


def test_rejected_refused_and_failed_groups_are_distinguished(tmp_path):
    async def workflow(generate, row):
        if row["i"] == 1:
            raise ServerError("its server failed")
        if row["i"] == 3:
            return None
        return sampled([1], Completion([2], [-1.0], [0], "stop"), temperature=1.0, reward=float(row["i"]))

    async def main():
        prompts = executor.Prompts([{"i": i} for i in range(50)], shuffle=False)
        async with executor.Executor(
            workflow, None, prompts, group_size=1, groups_per_batch=2, eta=0, max_concurrent=4, seed=None,
            accept=lambda samples: samples[0].reward != 2.0,
        ) as rollout:  # fmt: skip
            rollout.admit(0)
            await rollout.batch(0)

    with events.writing(tmp_path / "a"):
        clock.run(main())
    outcomes = {line["prompt"]: line["outcome"] for line in lines(tmp_path / "a") if line["kind"] == "group"}
    assert outcomes[2] == "refused" and outcomes[3] == "rejected"
    assert outcomes[0] == "accepted" and outcomes.get(1, "failed") == "failed"
