"""Signals that end a run: at once before it trains, in order while it does and after."""

import asyncio
import json
import os
import signal
import sys
import threading

import pytest

from areax.parallel.multihost import liveness
from areax.recipes.shared import ending
from areax.rollout import loop

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def send(number):
    os.kill(os.getpid(), number)


@BOTH
def test_a_signal_before_training_interrupts_at_once(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ending.stop_signal():
        send(number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first, other", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_both_signals_at_once_ask_the_same(first, other, monkeypatch):
    """As scancel and srun send them: the second is ignored, but not a third, nor one that comes later."""
    for now in (True, False):
        with ending.stop_signal() as stop:
            stop.orderly()
            send(first)
            assert stop.asked
            monkeypatch.setattr(ending, "ECHO_S", ending.ECHO_S if now else 0)
            if now:
                send(other)
            with pytest.raises(KeyboardInterrupt):
                send(other)
            monkeypatch.undo()


def test_no_state_is_promised_when_another_process_has_ended(monkeypatch, capfd):
    monkeypatch.setattr(liveness, "lost", threading.Event())
    with ending.stop_signal() as stop:
        stop.orderly()
        liveness.lost.set()
        send(signal.SIGINT)
        assert stop.asked and capfd.readouterr().err == ""


@BOTH
@pytest.mark.parametrize("held", ["push", "evaluate", "nothing"])
def test_a_run_is_complete_only_after_its_last_push_and_evaluation(capfd, number, held):
    """A signal within them lets the newest state be saved, which a line says; one after them changes nothing."""
    saved, steps = [], []

    async def hold(what, v):
        if what == held and v == 2:
            send(number)
            await asyncio.sleep(0.05 if what == "push" else 600)

    async def main(stop):
        async def groups(v):
            return v

        run = loop.run(
            groups, lambda groups: groups, lambda v: lambda: hold("push", v), lambda v, position: saved.append(v),
            lambda v: hold("evaluate", v), eta=1, steps=2, evaluate_every=2,
            on_step=lambda v, result, seconds: steps.append(v),
        )  # fmt: skip
        return await ending.interruptible(run, stop)

    with ending.stop_signal() as stop:
        seconds = asyncio.run(main(stop))
        assert (seconds is None) == stop.asked == (held != "nothing")
        if held == "nothing":
            send(number)
        assert stop.asked and saved == [2] and steps == [1, 2]
        assert capfd.readouterr().err.count("saving the state; a second signal stops at once") == 1
        with pytest.raises(KeyboardInterrupt):
            send(number)


def test_a_run_ends_with_its_summary_and_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "sft", "step": 1, "loss": 0.5}\n')
    (tmp_path / "events.jsonl").write_text("")
    ending.finish(str(tmp_path), {"steps": 1, "complete": False})
    said = json.loads((tmp_path / "summary.json").read_text())
    assert said == {"steps": 1, "complete": False, "exports": {}, "alarms": [], "report": str(tmp_path / "report.html")}
    assert "1 step of sft" in (tmp_path / "report.html").read_text() and not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("status", [0, 5])
def test_a_task_that_exits_does_not_end_the_process_in_silence(status):
    async def leaves():
        sys.exit(status)

    async def main():
        task = asyncio.ensure_future(leaves())
        await asyncio.sleep(60)
        await task

    with pytest.raises(ValueError, match=f"^a task that the workflow started .*: SystemExit: {status} .*ending.py:"):
        ending.run(main())


@pytest.mark.parametrize(
    "end, words",
    [
        (lambda: asyncio.get_running_loop().stop(), "^the event loop was stopped, as by a workflow"),
        (
            lambda: [task.cancel() for task in asyncio.all_tasks()],
            "^the run's own task was cancelled",
        ),
    ],
)
def test_code_that_ends_the_event_loop_is_named(end, words):
    async def main():
        end()
        await asyncio.sleep(60)

    with pytest.raises(ValueError, match=words):
        ending.run(main())


def test_a_second_signal_is_no_orderly_end():
    async def main(stop):
        async def work():
            send(signal.SIGTERM)
            try:
                await asyncio.sleep(60)
            finally:
                send(signal.SIGTERM)
                await asyncio.sleep(0)

        return await ending.interruptible(work(), stop)

    with ending.stop_signal() as stop:
        with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
            asyncio.run(main(stop))
        assert stop.asked and stop.interrupted
