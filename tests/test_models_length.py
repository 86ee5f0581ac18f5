"""A training step on a long row holds nothing of the size of its square."""

import math
import re
from functools import partial

import jax
import numpy as np
import optax
import tiny

from areax import models
from areax.core import losses, packing, param, step
from areax.rollout.types import supervised

T = 512


def test_no_array_has_two_axes_as_long_as_the_row():
    config = models.config_from_hf({**tiny.HF, "vocab_size": 64, "num_hidden_layers": 1})
    token = np.arange(T) % 64
    samples = [supervised(token[:1], token[1:])]
    optimizer, objective = optax.sgd(1e-3), losses.SFT()
    update = step.make_step(partial(models.score, config=config, run=models.Run()), objective, optimizer)
    state = jax.eval_shape(lambda params: step.init(params, optimizer), param.abstract(models.table(config)))
    batch = jax.eval_shape(objective.prepare, packing.pack(samples, T, rows=1))
    text = update.lower(state, batch).compile().as_text()
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\[(\d+(?:,\d+)+)\]", text)}
    assert any(T in shape for shape in shapes)  # it is the row that is looked for
    assert not [shape for shape in shapes if sum(n >= T for n in shape) > 1 or math.prod(shape) >= T * T]
