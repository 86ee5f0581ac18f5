"""Drafts: guesses at the next tokens of each slot, which one step of decoding computes together and verifies.

Text repeats itself and that of its siblings: a draft is what followed the longest match of a slot's last tokens in the
histories of its group, its own and those of samples of the same prompt that are in slots, or were there last (prompt
lookup, arXiv:2304.04487; suffixes of other requests, arXiv:2411.04975). Any draft is as good as another for the
samples, which never change: see `decode`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ....parallel import mesh

LONGEST = 6  # tokens of a match; one suffices, as a step is equally wide with a bad draft or none
GROUP = 8  # histories of its group that a slot searches, the own one first


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Histories:
    """The sequences of all slots; a slot keeps that of its last request until the next one.

    Attributes:
      token_SL: i32, prompt and text.
      length_S: i32, how many tokens there are.
      group_S: i32, alike for the same prompts; -1 before the first request.
    """

    token_SL: Any
    length_S: Any
    group_S: Any


@functools.partial(jax.jit, static_argnames=("slots", "context"))
def empty(slots: int, context: int) -> Histories:
    zero_S = jnp.zeros(slots, jnp.int32)
    return pinned(Histories(jnp.zeros((slots, context), jnp.int32), zero_S, zero_S - 1))


def pinned(histories: Histories) -> Histories:
    """The histories, whole on each device of a mesh, to be returned by a program as they were given."""
    if mesh.one_device():
        return histories
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), histories)


def rewritten(histories: Histories, slot: int, prompt: Sequence[int], done: Sequence[int]) -> Histories:
    """The histories, donated, with those of a slot for a request that has generated the tokens `done`."""
    token_L = np.zeros(histories.token_SL.shape[1], np.int32)
    length = len(prompt) + len(done)
    token_L[:length] = (*prompt, *done)
    group = hash(tuple(prompt)) & 0x7FFFFFFF  # two prompts with the same one only waste drafts
    return _rewritten(histories, slot, token_L, length, group)


@functools.partial(jax.jit, donate_argnames=("histories",))
def _rewritten(histories: Histories, slot, token_L, length, group) -> Histories:
    return pinned(
        Histories(
            histories.token_SL.at[slot].set(token_L),
            histories.length_S.at[slot].set(length),
            histories.group_S.at[slot].set(group),
        )
    )


def grown(histories: Histories, token_SQ, count_S) -> Histories:
    """The histories with the first `count` tokens of each slot behind them."""
    S, Q = token_SQ.shape
    at_SQ = histories.length_S[:, None] + jnp.arange(Q)[None]
    at_SQ = jnp.where(jnp.arange(Q)[None] < count_S[:, None], at_SQ, histories.token_SL.shape[1])
    token_SL = histories.token_SL.at[jnp.arange(S)[:, None], at_SQ].set(token_SQ, mode="drop")
    return pinned(Histories(token_SL, histories.length_S + count_S, histories.group_S))


def draft(histories: Histories, count: int):
    """Guesses the next `count` tokens of each slot, i32[S, count]; -1 = none.

    Of equally long matches those in the slot's own history come first, and of these the last one. Where the text behind
    a match is shorter than the draft, it is repeated, as if the sequence had run into a loop.
    """
    token_SL, length_S, group_S = histories.token_SL, histories.length_S, histories.group_S
    S, L = token_SL.shape
    alike_SS = (group_S[:, None] == group_S[None]).astype(jnp.int32) + jnp.eye(S, dtype=jnp.int32)
    alike_SJ, slot_SJ = jax.lax.top_k(alike_SS, min(S, GROUP))
    ends_SJL = (alike_SJ > 0)[..., None] & (jnp.arange(L)[None, None] + 1 < length_S[slot_SJ][..., None])
    text_SJL, matched_SJL = token_SL[slot_SJ], jnp.zeros((*slot_SJ.shape, L), jnp.int32)
    for n in range(LONGEST):
        at_S1 = length_S[:, None] - 1 - n
        own_S1 = jnp.where(at_S1 < 0, -1, jnp.take_along_axis(token_SL, jnp.maximum(at_S1, 0), 1))
        before_SJL = jnp.pad(text_SJL, ((0, 0), (0, 0), (n, 0)), constant_values=-2)[..., :L]
        ends_SJL &= before_SJL == own_S1[..., None]
        matched_SJL += ends_SJL
    own_SJ1 = (alike_SJ > 1).astype(jnp.int32)[..., None]
    score_SX = ((2 * matched_SJL + own_SJ1) * L + jnp.arange(L)[None, None]).reshape(S, -1)
    best_S = jnp.argmax(score_SX, 1)
    slot_S1, end_S1 = jnp.take_along_axis(slot_SJ, best_S[:, None] // L, 1), best_S[:, None] % L
    behind_S1 = jnp.maximum(length_S[slot_S1] - 1 - end_S1, 1)
    draft_SD = token_SL[slot_S1, end_S1 + 1 + jnp.arange(count)[None] % behind_S1]
    return jnp.where(jnp.max(score_SX, 1, keepdims=True) >= 2 * L, draft_SD, -1)
