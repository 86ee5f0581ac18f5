"""SkyPilot itself reads the tasks that `areax launch` writes: `make test-skypilot`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from launching import TASKS

from areax.adapters import cli

PYTHON = os.environ["AREAX_SKYPILOT_PYTHON"]
SCHEMAS = Path(__file__).parents[1] / "data/skypilot.json"


@pytest.fixture
def ask(tmp_path):
    """Runs judge.py; the last lines of its output, as many as it has arguments."""

    def asked(*paths):
        words = [PYTHON, str(Path(__file__).with_name("judge.py")), *map(str, paths)]
        environ = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
        return [json.loads(line) for line in said.splitlines()[-max(1, len(paths)) :]]

    return asked


def write(path, words):
    words = ["launch", "--on", "skypilot", "--skypilot.file", str(path), *words, "--", "train", "r.py", "--model", "m"]
    assert cli.main(words) == 0
    return yaml.safe_load(path.read_text())


def test_skypilot_reads_what_is_written(ask, tmp_path):
    paths = {tmp_path / f"{i}.yaml": words for i, words in enumerate(TASKS.values())}
    tasks = [write(path, words) for path, words in paths.items()]
    for task, told in zip(tasks, ask(*paths), strict=True):
        resources = task["resources"]
        name, _, count = resources.get("accelerators", "").partition(":")
        mounts = {path: [one["source"], one["mode"]] for path, one in task.get("file_mounts", {}).items()}
        assert told == {
            "nodes": task["num_nodes"], "cpus": resources["cpus"], "mounts": mounts,
            "accelerators": {name: int(count or 1)} if name else None, "secrets": sorted(task.get("secrets", {})),
        }  # fmt: skip


def test_skypilot_refuses_what_the_launcher_does(ask, tmp_path, capsys):
    """A part of a bucket, and another store."""
    path = tmp_path / "task.yaml"
    task = write(path, ["--skypilot.shared", "s3://mine"])
    for bucket in ("s3://mine/runs", "ftp://mine"):
        task["file_mounts"]["/shared"]["source"] = bucket
        path.write_text(yaml.safe_dump(task))
        assert "refused" in ask(path)[0]
        words = ["launch", "--on", "skypilot", "--skypilot.shared", bucket, "--", "train", "r.py", "--model", "m"]
        assert cli.main(words) == 2 and "must be the address of a whole bucket" in capsys.readouterr().err


def test_the_schemas_of_other_tests_are_those_of_this_version(ask):
    [now] = ask()
    kept = json.loads(SCHEMAS.read_text())
    assert {name: kept[name] for name in now} == now
