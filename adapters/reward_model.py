"""A trained reward model as a reward: put `reward = reward_model.load("runs/rewardmodel/model")` in your own file."""

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
from .runtime import hub


def load(path: str | os.PathLike) -> Callable[[str, Mapping[str, Any]], float]:
    """Returns f(text, row) -> score of the completion `text` to the row's prompt, at its end of turn, with the chat
    template as in training.

    The first call loads the weights, so a process that only looks the reward up holds none. In a process that has not
    used JAX yet, it restricts JAX to the CPU: accelerators belong to the trainer. Each call scores one completion in
    fp32, and compiles once for each power of two of tokens.

    Args:
      path: directory of a reward model, or its name on the hub, with its tokenizer.

    Raises:
      ValueError: there is no checkpoint, or (at the first call) it has no score head.
    """
    path = Path(hub.folder(path, weights=True)).absolute()
    hf.read_config(path)

    @functools.cache
    def opened():
        jax.config.update("jax_platforms", "cpu")
        config, params = hf.load(path, init_missing=("head",))  # unused; reward models of other tools lack it
        if not config.score_head:
            raise ValueError(f"{path}: a reward model needs a score head, got no score.weight")
        score = jax.jit(lambda batch: models.value(params, batch, config=config).value_BT)
        return tokenizer.load(path), score

    def reward(text: str, row: Mapping[str, Any]) -> float:
        tokens, score = opened()
        sample = supervised(*tokenizer.supervised(tokens, {**row, "completion": text}))
        n = len(sample.tokens)
        batch = packing.pack([sample], max(32, 1 << (n - 1).bit_length()), rows=1)
        return float(np.asarray(score(jax.tree.map(lambda x: x[0], batch)))[0, n - 1])

    return reward
