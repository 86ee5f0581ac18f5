"""docs/primitives.md, block by block: a tiny model learns sums, then what is rewarded, and is saved."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import servers
import tiny

from areax.adapters import hf
from areax.rollout.servers.labels import read_label

PAGE = (Path(__file__).parents[1] / "docs" / "primitives.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.docs
def test_the_four_primitives_train_sample_and_save(tmp_path, capsys):
    model = tiny.model(tmp_path / "model")
    text = {"path/to/checkpoint": model, "path/to/result": tmp_path / "result", "path/to/versions": tmp_path / "pushed"}
    [setup, learn, reinforce, served, save] = [
        functools.reduce(lambda block, pair: block.replace(pair[0], str(pair[1])), text.items(), block)
        for block in BLOCKS
    ]
    exec(setup, space := {})
    exec(learn, space)
    steps = [eval(line) for line in capsys.readouterr().out.splitlines()]  # noqa: S307 - dicts of numbers
    assert len(steps) == 20 and steps[-1]["loss"] < 0.2 * steps[0]["loss"] and not any(x["skipped"] for x in steps)
    assert space["forward_backward"][space["imitate"]]._cache_size() == space["optim_step"]._cache_size() == 1
    exec(reinforce, space)
    rewards = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert np.mean(rewards[:3]) < 0.3 and np.mean(rewards[-3:]) > 0.7, rewards
    assert space["optim_step"]._cache_size() == 1
    with servers.embedded(model, slots=4, context=64) as server:
        exec(served.replace("http://127.0.0.1:30000", server.url), space)
        label = read_label(tmp_path / "pushed/1/manifest.json")
        assert server.ok("/model_info")["weight_version"] == label
    # A sampled text may have a line break in it.
    texts = re.findall(r"(.*?) \[1(?:, 1)*\] \[.*?\]\n", capsys.readouterr().out, re.S)
    assert len(texts) == 4 and sum(text.startswith("9") for text in texts) >= 2, texts
    exec(save, space)
    for a, b in zip(*map(jax.tree.leaves, (hf.load(tmp_path / "result")[1], space["state"].params)), strict=True):
        np.testing.assert_array_equal(a, b)
