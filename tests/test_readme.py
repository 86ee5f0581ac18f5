"""What the README says can be typed, can be typed."""

import re
from pathlib import Path

import numpy as np
import tiny

from areax.adapters import cli
from areax.rollout.types import Completion, sampled

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_ten_lines_run(tmp_path):
    source = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    rng = np.random.default_rng(0)
    draw = lambda: Completion(rng.integers(5, 16, 3).tolist(), [-2.0] * 3, [0] * 3, "stop")
    samples = [
        sampled([5, 6, 7], draw(), temperature=1.0, reward=float(i % 2), group=i // 4, rollout=i, sample=i)
        for i in range(8)
    ]
    source = source.replace("path/to/checkpoint", str(tiny.model(tmp_path / "model"))).replace("4096", "32")
    space: dict = {"samples": samples}
    exec(source.replace("path/to/result", str(tmp_path / "result")), space)
    assert (tmp_path / "result" / "model.safetensors").exists() and int(space["state"].step) == 1


def test_every_file_of_the_tree_exists():
    tree = re.search(r"## The tree.*?```\n(.*?)```", README, re.S).group(1)
    root = Path(__file__).parent.parent
    folder = ""
    for line in tree.splitlines():
        if found := re.match(r"(\w+)/", line):
            folder = found.group(1)
        for name in re.findall(r"\b(\w+\.py)\b", line):
            assert (root / folder / name).exists(), f"{folder}/{name}"


def test_every_command_exists():
    block = re.search(r"## The command line\n\n```\n(.*?)```", README, re.S).group(1)
    for command in re.findall(r"^areax (\w+)", block, re.M):
        assert command in cli.COMMANDS
