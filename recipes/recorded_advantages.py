"""The advantages of a recorded batch, which a run does not keep: by its own objective, from its options."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from areax.adapters.command_line import parse
from areax.adapters.tracking import run_dir
from areax.core import packing
from areax.core.corrections import Correction
from areax.core.entropy import Entropy
from areax.core.kl import KL
from areax.core.observation import Observation
from areax.core.policy import Policy
from areax.recipes import grpo
from areax.recipes.shared import describe, recorded
from areax.rollout.types import Sample

NEEDS_ALL = "Advantages compare with all batches before here: areax replay has them."
NEEDS_MODELS = "Advantages come from models here (critic, teacher or reference): areax replay has them."


def of(run: Path, groups: Sequence[Sequence[Sample]], version: int) -> tuple[Sequence[np.ndarray | None], str]:
    """(f[n] for each sample of the batch that version `version` was trained on, ""), or Nones and the reason."""
    flat = [sample for group in groups for sample in group]
    try:
        file = run / run_dir.CONFIG
        if (run / "config.1.json").is_file():  # it went on with other options
            file = recorded.options(recorded.read(run), version, version + 1)[-1][1]
        config = _config(file, file.stat().st_mtime_ns)
    except (ValueError, OSError) as error:
        return [None] * len(flat), f"Advantages need the run's options: {error}"
    objective, size = config.training.objective, len(groups) // config.training.minibatches
    by_model = objective.needs_values or objective.advantage.teacher or objective.needs_squares
    if by_model or (objective.kl.coef and objective.kl.place == "reward"):
        return [None] * len(flat), NEEDS_MODELS
    if objective.advantage.mean == "moving":
        return [None] * len(flat), NEEDS_ALL
    jax.config.update("jax_platforms", "cpu")  # accelerators belong to the run
    if config.rewards.shuffle_rewards:
        groups = describe.shuffled([list(group) for group in groups], seed=(config.seed, version))
    parts = [[s for group in groups[i : i + size] for s in group] for i in range(0, len(groups), size)]
    return [adv for part in parts for adv in batch(objective, part)], ""


def batch(objective: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The advantages f[n] of a minibatch's samples, by an objective that needs no model for them."""
    length = packing.power(max(len(sample.tokens) for sample in samples))
    packed = packing.pack(samples, length, components=objective.advantage.needs)
    return packing.unpack(_prepared(objective)(packed), packed, samples)


@functools.lru_cache(4)
def _config(file: Path, changed: int) -> grpo.Config:
    return parse.parse(grpo.Config, ["--config", str(file)], "areax report")


@functools.cache
def _prepared(objective: Policy) -> Callable:
    """The part of `prepare` that makes advantages, compiled."""
    own = replace(objective, correction=Correction(proximal="behaviour"), kl=KL(), entropy=Entropy())
    own = replace(own, observation=Observation(), score_centering=False)
    return jax.jit(lambda batch: own.prepare(batch).adv_BT)
