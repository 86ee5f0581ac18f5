"""The training loop: order and overlap of its phases, and the state it leaves when it is stopped."""

import asyncio
import json
import signal
import subprocess
import sys
import threading

import pytest

from areax.rollout import loop
from areax.rollout.scheduling.executor import Executor, Prompts
from areax.rollout.types import Completion, sampled


class Play:
    """Phases of a loop that record their calls, and fail or wait on demand."""

    def __init__(self, fail=None, hold=None):
        self.notes, self.fail, self.hold = [], fail, hold
        self.held, self.release = asyncio.Event(), asyncio.Event()
        self.version, self.batches = 0, 0
        self.steps = []

    def note(self, *what):
        self.notes.append(what)
        if what == self.fail:
            raise RuntimeError(f"{what} failed")

    async def anote(self, *what):
        self.note(*what)
        if what == self.hold:
            self.held.set()
            await self.release.wait()
        await asyncio.sleep(0)

    async def next_groups(self, v):
        await self.anote("groups", v)
        self.batches += 1
        return f"batch {v}"

    def update(self, groups):
        assert groups == f"batch {self.version}"
        assert threading.current_thread() is not threading.main_thread()
        self.note("update", self.version)
        self.version += 1
        return {"loss": self.version}

    def publish(self, v):
        assert v == self.version
        self.note("publish", v)

        async def push():
            await self.anote("push", v)
            self.note("pushed", v)

        return push

    def save(self, v, cursor):
        assert v == self.version == cursor  # the cursor matches the state
        self.note("save", v)

    async def evaluate(self, v):
        await self.anote("evaluate", v)
        self.note("evaluated", v)

    def run(self, **options):
        options = {"eta": 0, "steps": 2, "save_every": 1, "evaluate_every": 1} | options
        return loop.run(
            self.next_groups,
            self.update,
            self.publish,
            self.save,
            self.evaluate,
            admit=lambda v: self.note("admit", v),
            cursor=lambda: self.batches,
            on_step=lambda *step: self.steps.append(step),
            **options,
        )


def test_a_version_is_checked_once_servers_take_requests_of_it_and_stays_until_then():
    async def main():
        play = Play()
        await play.run(check=lambda: play.anote("check"), eta=1, steps=2)
        return [note for note in play.notes if note[0] in ("pushed", "admit", "check", "evaluate")]

    each = [[("pushed", v), *([("admit", v)] if v < 2 else []), ("check",), ("evaluate", v)] for v in range(3)]
    assert asyncio.run(main()) == [note for notes in each for note in notes]


def notes(**options):
    async def main():
        play = Play()
        await play.run(**options)
        return play.notes

    return asyncio.run(main())


def test_at_eta_0_phases_run_one_after_the_other():
    def version(v):
        save = [("save", v)] if v else []
        front, middle = [("publish", v)], [("push", v), ("pushed", v), ("admit", v)]
        return front, save, middle + [("evaluate", v), ("evaluated", v)]

    out = notes()
    assert [note for note in out if note[0] not in ("save",)] == [
        *version(0)[0], *version(0)[2], ("groups", 0), ("update", 0),
        *version(1)[0], *version(1)[2], ("groups", 1), ("update", 1),
        *version(2)[0], *(note for note in version(2)[2] if note[0] != "admit"),
    ]  # fmt: skip
    at = out.index
    for v in (1, 2):  # a state is saved before the update that consumes it
        assert at(("update", v - 1)) < at(("publish", v)) < at(("save", v))
    assert at(("save", 1)) < at(("update", 1))
    assert ("save", 0) not in out


def test_intervals_count_versions_and_always_include_the_last():
    out = notes(steps=5, save_every=2, evaluate_every=3)
    assert [v for name, v in out if name == "save"] == [2, 4, 5]
    assert [v for name, v in out if name == "evaluate"] == [0, 3, 5]
    out = notes(steps=5, save_every=0, evaluate_every=0)
    assert [v for name, v in out if name == "save"] == [5]
    assert not [v for name, v in out if name == "evaluate"]


def test_a_state_is_saved_when_the_last_save_is_too_long_ago():
    out = notes(steps=3, save_every=0, save_seconds=1e-9)
    assert [v for name, v in out if name == "save"] == [1, 2, 3]
    out = notes(steps=3, save_every=0, save_seconds=3600)
    assert [v for name, v in out if name == "save"] == [3]


def test_a_resumed_run_publishes_its_version_first():
    async def main():
        play = Play()
        play.version = play.batches = 3
        await play.run(start=3, steps=4)
        return play.notes

    out = asyncio.run(main())
    assert out[0] == ("publish", 3) and ("update", 3) in out and ("save", 3) not in out


def test_a_finished_run_only_publishes_and_evaluates():
    async def main():
        play = Play()
        play.version = play.batches = 2
        await play.run(start=2)
        return play.notes

    assert [name for name, _ in asyncio.run(main())] == "publish push pushed evaluate evaluated".split()
    with pytest.raises(ValueError, match="start must lie in 0..steps = 2, got 3"):
        asyncio.run(Play().run(start=3))


@pytest.mark.parametrize("held", [("push", 1), ("evaluate", 1)])
def test_with_eta_the_next_update_overlaps_with_push_and_evaluation(held):
    async def main():
        play = Play(hold=held)
        task = asyncio.create_task(play.run(eta=1, steps=3))
        await play.held.wait()
        while ("update", 1) not in play.notes:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert ("publish", 2) not in play.notes  # pushes are serialised
        play.release.set()
        await task
        out = play.notes
        assert out.index(("update", 1)) < out.index(("admit" if held[0] == "push" else "evaluated", 1))
        assert out.index(("evaluated", 1)) < out.index(("publish", 2))

    asyncio.run(main())


def test_the_loop_trains_without_servers():
    async def groups(v):
        return v

    done, steps = [], []
    total = asyncio.run(loop.run(groups, done.append, eta=0, steps=3, on_step=lambda *step: steps.append(step)))
    assert done == [0, 1, 2] and [v for v, *_ in steps] == [1, 2, 3]
    assert total["publish_s"] == total["save_s"] == 0.0


def test_the_phases_of_a_step_add_up():
    async def main():
        play = Play()
        total = await play.run(steps=3, save_every=0)
        assert [(v, result) for v, result, _ in play.steps] == [(v, {"loss": v}) for v in (1, 2, 3)]
        for _, _, seconds in play.steps:
            assert 0 < sum(seconds[part] for part in loop.PARTS) <= seconds["step_s"]
            assert seconds["push_s"] + seconds["evaluate_s"] <= seconds["wait_s"]  # because eta = 0
        for name, whole in total.items():  # the last version's publishing, saving and evaluation too
            assert whole > sum(seconds[name] for *_, seconds in play.steps) or name in ("rollout_s", "update_s")

    asyncio.run(main())


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize(
    "fail, saved",
    [
        (("groups", 2), [2]),
        (("push", 2), [2]),
        (("evaluate", 2), [2]),
        (("publish", 2), [2]),
        (("update", 2), []),  # its buffers were donated
        (("save", 2), [2]),  # saving is not retried
    ],
)
def test_a_failure_is_raised_after_saving_the_newest_state(eta, fail, saved):
    async def main():
        play = Play(fail=fail)
        every = 1 if fail[0] == "save" else 0
        with pytest.raises(RuntimeError, match=f"'{fail[0]}', 2.* failed"):
            await asyncio.wait_for(play.run(eta=eta, steps=9, save_every=every), 20)
        states = [v for name, v in play.notes if name == "save" and v > 1]
        assert states == saved or (eta and states == [3] and fail[0] in ("push", "evaluate"))
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("held", [("groups", 2), ("push", 2), ("evaluate", 2)])
def test_a_cancelled_run_saves_its_newest_state_and_leaves_no_tasks(held):
    async def main():
        play = Play(hold=held)
        task = asyncio.create_task(play.run(eta=0, steps=9, save_every=0))
        await play.held.wait()
        task.cancel()
        if held[0] == "push":  # a push is not interrupted: no server is left half updated
            await asyncio.sleep(0.05)
            assert not task.done() and ("save", 2) in play.notes
            play.release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [note for note in play.notes if note[0] == "save"] == [("save", 2)]
        assert ("pushed", 2) in play.notes
        assert (("evaluated", 2) in play.notes) == (held[0] == "groups")
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_push_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(loop, "PUSH_S", 0.1)

    async def main():
        play = Play(hold=("push", 2))
        task = asyncio.create_task(play.run(eta=0, steps=9, save_every=0))
        await play.held.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await task
        assert ("save", 2) in play.notes and ("pushed", 2) not in play.notes and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


class Slow(Play):
    """The update of version `at` waits for `go`."""

    def __init__(self, at):
        super().__init__()
        self.at, self.entered, self.go = at, threading.Event(), threading.Event()

    def update(self, groups):
        if self.version == self.at:
            self.entered.set()
            self.go.wait()
        return super().update(groups)

    async def updating(self):
        """Starts a run; returns its task once the update is in progress."""
        task = asyncio.create_task(self.run(steps=9, save_every=0))
        while not self.entered.is_set():
            await asyncio.sleep(0.001)
        return task


def test_an_update_is_never_interrupted():
    async def main():
        play = Slow(1)
        task = await play.updating()
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
        play.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert play.notes[-2:] == [("update", 1), ("save", 2)]
        assert [(v, result) for v, result, _ in play.steps] == [(1, {"loss": 1}), (2, {"loss": 2})]  # it is logged too

    asyncio.run(main())


def test_a_second_interruption_ends_the_wait_for_an_update():
    async def main():
        play = Slow(0)
        task = await play.updating()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.02)
        assert task.cancelled() and play.steps == []
        play.go.set()

    asyncio.run(main())


def trained(eta, steps, start=0, cursor=None, stop=None):
    """Loop and executor together; `params` is a hash of all tokens trained on and of their versions."""
    state = {"version": start, "params": 0} if cursor is None else dict(cursor["state"])
    servers, saved, ages = {}, {}, []

    async def generate(tokens, *, seed):
        version = servers["version"]
        await asyncio.sleep((seed % 5) / 2000)
        return Completion([seed % 101], [-1.0], [version], "stop")

    async def workflow(generate, row):
        done = await generate([row["x"]])
        if done.tokens[0] % 10 == 0:
            return None
        return sampled([row["x"]], done, temperature=1.0, reward=1.0)

    def update(groups):
        for sample in (sample for group in groups for sample in group):
            ages.append(state["version"] - sample.info["admitted"])
            state["params"] = hash((state["params"], *sample.tokens.tolist(), *sample.version.tolist()))
        state["version"] += 1
        if state["version"] == stop:
            raise KeyError("stopped")

    def publish(v):
        async def push():
            await asyncio.sleep(0.002)
            servers["version"] = v

        return push

    def save(v, position):
        saved[v] = json.loads(json.dumps({"state": state, "cursor": position}))

    async def main():
        async with Executor(
            workflow,
            generate,
            Prompts([{"x": x} for x in range(17)], seed=3),
            group_size=2,
            groups_per_batch=3,
            eta=eta,
            max_concurrent=5,
            batches=steps,
            cursor=cursor and cursor["cursor"],
        ) as ex:
            await loop.run(
                ex.batch,
                update,
                publish,
                save,
                eta=eta,
                steps=steps,
                start=start,
                admit=ex.admit,
                cursor=ex.cursor,
                save_every=2,
            )
            return ex.counts

    try:
        counts = asyncio.run(main())
    except KeyError:
        counts = None
    assert max(ages) <= eta
    return saved, counts


def test_runs_at_eta_0_are_reproducible_and_resume_exactly():
    straight, counts = trained(0, 8)
    again, _ = trained(0, 8)
    assert straight == again and counts["accepted"] == 24 and counts["running"] == 0
    crashed, _ = trained(0, 8, stop=6)
    assert sorted(crashed) == [2, 4]
    resumed, _ = trained(0, 8, start=4, cursor=crashed[4])
    assert resumed[8] == straight[8]


def test_asynchronous_runs_keep_the_staleness_bound_and_resume():
    saved, counts = trained(2, 8)
    assert counts["accepted"] == 24 and counts["running"] == 0
    resumed, counts = trained(2, 8, start=4, cursor=saved[4])
    assert counts["accepted"] == 24 and sorted(resumed) == [6, 8]


SCRIPT = """
import asyncio, signal, sys
from areax.rollout import loop

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
version = 0

def update(groups):
    global version
    print("update", flush=True)
    sys.stdin.readline()
    version += 1

def save(v, cursor):
    assert v == version == cursor, (v, version, cursor)
    print("saved", v, flush=True)

batches = 0

async def next_groups(v):
    global batches
    if v == 2:
        print("waiting", flush=True)
        await asyncio.sleep(600)
    batches += 1

try:
    asyncio.run(loop.run(next_groups, update, None, save, eta=0, steps=9, cursor=lambda: batches))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("line, lines_before, version", [("update", "", 1), ("waiting", "\n\n", 2)])
def test_ctrl_c_leaves_a_checkpoint(line, lines_before, version):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with process:
        process.stdin.write(lines_before)
        for printed in process.stdout:
            if printed.strip() == line:
                break
        process.send_signal(signal.SIGINT)
        process.stdin.write("\n")  # lets an update that the signal interrupted finish
        rest = process.stdout.read().splitlines()
    assert rest == [f"saved {version}", "interrupted"] and process.returncode == 0
