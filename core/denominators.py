"""What a loss is a mean of: the share of each learnt token in it, exact over rows, microbatches and devices.

token: over all learnt tokens (DAPO, arXiv:2503.14476). sequence: over sequences, of the mean over a sequence's tokens
(GRPO, arXiv:2402.03300). sequence_sum: over sequences, of the sum. constant: as sequence_sum, over a fixed number of
tokens (Dr. GRPO, arXiv:2503.20783), never a padded width. rollout, prompt: over rollouts (prompts), of the mean over
all tokens of its sequences, so that one cut into several rows, or sampled more often, counts as much as any.
"""

from typing import Literal

import jax.numpy as jnp

from .batch import Batch
from .segments import by_id, divisor, to_tokens, total

Denominator = Literal["token", "sequence", "sequence_sum", "constant", "rollout", "prompt"]


def share(batch: Batch, mask_BT, kind: Denominator, tokens: int = 0):
    """Share of each token in the mean, [B, T]; 0 off the mask. Sequences weigh what `batch.weight_BT` says.

    Args:
      mask_BT: the tokens that count; a sequence without any counts for nothing.
      tokens: of "constant".
    """
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
