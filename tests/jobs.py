"""Starts several processes of a job on this machine, joined by the AREAX_ environment variables."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def start(commands, logs, *, devices=1, folders=None):
    """Starts `python *words` for each command, in its folder if there are any; process i writes logs/i.log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    logs.mkdir(parents=True, exist_ok=True)
    running = []
    for i, words in enumerate(commands):
        joined = {"AREAX_COORDINATOR": address, "AREAX_PROCESSES": str(len(commands)), "AREAX_PROCESS": str(i)}
        environ = {**os.environ, **joined, **settings(devices)}
        with open(logs / f"{i}.log", "w") as log:
            where = folders[i] if folders else None
            running.append(subprocess.Popen([sys.executable, *words], env=environ, stdout=log, stderr=log, cwd=where))
    return running


def run(words, count, logs, *, devices=1, timeout_s=300):
    """Runs one command `count` times and returns the output of the first; all must end with exit code 0."""
    running = start([words] * count, logs, devices=devices)
    try:
        codes = [process.wait(timeout_s) for process in running]
    finally:
        end(running)
    said = [(logs / f"{i}.log").read_text() for i in range(count)]
    assert codes == [0] * count, (codes, *[text[-3000:] for text in said])
    return said[0]


def end(running):
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()


def until(condition, timeout_s=240):
    """Waits until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def settings(devices):
    """Environment variables as in conftest.py, with the modules of tests/ importable."""
    return {
        "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
