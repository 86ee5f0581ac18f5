"""What a run says on stderr: phases, compilation, and steps in which nothing is learnt."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from areax.adapters.report import rows
from areax.adapters.runtime import compile_time, malloc
from areax.adapters.tracking import diagnosis, progress, run_dir
from areax.recipes.shared.stop_on import StopOn
from areax.rollout import events


def phase(words: str) -> contextlib.AbstractContextManager[None]:
    """Says that a phase begins and how long it took; nothing in processes other than the first."""
    return progress.phase(words, quiet=jax.process_index() > 0)


def loading(path: str, more: str = "") -> contextlib.AbstractContextManager[None]:
    """The phase of loading a checkpoint, with its size if it is a directory, and what else to say of it."""
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    return phase(", ".join(filter(None, (f"loading {path}", f"{size / 1e9:.3f} GB" if size else "", more))))


class Terminal:
    """The terminal of a run that trains.

    Args:
      kind: `kind` of the run's steps, which begins each line.
      stop_on: ends the run when a metric demands it.
      out: directory of the run; alarms of its former steps are not said again.
    """

    def __init__(self, kind: str, stop_on: StopOn | None = None, out: Path | None = None):
        self.kind, self.stop_on = kind, stop_on or StopOn()
        self._watch, self._first = diagnosis.Watch(kind), True
        for line in rows.read(out / run_dir.METRICS).get(kind, ()) if out else ():
            self._watch.see(line["step"], run_dir.numbers(line))
        self._waiting = contextlib.ExitStack()

    def counting(self, words: str) -> contextlib.AbstractContextManager[Callable[..., None]]:
        """As `progress.counting`, for a part of the run; nothing in processes other than the first."""
        return progress.counting(f"{self.kind} {words}", quiet=jax.process_index() > 0)

    @contextlib.contextmanager
    def waiting(self, words: str, more: Callable[[], str]) -> Iterator[None]:
        """A phase that lasts until the first step begins; `more` as in `progress.phase`."""
        with self._waiting:
            self._waiting.enter_context(progress.phase(f"{self.kind} {words}", more=more))
            yield

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Wraps a training step: says that the first one compiles, and how long that took, which the clock of the
        progress leaves out; and how long a later one compiled, for rows of another shape, while the device computed."""
        first, self._first = self._first and jax.process_index() == 0, False
        before = compile_time.seconds()
        with contextlib.ExitStack() as stack:
            if first:
                stack.enter_context(compile_time.left_out())
                self._waiting.close()
                progress.say(f"{self.kind} compiling the first step ...")
                stack.enter_context(progress.reminding(f"{self.kind} compiling and computing the first step"))
            yield
        if (seconds := compile_time.seconds() - before) < progress.SHORT_S:
            return
        malloc.return_memory()
        if jax.process_index() == 0:
            progress.say(f"{self.kind} compiled {'' if first else 'another shape of rows '}in {seconds:.1f} s")

    def say_not_finite(self, step: int, where: str) -> None:
        """Says, in the first process, where a number first was not finite."""
        if jax.process_index() == 0:
            progress.say(f"{self.kind} step {step}: {where}")
            events.emit("not_finite", step=step, where=where)

    def look(self, step: int, values: dict) -> None:
        """Says in which way a step taught nothing, or the wrong thing, once that is an alarm (`diagnosis.Watch`)."""
        numbers = run_dir.numbers(values)
        alarms = self._watch.see(step, numbers)
        for alarm in alarms if jax.process_index() == 0 else ():
            progress.say(str(alarm))
            events.emit(
                "alarm", step=step, name=alarm.condition.name, rule=alarm.condition.rule, shown=alarm.shown,
                what=alarm.condition.what, advice=alarm.condition.advice,
            )  # fmt: skip
        self.stop_on.see(step, numbers, alarms)
