"""trackio sink: a run's numbers and histograms as `kind/name` over the run's steps, by default in a local database."""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
import sys
from typing import Any

from . import run_dir as tracker
from . import tail
from .tail import START, Mark

STATE = "trackio.json"  # in the run directory: trackio run, project, and the position in metrics.jsonl


class Trackio:
    """A trackio run, resumed when the run resumes.

    It is on this machine, below ~/.cache/huggingface/trackio or TRACKIO_DIR, unless trackio's own variables name a
    Space or a server. Written lines cannot be removed: if some have since been removed from the file, a new trackio run
    in the same group gets the whole file.
    """

    def __init__(self, project: str, run_dir: pathlib.Path):
        self.project, self.run_dir = project, run_dir
        self._run: Any = None
        self._name, self.mark = self._new_name(), START
        state = tail.saved(run_dir / STATE, name=str, project=str)
        if state and state["project"] == project:
            self._name, self.mark = state["name"], Mark(state["bytes"], state["xxh3_128"])

    def begin(self) -> None:
        """Starts over with a new trackio run."""
        self.close()
        self._name = self._new_name()

    def take(self, lines: list[dict], mark: Mark) -> None:
        import trackio

        self._run = self._run or self._open()
        for line in lines:
            values: dict[str, Any] = {"seconds": line.get("seconds", 0.0), **tracker.numbers(line)}
            for name, value in tracker.histograms(line).items():
                values[name] = trackio.Histogram(np_histogram=(value["counts"], value["edges"]))
            kind = line.get("kind", "run")
            self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=line.get("step", 0))
        tracker.write_json(self.run_dir / STATE, {"project": self.project, "name": self._name, **mark._asdict()})

    def close(self) -> None:
        if self._run:
            import trackio

            with contextlib.redirect_stdout(sys.stderr):  # the results of a command are on its standard output
                trackio.finish()  # this thread's run
            self._run = None

    def _new_name(self) -> str:
        """A name of its own: trackio resumes the newest run of a name."""
        return f"{self.run_dir.name}-{secrets.token_hex(3)}"

    def _open(self) -> Any:
        import trackio

        config = self.run_dir / tracker.CONFIG
        with contextlib.redirect_stdout(sys.stderr):
            return trackio.init(
                project=self.project, name=self._name, group=self.run_dir.name, resume="allow", embed=False,
                config=json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
            )  # fmt: skip
