import dataclasses
import errno
import json
import math
import os
import resource
import stat
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.adapters.tracking import run_dir


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def sample(run, step, **changes):
    given = dict(version=step, prompt="1+1", text="2", reward=1.0, finish="stop", kind="grpo")
    given |= dict(tokens=["2"], logp=[-0.5], version_of_token=[step])
    run.sample(step, **(given | changes))


def test_a_line_contains_what_was_logged(tmp_path):
    hist = {"edges": np.arange(3.0), "counts": jnp.array([1, 2])}
    with run_dir.open_run(tmp_path / "a" / "run", config={"lr": np.float32(0.5)}) as run:
        run.log("sft", np.int64(3), loss=jnp.float32(0.25), tokens=np.int32(7), ok=True, half=jnp.bfloat16(1.5))
        run.log("grpo", 0, length_hist=hist, missing=None)
    first, second = lines(tmp_path / "a" / "run" / "metrics.jsonl")
    assert first.pop("seconds") >= 0
    assert first == {"step": 3, "kind": "sft", "loss": 0.25, "tokens": 7, "ok": True, "half": 1.5}
    assert second["length_hist"] == {"edges": [0.0, 1.0, 2.0], "counts": [1, 2]} and second["missing"] is None
    assert json.loads((tmp_path / "a" / "run" / "config.json").read_text()) == {"lr": 0.5}


def test_non_finite_numbers_are_null_and_listed_by_name(tmp_path):
    with run_dir.open_run(tmp_path) as run:
        run.log("grpo", 1, a=float("nan"), b=jnp.float32(jnp.inf), c=-np.inf, d=1.0)
        sample(run, 1, reward=float("nan"), logp=[-math.inf])
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["a"], line["b"], line["c"], line["d"]) == (None, None, None, 1.0)
    assert line["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (kept,) = lines(tmp_path / "samples.jsonl")
    assert kept["reward"] is None and kept["logp"] == [None]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"x": np.zeros(3)}, "x must be a number"),
        ({"x": "fast"}, "x must be a number"),
        ({"seconds": 3.0}, "must not be named"),
        ({"h": {"edges": [0, 1], "counts": [1, 2]}}, "histogram h needs"),
        ({"h": {"edges": [1, 0], "counts": [1]}}, "histogram h needs"),
        ({"h": {"edges": [0, math.inf], "counts": [1]}}, "histogram h needs"),
        ({"h": {}}, "histogram h needs"),
    ],
)
def test_invalid_values_are_refused_and_leave_no_line(tmp_path, values, said):
    with run_dir.open_run(tmp_path) as run:
        with pytest.raises(ValueError, match=said):
            run.log("grpo", 1, **values)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_sample_needs_one_entry_per_token(tmp_path):
    with run_dir.open_run(tmp_path) as run:
        with pytest.raises(ValueError, match="trainer_logp needs one entry per token, got 2 for 1"):
            sample(run, 0, trainer_logp=[0.0, 0.0])
        sample(run, 0, trainer_logp=np.float32([-0.25]), text="\ud800 half a pair", adv=jnp.float32(2))
    (line,) = run_dir.read_lines(tmp_path / "samples.jsonl")
    assert line["trainer_logp"] == [-0.25] and line["adv"] == 2.0 and line["text"] == "\ud800 half a pair"


def test_lines_are_on_disk_before_the_run_is_closed(tmp_path):
    with run_dir.open_run(tmp_path) as run:
        run.log("sft", 0, loss=1.0)
        sample(run, 0)
        assert len(lines(tmp_path / "metrics.jsonl")) == len(lines(tmp_path / "samples.jsonl")) == 1


def test_a_disk_that_takes_no_more_is_named_with_the_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError) as raised, run_dir.open_run(tmp_path) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            run.log("sft", 0, loss=1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / "metrics.jsonl"))


def test_lines_of_concurrent_threads_are_not_mixed(tmp_path):
    with run_dir.open_run(tmp_path) as run:
        work = lambda k: [run.log("grpo", step, worker=k, pad=0.123456789) for step in range(50)]
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {(line["worker"], line["step"]) for line in run_dir.read_lines(tmp_path / "metrics.jsonl")}
    assert found == {(k, step) for k in range(4) for step in range(50)}


def test_resuming_removes_lines_after_the_kept_step_of_each_kind(tmp_path):
    with run_dir.open_run(tmp_path) as run:
        for step in range(5):
            run.log("sft", step, loss=1.0)
            run.log("grpo", step, loss=2.0)
            sample(run, step)
    with run_dir.open_run(tmp_path, keep={"grpo": 2}) as run:
        run.log("grpo", 3, loss=3.0)
    steps = lambda kind: [x["step"] for x in lines(tmp_path / "metrics.jsonl") if x["kind"] == kind]
    assert steps("sft") == [0, 1, 2, 3, 4] and steps("grpo") == [0, 1, 2, 3]
    assert [x["step"] for x in lines(tmp_path / "samples.jsonl")] == [0, 1, 2]
    with run_dir.open_run(tmp_path, keep={"grpo": -1, "sft": -1}):
        pass
    assert lines(tmp_path / "metrics.jsonl") == lines(tmp_path / "samples.jsonl") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_seconds_continue_after_resuming(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "kind": "sft", "seconds": 1000.0}\n')
    with run_dir.open_run(tmp_path) as run:
        run.log("sft", 1)
    assert 1000 <= lines(tmp_path / "metrics.jsonl")[1]["seconds"] < 1100


def test_reopening_does_not_disturb_an_open_run(tmp_path):
    with run_dir.open_run(tmp_path) as outer:
        outer.log("sft", 0)
        with run_dir.open_run(tmp_path) as inner:
            inner.log("grpo", 0)
        outer.log("sft", 1)
    assert [x["kind"] for x in lines(tmp_path / "metrics.jsonl")] == ["sft", "grpo", "sft"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    with run_dir.open_run(path) as run:
        for step in range(3):
            run.log("sft", step, loss=0.5)
    return path


@given(cut=st.integers(0, 300))
def test_a_crash_at_any_byte_loses_at_most_the_last_line(written, tmp_path_factory, cut):
    whole = (written / "metrics.jsonl").read_bytes()
    left = whole[:cut]
    path = tmp_path_factory.mktemp("crashed")
    (path / "metrics.jsonl").write_bytes(left)
    complete = left.count(b"\n")
    assert [x["step"] for x in run_dir.read_lines(path / "metrics.jsonl")] == list(range(complete))
    with run_dir.open_run(path) as run:
        run.log("sft", complete, loss=0.5)
    assert [x["step"] for x in lines(path / "metrics.jsonl")] == list(range(complete + 1))


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + '{"a":' * 100_000 + '\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r'metrics.jsonl:2: every line must be one JSON object, got .{"a":'):
        list(run_dir.read_lines(path))
    path.write_text('{"step": 0}\n[1, 2]\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: every line must be one JSON object, got '\[1, 2\]'"):
        list(run_dir.read_lines(path))
    with pytest.raises(ValueError, match="metrics.jsonl:2"), run_dir.open_run(tmp_path):
        pass
    assert path.read_text().count("\n") == 3


def test_a_file_is_not_accepted_as_run_directory(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="a run needs a directory, got the file"), run_dir.open_run(tmp_path / "run"):
        pass


@dataclasses.dataclass(frozen=True)
class Optim:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)


@dataclasses.dataclass(frozen=True)
class Config:
    model: Path
    optim: Optim = Optim()
    limit: float = math.inf


def test_json_files_are_written_atomically(tmp_path):
    path = tmp_path / "config.json"
    run_dir.write_json(path, Config(Path("runs/demo")))
    want = {"model": "runs/demo", "optim": {"learning_rate": 1e-3, "betas": [0.9, 0.99]}, "limit": "inf"}
    assert json.loads(path.read_text()) == want
    with pytest.raises(ValueError, match="values must be text, numbers, lists, mappings or dataclasses, got <object"):
        run_dir.write_json(path, {"a": 1, "b": object()})
    assert json.loads(path.read_text()) == want and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """As `areax report --out /dev/stdout`, which may be a pipe."""
    path = tmp_path / "out"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        run_dir.write_text(path, "text")
        assert os.read(reader, 99) == b"text" and stat.S_ISFIFO(path.stat().st_mode)
    finally:
        os.close(reader)
    assert os.listdir(tmp_path) == ["out"]
