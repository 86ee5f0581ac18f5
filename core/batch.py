"""What a training step reads: packed rows, as a pytree of arrays."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
FINISH = ("stop", "length", "abort", "error")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Packed rows `B x T` with `J` segment slots a row; `pack` puts microbatches M in front of every axis.

    `input` arrays belong to the token at t; `target` arrays speak of predicting token t + 1, so that
    `target_BT[b, t]` is the next token, `mask_BT[b, t]` says whether to learn it and `logp_BT[b, t]` is its behaviour
    log-probability. Segment arrays hold -1 (ids), 0 (lengths, weights) or NaN (rewards) in empty slots.

    Attributes:
      token_BT, position_BT: input; token id and rope position.
      index_BT: input; order inside the segment, which is what causality follows.
      segment_BT: input; slot + 1, 0 = padding.
      target_BT, mask_BT: target; the next token, and whether it is learnt.
      logp_BT, version_BT: target; behaviour log-probability (nats) and policy version (-1 = not sampled).
      weight_BT: target; weight of the token in the loss, the global denominator folded in by `prepare`.
      reward_BT: target; rewards where they were given, those of tokens that are not learnt with the last learnt one
        before (else the first).
      adv_BT, ref_BT, prox_BT: target; advantage, reference and proximal log-probability; None until prepared.
      value_BT, return_BT: target; what a critic expects of the tokens to come, and what it is to learn; None without.
      reward_BJ: total reward of the segment; NaN = unscorable.
      finish_BJ: why generation ended: position in `FINISH`.
      group_BJ, prompt_BJ, rollout_BJ: which segments belong together, numbered from 0 inside the batch.
      sample_BJ: position of the sample in the list that was packed.
      length_BJ, weight_BJ: tokens of the segment; its weight inside its rollout.
      pair_BJ, label_BJ: of preference data: which segments are compared, numbered from 0; 1 = preferred, 0 = not, -1 =
        neither, of a baseline.
      component: parts of the reward, [B, J], by name; those that `pack` was asked for.
      input, target: arrays that samples brought along, by name.
      whole: what `prepare` says of the whole batch, by name; the same in every microbatch.
    """

    token_BT: Array
    position_BT: Array
    index_BT: Array
    segment_BT: Array
    target_BT: Array
    mask_BT: Array
    logp_BT: Array
    version_BT: Array
    weight_BT: Array
    reward_BT: Array
    reward_BJ: Array
    finish_BJ: Array
    group_BJ: Array
    prompt_BJ: Array
    sample_BJ: Array
    rollout_BJ: Array
    length_BJ: Array
    weight_BJ: Array
    pair_BJ: Array
    label_BJ: Array
    adv_BT: Array | None = None
    ref_BT: Array | None = None
    prox_BT: Array | None = None
    value_BT: Array | None = None
    return_BT: Array | None = None
    component: dict[str, Array] = field(default_factory=dict)
    input: dict[str, Array] = field(default_factory=dict)
    target: dict[str, Array] = field(default_factory=dict)
    whole: dict[str, Array] = field(default_factory=dict)

    def replace(self, **changes) -> "Batch":
        return dataclasses.replace(self, **changes)

    def tell(self, **values) -> "Batch":
        """The batch with more values in `whole`, each repeated for every microbatch."""
        front = self.token_BT.shape[:-2]
        repeat = lambda x: jnp.broadcast_to(x, (*front, *jnp.shape(x)))
        return self.replace(whole={**self.whole, **{name: repeat(x) for name, x in values.items()}})
