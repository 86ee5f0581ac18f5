"""A training step on a long row holds nothing of the size of its square."""

import math
import re
from functools import partial

import jax
import numpy as np
import optax
import pytest
import tiny

from areax import models
from areax.core import losses, packing, param, step
from areax.rollout.types import supervised

T = 512


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("shared", [0, 384], ids=["a row", "tries"])
def test_no_array_has_two_axes_as_long_as_the_row(shared):
    config = models.config_from_hf({**tiny.HF, "vocab_size": 64, "num_hidden_layers": 1})
    token = np.arange(T) % 64
    samples = [supervised(token[:1], token[1:])]
    if shared:
        samples += [supervised(token[:shared], (token[shared:] + i) % 64) for i in (0, 1, 2)]
    optimizer, objective = optax.sgd(1e-3), losses.SFT()
    update = step.make_step(partial(models.score, config=config, run=models.Run()), objective, optimizer)
    state = jax.eval_shape(lambda params: step.init(params, optimizer), param.abstract(models.table(config)))
    packed = packing.pack_tries(samples, T, rows=1)
    assert (packed.trie is not None) == bool(shared)
    batch = jax.eval_shape(objective.prepare, packed)
    text = update.lower(state, batch).compile().as_text()
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\[(\d+(?:,\d+)+)\]", text)}
    assert any(T in shape for shape in shapes)  # it is the row that is looked for
    assert not [shape for shape in shapes if sum(n >= T for n in shape) > 1 or math.prod(shape) >= T * T]
