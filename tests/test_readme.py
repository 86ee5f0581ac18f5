"""The README code runs, also with the three lines of docs/mesh.md; its tree and docs/command-line.md are correct."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from areax import models
from areax.adapters import cli
from areax.adapters.command_line import parse
from areax.parallel import rules
from areax.recipes import grpo
from areax.rollout.types import Completion, sampled

ROOT = Path(__file__).parent.parent
README, MESH, COMMANDS = ((ROOT / page).read_text() for page in ("README.md", "docs/mesh.md", "docs/command-line.md"))
[TEN, REWARD], [THREE], [OPTIONS] = (
    re.findall(r"```python\n(.*?)```", page, re.S) for page in (README, MESH, COMMANDS)
)
[ROW] = re.findall(r"```\n({.*?)```", README, re.S)
[YAML] = re.findall(r"```yaml\n(.*?)```", COMMANDS, re.S)


def run(source, path):
    """The namespace after running a piece of the README that trains on `samples`."""
    rng = np.random.default_rng(0)
    draw = lambda: Completion(rng.integers(5, 16, 3).tolist(), [-2.0] * 3, [0] * 3, "stop")
    samples = [
        sampled([5, 6, 7], draw(), temperature=1.0, reward=float(i % 2), group=i // 4, rollout=i, sample=i)
        for i in range(8)
    ]
    source = source.replace("path/to/checkpoint", str(tiny.model(path / "model"))).replace("4096", "32")
    space: dict = {"samples": samples}
    exec(source.replace("path/to/result", str(path / "result")), space)
    assert (path / "result" / "model.safetensors").exists() and int(space["state"].step) == 1
    return space


@pytest.mark.docs
def test_the_ten_lines_run_and_three_more_run_them_on_a_mesh(tmp_path):
    one = run(TEN, tmp_path)
    imports, rest = TEN.split("\n\n")
    config, *others = rest.splitlines()
    assert config.split("#")[0].strip().replace(")", ", mesh=on)") in THREE
    many = run(f"{imports}\n{THREE}".replace("    ...  # the other lines as they are", indent(others)), tmp_path)
    assert many["on"].devices.size == 8 and many["params"]["embed"].sharding.spec == PartitionSpec("tp", "fsdp")
    for a, b in zip(*(jax.tree.leaves(space["state"].opt_state) for space in (many, one)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max() + 1e-12)
    weights = rules.of_params(models.table(many["config"]), many["on"])
    for x, sharding in zip(jax.tree.leaves(many["state"].params), jax.tree.leaves(weights), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_the_reward_scores_the_row():
    exec(REWARD, space := {})
    assert [space["score"](text, json.loads(ROW)) for text in ("It is 7", "7 or 8", "")] == [1.0, 0.0, 0.0]


def indent(lines):
    return "\n".join(f"    {line}" for line in lines)


def test_the_tree_names_every_folder():
    tree = re.search(r"## The tree.*?```\n(.*?)```", README, re.S).group(1)
    named, top = set(), ""
    for line in tree.splitlines():
        if found := re.match(r"( *)([\w/]+)/ ", line):
            top = top if found.group(1) else found.group(2)
            named.add(f"{top}/{found.group(2)}" if found.group(1) else top)
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("core", "models", "parallel", "rollout", "adapters", "service", "recipes")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert packages <= named and all((ROOT / folder).is_dir() for folder in named)


def test_every_command_exists():
    block = re.search(r"# The command line\n\n```\n(.*?)```", COMMANDS, re.S).group(1)
    assert set(re.findall(r"^areax (\w+)", block, re.M)) == cli.COMMANDS.keys() - {"demo"}


def test_python_file_and_arguments_give_the_same_options(tmp_path):
    exec(OPTIONS, space := {})
    read = lambda *arguments: parse.parse(grpo.Config, arguments, "areax train grpo")
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    assert read("--config", str(file)) == space["config"]
    given = [f"--{name}={getattr(space['config'], name)}" for name in ("model", "data", "reward")]
    assert read(*given, *re.findall(r"--[\w-]+|(?<= )\d+", " ".join(re.findall(r"# (.*)", OPTIONS)))) == space["config"]
