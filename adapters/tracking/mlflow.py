"""MLflow sink: a run's numbers as `kind/name` over the run's steps, in MLflow's local store or on a server."""

from __future__ import annotations

import json
import pathlib
import re
import time
from typing import Any

from . import run_dir as tracker
from . import tail
from .tail import START, Mark

STATE = "mlflow.json"  # in the run directory: MLflow run, experiment, and the position in metrics.jsonl
MOST, MOST_PARAMS = 1000, 100  # metrics and parameters that a request may have
LONGEST = 6000  # letters of a parameter


class MLflow:
    """An MLflow run, resumed when the run resumes.

    MLFLOW_TRACKING_URI says where it is, otherwise it is where MLflow keeps runs by default, in the working directory.
    Written numbers cannot be removed: if lines have since been removed from the file, a new MLflow run with the same
    tag `areax.run` gets the whole file. MLflow has no histograms; they are left out.
    """

    def __init__(self, experiment: str, run_dir: pathlib.Path):
        self.experiment, self.run_dir = experiment, run_dir
        self._client: Any = None
        self._id, self.mark = "", START
        state = tail.saved(run_dir / STATE, id=str, experiment=str)
        if state and state["experiment"] == experiment:
            self._id, self.mark = state["id"], Mark(state["bytes"], state["xxh3_128"])

    def begin(self) -> None:
        """Starts over with a new MLflow run."""
        self.close()
        self._id = ""

    def take(self, lines: list[dict], mark: Mark) -> None:
        from mlflow.entities import Metric

        self._client = self._client or self._open()
        now = int(1000 * time.time())
        metrics = [
            Metric(_named(f"{line.get('kind', 'run')}/{name}"), value, now, line.get("step", 0))
            for line in lines
            for name, value in {"seconds": line.get("seconds", 0.0), **tracker.numbers(line)}.items()
        ]
        for i in range(0, len(metrics), MOST):
            self._client.log_batch(self._id, metrics=metrics[i : i + MOST])
        state = {"experiment": self.experiment, "id": self._id, **mark._asdict()}
        tracker.write_json(self.run_dir / STATE, state)

    def close(self) -> None:
        if self._client:
            self._client.set_terminated(self._id)
            self._client = None

    def _open(self) -> Any:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient()
        if self._id:
            client.update_run(self._id, status="RUNNING")
            return client
        found = client.get_experiment_by_name(self.experiment)
        home = found.experiment_id if found else client.create_experiment(self.experiment)
        name = self.run_dir.name
        self._id = client.create_run(home, run_name=name, tags={"areax.run": name}).info.run_id
        config = self.run_dir / tracker.CONFIG
        options = _flat(json.loads(config.read_text(encoding="utf-8"))) if config.exists() else {}
        params = [Param(name, str(value)[:LONGEST]) for name, value in options.items()]
        for i in range(0, len(params), MOST_PARAMS):
            client.log_batch(self._id, params=params[i : i + MOST_PARAMS])
        return client


def check() -> None:
    """Raises ValueError if MLflow has no store of runs where MLFLOW_TRACKING_URI says, or its default is."""
    import mlflow

    try:
        mlflow.MlflowClient()
    except mlflow.MlflowException as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"--track.mlflow needs a store of runs, got {mlflow.get_tracking_uri()} ({why:.100}); pip install mlflow "
            "for a local one, or set MLFLOW_TRACKING_URI to a server's address"
        ) from error


def _flat(options: dict, at: str = "") -> dict[str, Any]:
    """{"optim.lr": value} of nested options."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= _flat(value, f"{at}{name}.") if isinstance(value, dict) else {f"{at}{name}": value}
    return found


def _named(metric: str) -> str:
    """The name with "_" in place of what MLflow takes in none, such as "@"."""
    return re.sub(r"[^\w\-. /:]", "_", metric, flags=re.ASCII)
