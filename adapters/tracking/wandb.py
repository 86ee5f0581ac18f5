"""Weights & Biases sink: a run's numbers and histograms as `kind/name` over `kind/step`."""

from __future__ import annotations

import contextlib
import json
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

from . import run_dir as tracker
from . import tail
from .tail import START, Mark

STATE = "wandb.json"  # in the run directory: wandb run, project, and the position in metrics.jsonl
ANSWER_S = 60.0  # timeout of starting a run, and of the last uploads


class Wandb:
    """A wandb run, resumed when the run resumes.

    Sent lines cannot be removed: if some have since been removed from the file, a new wandb run in the same group gets
    the whole file.
    """

    def __init__(self, project: str, run_dir: pathlib.Path):
        self.project, self.run_dir = project, run_dir
        self._run: Any = None
        self._kinds: set[str] = set()
        self._id, self.mark, self._sent = uuid.uuid4().hex[:12], START, 0
        state = tail.saved(run_dir / STATE, id=str, project=str, lines=int)
        if state and state["project"] == project:
            self._id, self._sent = state["id"], state["lines"]
            self.mark = Mark(state["bytes"], state["xxh3_128"])

    def begin(self) -> None:
        """Starts over with a new wandb run."""
        self.close()
        self._id, self._run, self._sent = uuid.uuid4().hex[:12], None, 0

    def take(self, lines: list[dict], mark: Mark) -> None:
        import wandb

        with _errors():
            self._run = self._run or self._open()
            for number, line in enumerate(lines, self._sent):
                kind = line.get("kind", "run")
                if kind not in self._kinds:
                    self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
                    self._kinds.add(kind)
                values: dict[str, Any] = {"step": line.get("step", 0), "seconds": line.get("seconds", 0.0)}
                values |= tracker.numbers(line)
                for name, value in tracker.histograms(line).items():
                    values[name] = wandb.Histogram(np_histogram=(value["counts"], value["edges"]))
                self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=number)
        self._sent += len(lines)
        state = {"id": self._id, "project": self.project, "lines": self._sent, **mark._asdict()}
        tracker.write_json(self.run_dir / STATE, state)

    def close(self) -> None:
        if self._run:
            with _errors():
                self._run.finish()

    def _open(self) -> Any:
        import wandb

        config = self.run_dir / tracker.CONFIG
        self._kinds = set()
        return wandb.init(
            project=self.project, id=self._id, resume="allow", reinit="create_new", dir=str(self.run_dir),
            name=self.run_dir.name, group=self.run_dir.name,
            config=json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
            settings=wandb.Settings(console="off", init_timeout=ANSWER_S, finish_timeout=ANSWER_S),
        )  # fmt: skip


def check() -> None:
    """Raises ValueError if wandb has no login."""
    import wandb

    with _errors():
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError("--track.wandb needs an account, got no key; `wandb login`, or set WANDB_MODE=offline")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turns wandb's errors into RuntimeError."""
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise RuntimeError(f"wandb: {error}") from error
