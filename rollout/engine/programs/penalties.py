"""Penalties and biases of the tokens of each slot, as SGLang computes them.

How often a slot has generated each token is counted on the device. A slot's rows are made from its tokens when a
request enters it, so a request that was retracted continues with its counts.
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
from ..request import BIASES

NAMES = ("frequency", "presence", "repetition")
MOST = np.iinfo(np.int16).max  # counts stay there


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tables:
    """What a slot's penalties depend on; rows of slots without penalties are never read.

    Attributes:
      count_SV: i16, how often each token was generated.
      id_SB, bias_SB: the biased tokens, V and above = none, and their biases.
    """

    count_SV: Any
    id_SB: Any
    bias_SB: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Penalties:
    """Penalties per slot, as in `request.Sampling`; `used_S`: which slots have any, or biases."""

    used_S: Any
    frequency_S: Any
    presence_S: Any
    repetition_S: Any


@functools.partial(jax.jit, static_argnames=("slots", "vocab"))
def empty(slots: int, vocab: int) -> Tables:
    return pinned(
        Tables(
            jnp.zeros((slots, vocab), jnp.int16),
            jnp.full((slots, BIASES), vocab, jnp.int32),
            jnp.zeros((slots, BIASES), jnp.float32),
        )
    )


def pinned(tables: Tables) -> Tables:
    """The tables, with counts split over tp as logits are, to be returned by a program as they were given."""
    if mesh.one_device():
        return tables
    put = jax.lax.with_sharding_constraint
    return Tables(put(tables.count_SV, P(None, "tp")), put(tables.id_SB, P()), put(tables.bias_SB, P()))


def rewritten(tables: Tables, slot: int, tokens: Sequence[int], biases: Sequence[tuple[int, float]]) -> Tables:
    """The tables, donated, with the rows of a slot for a request that has generated these tokens."""
    vocab = tables.count_SV.shape[1]
    token_T = np.full(1 << max(4, (len(tokens) - 1).bit_length()), vocab, np.int32)
    token_T[: len(tokens)] = tokens
    id_B, bias_B = np.full(BIASES, vocab, np.int32), np.zeros(BIASES, np.float32)
    for i, (id, bias) in enumerate(biases):
        id_B[i], bias_B[i] = id, bias
    return _rewritten(tables, slot, token_T, id_B, bias_B)


@functools.partial(jax.jit, donate_argnames=("tables",))
def _rewritten(tables: Tables, slot, token_T, id_B, bias_B) -> Tables:
    count_V = jnp.zeros(tables.count_SV.shape[1], jnp.int32).at[token_T].add(1, mode="drop")
    return pinned(
        Tables(
            tables.count_SV.at[slot].set(jnp.minimum(count_V, MOST).astype(jnp.int16)),
            tables.id_SB.at[slot].set(id_B),
            tables.bias_SB.at[slot].set(bias_B),
        )
    )


def counted(tables: Tables, token_S, where_S) -> Tables:
    """The tables with one more of `token_S` in the slots `where_S`."""
    at = jnp.arange(len(token_S)), token_S
    count_S = tables.count_SV[at].astype(jnp.int32)
    new_S = jnp.minimum(count_S + where_S, MOST).astype(jnp.int16)
    return pinned(Tables(tables.count_SV.at[at].set(new_S), tables.id_SB, tables.bias_SB))


def penalised(logits_SV, tables: Tables, penalties: Penalties):
    """Logits f32[S, V] of the distribution to draw from; rows that use no penalty keep their bits.

    With c the number of times that a token was generated in this request (its prompt does not count):
    x = logit - frequency * c - presence * [c > 0]; then, where c > 0, x * repetition if x < 0, else x / repetition
    (CTRL, arXiv:1909.05858); then x + bias.
    """
    count_SV = tables.count_SV.astype(jnp.float32)
    seen_SV = count_SV > 0
    x_SV = logits_SV - penalties.frequency_S[:, None] * count_SV
    x_SV = x_SV - penalties.presence_S[:, None] * seen_SV
    repetition_S1 = penalties.repetition_S[:, None]
    x_SV = jnp.where(seen_SV, jnp.where(x_SV < 0, x_SV * repetition_S1, x_SV / repetition_S1), x_SV)
    x_SV = x_SV.at[jnp.arange(len(x_SV))[:, None], tables.id_SB].add(tables.bias_SB, mode="drop")
    return jnp.where(penalties.used_S[:, None], x_SV, logits_SV)
