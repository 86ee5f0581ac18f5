"""docs/pytorch.md, block by block: a tiny model learns sums in torch's loop, in a Trainer and in Flax, and is saved."""

import ast
import functools
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from areax.adapters import hf
from areax.rollout.tasks import arithmetic

PAGE = (Path(__file__).parents[1] / "docs" / "pytorch.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
ROWS = list(itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 160))


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_loop_trainer_and_flax_train_and_save(tmp_path, capsys):
    text = {"path/to/checkpoint": tiny.model(tmp_path / "model"), "path/to/result": tmp_path / "result"}
    text |= {"path/to/run": tmp_path / "run", "length=512": "length=64", "1e-5": "3e-3"}
    [loop, tree, trainer, states, nnx, linen] = [
        functools.reduce(lambda block, pair: block.replace(pair[0], str(pair[1])), text.items(), block)
        for block in BLOCKS
    ]
    torch.manual_seed(0)
    exec(loop, space := {"rows": ROWS})
    losses = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20 and np.mean(losses[-5:]) < 0.75 * losses[0]
    exec(tree, space)
    saved = lambda: hf.load(tmp_path / "result")[1]
    np.testing.assert_array_equal(saved()["embed"], space["engine_weights"]["embed"])
    exec(trainer, space)
    lines = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert float(lines[-1]["eval_loss"]) < np.mean(losses[-5:])
    np.testing.assert_array_equal(saved()["embed"], space["params"](space["model"])["embed"])
    exec(states, space)
    exec(nnx, space)
    losses = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20 and np.mean(losses[-5:]) < 0.75 * losses[0]
    np.testing.assert_array_equal(saved()["embed"], space["flax"].params(space["model"])["embed"])
    exec(linen, space)
    assert space["logits_BTV"].shape == (*space["batch"]["input_ids"].shape, space["config"].vocab)
