"""What a command says on stderr while it works: phases, a bar or lines, warnings.

On a terminal a bar shows the steps, and lines appear above it. Elsewhere there are lines, at most one every ten seconds
for steps.
"""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

SHORT_S = 1.0  # a phase that ends sooner has only its first line
FIRST_S, MOST_S = 10.0, 60.0  # pauses between reminders of a long phase: the first, doubled up to the longest


def say(words: str) -> None:
    """Prints a line, above the bar if there is one; nothing if nobody reads it any more, which must not end a run."""
    with contextlib.suppress(BrokenPipeError):
        print(words, file=sys.stderr, flush=True)


@contextlib.contextmanager
def phase(words: str, quiet: bool = False, more: Callable[[], str] = str) -> Iterator[None]:
    """Says that a phase begins, while it is long that it goes on, as `reminding`, and when it is over how long it took,
    unless it was short."""
    if quiet:
        yield
        return
    say(f"{words} ...")
    began = time.monotonic()
    with reminding(words, more):
        yield
    if (seconds := time.monotonic() - began) >= SHORT_S:
        say(f"{words}: {seconds:.1f} s")


@contextlib.contextmanager
def counting(words: str, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A phase that says, while it is long, how many rows are done; yields count(n=1), which adds n to them."""
    done = 0

    def count(n: int = 1) -> None:
        nonlocal done
        done += n

    with phase(words, quiet, lambda: f", {done:,} rows done"):
        yield count


@contextlib.contextmanager
def reminding(words: str, more: Callable[[], str] = str) -> Iterator[None]:
    """Says again and again for how long something is under way, and what `more` says of it: a program that is silent
    for a minute looks as if it hung."""
    began, over = time.monotonic(), threading.Event()

    def remind():
        pause = FIRST_S
        while not over.wait(pause):
            say(f"{words} ... {_clock(time.monotonic() - began)}{more()}")
            pause = min(2 * pause, MOST_S)

    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def steps(
    kind: str, total: int, *, start: int = 0, every: float = 10.0, console=None, quiet: bool = False,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Callable]:  # fmt: skip
    """Shows a run's progress: a bar on a terminal, else a line at most every `every` seconds; nothing if `quiet`.

    Yields tick(step, *, tokens=0, **values): `values` are shown by name; `tokens` counts tokens since the last tick.
    Rate and time left are estimated from the last 20 ticks.

    Args:
      now: a clock without the time in which a step is compiled (`compile_time.clock`), which happens once.
    """
    console = console or _Console(stderr=True, quiet=quiet, force_jupyter=False)  # else rich shows it in the notebook
    recent = collections.deque([(now(), start, 0)], maxlen=20)

    def words(step, tokens, values):
        if len(recent) == 2 and recent[0][1] == start and step < total:
            recent.popleft()  # the first step, with all that is warmed up in it, counts only until there is another
        recent.append((now(), step, recent[-1][2] + tokens))
        (t0, step0, tokens0), (t1, step1, tokens1) = recent[0], recent[-1]
        seconds = max(t1 - t0, 1e-9)
        parts = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
        if tokens1 > tokens0:
            parts.append(f"{(tokens1 - tokens0) / seconds:,.0f} tokens/s")
        if step1 > step0 and step1 < total:
            parts.append(f"{_clock((total - step1) * seconds / (step1 - step0))} left")
        return "  ".join(parts)

    if console.is_terminal:
        columns = TextColumn(kind), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}")
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(kind, total=total, completed=start, now="")

            def advance(step, *, tokens=0, **values):
                bar.update(task, completed=step, now=words(step, tokens, values))

            yield advance
        return

    printed, waiting = -math.inf, None

    def show():
        nonlocal printed, waiting
        if waiting is not None:
            console.print(waiting, markup=False, highlight=False, soft_wrap=True)
            printed, waiting = time.monotonic(), None

    def tick(step, *, tokens=0, **values):
        nonlocal waiting
        waiting = f"{kind} {step}/{total}  {words(step, tokens, values)}".rstrip()
        if step >= total or time.monotonic() - printed >= every:
            show()

    yield tick
    show()  # always print the last step, also of a run that stops early


class _Console(Console):
    """A console that falls silent when nobody reads it any more; rich would end the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
