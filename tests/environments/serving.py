"""Servers in processes of their own, on loopback ports."""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(file, *words, last=()):
    """The address of `python FILE WORDS PORT LAST`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name(file)), *words, str(port), *last]
    with subprocess.Popen(command) as process:
        try:
            until = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < until:
                with socket.socket() as other:
                    if other.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
