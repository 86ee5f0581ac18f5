"""Sinks against the real MLflow, in a database of its own, and the real SwanLab, off the network."""

import json
import math

import pytest
from tracked_lines import log, wanted

from areax.adapters import cli
from areax.adapters.tracking import mlflow, run_dir, sinks, swanlab
from areax.adapters.tracking.sinks import Sinks


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    import mlflow

    mlflow.set_tracking_uri(None)  # that of the variable
    return mlflow.MlflowClient()


def runs(store):
    """{id: (run, {name: [(step, value)]})} of the experiment "test", oldest first."""
    home = store.get_experiment_by_name("test").experiment_id
    found = store.search_runs([home], order_by=["attributes.start_time"])
    history = lambda run, name: [(m.step, m.value) for m in store.get_metric_history(run.info.run_id, name)]
    return {run.info.run_id: (run, {name: history(run, name) for name in run.data.metrics}) for run in found}


def off_line(path):
    """{run id: [[(name, step, value), ...] of each folder]} that SwanLab kept on disk, oldest first."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = {}
    for file in sorted(path.glob("swanlog/run-*/*.swanlab"), key=lambda file: file.stat().st_mtime_ns):
        reader = DataStoreReader()
        reader.open(file)
        scalars = [record.scalar for record in map(Record.FromString, reader) if record.HasField("scalar")]
        rows = [(scalar.key, scalar.step, scalar.value.number) for scalar in scalars]
        found.setdefault(file.stem.removeprefix("run-"), []).append(rows)
    return found


def follow(path, every, steps, *, keep=None, plus=0.0, **config):
    with run_dir.open_run(path, keep=keep, **config) as run, sinks.following(path, every, every_s=0.01):
        log(run, steps, plus=plus)


def test_mlflow_resumes_its_run_or_starts_a_new_one_if_lines_were_removed(tmp_path, store):
    every, path = Sinks(mlflow="test"), tmp_path / "sft"
    sinks.check(every)
    follow(path, every, [1, 2], config={"optim": {"lr": 1}, "model": "m" * 9000})
    follow(path, every, [3])
    [(first, (run, values))] = runs(store).items()
    assert run.info.status == "FINISHED" and run.info.run_name == "sft" == run.data.tags["areax.run"]
    assert run.data.params == {"optim.lr": "1", "model": "m" * 6000}
    lines = wanted(path)
    assert lines["grpo/odd"][1] == (2, math.inf)
    seconds = values.pop("grpo/seconds")
    assert [step for step, _ in seconds] == [1, 2, 3]
    largest = max(value for _, value in values["grpo/odd"])  # a database holds no infinity
    finite = lambda each: [(step, min(value, largest)) for step, value in each]
    assert largest > 1e300 and values == {name: finite(each) for name, each in lines.items()}
    follow(path, every, [3], keep={"grpo": 2}, plus=0.5)
    assert runs(store)[first][1]["grpo/reward"] == lines["grpo/reward"]
    second, (_, values) = list(runs(store).items())[1]
    assert json.loads((path / mlflow.STATE).read_text())["id"] == second
    assert values["grpo/reward"] == wanted(path)["grpo/reward"] != lines["grpo/reward"]


def test_mlflow_takes_any_number_of_metrics_and_any_name(tmp_path, store):
    many = {f"own_{i}": float(i) for i in range(1200)} | {"math/pass@k": 0.5}
    with run_dir.open_run(tmp_path / "grpo", config={f"option_{i}": i for i in range(250)}) as run:
        run.log("eval", 1, **many)
    assert cli.main(["report", str(tmp_path / "grpo"), "--mlflow", "test"]) == 0
    [(run, _)] = runs(store).values()
    assert run.data.metrics["eval/math/pass_k"] == 0.5 and run.data.metrics["eval/own_1199"] == 1199
    assert len(run.data.metrics) == len(many) + 1 and len(run.data.params) == 250


def test_mlflow_without_a_store_is_refused_in_one_line(monkeypatch):
    import mlflow

    monkeypatch.setattr(mlflow, "MlflowClient", lambda: (_ for _ in ()).throw(mlflow.MlflowException("no\nstore")))
    with pytest.raises(ValueError, match=r"--track.mlflow needs a store of runs, got \S+ \(no\); pip ins") as e:
        sinks.check(Sinks(mlflow="test"))
    assert "\n" not in str(e.value)


def test_swanlab_resumes_its_run_or_starts_a_new_one_if_lines_were_removed(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "root"))
    every, path = Sinks(swanlab="test"), tmp_path / "sft"
    sinks.check(every)
    follow(path, every, [1, 2], config={"optim": {"lr": 1}})
    follow(path, every, [3])
    [(first, parts)] = off_line(path).items()
    steps = [[step for name, step, _ in part if name == "grpo/reward"] for part in parts]
    assert steps == [[1, 2], [3]]
    follow(path, every, [3], keep={"grpo": 2}, plus=0.5)
    kept = off_line(path)
    assert kept.pop(first) == parts
    [(second, [rows])] = kept.items()
    assert json.loads((path / swanlab.STATE).read_text())["id"] == second
    for name, values in wanted(path).items():
        assert [(step, value) for key, step, value in rows if key == name] == values
    assert capfd.readouterr().out == ""


def test_swanlab_needs_an_account_or_the_mode(tmp_path, monkeypatch):
    for name, value in {"SWANLAB_ROOT": str(tmp_path), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--track.swanlab needs an account, got no key; `swanlab login`"):
        sinks.check(Sinks(swanlab="test"))
    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 21)
    sinks.check(Sinks(swanlab="test"))
