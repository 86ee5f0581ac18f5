"""docs/debug-distributed.md: a job of two processes is broken in the four ways of the page and prints what it shows."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import jobs
import pytest
import servers
import skills
import tiny

PAGE = (skills.DOCS / "debug-distributed.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
TIMEOUT_S = 240


def shown(text, count=1):
    """The page's expected lines after a command, as patterns: `...` stands for anything in a line."""
    at = [i for i, (language, block) in enumerate(BLOCKS) if not language and block.strip() == text]
    assert len(at) == 1, f"{text} is not a command of the page"
    expected = [block for language, block in BLOCKS[at[0] + 1 :] if language == "text"][:count]
    return [".*?".join(map(re.escape, block.rstrip().split("..."))) for block in expected]


def command(line):
    """The words behind `areax` of one of the page's commands, for Python."""
    return ["-m", "areax", *shlex.split(line.partition("areax ")[2])]


@pytest.fixture
def here(tmp_path, monkeypatch):
    [faults] = [block for language, block in BLOCKS if language == "python"]
    (tmp_path / "faults.py").write_text(faults)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(path):
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def launched(line, log):
    """`areax launch`, whose output and that of process 0 goes to a file; ended with its processes after the block."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command(line)], env={**os.environ, **jobs.settings(1)}, stdout=file, stderr=file
        )
    with servers.ended(process):
        yield process


@contextlib.contextmanager
def started(commands, logs, **more):
    running = jobs.start(commands, logs, **more)
    try:
        yield running
    finally:
        jobs.end(running)


@pytest.mark.docs
def test_a_missing_process_is_the_one_that_says_nothing(here):
    line = "AREAX_COORDINATOR=127.0.0.1:9876 AREAX_PROCESSES=2 AREAX_PROCESS=0 areax train faults.py"
    [expected] = shown(line)
    log = here / "logs/0.log"
    with started([command(line), ["-c", ""]], here / "logs"):  # process 1 ends before it joins
        jobs.until(lambda: "waits at" in read(log), TIMEOUT_S)
    assert re.fullmatch(expected.replace("127\\.0\\.0\\.1:9876", r"127\.0\.0\.1:\d+"), read(log).strip())
    assert read(here / "logs/1.log") == ""


@pytest.mark.docs
def test_other_weights_in_one_process_are_refused_by_the_tensor(here):
    line = "areax train sft --model model --data rows.jsonl --mesh.dp 2 --steps 1 --batch 2 --length 32 --out run"
    [expected] = shown(line)
    for i in range(2):
        tiny.model(here / f"host-{i}/model", seed=i)
        tiny.rows(here / f"host-{i}/rows.jsonl", [{"prompt": "1+1", "completion": "2"}] * 4)
    folders = [here / "host-0", here / "host-1"]
    with started([command(line)] * 2, here / "logs", folders=folders) as running:
        codes = {process.wait(TIMEOUT_S) for process in running}
    said = read(here / "logs/0.log") + read(here / "logs/1.log")
    assert {2} <= codes <= {2, 3} and re.search(f"^{expected}$", said, re.M), said  # of the first to say so
    assert not (here / "host-0/run/model").exists()


@pytest.mark.docs
def test_stacks_show_which_process_the_others_wait_for(here):
    line = "areax launch --processes 2 --logs logs -- train faults.py"
    waiting, cause = shown(line, 2)
    first, second = here / "launch.log", here / "logs/process-1.log"
    with launched(line, first) as process:
        jobs.until(lambda: "process 0 has joined" in read(first) and "process 1 has joined" in read(second), TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while not (re.search(waiting, read(first)) and re.search(cause, read(second))):
            assert process.poll() is None and time.monotonic() < deadline, read(first) + read(second)
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
        assert process.poll() is None  # it goes on: once the file is there, it ends
        (here / "rows.jsonl").touch()
        assert process.wait(TIMEOUT_S) == 0
    assert "wait_for" not in read(first) and "anyone" not in read(second)


@pytest.mark.docs
def test_replicas_that_differ_are_named_with_their_processes(here):
    line = "areax launch --processes 2 --logs logs -- train faults.py --fault diverge"
    [expected] = shown(line)
    with launched(line, here / "launch.log") as process:
        assert process.wait(TIMEOUT_S) in (2, 3)
    said = read(here / "launch.log") + read(here / "logs/process-1.log")
    assert re.search(f"^{expected}$", said, re.M), said
