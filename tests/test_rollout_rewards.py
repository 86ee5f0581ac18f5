"""Rewards in real processes: by name and by path, hanging, crashing, raising."""

import asyncio
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from areax.rollout import names, rewards
from areax.rollout.rewards import Score, score

FILE = '''
import asyncio, dataclasses, os, subprocess, sys, time

@dataclasses.dataclass
class Row:
    answer: str

    def grade(self, text):
        return Grade(float(text == self.answer))

@dataclasses.dataclass(frozen=True)
class Grade:
    value: float

def exact(text, row):
    return row.grade(text).value

def act(text, row):
    """Does as the text says."""
    if text == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(row["pids"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        while True:
            pass
    if text == "die":
        os._exit(3)
    if text == "exit":
        sys.exit(1)
    if text == "raise":
        return 1 / 0
    if text == "pid":
        return os.getpid()
    return {"none": None, "string": "yes", "parts": {"format": 1, "answer": 0.5}}.get(text, 1.0)

async def later(text, row):
    await asyncio.sleep(0.001)
    return len(text)

def loaded(text, row):
    return {name: name in sys.modules for name in ("jax", "torch", "transformers", "numpy", "__mp_main__")}

def slow(text, row):
    time.sleep(float(text))
    return float(text)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FILE)
    return str(path)


def ask(name, texts, row=None, **options):
    """Scores or exceptions of all texts, asked at once, and the counts."""

    async def main():
        async with rewards.pool(name, **options) as reward:
            calls = (reward(text, {"id": 7} if row is None else row) for text in texts)
            return await asyncio.gather(*calls, return_exceptions=True), reward.counts

    return asyncio.run(main())


def test_a_reward_of_a_file_gets_rows_of_its_own_dataclass(file):
    row = names.resolve(f"{file}:Row")("41")
    out, counts = ask(f"{file}:exact", ["41", "31"] * 50, row)
    assert out == [Score(1.0), Score(0.0)] * 50
    assert counts == dict(scored=100, raised=0, late=0, died=0)


def test_components_unknown_values_and_async_rewards(file):
    out, _ = ask(f"{file}:act", ["parts", "none", "other"])
    assert out[0] == Score(1.5, {"format": 1.0, "answer": 0.5})
    assert math.isnan(out[1].value) and out[2] == Score(1.0)
    assert ask(f"{file}:later", ["", "abc"])[0] == [Score(0.0), Score(3.0)]


def test_workers_load_what_the_reward_imports_and_nothing_heavy(file):
    [out], _ = ask(f"{file}:loaded", [""], workers=1)
    assert out.value == 0, out.components


def test_work_is_spread_over_the_workers(file):
    out, _ = ask(f"{file}:act", ["pid"] * 64, workers=2)
    pids = {int(score.value) for score in out}
    assert len(pids) == 2 and os.getpid() not in pids


def test_a_reward_that_raises_says_what_where_and_on_which_row(file):
    out, counts = ask(f"{file}:act", ["raise", "ok", "string", "exit", "ok"])
    assert out[1] == out[4] == Score(1.0)
    assert [type(out[i]) for i in (0, 2, 3)] == [ValueError] * 3
    line = FILE.splitlines().index("        return 1 / 0") + 1
    assert str(out[0]) == (f"reward {file}:act: ZeroDivisionError: division by zero (mine.py:{line}), on row id 7")
    assert "a reward must be a number, a dict of numbers or None, got 'yes'" in str(out[2])
    assert "SystemExit: 1" in str(out[3])
    assert counts == dict(scored=2, raised=3, late=0, died=0)


def test_a_hanging_reward_is_killed_with_its_children_and_costs_one_sample(file, tmp_path):
    pids = tmp_path / "pids"
    texts = ["pid"] * 20 + ["hang"] + ["ok"] * 20
    out, counts = ask(f"{file}:act", texts, {"pids": pids}, workers=2, timeout_s=1.0)
    assert math.isnan(out[20].value)
    assert all(score.value > 0 for i, score in enumerate(out) if i != 20)
    assert counts == dict(scored=40, raised=0, late=1, died=0)
    for pid in map(int, pids.read_text().split()):
        for _ in range(100):  # an orphan's end is reaped by init
            if not os.path.exists(f"/proc/{pid}") or "Z" == state(pid):
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"process {pid} survived")


def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_other_workers_go_on_while_one_hangs(file, tmp_path):
    async def main():
        async with rewards.pool(f"{file}:act", workers=2, timeout_s=1.5) as reward:
            row = {"pids": tmp_path / "pids"}
            hanging = asyncio.create_task(reward("hang", row))
            while not (tmp_path / "pids").exists():
                await asyncio.sleep(0.01)
            before = {(await reward("pid", row)).value for _ in range(10)}
            assert len(before) == 1 and not hanging.done()
            assert math.isnan((await hanging).value)
            after = set()
            while len(after) < 2:  # until the replacement has started
                calls = (reward("pid", row) for _ in range(32))
                after |= {score.value for score in await asyncio.gather(*calls)}
            assert before < after  # one replaced, the other kept

    asyncio.run(main())


def test_a_reward_that_kills_its_worker_is_unscorable(file):
    out, counts = ask(f"{file}:act", ["ok", "die", "ok", "die", "ok"], workers=1)
    assert [score.value for score in out[::2]] == [1.0] * 3
    assert math.isnan(out[1].value) and math.isnan(out[3].value)
    assert counts == dict(scored=3, raised=0, late=0, died=2)


def test_the_clock_of_a_call_starts_when_its_worker_turns_to_it(file):
    out, counts = ask(f"{file}:slow", ["0.15"] * 6, workers=1, timeout_s=0.8)
    assert [score.value for score in out] == [0.15] * 6 and counts["late"] == 0


def test_a_busy_event_loop_makes_no_worker_late(file):
    async def main():
        async with rewards.pool(f"{file}:act", workers=1, timeout_s=0.5) as reward:
            calls = [asyncio.create_task(reward("ok", {})) for _ in range(5)]
            await asyncio.sleep(0)
            time.sleep(1.0)  # nothing else runs meanwhile: that is the point
            assert [s.value for s in await asyncio.gather(*calls)] == [1.0] * 5
            assert reward.counts["late"] == 0

    asyncio.run(main())


def test_cancelled_calls_leave_the_pool_usable(file):
    async def main():
        async with rewards.pool(f"{file}:slow", workers=1) as reward:
            calls = [asyncio.create_task(reward("0.01", {})) for _ in range(20)]
            await asyncio.sleep(0.02)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert (await reward("0.02", {})).value == 0.02

    asyncio.run(main())


def test_leaving_ends_the_workers_and_the_calls(file):
    async def main():
        async with rewards.pool(f"{file}:act", workers=2) as reward:
            pids = {int((await reward("pid", {})).value) for _ in range(4)}
            waiting = asyncio.create_task(reward("hang", {"pids": os.devnull}))
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return pids

    for pid in asyncio.run(main()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    "name, message",
    [
        ("{file}:nothing", "reward {file}:nothing: there is no 'nothing' in .*; did you mean"),
        ("no_such_package:reward", "reward no_such_package: there is no module"),
        ("{folder}/bad.py:reward", "reward .*bad.py:reward: NameError: name 'boom' is not defined"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_known_at_the_start(file, name, message):
    folder = os.path.dirname(file)
    with open(f"{folder}/bad.py", "w") as bad:
        bad.write("boom")
    with pytest.raises(ValueError, match=message.format(file=file, folder=folder)) as caught:
        ask(name.format(file=file, folder=folder), [])
    assert "\n" not in str(caught.value)


def test_a_row_that_cannot_travel_is_the_callers_error(file):
    with pytest.raises(Exception, match="pickle"):
        raise ask(f"{file}:act", ["ok"], {"f": lambda: 0}, workers=1)[0][0]


@pytest.mark.parametrize("options", [{"workers": 0}, {"timeout_s": 0}])
def test_bad_options(file, options):
    with pytest.raises(ValueError, match="workers must be at least 1 and timeout_s positive"):
        ask(f"{file}:act", [], **options)


def test_the_main_script_is_not_run_again(file, tmp_path):
    """So a script needs no guard around its last line, and its imports do not reach the workers."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import asyncio
from areax.rollout import rewards
print("script")

async def main():
    async with rewards.pool({f"{file}:loaded"!r}, workers=2) as reward:
        print((await reward("", {{}})).value)

asyncio.run(main())
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("script\n0.0\n", "")


def test_what_a_reward_may_return():
    assert score(True) == Score(1.0) == score(np.float32(1)) == score(np.array(1)) == score(Score(1.0))
    assert math.isnan(score(None).value) and math.isnan(score({"a": 1, "b": float("nan")}).value)
    assert score({"reward": 2, "a": 5}) == Score(2.0, {"a": 5.0})
    for wrong in ("1.0", [1.0], {}, {"a": "b"}, float("inf"), {"a": -float("inf")}):
        with pytest.raises(ValueError, match="a reward must be"):
            score(wrong)
