"""How a run ends: signals that stop it in order, its summary and its report."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from areax.adapters import hf
from areax.adapters.report import build, rows
from areax.adapters.runtime import hub
from areax.adapters.tracking import diagnosis, run_dir
from areax.parallel.multihost import liveness
from areax.recipes.shared import notebook
from areax.rollout import object_path

log = logging.getLogger(__name__)

STOPPING = b"\nstopping after this step and saving the state; a second signal stops at once, unsaved\n"
ECHO_S = 5.0  # within which SIGINT and SIGTERM are one request: scancel sends SIGTERM, and SIGINT by way of srun


class Stop:
    """What Ctrl-C and SIGTERM ask of a run; made by `stop_signal`.

    Attributes:
      asked: whether a signal came after `orderly` was called, or `ask` was.
      interrupted: whether a signal interrupted.
    """

    def __init__(self) -> None:
        self.asked = self.interrupted = False
        self._act: Callable[[], Any] | None = None
        self._first: tuple[int, float] | None = None  # the signal that asked, and when, until its echo comes

    def orderly(self, act: Callable[[], Any] = lambda: None) -> None:
        """From now on the first signal sets `asked` and calls `act`; the run ends in order. A second interrupts, unless
        it is of the other kind and comes within ECHO_S seconds."""
        self._act = act
        if self.asked:
            act()

    def receive(self, number: int, frame: Any) -> None:
        """Handles a signal."""
        now, first = time.monotonic(), self._first
        self._first = None
        if self.asked and first and number != first[0] and now - first[1] < ECHO_S:
            return
        if self._act is None or self.asked:
            self.interrupted = True
            raise KeyboardInterrupt
        self._first = number, now
        if not liveness.lost.is_set():  # else by its watch: without the other processes no state can be saved
            with contextlib.suppress(OSError):  # of a closed stderr
                os.write(2, STOPPING)  # print may have been interrupted itself
        self.ask()

    def ask(self) -> None:
        """Asks the run to end in order, as soon as it can."""
        self.asked = True
        if self._act:
            self._act()


@contextlib.contextmanager
def stop_signal() -> Iterator[Stop]:
    """Yields a Stop that receives Ctrl-C and SIGTERM: they interrupt at once until it is made `orderly`.

    In other threads than the main one, which gets the signals, the end of `notebook.run_in_thread` asks it.
    """
    stop = Stop()
    main = threading.current_thread() is threading.main_thread()
    if not main and (asked := notebook.stop_request.get()):
        asked.add_done_callback(lambda _: stop.ask())
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, stop.receive) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run`; raises ValueError if a task of a user's code exits, stops the event loop or cancels all tasks,
    which would end the process in silence, or without a reason."""
    try:
        return asyncio.run(coroutine)
    except SystemExit as error:
        raise ValueError(f"a task that the workflow started ended the process: {object_path.line(error)}") from error
    except asyncio.CancelledError as error:
        raise ValueError("the run's own task was cancelled, as by a workflow that cancels all tasks") from error
    except RuntimeError as error:
        if str(error) != "Event loop stopped before Future completed.":
            raise
        raise ValueError("the event loop was stopped, as by a workflow that calls its stop()") from error


async def interruptible(coroutine: Coroutine[Any, Any, Any], stop: Stop) -> Any:
    """Awaits the coroutine, which the first signal cancels. Returns its result, or None if it was cancelled that way.

    Signals after it has ended let what follows end in order.
    """
    running, task = asyncio.get_running_loop(), asyncio.ensure_future(coroutine)
    stop.orderly(lambda: running.call_soon_threadsafe(task.cancel))
    try:
        return await task
    except asyncio.CancelledError:
        if not stop.asked or stop.interrupted:
            raise
        return None
    finally:
        stop.orderly()


def exports(out: str | os.PathLike) -> dict[str, str]:
    """{folder: xxh3-128 of its manifest.json} of a run's exports, which tells them from those of other runs."""
    manifests = {name: Path(out) / name / hf.MANIFEST for name in ("model", "adapter")}
    return {name: hub.content(file) for name, file in manifests.items() if file.is_file()}


def finish(out: str, summary: dict) -> None:
    """Writes `out`/summary.json and `out`/report.html, which is added to `summary` with `exports` and `alarms`; a disk
    too full for the report is only a warning."""
    alarms = [
        {"name": alarm.condition.name, "kind": alarm.kind, "what": alarm.condition.what}
        | {name: getattr(alarm, name) for name in ("shown", "first", "last", "steps", "raised")}
        for alarm in diagnosis.alarms(rows.read(Path(out) / run_dir.METRICS))
    ]
    summary |= {"exports": exports(out), "alarms": alarms, "report": str(Path(out) / "report.html")}
    run_dir.write_json(Path(out) / run_dir.SUMMARY, summary)
    try:
        build.report(out, trace=False)
    except OSError as error:
        log.warning("%s: no report was written: %s; areax report %s writes it", out, error, out)
