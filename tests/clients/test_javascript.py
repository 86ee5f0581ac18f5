"""Clients in JavaScript: each script runs its tests against the server."""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("script", sorted(Path(__file__).parent.glob("*.mjs")), ids=lambda path: path.stem)
def test_javascript(url, script):
    command = ["node", "--input-type=module", "-", url]  # from stdin: modules are found in the folder below
    options = {"cwd": os.environ["AREAX_NPM"], "input": script.read_text(), "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
