"""`--profile 5:8`: a trace of a run's steps by jax.profiler, for Perfetto and XProf."""

import contextlib
import re
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from areax.adapters.tracking import progress

FOLDER = "profile"  # in the run directory
PERFETTO = "perfetto_trace.json.gz"


def chosen(option: str, steps: int) -> tuple[int, int] | None:
    """(first, last) step of "5:8" or "5"; None for "", no trace.

    Args:
      steps: of the run, counted from 1.

    Raises:
      ValueError: it is neither, or not within the run.
    """
    if not option:
        return None
    if not re.fullmatch("[0-9]{1,18}(:[0-9]{1,18})?", option):
        raise ValueError(f"--profile must be a step or FIRST:LAST, such as 5:8, got {reprlib.repr(option)}")
    first, _, last = option.partition(":")
    if not 1 <= int(first) <= int(last or first) <= steps:
        raise ValueError(f"--profile must name steps from 1 to --steps {steps}, in order, got {option}")
    return int(first), int(last or first)


@contextlib.contextmanager
def steps(kind: str, option: str, out: str, total: int, *, start: int = 0) -> Iterator[Callable]:
    """Yields step(number), a context manager around each training step. It yields a function for the step's results,
    which returns them, in a trace's last step once they are computed.

    A trace starts before the first step that `option` names and is written to `out`/profile after the last, or when
    the run ends earlier. A line says where it is and how to open it. It holds everything that this process does
    meanwhile, such as waiting for completions. In a job of several processes only process 0 writes one. A trace that
    cannot be written is a warning: the run goes on without it.

    Args:
      kind: `kind` of the run's steps, which begins each line.
      total: steps of the run.
      start: steps that a former process has done.
    """
    named = None if jax.process_index() else chosen(option, total)
    if named is None:
        yield lambda number: contextlib.nullcontext(_unchanged)
        return
    first, last = named
    folder = Path(out) / FOLDER
    traced: list[int] = []  # steps in the trace; empty while there is none
    failed: list[str] = []  # why there is no trace
    if start >= last:
        progress.say(f"{kind} starts after step {start}: --profile {option} traces nothing")

    @contextlib.contextmanager
    def step(number: int) -> Iterator[Callable]:
        if not first <= number <= last or failed:
            yield _unchanged
            return
        if not traced:
            with going_on():
                folder.mkdir(parents=True, exist_ok=True)
                jax.profiler.start_trace(folder, create_perfetto_trace=True)
            if failed:
                yield _unchanged
                return
        traced.append(number)
        with jax.profiler.StepTraceAnnotation(kind, step_num=number):
            yield jax.block_until_ready if number == last else _unchanged
        if number == last:
            write()

    @contextlib.contextmanager
    def going_on() -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:  # what the profiler raises
            failed.append(" ".join(str(error).split()) or type(error).__name__)
            progress.say(f"{kind} goes on without a trace in {folder}: {failed[-1]}")

    def write() -> None:
        what = f"step {traced[0]}" if len(traced) == 1 else f"steps {traced[0]} to {traced[-1]}"
        traced.clear()
        with going_on():
            jax.profiler.stop_trace()
            newest = max(folder.glob(f"plugins/profile/*/{PERFETTO}"), key=lambda file: file.stat().st_mtime)
            progress.say(f"{kind} trace of {what}: open {newest} in ui.perfetto.dev, or run: xprof {folder}")

    try:
        yield step
    finally:
        if traced:
            write()


def _unchanged(results):
    return results
