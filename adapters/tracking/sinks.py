"""Exports a run's metrics to TensorBoard, wandb, trackio, MLflow, SwanLab and Prometheus.

Each sink follows metrics.jsonl in its own thread; the run itself writes only the file. A failing sink logs a warning
and stops, but never fails the run. When lines are removed from the file, because a run resumes from an earlier state,
sinks start over.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from . import mlflow as experiments
from . import prometheus
from . import run_dir as tracker
from . import swanlab as swans
from . import tensorboard as boards
from . import trackio as local
from . import wandb as accounts
from .tail import Mark, Tail

log = logging.getLogger(__name__)

EVERY_S = 1.0  # between reads of the file
PATIENCE_S = 90.0  # at the end, for a sink to export the last lines


@dataclass(frozen=True)
class Sinks:
    """Export of metrics.jsonl to other trackers (docs/metrics.md; TRL's report_to).

    Attributes:
      tensorboard: write event files to `tensorboard/` in the run directory.
      wandb: Weights & Biases project; "" = none.
      trackio: trackio project, on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set; "" = none.
      mlflow: MLflow experiment, where MLFLOW_TRACKING_URI says, or in MLflow's local store; "" = none.
      swanlab: SwanLab project; "" = none.
      prometheus: port to scrape the latest metrics from during the run; 0 = none.
      prometheus_host: address that Prometheus listens on; readable by anyone who can reach it.
    """

    tensorboard: bool = False
    wandb: str = ""
    trackio: str = ""
    mlflow: str = ""
    swanlab: str = ""
    prometheus: int = 0
    prometheus_host: str = "127.0.0.1"

    def __post_init__(self):
        if not 0 <= self.prometheus < 1 << 16:
            raise ValueError(f"--track.prometheus must be a port from 1 to 65535, or 0 for none, got {self.prometheus}")
        if self.prometheus_host != Sinks.prometheus_host and not self.prometheus:
            raise ValueError(
                f"--track.prometheus-host needs --track.prometheus, a port, got {self.prometheus_host} alone"
            )


class Sink(Protocol):
    """Receives metrics lines; all calls come from one thread.

    Attributes:
      mark: position in the file up to which it already has the lines.
    """

    mark: Mark

    def begin(self) -> None: ...

    def take(self, lines: list[dict], mark: Mark) -> None: ...

    def close(self) -> None: ...


@dataclass
class Followed:
    """What `following` yields.

    Attributes:
      live: may be set to a function that returns current values {name: value} at each Prometheus scrape; names that end
        in _total are counters.
    """

    live: Callable[[], Mapping[str, float]] = dict


def check(sinks: Sinks) -> None:
    """Raises ValueError if a sink cannot work: its package is missing, its port in use, or there is no login."""
    for extra, package, wanted in (
        ("tensorboard", "tensorboardX", sinks.tensorboard), ("wandb", "wandb", sinks.wandb),
        ("trackio", "trackio", sinks.trackio), ("mlflow", "mlflow", sinks.mlflow),
        ("swanlab", "swanlab", sinks.swanlab),
    ):  # fmt: skip
        if wanted and importlib.util.find_spec(package) is None:
            raise ValueError(f"--track.{extra} needs {package}, which is not installed; pip install 'areax[{extra}]'")
    if sinks.wandb:
        accounts.check()
    if sinks.mlflow:
        experiments.check()
    if sinks.swanlab:
        swans.check()
    if sinks.prometheus:
        prometheus.Prometheus(sinks.prometheus_host, sinks.prometheus).close()


@contextlib.contextmanager
def following(
    run_dir: str | os.PathLike, sinks: Sinks, *, quiet: bool = False, every_s: float = EVERY_S
) -> Iterator[Followed]:
    """Runs sinks that follow the run's metrics.jsonl, and exports the last lines on exit.

    Args:
      quiet: no sinks: for the other processes of a job.

    Raises ValueError if the port is in use.
    """
    followed, run_dir = Followed(), pathlib.Path(run_dir)
    if quiet:
        yield followed
        return
    found: list[Sink] = []
    if sinks.prometheus:
        endpoint = prometheus.Prometheus(sinks.prometheus_host, sinks.prometheus)
        endpoint.live = lambda: followed.live()
        found.append(endpoint)
    if sinks.tensorboard:
        found.append(boards.TensorBoard(run_dir / "tensorboard"))
    found += _trackers(run_dir, wandb=sinks.wandb, trackio=sinks.trackio, mlflow=sinks.mlflow, swanlab=sinks.swanlab)
    ended = threading.Event()
    threads = [
        threading.Thread(target=_follow, args=(run_dir / tracker.METRICS, sink, ended, every_s), daemon=True)
        for sink in found
    ]
    for thread in threads:
        thread.start()
    try:
        yield followed
    finally:
        ended.set()
        for thread, sink in zip(threads, found, strict=True):
            thread.join(PATIENCE_S)
            if thread.is_alive():
                log.warning("%s did not export the last lines of %s within %g s", _name(sink), run_dir, PATIENCE_S)


def copy(run_dir: str | os.PathLike, *, tensorboard: str = "", **projects: str) -> None:
    """Exports the metrics of a run, finished or not.

    Args:
      tensorboard: folder for event files; existing ones are removed.
      projects: wandb, trackio, mlflow and swanlab, as of `Sinks`.
    """
    check(Sinks(tensorboard=bool(tensorboard), **projects))  # type: ignore[arg-type]
    path = pathlib.Path(run_dir) / tracker.METRICS
    if not path.is_file():
        raise ValueError(f"report: a run directory must contain {tracker.METRICS}, got {run_dir} without it")
    found: list[Sink] = [boards.TensorBoard(pathlib.Path(tensorboard))] if tensorboard else []
    found += _trackers(pathlib.Path(run_dir), **projects)
    for sink in found:
        with contextlib.closing(sink), contextlib.closing(Tail(path, sink.mark)) as tail:
            _hand(tail, sink)


def _trackers(run_dir: pathlib.Path, **projects: str) -> list[Sink]:
    kinds: dict[str, Callable[[str, pathlib.Path], Sink]] = {
        "wandb": accounts.Wandb, "trackio": local.Trackio, "mlflow": experiments.MLflow, "swanlab": swans.SwanLab,
    }  # fmt: skip
    return [kinds[name](project, run_dir) for name, project in projects.items() if project]


def _follow(path: pathlib.Path, sink: Sink, ended: threading.Event, every_s: float) -> None:
    try:
        with contextlib.closing(sink), contextlib.closing(Tail(path, sink.mark)) as tail:
            last = False
            while not last:
                last = ended.is_set()  # checked before reading: all earlier lines are in the file
                _hand(tail, sink)
                ended.wait(every_s)
    except Exception as error:  # a sink must never fail the run
        log.warning("%s stopped following %s: %s: %s", _name(sink), path, type(error).__name__, error)


def _hand(tail: Tail, sink: Sink) -> None:
    void, lines = tail.look()
    if void:
        sink.begin()
    if lines:
        sink.take(lines, tail.mark)


def _name(sink: Sink) -> str:
    return type(sink).__name__
