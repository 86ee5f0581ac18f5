"""Advantages from rewards of whole rollouts, with explicit group ids: any group sizes, in any order."""

from typing import Literal

import jax
import jax.numpy as jnp

from .segments import by_id
from .shapes import shaped


@shaped
def group(
    reward_BJ,
    group_BJ,
    rollout_BJ,
    *,
    mean: Literal["group", "batch", "none"] = "group",
    std: Literal["group", "batch", "none"] = "group",
    leave_one_out: bool = False,
    length_BJ=None,
    eps: float = 1e-6,
    ddof: int = 1,
):
    """(reward - baseline) / (std + eps) a segment (GRPO, arXiv:2402.03300; without std Dr. GRPO, arXiv:2503.20783).

    A rollout counts once however many rows it spans: its rows must agree in reward. Rewards that are
    NaN are unscorable: outside every mean and standard deviation, advantage 0. A group with a single scorable rollout
    has advantage 0 (there is nothing to compare with), as has a group whose rewards are all equal.

    Args:
      reward_BJ: reward of each segment's rollout; NaN = unscorable.
      group_BJ, rollout_BJ: ids >= 0, -1 in empty slots; less than B * J.
      mean: over what the baseline is taken; "none" = 0.
      std: over what the deviation is taken; "none" = do not divide.
      leave_one_out: the baseline leaves the rollout itself out (RLOO, arXiv:2402.14740).
      length_BJ: learnt tokens of each segment, which the baseline then weighs rewards by (OPO, arXiv:2505.23585).
      eps: added to the deviation, in units of reward.
      ddof: delta degrees of freedom of the deviation.

    Returns:
      adv_BJ, f32 or wider, 0 in empty and unscorable slots. No gradient is meant to flow.
    """
    shape, size = reward_BJ.shape, reward_BJ.size
    reward_A, group_A, rollout_A = (jnp.asarray(x).reshape(-1) for x in (reward_BJ, group_BJ, rollout_BJ))
    scorable_A = (rollout_A >= 0) & ~jnp.isnan(reward_A)
    value_A = jnp.where(scorable_A, reward_A, 0)
    # A rollout of k rows counts 1/k a row.
    rows_A = by_id(scorable_A.astype(value_A.dtype), rollout_A, size)
    share_A = jnp.where(scorable_A, 1 / jnp.maximum(rows_A, 1), 0)

    def over(kind, x_A):
        """Sum over the rollout's group, or over the batch, of a quantity counted once a rollout."""
        if kind == "group":
            return by_id(x_A * share_A, group_A, size)
        return jnp.broadcast_to(jnp.sum(x_A * share_A), x_A.shape)

    ones_A = jnp.ones_like(value_A)
    baseline_A = jnp.zeros_like(value_A)
    if mean != "none":
        n_A, total_A = over(mean, ones_A), over(mean, value_A)
        if length_BJ is not None:
            tokens_A = jnp.where(scorable_A, length_BJ.reshape(-1), 0) / jnp.where(share_A > 0, share_A, 1)
            baseline_A = over(mean, tokens_A * value_A) / jnp.maximum(over(mean, tokens_A), 1)
        elif leave_one_out:
            baseline_A = (total_A - value_A) / jnp.maximum(n_A - 1, 1)
        else:
            baseline_A = total_A / jnp.maximum(n_A, 1)
    adv_A = value_A - baseline_A
    if std != "none":
        n_A = over(std, ones_A)
        centred_A = value_A - over(std, value_A) / jnp.maximum(n_A, 1)
        variance_A = over(std, jnp.square(centred_A)) / jnp.maximum(n_A - ddof, 1)
        adv_A = adv_A / (jnp.sqrt(variance_A) + eps)
    if mean != "none":
        # Exact zeros where nothing distinguishes the rollouts: rounding must not be scaled up by a tiny deviation.
        id_A = jnp.where(scorable_A, group_A if mean == "group" else 0, size)
        high_A = jax.ops.segment_max(value_A, id_A, size + 1)[id_A]
        low_A = jax.ops.segment_min(value_A, id_A, size + 1)[id_A]
        scorable_A &= high_A > low_A
    return jnp.where(scorable_A, adv_A, 0).reshape(shape)
