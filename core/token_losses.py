"""Losses per token for `losses.PerToken`, by the formulas of Tinker's training API, where they are summed.

Each is f(logp_BT, batch) -> loss_BT of p = logp_BT, the model's log-probability, and of arrays of the samples
(`Sample.arrays`): "weights", or "advantages" A with q = `batch.logp_BT`, the sampler's log-probability; r = exp(p - q).
A token of weight or advantage 0 has loss and gradient 0, whatever p - q, but in `dro`. Bounds are of r itself; options
are set by `functools.partial`.
"""

import jax
import jax.numpy as jnp

from . import segments
from .batch import Batch


def cross_entropy(logp_BT, batch: Batch):
    """-w p; the weights w may be any numbers, and are 1 without an array of that name."""
    return -batch.target["weights"] * logp_BT if "weights" in batch.target else -logp_BT


def importance_sampling(logp_BT, batch: Batch):
    """-r A."""
    adv_BT = _advantages(batch)
    return -_ratio(logp_BT, adv_BT, batch) * adv_BT


def ppo(logp_BT, batch: Batch, *, low: float = 0.8, high: float = 1.2):
    """-min(r A, clip(r, low, high) A)."""
    adv_BT = _advantages(batch)
    ratio_BT = _ratio(logp_BT, adv_BT, batch)
    return -jnp.minimum(ratio_BT * adv_BT, jnp.clip(ratio_BT, low, high) * adv_BT)


def gspo(logp_BT, batch: Batch, *, low: float = 0.8, high: float = 1.2):
    """ppo with the sequence's r, exp(mean of p - q over the tokens where "sequence_ratio_mask" is not 0), and with the
    gradient of the token's own p (GSPO-token, arXiv:2507.18071)."""
    adv_BT, J = _advantages(batch), batch.length_BJ.shape[-1]
    mean_BT = segments.mean(logp_BT - batch.logp_BT, batch.target["sequence_ratio_mask"] != 0, batch.segment_BT, J)
    own_BT = logp_BT - jax.lax.stop_gradient(logp_BT)  # 0, with the gradient of p
    ratio_BT = jnp.exp(jnp.where(adv_BT != 0, jax.lax.stop_gradient(mean_BT) + own_BT, 0))
    return -jnp.minimum(ratio_BT * adv_BT, jnp.clip(ratio_BT, low, high) * adv_BT)


def cispo(logp_BT, batch: Batch, *, low: float = 0.0, high: float = 4.0):
    """-stop(clip(r, low, high)) p A."""
    adv_BT = _advantages(batch)
    return -jax.lax.stop_gradient(jnp.clip(_ratio(logp_BT, adv_BT, batch), low, high)) * logp_BT * adv_BT


def dro(logp_BT, batch: Batch, *, beta: float):
    """-(p A - beta / 2 (p - q)^2)."""
    return -(logp_BT * _advantages(batch) - beta / 2 * jnp.square(logp_BT - batch.logp_BT))


def _advantages(batch: Batch):
    if "advantages" not in batch.target:
        raise ValueError(
            f"token_losses: samples need an array 'advantages', got {sorted(batch.target)}; "
            'Sample(arrays={"advantages": ("target", one number a token)})'
        )
    return batch.target["advantages"]


def _ratio(logp_BT, adv_BT, batch: Batch):
    """exp(p - q), 1 where A is 0: infinity times 0 would be NaN."""
    return jnp.exp(jnp.where(adv_BT != 0, logp_BT - batch.logp_BT, 0))
