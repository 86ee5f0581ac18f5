"""A trained reward model as a reward: `reward = reward_model.load("runs/rewardmodel/model")` in a file of one's own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import models
from ..core import packing
from ..rollout.types import supervised
from . import hf, tokenizer


def load(path: str | os.PathLike) -> Callable[[str, Mapping[str, Any]], float]:
    """f(text, row) -> the score of this completion of the row's prompt, at its end of turn, templated as in training.

    The weights are read at the first call, so that a process which only looks the reward up holds none, and this call
    takes as long as that. A process that has not computed with JAX before does so on the CPU alone: accelerators are
    the trainer's. Each call scores one completion in fp32, and compiles for each new power of two of tokens.

    Args:
      path: of a reward model's directory, with its tokenizer.

    Raises:
      ValueError: no checkpoint is there, or, at the first call, one without a score head.
    """
    path = Path(path).absolute()
    hf.read_config(path)

    @functools.cache
    def opened():
        jax.config.update("jax_platforms", "cpu")
        config, params = hf.load(path, init_missing=("head",))  # not used, and not saved with other reward models
        if not config.value_head:
            raise ValueError(f"{path}: a reward model needs a score head, score.weight, which is missing")
        score = jax.jit(lambda batch: models.value(params, batch, config=config).value_BT)
        return tokenizer.load(path), score

    def reward(text: str, row: Mapping[str, Any]) -> float:
        tokens, score = opened()
        sample = supervised(*tokenizer.supervised(tokens, {**row, "completion": text}))
        n = len(sample.tokens)
        batch = packing.pack([sample], max(32, 1 << (n - 1).bit_length()), rows=1)
        return float(np.asarray(score(jax.tree.map(lambda x: x[0], batch)))[0, n - 1])

    return reward
