"""SwanLab sink: a run's numbers as `kind/name` over the run's steps."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import uuid
from typing import Any

from . import run_dir as tracker
from . import tail
from .tail import START, Mark

STATE = "swanlab.json"  # in the run directory: SwanLab run, project, and the position in metrics.jsonl
LOGS = "swanlog"  # in the run directory: what SwanLab keeps on disk


class SwanLab:
    """A SwanLab run, resumed when the run resumes; a process has one at a time.

    Sent lines cannot be removed: if some have since been removed from the file, a new SwanLab run in the same group
    gets the whole file. Histograms are left out.
    """

    def __init__(self, project: str, run_dir: pathlib.Path):
        self.project, self.run_dir = project, run_dir
        self._run: Any = None
        self._id, self.mark = uuid.uuid4().hex[:21], START
        state = tail.saved(run_dir / STATE, id=str, project=str)
        if state and state["project"] == project:
            self._id, self.mark = state["id"], Mark(state["bytes"], state["xxh3_128"])

    def begin(self) -> None:
        """Starts over with a new SwanLab run."""
        self.close()
        self._id = uuid.uuid4().hex[:21]

    def take(self, lines: list[dict], mark: Mark) -> None:
        self._run = self._run or self._open()
        for line in lines:
            values = {"seconds": line.get("seconds", 0.0), **tracker.numbers(line)}
            kind = line.get("kind", "run")
            self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=line.get("step", 0))
        tracker.write_json(self.run_dir / STATE, {"project": self.project, "id": self._id, **mark._asdict()})

    def close(self) -> None:
        if self._run:
            with contextlib.redirect_stdout(sys.stderr):  # the results of a command are on its standard output
                self._run.finish()
            self._run = None

    def _open(self) -> Any:
        import swanlab

        config = self.run_dir / tracker.CONFIG
        with contextlib.redirect_stdout(sys.stderr):
            return swanlab.init(
                project=self.project, name=self.run_dir.name, group=self.run_dir.name, id=self._id, resume="allow",
                log_dir=str(self.run_dir / LOGS),
                config=json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
                settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
            )  # fmt: skip


def check() -> None:
    """Raises ValueError if SwanLab has no login."""
    import swanlab

    settings = swanlab.Settings()
    if settings.mode == "online" and not settings.api_key:
        raise ValueError(
            "--track.swanlab needs an account, got no key; `swanlab login`, or set SWANLAB_API_KEY or "
            "SWANLAB_MODE=offline"
        )
