"""What the directory of a `grpo` run says that a replay needs: options, logged metrics, pushed versions, states."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areax.adapters import orbax
from areax.adapters.report import chrome_trace
from areax.adapters.tracking import run_dir


@dataclass(frozen=True)
class Run:
    """A run's directory.

    Attributes:
      metrics: {step: its line in metrics.jsonl}.
      pushed: {version: label} of the versions that servers got.
      changes: (version, file with the options before it), in order, of a run that went on with other options.
    """

    path: Path
    metrics: Mapping[int, Mapping[str, Any]]
    pushed: Mapping[int, str]
    changes: Sequence[tuple[int, str]]

    @property
    def states(self) -> Path:
        """The folder of saved states."""
        return self.path / run_dir.STATE

    @property
    def kept(self) -> list[int]:
        """The versions of the saved states, oldest first."""
        return orbax.versions(self.states) if self.states.is_dir() else []


def read(path: Path) -> Run:
    """Reads a run's directory, also while the run goes on. Raises ValueError if no step was logged."""
    lines = [*run_dir.read_lines(path / run_dir.METRICS)] if (path / run_dir.METRICS).is_file() else []
    metrics = {line["step"]: line for line in lines if line.get("kind") == "grpo"}
    if not metrics:
        raise ValueError(f"{path}: must be the directory of a run of areax train grpo that has made a step")
    file = chrome_trace.file(path)
    events = [*run_dir.read_lines(file)] if file.is_file() else []
    labels = [event["label"] for event in events if event["kind"] == "push"]
    changes: list[tuple[int, str]] = []
    for event in events:
        if event["kind"] == "options":
            undone = [file for version, file in changes if version >= event["version"]]  # it went on from before them
            changes = [change for change in changes if change[0] < event["version"]]
            changes.append((event["version"], [*undone, event["former"]][0]))
        elif event["kind"] == "push":  # the first of a process is of the version that it goes on from
            begin = int(event["label"].partition("-")[0])
            undone = [file for version, file in changes if version > begin]
            changes = [change for change in changes if change[0] <= begin]
            if undone and begin not in dict(changes):  # an older state, with the options that the run had by then
                changes.append((begin, undone[0]))
    return Run(path, metrics, {int(label.partition("-")[0]): label for label in labels}, changes)


def options(run: Run, start: int, end: int) -> list[tuple[int, Path]]:
    """(step before it, file) of the options with which a run made steps `start` + 1 to `end`, in order."""
    used: list[tuple[int, Path]] = []
    begin = 0
    for until, file in [*run.changes, (sys.maxsize, run_dir.CONFIG)]:
        used += [(begin, run.path / file)] if begin < end and start < until else []
        begin = until
    return used
