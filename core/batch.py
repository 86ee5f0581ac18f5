"""Packed rows as a pytree of arrays: the input of a training step."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .trie import Trie

Array = Any
FINISH = ("stop", "length", "abort", "error")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Packed rows `B x T` with `J` segment slots per row; `pack` adds a leading microbatch axis M.

    `input` arrays describe the token at t, `target` arrays the prediction of token t + 1: `target_BT[b, t]` is the next
    token, `mask_BT[b, t]` whether it is learnt (in the loss), `logp_BT[b, t]` its behaviour log-probability. Segment
    arrays hold -1 (ids), 0 (lengths, weights) or NaN (rewards) in empty slots.

    Attributes:
      token_BT, position_BT: input; token id and rope position.
      index_BT: input; order inside the segment, which defines the causal mask.
      segment_BT: input; slot + 1, 0 = padding.
      target_BT, mask_BT: target; the next token, and whether it is learnt.
      logp_BT, version_BT: target; behaviour log-probability (nats) and policy version (-1 = not sampled).
      weight_BT: target; weight of the token in the loss; `prepare` folds the global denominator in.
      reward_BT: target; rewards at the tokens they were given for; those of tokens that are not learnt are moved to the
        last learnt one before (else the first).
      adv_BT, ref_BT, prox_BT: target; advantage, reference and proximal log-probability; None until prepared.
      value_BT, return_BT: target; the critic's value estimate and its regression target; None without a critic.
      reward_BJ: total reward of the segment; NaN = unscorable.
      finish_BJ: why generation ended, as an index into `FINISH`.
      group_BJ, prompt_BJ, rollout_BJ: ids of segments that belong together, numbered from 0 inside the batch.
      sample_BJ: index of the sample in the packed list.
      length_BJ, weight_BJ: tokens of the segment; its weight inside its rollout.
      pair_BJ, label_BJ: for preference data: id of the pair, numbered from 0; 1 = preferred, 0 = not, -1 = neither, for
        a baseline.
      component: reward components [B, J] by name, those requested from `pack`.
      input, target: the samples' extra arrays, by name.
      trie: the tokens that samples share, computed once; then `T` in all other fields are flattened samples, the `A` of
        `Trie`. None = none are shared.
      scalars: values that `prepare` computes over the whole batch, by name; repeated in every microbatch.
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
    trie: Trie | None = None
    component: dict[str, Array] = field(default_factory=dict)
    input: dict[str, Array] = field(default_factory=dict)
    target: dict[str, Array] = field(default_factory=dict)
    scalars: dict[str, Array] = field(default_factory=dict)

    def replace(self, **changes) -> "Batch":
        return dataclasses.replace(self, **changes)

    @property
    def scored_BT(self) -> Array:
        """The predictions whose log-probabilities a loss reads: learnt ones and, once prepared, observations."""
        weight_BT = self.target.get("observation_weight_BT")
        return self.mask_BT if weight_BT is None else self.mask_BT | (weight_BT != 0)

    def without(self, name: str) -> "Batch":
        """The batch without one of its `input` arrays, if it has it."""
        return self.replace(input={key: x for key, x in self.input.items() if key != name})

    def with_scalars(self, **values) -> "Batch":
        """The batch with more values in `scalars`, each repeated for every microbatch."""
        front = self.token_BT.shape[:-2]
        repeat = lambda x: jnp.broadcast_to(x, (*front, *jnp.shape(x)))
        return self.replace(scalars={**self.scalars, **{name: repeat(x) for name, x in values.items()}})
