"""Loss aggregation: each learnt token's share of the mean, exact across rows, microbatches and devices.

TRL's loss_type, verl's loss_agg_mode. token: mean over all learnt tokens (DAPO, arXiv:2503.14476). sequence: mean over
sequences of the mean over their tokens (GRPO, arXiv:2402.03300). sequence_sum: mean over sequences of the sum over
their tokens. constant: sequence_sum divided by a fixed number of tokens (Dr. GRPO, arXiv:2503.20783), never a padded
width. rollout, prompt: mean over rollouts (prompts) of the mean over all their tokens: each counts the same, however
many rows it is cut into or samples it has.
"""

from typing import Literal

import jax.numpy as jnp

from .batch import Batch
from .checks import one_of
from .segments import by_id, divisor, to_tokens, total

Denominator = Literal["token", "sequence", "sequence_sum", "constant", "rollout", "prompt"]


def share(batch: Batch, mask_BT, kind: Denominator, tokens: int = 0):
    """Share of each token in the mean, [B, T]; 0 off the mask. Tokens are weighted by `batch.weight_BT`.

    Args:
      mask_BT: the tokens that count; a sequence without any does not count.
      tokens: the divisor of "constant".
    """
    one_of("share: kind", kind, Denominator)
    weight_BT = jnp.where(mask_BT, batch.weight_BT, 0)
    if kind == "token":
        return weight_BT / divisor(jnp.sum(weight_BT))
    J = batch.reward_BJ.shape[-1]
    count_BJ = total(jnp.where(mask_BT, 1.0, 0.0).astype(weight_BT.dtype), batch.segment_BT, J)
    if kind in ("rollout", "prompt"):
        id_A = (batch.rollout_BJ if kind == "rollout" else batch.prompt_BJ).reshape(-1)
        weight_A = by_id(total(weight_BT, batch.segment_BT, J).reshape(-1), id_A, id_A.size)
        learns_A = (count_BJ.reshape(-1) > 0) & (id_A >= 0)
        rows_A = by_id(jnp.where(learns_A, 1.0, 0.0), id_A, id_A.size)
        members = jnp.sum(jnp.where(learns_A, 1 / divisor(rows_A), 0))
        return weight_BT / divisor(to_tokens(weight_A.reshape(count_BJ.shape), batch.segment_BT)) / divisor(members)
    mean_BT = weight_BT / divisor(to_tokens(count_BJ, batch.segment_BT))
    sequences = divisor(jnp.sum(mean_BT))
    if kind == "sequence":
        return mean_BT / sequences
    return weight_BT / sequences / (tokens if kind == "constant" else 1)
