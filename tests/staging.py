"""Small published versions, and stagers as processes."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Published
from areax.rollout.weights import file_server

KEY = "a key of the fleet"


def published(root, v, weights, **files):
    """A directory as `write_published` leaves one, with these bytes for tensors, and for further files."""
    path = root / str(v)
    path.mkdir()
    for name, data in {"model": weights, **files}.items():
        (path / f"{name}.safetensors").write_bytes(data)
    (path / "config.json").write_text('{"model_type": "any"}')
    (path / "manifest.json").write_text(json.dumps({"version": v, "first": weights[:8].hex()}))
    return Published(str(path), read_label(path / "manifest.json"))


def contents(path):
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


class Full:
    """A file on a full disk, in place of `open`."""

    def __init__(self, path, mode):
        self.file = open(path, mode)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


def similar(size=3_000_000):
    """The tensors of three versions that differ in a few bytes, and of an unrelated one."""
    rng = np.random.default_rng(0)
    made = [rng.bytes(size)]
    for _ in range(2):
        now = np.frombuffer(made[-1], np.uint8).copy()
        now[rng.integers(0, now.size, size * 3 // 1000)] ^= 1
        made.append(now.tobytes())
    return [*made, rng.bytes(size)]


@contextlib.contextmanager
def process(root, *options, key=KEY, port=0):
    """Yields (address, process) of a stager; the address is None if it does not start."""
    command = [sys.executable, "-m", "areax.rollout.weights.stager", "--root", str(root), "--port", str(port), *options]
    environment = {name: value for name, value in os.environ.items() if name != file_server.KEY}
    environment |= {file_server.KEY: key} if key else {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as own:
        try:
            found = re.match(r"(http://\S+) stages versions in ", own.stdout.readline())
            yield found and found.group(1), own
        finally:
            own.send_signal(signal.SIGTERM)
            own.communicate(timeout=20)
