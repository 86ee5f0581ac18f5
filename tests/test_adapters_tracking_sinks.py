"""Sinks follow metrics.jsonl while it grows, is truncated and grows again, within one process and across several."""

import contextlib
import importlib
import json
import math
import os
import socket
import sqlite3
import struct
import sys
import threading
import time
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracked_lines import log, wanted

from areax.adapters import cli
from areax.adapters.tracking import mlflow, prometheus, run_dir, sinks, swanlab, tail, trackio, wandb
from areax.adapters.tracking.sinks import Sinks

DAMAGED = (
    "", "[]", "3", "{", "[" * 100_000, '{"project": "mine"}', "\x00\ufffd",
    '{"project": "mine", "experiment": "mine", "id": 3, "name": null, "lines": "1", "bytes": 1.5, "xxh3_128": ""}',
)  # fmt: skip
FAST = 0.01  # seconds between polls


def until(holds):
    limit = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


# ---------------------------------------------------------------- third-party readers


def boards(folder):
    """({tag: [(step, value)]}, {tag: [(step, limits, counts)]}) as read by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    scalars = {tag: [(e.step, e.value) for e in own.Scalars(tag)] for tag in own.Tags()["scalars"]}
    shapes = {tag: own.Histograms(tag) for tag in own.Tags()["histograms"]}
    value = lambda h: (h.bucket_limit, h.bucket)
    return scalars, {tag: [(e.step, *value(e.histogram_value)) for e in events] for tag, events in shapes.items()}


def scraped(port):
    """{sample: value} and the metric types, as parsed by the Prometheus client."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    assert len({family.name for family in families}) == len(families)
    return {s.name: s.value for f in families for s in f.samples}, {f.name: f.type for f in families}


def account(path):
    """{id: list of logged dictionaries} of the files left by offline wandb runs, oldest first."""
    from wandb.proto import wandb_internal_pb2

    runs = {}
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        own = runs.setdefault(file.stem.removeprefix("run-"), [])
        for data in leveldb(file.read_bytes()[7:]):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                own.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return runs


def database(folder):
    """{(id, name) of a run: (group, [(step, {name: value})])} of trackio's databases, oldest run first."""
    runs = {}
    for path in folder.glob("*.db"):
        with contextlib.closing(sqlite3.connect(path)) as file:
            groups = {
                run: json.loads(text)["_Group"] for run, text in file.execute("SELECT run_id, config FROM configs")
            }
            for run, *own in file.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id"):
                runs.setdefault((run, own[0]), (groups[run], []))[1].append((own[1], json.loads(own[2])))
    return runs


def leveldb(data):
    """The records of a LevelDB log; its 32 KiB blocks are counted from 7 bytes before `data`."""
    at, whole = 0, b""
    while at + 7 <= len(data):
        left = 32768 - (at + 7) % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):
            return  # still being written
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield whole
            whole = b""


# ---------------------------------------------------------------- following the file


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 25)),
            st.tuples(st.sampled_from(["cut", "truncate"]), st.integers(0, 6)),
            st.tuples(st.just("look"), st.just(0)),
            st.tuples(st.just("again"), st.just(0)),
        ),
        max_size=25,
    )
)
def test_a_tail_has_exactly_the_lines_of_the_file(tmp_path_factory, events):
    """Whatever happens to the file: appended in pieces, replaced by a prefix, truncated, or read by a new process."""
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    source = b"".join(json.dumps({"step": i, "pad": "x" * (i % 5)}).encode() + b"\n" for i in range(100))
    written, own, has = 0, tail.Tail(path), []

    def look():
        void, lines = own.look()
        if void:
            has.clear()
        has.extend(lines)

    for what, n in events:
        if what == "write":
            with open(path, "ab") as file:
                file.write(source[written : written + n])
            written += n
        elif what in ("cut", "truncate") and path.exists():
            kept = b"".join(path.read_bytes().splitlines(keepends=True)[:n])
            written = len(kept)
            if what == "cut":
                path.with_name("new").write_bytes(kept)
                os.replace(path.with_name("new"), path)
            else:
                look()  # overwriting in place between two polls cannot be detected
                os.truncate(path, written)
                look()
        elif what == "look":
            look()
        elif what == "again":
            own.close()
            own = tail.Tail(path, own.mark)
    look()
    own.close()
    text = path.read_bytes() if path.exists() else b""
    assert has == [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def test_replaced_lines_are_detected(tmp_path):
    path = tmp_path / "a"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with contextlib.closing(tail.Tail(path)) as first:
        assert first.look() == (True, [{"a": 1}, {"a": 2}]) and first.look() == (False, [])
        for i, others in enumerate(([1, 2, 3], [1, 4, 5, 6]), 1):  # longer, and never polled while short
            new = path.with_name("new")
            new.write_text("".join(f'{{"a": {n}}}\n' for n in others))
            os.replace(new, path)
            assert first.look() == ((False, [{"a": 3}]) if i == 1 else (True, [{"a": n} for n in others]))
    path.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n{"a": 5}\n')
    with contextlib.closing(tail.Tail(path, first.mark)) as second:
        assert second.look() == (True, [{"a": n} for n in (1, 3, 4, 5)])
        with open(path, "a") as file:
            file.write("[]\n")
        with pytest.raises(ValueError, match="a:5: every line must be one JSON object"):
            second.look()


# ---------------------------------------------------------------- each sink


def test_tensorboard_gets_each_line_once(tmp_path):
    every = Sinks(tensorboard=True)
    with run_dir.open_run(tmp_path) as run, sinks.following(tmp_path, every, every_s=FAST):
        log(run, range(1, 6))
        until(lambda: (tmp_path / "tensorboard").exists() and len(boards(tmp_path / "tensorboard")[0]) == 3)
        until(lambda: len(boards(tmp_path / "tensorboard")[0]["grpo/reward"]) == 5)
        with run_dir.open_run(tmp_path, keep={"grpo": 3}) as again:  # truncated while it is followed
            log(again, [4, 5], plus=0.5)
            log(again, [5], kind="eval")
    scalars, shapes = boards(tmp_path / "tensorboard")
    assert scalars == wanted(tmp_path) and len(scalars["grpo/reward"]) == 5
    assert scalars["grpo/reward"][3:] == [(4, 4.5), (5, 5.5)] and scalars["grpo/odd"][1] == (2, math.inf)
    with run_dir.open_run(tmp_path, keep={"grpo": 2}) as run, sinks.following(tmp_path, every, every_s=FAST):
        log(run, [3], plus=0.75)
    scalars, shapes = boards(tmp_path / "tensorboard")
    assert scalars == wanted(tmp_path) and scalars["grpo/reward"] == [(1, 1), (2, 2), (3, 3.75)]
    found = [(step, limits[-2:], counts[-2:]) for step, limits, counts in shapes["grpo/staleness_hist"]]
    assert found == [(step, [1, 2], [step, 2]) for step in (1, 2, 3)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_prometheus_exports_the_newest_values(tmp_path):
    port = free_port()
    every = Sinks(prometheus=port)
    with run_dir.open_run(tmp_path) as run, sinks.following(tmp_path, every, every_s=FAST) as followed:
        followed.live = lambda: {"fleet_servers": 2, "fleet_requests_total": 7}
        log(run, range(1, 6))
        run.log("eval", 5, **{"accuracy of x-1": 0.5})
        until(lambda: "areax_eval_accuracy_of_x_1" in scraped(port)[0])
        found, kinds = scraped(port)
        assert found["areax_grpo_reward"] == 5 and found["areax_grpo_odd"] == 0.25 and found["areax_grpo_step"] == 5
        assert found["areax_grpo_refused_total"] == 15 and "areax_grpo_missing" not in found
        assert found["areax_fleet_servers"] == 2 and found["areax_fleet_requests_total"] == 7
        assert kinds["areax_grpo_reward"] == "gauge" and kinds["areax_grpo_refused"] == "counter"
        with run_dir.open_run(tmp_path, keep={"grpo": 2, "eval": 2}):
            pass
        until(lambda: "areax_eval_accuracy_of_x_1" not in scraped(port)[0])
        found, _ = scraped(port)
        assert found["areax_grpo_reward"] == 2 and found["areax_grpo_odd"] == math.inf
        assert found["areax_grpo_refused_total"] == 3
    with pytest.raises(OSError):
        scraped(port)
    with run_dir.open_run(tmp_path) as run, sinks.following(tmp_path, every, every_s=FAST):
        until(lambda: "areax_grpo_refused_total" in scraped(port)[0])
        log(run, [3])
        until(lambda: scraped(port)[0]["areax_grpo_refused_total"] == 6)  # counters continue from the file


def test_prometheus_listens_on_loopback_only():
    endpoint = prometheus.Prometheus(Sinks().prometheus_host, 0)
    assert endpoint._server.server_address[0] == "127.0.0.1"
    endpoint.close()


@pytest.mark.slow
def test_wandb_resumes_its_run_or_starts_a_new_one_if_lines_were_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    every = Sinks(wandb="test")
    follow = lambda: sinks.following(tmp_path, every, every_s=FAST)
    with run_dir.open_run(tmp_path, config={"lr": 1}) as run, follow():
        log(run, [1, 2])
    with run_dir.open_run(tmp_path) as run, follow():  # no lines were removed: the same wandb run
        log(run, [3])
    lengths = lambda: [len(lines) for lines in account(tmp_path).values()]
    until(lambda: lengths() == [3])  # written by a background process of wandb
    [(first, lines)] = account(tmp_path).items()
    assert [(line["_step"], line["grpo/step"]) for line in lines] == [(0, 1), (1, 2), (2, 3)]
    with run_dir.open_run(tmp_path, keep={"grpo": 2}) as run, follow():
        log(run, [3], plus=0.5)
    until(lambda: lengths() == [3, 3])
    runs = account(tmp_path)
    assert runs.pop(first) == lines
    [(second, lines)] = runs.items()
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == second
    for tag, values in wanted(tmp_path).items():
        assert [(line["grpo/step"], float(line[tag])) for line in lines] == values
    shape = [lines[2][f"grpo/staleness_hist/{part}"] for part in ("bins", "values", "_type")]
    assert shape == [[0, 1, 2], [3, 2], "histogram"]


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory):
    """Where trackio keeps its databases, which it reads once, when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder := tmp_path_factory.mktemp("trackio")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        importlib.import_module("trackio")
        yield folder


def test_trackio_resumes_its_run_or_starts_a_new_one_if_lines_were_removed(tmp_path, trackio_folder, capsys):
    every = Sinks(trackio="test")
    follow = lambda: sinks.following(tmp_path, every, every_s=FAST)
    with run_dir.open_run(tmp_path, config={"lr": 1}) as run, follow():
        log(run, [1, 2])
    with run_dir.open_run(tmp_path) as run, follow():  # no lines were removed: the same trackio run
        log(run, [3])
    [(first, (group, lines))] = database(trackio_folder).items()
    assert [step for step, _ in lines] == [1, 2, 3] and group == tmp_path.name and first[1].startswith(f"{group}-")
    with run_dir.open_run(tmp_path, keep={"grpo": 2}) as run, follow():
        log(run, [3], plus=0.5)
    runs = database(trackio_folder)
    assert runs.pop(first) == (group, lines)
    [(second, (group, lines))] = runs.items()
    assert json.loads((tmp_path / "trackio.json").read_text())["name"] == second[1] and group == tmp_path.name
    for tag, values in wanted(tmp_path).items():
        assert [(step, value(line[tag])) for step, line in lines] == values
    assert lines[2][1]["grpo/staleness_hist"] == {"_type": "trackio.histogram", "bins": [0, 1, 2], "values": [3, 2]}
    said = capsys.readouterr()
    assert said.out == "" and "trackio show" in said.err
    assert cli.main(["report", str(tmp_path), "--trackio", "another"]) == 0
    [copied] = [own for name, (_, own) in database(trackio_folder).items() if name not in (first, second)]
    assert copied == lines


def value(stored):
    """A number as trackio stores it: JSON has no infinity."""
    return math.inf if stored == "Infinity" else stored


# ---------------------------------------------------------------- failures


def test_a_failing_sink_does_not_affect_the_run_or_other_sinks(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    port = free_port()
    every = Sinks(tensorboard=True, prometheus=port)
    with run_dir.open_run(tmp_path) as run, sinks.following(tmp_path, every, every_s=FAST):
        until(lambda: "TensorBoard stopped following" in caplog.text)
        log(run, [1, 2])
        until(lambda: scraped(port)[0].get("areax_grpo_reward") == 2)
    assert (
        len(list(run_dir.read_lines(tmp_path / "metrics.jsonl"))) == 2 and caplog.text.count("stopped following") == 1
    )


def test_a_hanging_sink_does_not_block_the_end_of_a_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sinks, "PATIENCE_S", 0.05)
    go, done = threading.Event(), threading.Event()
    monkeypatch.setattr(sinks.boards.TensorBoard, "take", lambda self, lines, mark: go.wait(30))
    close = sinks.boards.TensorBoard.close
    monkeypatch.setattr(sinks.boards.TensorBoard, "close", lambda self: (close(self), self._writer and done.set()))
    with run_dir.open_run(tmp_path) as run, sinks.following(tmp_path, Sinks(tensorboard=True), every_s=FAST):
        log(run, [1])
    assert "TensorBoard did not export the last lines" in caplog.text
    go.set()
    assert done.wait(30)


def test_quiet_processes_have_no_sinks(tmp_path):
    port = free_port()
    with sinks.following(tmp_path, Sinks(tensorboard=True, prometheus=port), quiet=True):
        with pytest.raises(OSError):
            scraped(port)
    assert list(tmp_path.iterdir()) == []


def test_bad_options_give_a_one_line_error(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--track.prometheus must be a port from 1 to 65535, or 0 for none, got 70000"):
        Sinks(prometheus=70000)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ValueError, match=f"must be a free port of 127.0.0.1, got {port} .*already in use"):
            sinks.check(Sinks(prometheus=port))
    sinks.check(Sinks(prometheus=port))
    for extra, package in (
        ("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio"), ("mlflow", "mlflow"),
        ("swanlab", "swanlab"),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ValueError, match=rf"--track.{extra} needs {package}.*pip install 'areax\[{extra}\]'"):
            sinks.check(Sinks(**{extra: "x"}))
    sinks.check(Sinks())


def test_report_exports_a_finished_run_to_tensorboard(tmp_path, capsys):
    with run_dir.open_run(tmp_path / "run") as run:
        log(run, range(1, 4))
    assert cli.main(["report", str(tmp_path / "run"), "--tensorboard", str(tmp_path / "boards")]) == 0
    assert boards(tmp_path / "boards")[0] == wanted(tmp_path / "run")
    assert cli.main(["report", str(tmp_path), "--tensorboard", str(tmp_path / "boards")]) == 2
    assert "must contain metrics.jsonl, got" in capsys.readouterr().err


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_state_is_a_warning(text, tmp_path, caplog):
    """The file where a sink left off: the run goes on, and the sink starts a new run with all lines."""
    for sink, name in (
        (wandb.Wandb, wandb.STATE), (trackio.Trackio, trackio.STATE), (mlflow.MLflow, mlflow.STATE),
        (swanlab.SwanLab, swanlab.STATE),
    ):  # fmt: skip
        caplog.clear()
        (tmp_path / name).write_text(text)
        assert sink("mine", tmp_path).mark == tail.START
        [record] = caplog.records
        said = record.getMessage()
        assert said.startswith(f"{tmp_path / name} is damaged (") and "\n" not in said
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()  # cannot be read
        assert sink("mine", tmp_path).mark == tail.START
        (tmp_path / name).rmdir()
