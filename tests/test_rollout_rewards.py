"""Rewards in real worker processes, loaded by name or path, that hang, crash, raise or leak."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from areax.rollout import object_path, rewards
from areax.rollout.processes.child import Child
from areax.rollout.rewards import Score, score
from areax.rollout.rewards.worker import Worker

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
        time.sleep(600)  # the benchmark's loops instead
    if text == "die":
        os._exit(3)
    if text == "exit":
        sys.exit(1)
    if text == "raise":
        return 1 / 0
    if text == "pid":
        return os.getpid()
    if text == "once":  # dies the first time
        if not os.path.exists(row["seen"]):
            open(row["seen"], "w").close()
            os._exit(3)
    if text == "fork":  # and the child answers, too
        return 0.75 if os.fork() else 0.25
    if text == "garble":  # whatever is open: the pool's pipe is among it
        for number in range(3, 64):
            try:
                os.write(number, b"not a frame, of no use to anybody")
            except OSError:
                pass
    if text in ("forge", "infinite"):
        answer = b'{"memory": 1, "answers": [[123456, "scored", [1.0, {}, []]]]}'
        if text == "infinite":
            answer = b'{"memory": Infinity, "answers": []}'
        for number in range(3, 64):
            try:
                os.write(number, len(answer).to_bytes(4, "little") + answer)
            except OSError:
                pass
    if text == "empty":  # frames without an answer, for ever
        while True:
            for number in range(3, 64):
                try:
                    os.write(number, bytes([28, 0, 0, 0]) + b'{"memory": 1, "answers": []}')
                except OSError:
                    pass
    if text == "daemon":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        return child.pid
    if text == "leak":
        KEPT.append(b"x" * 20_000_000)
        return len(KEPT)
    return {"none": None, "string": "yes", "parts": {"format": 1, "answer": 0.5}}.get(text, 1.0)

KEPT = []

async def later(text, row):
    await asyncio.sleep(0.001)
    return len(text)

async def wait(text, row):
    await asyncio.sleep(float(text)) if text != "block" else time.sleep(100)
    return float(os.getpid())

async def later_act(text, row):
    await asyncio.sleep(0.05)
    return act(text, row)

def batched(texts, rows):
    """The size of the batch; as the texts say."""
    if "short" in texts:
        return [0.0]
    for text, row in zip(texts, rows):
        act(text, row)
    return [{"size": len(texts), "pid": os.getpid(), "reward": row["i"]} for row in rows]

def areal(prompt, completions, prompt_ids, completion_ids, answer, **row):
    assert set(row) <= {"messages", "text", "row"}, row
    return float(prompt == "<user>2+2" and completions == answer and prompt_ids == [1, 2] and completion_ids == [3])

async def areal_strict(prompt, completions, prompt_ids, completion_ids, answer):
    return float(completions == answer)

def odd(completions, answer):
    return 1.0

def verl(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "index": extra_info["index"], "pred": solution_str, "of": data_source}

async def verl_short(solution_str, ground_truth, **more):
    assert set(more) == {"data_source", "extra_info"}, more
    return float(solution_str == ground_truth)

def verl_more(solution_str, ground_truth, tokenizer):
    return 1.0

def counted(text, row, completion_ids):
    return len(completion_ids)

def everything(text, row, **context):
    return {name: len(value) for name, value in context.items()}

def loaded(text, row):
    return {name: name in sys.modules for name in ("jax", "torch", "transformers", "numpy", "__mp_main__")}

def lines(text, row):
    ends = [at + 1 for at, c in enumerate(text) if c == "\\n"]
    return [(end, i / 4) for i, end in enumerate(ends)]

def environment(text, row):
    """How many of the variables in the text it sees."""
    return sum(name in os.environ for name in text.split())

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
    """(scores or exceptions of all texts, scored concurrently, the counts)."""

    async def main():
        async with rewards.pool(name, **options) as reward:
            calls = (reward(text, {"id": 7} if row is None else row) for text in texts)
            return await asyncio.gather(*calls, return_exceptions=True), reward.counts

    return asyncio.run(main())


def counted(**counts):
    return dict(scored=0, raised=0, late=0, died=0, retried=0, recycled=0) | counts


def test_a_reward_in_a_file_receives_rows_of_its_own_dataclass(file):
    row = object_path.resolve(f"{file}:Row")("41")
    out, counts = ask(f"{file}:exact", ["41", "31"] * 50, row)
    assert out == [Score(1.0), Score(0.0)] * 50
    assert counts == counted(scored=100)


def test_components_unknown_values_and_async_rewards(file):
    out, _ = ask(f"{file}:act", ["parts", "none", "other"])
    assert out[0] == Score(1.5, {"format": 1.0, "answer": 0.5})
    assert math.isnan(out[1].value) and out[2] == Score(1.0)
    assert ask(f"{file}:later", ["", "abc"])[0] == [Score(0.0), Score(3.0)]


def test_workers_import_only_what_the_reward_needs(file):
    [out], _ = ask(f"{file}:loaded", [""], workers=1)
    assert out.value == 0, out.components


def test_calls_are_spread_over_the_workers(file):
    out, _ = ask(f"{file}:act", ["pid"] * 64, workers=2)
    pids = {int(score.value) for score in out}
    assert len(pids) == 2 and os.getpid() not in pids


def test_a_reward_that_raises_is_unscorable_and_logs_error_line_and_row(file, caplog):
    out, counts = ask(f"{file}:act", ["raise", "ok", "string", "exit", "ok"])
    assert out[1] == out[4] == Score(1.0)
    assert all(math.isnan(out[i].value) for i in (0, 2, 3))
    line = FILE.splitlines().index("        return 1 / 0") + 1
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 3 and not any("\n" in message for message in said)
    assert f"reward {file}:act: ZeroDivisionError: division by zero (mine.py:{line}), on row id 7" in said
    kinds = "a number, a dict of numbers, a list of (end, reward) pairs or None"
    assert any(f"a reward must be {kinds}, got 'yes'" in message for message in said)
    assert any("SystemExit: 1" in message for message in said)
    assert counts == counted(scored=2, raised=3, retried=3)


def test_a_failure_may_count_as_zero(file):
    out, counts = ask(f"{file}:act", ["raise", "ok", "die"], failed="zero", retries=0)
    assert [score.value for score in out] == [0.0, 1.0, 0.0]
    assert counts == counted(scored=1, raised=1, died=1)


@pytest.mark.sweep
@pytest.mark.parametrize("text, what", [("raise", "ZeroDivisionError: .*"), ("die", "killed its worker")])
def test_a_reward_that_always_fails_raises_an_error(file, text, what):
    out, counts = ask(f"{file}:act", [text] * 12, workers=1, retries=0)
    assert [type(score) for score in out] == [Score] * 7 + [ValueError] * 5
    with pytest.raises(ValueError, match=f"act: the first 8 calls all failed, the last: {what}, on row id 7$"):
        raise out[-1]


def test_failures_after_one_score_raise_no_error(file):
    out, counts = ask(f"{file}:act", ["ok"] + ["raise"] * 20, workers=1, retries=0)
    assert counts == counted(scored=1, raised=20) and not any(isinstance(score, Exception) for score in out)


def test_a_second_attempt_succeeds(file, tmp_path):
    out, counts = ask(f"{file}:act", ["once", "ok"], {"seen": tmp_path / "seen"})
    assert out == [Score(1.0)] * 2 and counts == counted(scored=2, retried=1)


def test_a_hanging_reward_is_killed_with_its_children_and_only_its_sample_is_lost(file, tmp_path):
    pids = tmp_path / "pids"
    texts = ["pid"] * 20 + ["hang"] + ["ok"] * 20
    out, counts = ask(f"{file}:act", texts, {"pids": pids}, workers=2, timeout_s=1.0, retries=0)
    assert math.isnan(out[20].value)
    assert all(score.value > 0 for i, score in enumerate(out) if i != 20)
    assert counts == counted(scored=40, late=1)
    for pid in map(int, pids.read_text().split()):
        for _ in range(100):  # orphans are reaped by init
            if not os.path.exists(f"/proc/{pid}") or "Z" == state(pid):
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"process {pid} survived")


@pytest.mark.parametrize("text", ["fork", "garble", "forge", "infinite", "empty"])
def test_a_reward_that_breaks_its_worker_costs_at_most_its_sample(file, text):
    out, counts = ask(f"{file}:act", [*["ok"] * 8, text, *["ok"] * 8], workers=1, timeout_s=2.0, retries=0)
    assert [x.value for i, x in enumerate(out) if i != 8] == [1.0] * 16
    assert out[8].value == 0.75 if text == "fork" else math.isnan(out[8].value)
    assert counts["scored"] + counts["died"] == 17


def test_what_a_reward_starts_in_another_session_ends_with_its_worker(file):
    [out], _ = ask(f"{file}:act", ["daemon"], workers=1)
    pid = int(out.value)
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or state(pid) == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} survived")


def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_other_workers_continue_while_one_hangs(file, tmp_path):
    async def main():
        async with rewards.pool(f"{file}:act", workers=2, timeout_s=1.5, retries=0) as reward:
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
    assert counts == counted(scored=3, died=2, retried=2)


def test_the_timeout_of_a_call_starts_when_its_worker_starts_it(file):
    out, counts = ask(f"{file}:slow", ["0.25"] * 8, workers=1, timeout_s=1.8)
    assert [score.value for score in out] == [0.25] * 8 and counts["late"] == 0


def test_a_busy_event_loop_causes_no_timeouts(file):
    async def main():
        async with rewards.pool(f"{file}:act", workers=1, timeout_s=0.5) as reward:
            calls = [asyncio.create_task(reward("ok", {})) for _ in range(5)]
            await asyncio.sleep(0)
            time.sleep(1.0)  # blocks the event loop on purpose
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


def test_closing_the_pool_ends_workers_and_pending_calls(file):
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
        ("{folder}/bad.py:reward", "reward .*bad.py: its import ends with NameError: name 'boom' is not"),
    ],
)
def test_a_reward_that_cannot_be_loaded_fails_at_the_start(file, name, message):
    folder = os.path.dirname(file)
    with open(f"{folder}/bad.py", "w") as bad:
        bad.write("boom")
    with pytest.raises(ValueError, match=message.format(file=file, folder=folder)) as caught:
        ask(name.format(file=file, folder=folder), [])
    assert "\n" not in str(caught.value)


def test_a_row_that_cannot_be_pickled_raises_in_the_caller(file):
    with pytest.raises(Exception, match="pickle"):
        raise ask(f"{file}:act", ["ok"], {"f": lambda: 0}, workers=1)[0][0]


@pytest.mark.parametrize("options", [{"workers": 0}, {"timeout_s": 0}])
def test_bad_options(file, options):
    with pytest.raises(ValueError, match="workers must be at least 1 and timeout_s positive"):
        ask(f"{file}:act", [], **options)


def test_workers_do_not_run_the_main_script_again(file, tmp_path):
    """So a script needs no `if __name__` guard, and its imports are not loaded in the workers."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import asyncio
import json
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


def test_valid_and_invalid_return_values_of_a_reward():
    assert score(True) == Score(1.0) == score(np.float32(1)) == score(np.array(1)) == score(Score(1.0))
    assert math.isnan(score(None).value) and math.isnan(score({"a": 1, "b": float("nan")}).value)
    assert score({"reward": 2, "a": 5}) == Score(2.0, {"a": 5.0})
    large = 1e39, 3e38, 2e18, 10**400, [(1, 8e17), (2, 8e17)], np.array([[1, 2.0]])
    texts = np.str_("1.5"), np.bytes_(b"2"), np.void(b"1"), np.array("3"), np.complex64(1 + 2j), np.array(1, object)
    for wrong in ("1.0", [1.0], {}, {"a": "b"}, float("inf"), {"a": -float("inf")}, *large, *texts):
        with pytest.raises(ValueError, match="a reward must be"):
            score(wrong)


def test_a_reward_may_give_each_step_its_own(file):
    [scored, none, plain], _ = ask(f"{file}:lines", ["a\nbc\n", "ab", "a\n"])
    assert scored == Score(0.25, steps=((2, 0.0), (5, 0.25))) and plain.steps == ((2, 0.0),)
    assert math.isnan(none.value)  # no step at all is a mistake of the reward
    assert score([(3, 0.5), [4, True]]) == Score(1.5, steps=((3, 0.5), (4, 1.0)))
    assert math.isnan(score([(1, math.nan), (2, 1.0)]).value)
    for wrong in ([(1, 2, 3)], [(-1, 1.0)], [(0.5, 1.0)], ["ab"], [1.0]):
        with pytest.raises(ValueError, match="with end the number of characters up to the end of a step, got"):
            score(wrong)
    for wrong in ([], [(1, "x")]):
        with pytest.raises(ValueError, match="a reward must be a number, a dict of numbers, a list of"):
            score(wrong)
    with pytest.raises(ValueError, match="a reward of steps needs the workflow single_turn, got 1 "):
        rewards.whole([(1, 1.0)])
    assert rewards.whole({"a": 1}) == Score(1.0, {"a": 1.0})


def test_a_worker_is_replaced_after_max_calls(file):
    out, counts = ask(f"{file}:act", ["pid"] * 40, workers=2, max_calls=5)
    calls = Counter(int(score.value) for score in out)
    assert max(calls.values()) == 5 and set(sorted(calls.values())[2:]) == {5}  # the last two share the remaining calls
    assert counts["scored"] == 40 and counts["recycled"] >= 6


def test_workers_see_no_secret_unless_it_is_named(file, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("OTHER_TOKEN", "secret")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    texts = ["MY_TOKEN OTHER_TOKEN", "PATH HOME PYTHONHASHSEED"]
    assert [score.value for score in ask(f"{file}:environment", texts)[0]] == [0, 3]
    assert [score.value for score in ask(f"{file}:environment", texts, environment=("MY_TOKEN",))[0]] == [1, 3]
    with pytest.raises(ValueError, match="--reward-environment: must name variables that are set, got MY_TOKN$"):
        ask(f"{file}:environment", texts, environment=("MY_TOKN",))


def test_a_pool_may_close_at_the_moment_a_worker_becomes_ready(file, monkeypatch):
    """Otherwise the task that replaces a worker survives its cancellation, and the pool never closes."""
    receive = Child.receive

    async def main():
        came, go = asyncio.Event(), asyncio.Event()

        async def greeting(worker):
            said = await receive(worker)
            came.set()
            await go.wait()
            return said

        monkeypatch.setattr(Child, "receive", greeting)
        starting = asyncio.create_task(Worker.start(f"{file}:act", 10.0, os.environ))
        await came.wait()
        go.set()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())


def test_a_worker_whose_memory_grows_is_replaced(file):
    async def main():
        async with rewards.pool(f"{file}:act", workers=1, max_growth=100_000_000) as reward:
            held = [(await reward("leak", {})).value for _ in range(15)]
            return held, reward.counts

    held, counts = asyncio.run(main())
    assert 5 <= max(held) <= 8  # memory of the first call is not counted as growth
    assert counts == counted(scored=15, recycled=counts["recycled"]) and counts["recycled"] in (1, 2)


def test_async_rewards_run_concurrently_in_one_worker(file):
    start = time.monotonic()
    out, counts = ask(f"{file}:wait", ["1"] * 40, workers=1)
    assert time.monotonic() - start < 20 and len({score.value for score in out}) == 1 and counts == counted(scored=40)


def test_an_async_reward_that_times_out_is_cancelled_alone(file):
    out, counts = ask(f"{file}:wait", ["0.01", "100", "0.6"], workers=1, timeout_s=0.8, retries=0)
    assert math.isnan(out[1].value) and out[0] == out[2]  # in the same process
    assert counts == counted(scored=2, late=1)


def test_an_async_reward_that_blocks_its_worker_loses_only_its_own_sample(file):
    out, counts = ask(f"{file}:wait", ["0.2", "block", "0.4"], workers=1, timeout_s=0.5, retries=0)
    assert math.isnan(out[1].value) and out[0].value > 0 and out[2].value > 0
    assert counts == counted(scored=2, late=1, retried=counts["retried"]) and counts["retried"] >= 1


def test_the_async_reward_that_kills_a_worker_is_identified(file):
    out, counts = ask(f"{file}:later_act", ["ok"] * 4 + ["die"] + ["ok"] * 4, workers=2, retries=0)
    assert [math.isnan(score.value) for score in out] == [False] * 4 + [True] + [False] * 4
    assert counts["scored"] == 8 and counts["died"] == 1


def test_a_batched_reward_gets_all_waiting_calls(file):
    texts = ["ok"] * 30

    async def main():
        async with rewards.pool(f"{file}:batched", workers=1) as reward:
            return await asyncio.gather(*(reward(text, {"i": i}) for i, text in enumerate(texts)))

    out = asyncio.run(main())
    assert [score.value for score in out] == list(range(30))
    assert {score.components["size"] for score in out} == {30}


@pytest.mark.sweep
@pytest.mark.parametrize("bad, outcome", [("raise", "raised"), ("die", "died"), ("short", "raised"), ("hang", "late")])
def test_the_failing_call_of_a_batch_is_identified(file, bad, outcome):
    async def main():
        async with rewards.pool(f"{file}:batched", workers=1, timeout_s=0.6, retries=0) as reward:
            texts = ["ok"] * 3 + [bad] + ["ok"] * 3
            row = {"pids": os.devnull}
            out = await asyncio.gather(*(reward(text, {**row, "i": i}) for i, text in enumerate(texts)))
            return [score.value for score in out], reward.counts

    out, counts = asyncio.run(main())
    if bad == "short":  # correct for a batch of one
        assert out == [0, 1, 2, 0, 4, 5, 6] and counts == counted(scored=7, retried=7)
    else:
        assert math.isnan(out.pop(3)) and out == [0, 1, 2, 4, 5, 6]
        assert counts == counted(scored=6, retried=7, **{outcome: 1})


AREAL = {"messages": [], "answer": "4", "prompt": "taken", "completions": "taken", "text": "mine", "row": 1}


@pytest.mark.parametrize("name", ["areal", "areal_strict"])
def test_an_areal_reward_runs_unchanged(file, name):
    async def main():
        async with rewards.pool(f"{file}:{name}", workers=1) as reward:
            given = dict(prompt="<user>2+2", prompt_ids=[1, 2], completion_ids=[3])
            return [await reward(text, AREAL, **given) for text in "45"]

    assert asyncio.run(main()) == [Score(1.0), Score(0.0)]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name, components", [("verl", {"acc": 1.0, "index": 3.0}), ("verl_short", {})])
def test_a_verl_reward_runs_unchanged(file, name, components):
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "answer": "5", "extra_info": {"index": 3}}
    (right, wrong), _ = ask(f"{file}:{name}", "45", row)
    assert right == Score(1.0, components) and wrong.value == 0.0
    assert ask(f"{file}:verl_short", "4", {"answer": "4"})[0] == [Score(1.0)]


def test_a_verl_reward_that_needs_more_is_refused(file):
    with pytest.raises(ValueError, match=r"mine.py:verl_more: must take data_source, .*, and got tokenizer besides"):
        ask(f"{file}:verl_more", [])


def test_a_reward_gets_the_context_that_its_signature_requests(file):
    async def main(name):
        async with rewards.pool(f"{file}:{name}", workers=1) as reward:
            return await reward("", {}, prompt="abc", prompt_ids=[1, 2], completion_ids=[3])

    assert asyncio.run(main("counted")) == Score(1.0)
    assert asyncio.run(main("everything")).components == {"prompt": 3, "prompt_ids": 2, "completion_ids": 1}


def test_an_incomplete_areal_signature_is_refused(file):
    with pytest.raises(ValueError, match=r"mine.py:odd: with a parameter 'completions' it must begin with \(prompt, "):
        ask(f"{file}:odd", [])


def test_a_worker_killed_while_idle_is_replaced(file):
    async def main():
        async with rewards.pool(f"{file}:act", workers=1) as reward:
            pid = int((await reward("pid", {})).value)
            os.kill(pid, 9)
            while int((await reward("pid", {})).value) == pid:
                pass
            assert sum(reward.counts[name] for name in ("raised", "late", "died")) == 0

    asyncio.run(main())


def test_ctrl_c_is_for_the_process_that_has_the_workers(file, capfd):
    """They get it too, from a terminal or from srun."""

    async def main():
        async with rewards.pool(f"{file}:act", workers=1) as reward:
            pid = int((await reward("pid", {})).value)
            os.kill(pid, signal.SIGINT)
            assert int((await reward("pid", {})).value) == pid

    asyncio.run(main())
    assert not capfd.readouterr().err


def test_all_calls_fail_if_a_worker_cannot_be_replaced(tmp_path):
    (tmp_path / "gone.py").write_text(FILE)

    async def main():
        async with rewards.pool(f"{tmp_path}/gone.py:act", workers=1, retries=0) as reward:
            (tmp_path / "gone.py").unlink()
            out = await asyncio.gather(*(reward(text, {}) for text in ("die", "ok")), return_exceptions=True)
            assert math.isnan(out[0].value)
            for error in (out[1], *await asyncio.gather(reward("ok", {}), return_exceptions=True)):
                assert isinstance(error, ValueError) and "there is no such file" in str(error)

    asyncio.run(main())


def test_a_closed_pool_refuses_calls(file):
    async def main():
        async with rewards.pool(f"{file}:act", workers=1) as reward:
            pass
        with pytest.raises(RuntimeError, match="the pool is closed"):
            await reward("ok", {})

    asyncio.run(main())
    asyncio.run(main())  # in another event loop


def test_answers_sent_before_a_worker_died_are_not_lost(tmp_path):
    """They arrive while the event loop is busy, which then sends more calls before it reads them."""
    (tmp_path / "own.py").write_text(
        "import os\ndef reward(text, row):\n    if row['id'] == 3:\n        os._exit(1)\n    return row['id']\n"
    )

    async def main():
        async with rewards.pool(f"{tmp_path}/own.py:reward", workers=1, retries=0) as reward:
            calls = [asyncio.create_task(reward("", {"id": i})) for i in range(8)]
            for _ in range(10):
                await asyncio.sleep(0)  # some calls are sent
            calls += [asyncio.create_task(reward("", {"id": i})) for i in range(8, 24)]
            await asyncio.sleep(0)  # these are about to be sent
            time.sleep(1.0)
            return [one.value for one in await asyncio.gather(*calls)], reward.counts

    values, counts = asyncio.run(main())
    assert counts == counted(scored=23, died=1)
    assert [i for i, value in enumerate(values) if value != i] == [3]


@pytest.mark.slow
def test_a_short_run_of_the_benchmark():
    """The full benchmark makes 10,000 calls; here everything but the timings is checked."""
    script = Path(__file__).parents[1] / "benchmarks" / "rewards.py"
    done = subprocess.run(
        [sys.executable, str(script), "--calls", "200", "--timeout", "2", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    counts = found["counts"]
    stalled = counts["late"] - 2  # if the machine stalled that long; each loses its own call only
    assert counts == counted(scored=194 - stalled, raised=2, late=2 + stalled, died=2, recycled=counts["recycled"])
    assert found["answered"] == 200 and found["right"] == 200 - stalled and 0 <= stalled < 20
    assert counts["recycled"] >= 1 and found["processes"] <= found["workers"]
    assert found["parent_growth_mb"] < 30 and found["worker_growth_mb"] < 100
