"""Drafts by the checkpoint's layer for multi-token prediction (`models.mtp`).

The layer's keys and values are in pages like those of one more layer of the model. It runs over the tokens that the
model has computed, on the model's hidden states: over a prompt together with it, over generated tokens after each step.
From the last token that a step kept it continues by itself, one token at a time; the next step overwrites the keys and
values of those.

Drafts are sampled as the tokens themselves will be, with the noise of their positions: the closer the layer's
distribution is to the model's, the more drafts are accepted, at any temperature. The last token of a chunk of a prompt
that requests share was computed with the next token of the first of them. For the others drafts may be worse; samples
never.
"""

import functools

import jax
import jax.numpy as jnp

from ....models import mtp
from ....models import transformer as models
from ....models.layer import mixers
from ....models.layers import blocked
from ....models.layers.blocked import Blocked
from . import attention, pool, sampling


@functools.partial(jax.jit, static_argnames=("slots", "width"))
def empty(slots: int, width: int):
    """No drafts, i32[S, Q - 1]."""
    return pool.replicated(jnp.full((slots, width - 1), -1, jnp.int32))


@functools.partial(jax.jit, donate_argnames=("draft_SD",))
def forgotten(draft_SD, slot):
    """The drafts without those of a slot, which were another request's."""
    return pool.replicated(draft_SD.at[slot].set(-1))


def logits(weights, hidden, config):
    """The logits f32[R, V] of the token after each of the hidden states behind the last norm."""
    hidden_RD, head = hidden.reshape(-1, hidden.shape[-1]), weights["head"]
    if isinstance(head, Blocked):
        return models.logits(blocked.product(hidden_RD, head), config)
    return models.logits(jnp.dot(hidden_RD, head.weight, preferred_element_type=jnp.float32), config)


def draft(weights, held, hidden_SQD, new_SQ, count_S, position_S, active_S, table_SX, controls, config, shift_S=None):
    """Drafts the tokens behind those that a step of decoding has kept.

    Args:
      held: the memory of all layers, of this one last.
      hidden_SQD: of the tokens of the step, the first at `position`, behind the model's last norm.
      new_SQ: the token after each; the first `count` are kept.
      table_SX: the pages of each slot's sequence.
      controls: how each slot samples.
      shift_S: added to positions for rope; None = 0.

    Returns:
      held; draft_SD, i32[S, Q - 1].
    """
    (S, Q, _), record = hidden_SQD.shape, mtp.record(config)
    no_bans_S1, no_tops_S = jnp.full((S, 1), config.vocab), jnp.zeros(S, jnp.int32)

    def layer(pages, hidden_STD, token_ST, start_S):
        turned_S = start_S if shift_S is None else start_S + shift_S
        position_ST = turned_S[:, None] + jnp.arange(token_ST.shape[1])[None]
        own = [pages]
        attend = functools.partial(attention.append, own, 0, record, table_SX, start_S, active_S)
        length_ST = jnp.repeat(position_S[:, None] + 1, token_ST.shape[1], 1)  # as in the step
        mixer = mixers((record,), position_ST, length_BT=length_ST)(record, attend)
        hidden_STD = mtp.forward(weights, weights["mtp"], hidden_STD, token_ST, mixer, config)
        return own[0], hidden_STD

    def drawn(hidden_S1D, index_S):
        logits_SV = logits(weights, hidden_S1D, config)
        return sampling.choose(logits_SV, index_S, no_bans_S1, controls, no_tops_S)[0]

    def further(carry, step):
        pages, hidden_S1D, token_S = carry
        pages, hidden_S1D = layer(pages, hidden_S1D, token_S[:, None], last_S + 1 + step)
        token_S = drawn(hidden_S1D, last_S + 3 + step)
        return (pool.pinned(pages), hidden_S1D, token_S), token_S

    pages, hidden_SQD = layer(held[-1], hidden_SQD, new_SQ, position_S)
    kept_S = jnp.maximum(count_S - 1, 0)
    last_S = position_S + kept_S
    hidden_S1D = jnp.take_along_axis(hidden_SQD, kept_S[:, None, None], 1)
    token_S = drawn(hidden_S1D, last_S + 2)
    start = pool.pinned(pages), hidden_S1D, token_S
    (pages, _, _), later_DS = jax.lax.scan(further, start, jnp.arange(Q - 2))
    draft_SD = jnp.concatenate([token_S[:, None], later_DS.T], 1)
    return [*held[:-1], pages], pool.replicated(draft_SD)
