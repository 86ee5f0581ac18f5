"""What a killed run leaves: no process, no memory, nothing half-written; and what damage to its files does."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jobs
import numpy as np
import pytest
import tiny

from areax.adapters import cli
from areax.adapters.tracking import run_dir
from areax.recipes.shared import common
from areax.rollout.tasks import arithmetic

MEMORY = (Path("/dev/shm"), Path(tempfile.gettempdir()))
GONE_S = 10.0
NEWS = ("sft ", "loading ", "writing ")  # beginnings of lines on stderr that are no errors
# A reward that neither ends with its stream nor by SIGTERM.
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def score(text, row):
    if row["prompt"] == "0+0":
        time.sleep(600)
    return float(len(text))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", [*arithmetic.splits()["train"][:40], *[{"prompt": "0+0"}] * 10])
    (path / "rewards.py").write_text(STUBBORN)
    return path


def started(place, out, *options):
    command = [sys.executable, "-m", "areax", "train", "grpo", "--model", str(place / "model")]
    command += [
        "--data",
        str(place / "rows.jsonl"),
        "--reward",
        f"{place}/rewards.py:score",
        "--out",
        str(out),
        "--steps",
        "100000",
        "--length",
        "32",
        "--rows",
        "4",
    ]
    command += ["--groups", "2", "--group-size", "4", "--sampling.max-new-tokens", "4", "--max-concurrent", "8"]
    command += ["--serve.slots", "8", "--serve.context", "64", "--optim.warmup", "1", *options]
    with open(place / "log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def processes():
    """{process: (its parent, when it started)} of all that run."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *rest = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if state != "Z":
            found[int(stat.parent.name)] = int(parent), rest[17]
    return found


def family(pid):
    """{process: when it started} of a process and all below it."""
    running, below = processes(), {pid}
    while more := {child for child, (parent, _) in running.items() if parent in below} - below:
        below |= more
    return {process: running[process][1] for process in below if process in running}


def left(known):
    """Those of a family that still run."""
    now = processes()
    return [process for process, when in known.items() if process in now and now[process][1] == when]


def orphans():
    """Folders in memory and among temporary files that no process has a file open in.

    Looks from outside: asking for the lock of a folder that another test's process is about to lock would take it.
    """
    found, opened = {path.parent for root in MEMORY for path in root.glob("areax-*/.lock")}, set()
    for process in processes():
        with contextlib.suppress(OSError):  # it has just ended
            for number in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(FileNotFoundError):  # it has just closed it
                    opened.add(Path(os.readlink(f"/proc/{process}/fd/{number}")).parent)
    return found - opened


def killed(process):
    """Kills a trainer and waits until nothing of it is left; returns what is after GONE_S."""
    known = family(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + GONE_S
    while (rest := left(known)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [Path(f"/proc/{p}/cmdline").read_text().replace("\0", " ") for p in rest]


@pytest.mark.slow
def test_nothing_outlives_a_killed_run(place):
    """Not the server, a reward worker that hangs and ignores SIGTERM, or the versions in memory."""
    out, before = place / "run", orphans()
    process = started(place, out)
    metrics = out / "metrics.jsonl"
    jobs.until(lambda: process.poll() is not None or metrics.exists() and metrics.read_text().count("\n") > 1)
    assert len(family(process.pid)) >= 3  # a server and reward workers
    with pytest.raises(ValueError, match="another process is training in this directory"):
        with common.run_directory(str(out)):
            pass
    assert killed(process) == []
    jobs.until(lambda: orphans() <= before, GONE_S)
    with common.run_directory(str(out)):
        pass


INSTANTS = [pytest.param(n, marks=pytest.mark.long if n in (5, 12) else pytest.mark.wide) for n in range(20)]


@pytest.mark.sweep
@pytest.mark.parametrize("n", INSTANTS)
def test_a_run_killed_at_any_instant_leaves_nothing_and_goes_on(place, n):
    """From the first import to a step; saved by time and published all along."""
    out, before = place / "again", orphans()
    published = place / "versions"
    process = started(place, out, "--save-every", "1", "--published", str(published), "--eta", "1")
    wait = float(np.random.default_rng(n).uniform(0.3, 12))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(wait)
    assert killed(process) == []
    jobs.until(lambda: orphans() <= before, GONE_S)
    with common.run_directory(str(out)):  # the next start removes what was half-written
        assert not list(out.glob(".*.tmp"))
    if (out / "metrics.jsonl").exists():
        steps = [line["step"] for line in run_dir.read_lines(out / "metrics.jsonl")]
        assert steps == sorted(set(steps))


@pytest.mark.long
def test_a_flipped_bit_in_any_file_of_a_run_is_named_or_changes_nothing(place, capsys, caplog):
    """Resumed after it, a run gives the same model, from the state before if that is what was damaged, or refuses."""
    rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in arithmetic.splits()["train"][:40]]
    tiny.rows(place / "pairs.jsonl", rows)

    def trained(out, steps):
        """(exit code, what it printed to stderr, hashes of the model's tensors)."""
        caplog.clear()
        command = ["train", "sft", "--model", f"{place}/model", "--data", f"{place}/pairs.jsonl", "--out", str(out)]
        command += ["--steps", str(steps), "--batch", "8", "--length", "64", "--rows", "4", "--save-every", "1"]
        code = cli.main([*command, "--optim.schedule", "constant"])
        lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith(NEWS)]
        errors = [line for line in lines if "with other options, --steps 2 -> 4;" not in line]
        return code, errors, json.loads((out / "model/manifest.json").read_text())["tensors"] if code == 0 else None

    trained(place / "parts", 2)
    shutil.copytree(place / "parts", place / "whole")
    wanted = trained(place / "whole", 4)[2]
    rng = np.random.default_rng(0)
    names = [file.relative_to(place / "parts") for file in sorted((place / "parts").rglob("*")) if file.is_file()]
    for name in names:
        data = bytearray((place / "parts" / name).read_bytes())
        if not data or name.is_relative_to("state/1"):
            continue
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        shutil.copytree(place / "parts", place / "flipped")
        (place / "flipped" / name).write_bytes(data)
        code, errors, tensors = trained(place / "flipped", 4)
        assert code in (0, 2) and len(errors) == (code == 2), (name, errors)
        assert code == 2 or tensors == wanted, name
        named = "set aside, using 1 instead" in caplog.text
        assert named == name.is_relative_to("state/2"), name
        shutil.rmtree(place / "flipped")
