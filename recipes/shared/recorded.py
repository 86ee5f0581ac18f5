"""What the directory of a `grpo` run says that a replay needs: options, logged metrics, pushed versions, states."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areax.adapters import orbax
from areax.adapters.command_line import parse
from areax.adapters.report import chrome_trace
from areax.adapters.tracking import run_dir
from areax.recipes import grpo
from areax.recipes.shared import publishing


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
    events = [*run_dir.read_lines(path / chrome_trace.JOURNAL)] if (path / chrome_trace.JOURNAL).is_file() else []
    labels = [event["label"] for event in events if event["kind"] == "push"]
    changes: list[tuple[int, str]] = []
    for event in (event for event in events if event["kind"] == "options"):
        undone = [file for version, file in changes if version >= event["version"]]  # it went on from before them
        changes = [change for change in changes if change[0] < event["version"]]
        changes.append((event["version"], [*undone, event["former"]][0]))
    return Run(path, metrics, {int(label.partition("-")[0]): label for label in labels}, changes)


def config(run: Run, start: int, end: int) -> grpo.Config:
    """The options with which a run made steps `start` + 1 to `end`.

    Raises ValueError if they changed within, in what the numbers depend on.
    """
    used: list[tuple[int, str]] = []
    begin = 0
    for until, file in [*run.changes, (sys.maxsize, run_dir.CONFIG)]:
        used += [(begin, file)] if begin < end and start < until else []
        begin = until
    found = [_options(run.path / file) for _, file in used]
    for (begin, file), one, other in zip(used[1:], found, found[1:], strict=False):
        if _shaping(one) != _shaping(other):
            raise ValueError(
                f"{run.path}: went on from step {begin} with other options, in {file}: replay one part of it, "
                f"--to {begin} or --from {begin}"
            )
    return found[-1]


def _options(file: Path) -> grpo.Config:
    return parse.parse(grpo.Config, ["--config", str(file)], f"areax replay {file.parent}")


def _shaping(config: grpo.Config) -> tuple:
    """What the numbers of a step depend on besides its batch, and labels."""
    training = config.training
    scheduled = {training.optim.schedule, training.critic.optim.schedule} != {"constant"}
    return (
        training, config.model, config.init, config.seed, config.rollout.sampling.temperature,
        config.rewards.shuffle_rewards, config.steps if scheduled else None,
        publishing.dtype(config.serving, training.run),
    )  # fmt: skip
