"""Reward shaping before advantages are computed."""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from .batch import FINISH, Batch
from .checks import validate
from .segments import last, over_rollout, to_tokens, total


@dataclass(frozen=True)
class Shaping:
    """clip((R + bias) scale, low, high), minus the penalties. A NaN reward stays unscorable.

    Attributes:
      bias: added to the rollout's reward R, before `scale`.
      scale: factor of R + bias, and of the rewards of single tokens.
      low: lower bound of the scaled reward.
      high: upper bound of the scaled reward.
      overlong_tokens: sampled tokens from which on a rollout gets the full `overlong_penalty` (soft overlong
        punishment, DAPO, arXiv:2503.14476); 0 = off.
      overlong_buffer: number of tokens below overlong_tokens over which the penalty rises linearly from 0; with 0 there
        is none below overlong_tokens.
      overlong_penalty: largest overlong penalty.
      unfinished_penalty: subtracted if a rollout did not finish with "stop", whatever the reason.
      truncated: rollouts truncated at the length limit: "keep" trains on them, "mask" excludes them from the loss but
        keeps their reward in the baseline (overlong filtering, mask_truncated_completions in TRL), "drop" excludes them
        from both.
      dynamic_sampling: drops groups whose rewards are all equal and generates others in their place (DAPO).
    """

    bias: float = 0.0
    scale: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    overlong_tokens: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    unfinished_penalty: float = 0.0
    truncated: Literal["keep", "mask", "drop"] = "keep"
    dynamic_sampling: bool = False

    def __post_init__(self):
        rules = (
            ("low", self.low <= self.high, f"at most high {self.high:g}"),
            ("overlong_buffer", 0 <= self.overlong_buffer <= self.overlong_tokens, "between 0 and overlong_tokens"),
            ("overlong_penalty", self.overlong_penalty >= 0, "at least 0"),
            ("overlong_penalty", self.overlong_tokens or self.overlong_penalty == 1, "1 without overlong_tokens"),
            ("unfinished_penalty", self.unfinished_penalty >= 0, "at least 0"),
            ("truncated", self.truncated in ("keep", "mask", "drop"), "one of keep, mask, drop"),
        )
        validate(self, rules)

    @property
    def plain(self) -> bool:
        """Whether rewards are left unchanged."""
        changed = (self.bias, self.scale, self.low, self.high, self.overlong_tokens, self.unfinished_penalty)
        return changed == (0, 1, -math.inf, math.inf, 0, 0)


def bounded(spec: Shaping, reward):
    """clip((reward + bias) scale, low, high), without the penalties."""
    return jnp.clip((reward + spec.bias) * spec.scale, spec.low, spec.high)


def shape(spec: Shaping, batch: Batch):
    """Computes shaped rewards: (reward_BT, reward_BJ, learn_BJ).

    In reward_BT, what shaping adds to a rollout is placed at the last learnt token of each of its rows, and NaN becomes
    0. learn_BJ masks the segments to train on according to `truncated`; dropped ones have reward NaN.
    """
    of_rollout = lambda x_BJ: over_rollout(x_BJ.astype(jnp.float32), batch.rollout_BJ)
    J = batch.reward_BJ.shape[-1]
    reward_BJ = bounded(spec, batch.reward_BJ)
    if spec.overlong_tokens:
        count_BJ = of_rollout(total(jnp.where(batch.mask_BT, 1.0, 0.0), batch.segment_BT, J))
        buffer = max(spec.overlong_buffer, 1)
        over_BJ = count_BJ - (spec.overlong_tokens - buffer)
        reward_BJ -= spec.overlong_penalty * jnp.clip(over_BJ / buffer, 0, 1)
    if spec.unfinished_penalty:
        unfinished_BJ = batch.finish_BJ > FINISH.index("stop")  # -1 in empty slots
        reward_BJ -= spec.unfinished_penalty * jnp.where(of_rollout(unfinished_BJ) > 0, 1.0, 0.0)
    reward_BT = jnp.where(jnp.isnan(batch.reward_BT), 0, batch.reward_BT) * spec.scale
    added_BJ = jnp.nan_to_num(reward_BJ - spec.scale * batch.reward_BJ)
    reward_BT += jnp.where(last(batch.mask_BT, batch.segment_BT), to_tokens(added_BJ, batch.segment_BT), 0)
    cut_BJ = of_rollout(batch.finish_BJ == FINISH.index("length")) > 0
    if spec.truncated == "drop":
        reward_BJ = jnp.where(cut_BJ, jnp.nan, reward_BJ)
    learn_BJ = jnp.ones_like(cut_BJ) if spec.truncated == "keep" else ~cut_BJ
    return reward_BT, reward_BJ, learn_BJ
