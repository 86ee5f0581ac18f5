"""PPO critic: a scalar value head regressed on returns."""

from dataclasses import dataclass

import jax.numpy as jnp

from . import metrics
from .batch import Batch
from .clipping import clip
from .segments import to_tokens


@dataclass(frozen=True)
class Critic:
    """Value loss: squared error to the returns, mean over the batch's learnt tokens, weighted by `weight_BJ` (PPO,
    arXiv:1707.06347).

    1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2): the loss has no gradient once a value has moved
    further than `clip` towards its return (value clipping, arXiv:2005.12729).

    Attributes:
      clip: clip range in units of reward; 0 = (V - R)^2 / 2.
    """

    clip: float = 0.5

    needs_scores = False

    def __post_init__(self):
        if not self.clip >= 0:
            raise ValueError(f"Critic: clip must be at least 0, got {self.clip}")

    def __str__(self):
        near = f"clip(V, V_old - {self.clip:g}, V_old + {self.clip:g})"
        error = f"max((V - R)^2, ({near} - R)^2)" if self.clip else "(V - R)^2"
        return f"Critic: minimise sum_t {error} / 2 / learnt tokens"

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Turns the weights of a batch prepared by the policy's objective into shares of the mean over tokens."""
        if batch.return_BT is None or batch.value_BT is None:
            raise ValueError('Critic.prepare: needs a batch prepared by a policy with credit "gae", got no return_BT')
        weight_BT = jnp.where(batch.mask_BT, to_tokens(batch.weight_BJ, batch.segment_BT), 0)
        total = jnp.sum(weight_BT)
        return batch.replace(weight_BT=weight_BT / jnp.where(total > 0, total, 1))

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.value_BT`."""
        mask_BT = batch.mask_BT
        value_BT = jnp.where(mask_BT, out.value_BT, 0)
        before_BT, return_BT = (jnp.where(mask_BT, x, 0) for x in (batch.value_BT, batch.return_BT))
        error_BT = jnp.square(value_BT - return_BT)
        report = {
            "value": metrics.of(value_BT, mask_BT),
            "return": metrics.of(return_BT, mask_BT),
            "value_error": metrics.of(error_BT, mask_BT),
            "moment_return": metrics.moments(return_BT, return_BT, mask_BT),
        }
        if self.clip:
            moved_BT = clip(value_BT - before_BT, -self.clip, self.clip)
            clipped_BT = jnp.square(before_BT + moved_BT - return_BT)
            report["value_clip_fraction"] = metrics.of(clipped_BT > error_BT, mask_BT)
            error_BT = jnp.maximum(error_BT, clipped_BT)
        return jnp.sum(batch.weight_BT * error_BT) / 2, report
