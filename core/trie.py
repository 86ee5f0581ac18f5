"""Tries of packed samples: what samples share is one token, which is computed once.

A row of tries has two layouts: places T, one for each token of its tries, and flattened samples A, as rows without
tries have them. Models work on places; objectives, metrics and everything else of a `Batch` work on samples.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trie:
    """Where the tokens of a row's tries and samples are; `pack_tries` adds a leading microbatch axis M.

    The tokens of a trie are in depth-first preorder: those of a subtree are adjacent, and every token comes after the
    one before it in its sample.

    Attributes:
      first_BT: place in A of the token, in the first of the samples that share it; -1 = padding.
      parent_BT: place of the token before it in its samples; at roots and padding its own.
      until_BT: place behind the last token of its subtree; at padding the place behind its own. A token at place i sees
        one at j iff `j <= i < until[j]`.
      own_BA: place of each sample's token; 0 on padding.
      align: every node (tokens up to a fork, or to the end of a sample) begins at a multiple of it.
    """

    first_BT: Array
    parent_BT: Array
    until_BT: Array
    own_BA: Array
    align: int = field(default=1, metadata={"static": True})


def to_places(trie: Trie, x_BA, fill=0):
    """Values of samples' tokens at the places of tries, [B, T, ...]: those of the first sample; `fill` on padding."""
    return _picked(x_BA, trie.first_BT, fill)


def predicted(trie: Trie, x_BA, fill=0):
    """Values that belong to the prediction of a token, [B, T, ...], at the place of the predicted token; `fill` at
    roots, which nothing predicts, and padding."""
    root_BT = trie.parent_BT == jnp.arange(trie.parent_BT.shape[-1])[None]
    return _picked(x_BA, jnp.where(root_BT, -1, trie.first_BT - 1), fill)


def behind_parents(trie: Trie, x_BT):
    """Each place's value at the place before it, [B, T, ...]: what predicts the token there."""
    return _picked(x_BT, trie.parent_BT)


def to_samples(trie: Trie, x_BT):
    """Values of places at the samples' tokens, [B, A, ...]. Gradients of shared places add up."""
    return _picked(x_BT, trie.own_BA)


def predictions(trie: Trie, x_BT):
    """Values at places of predicted tokens, for the samples' tokens that predict them, [B, A, ...]: token t gets that
    of t + 1. The last token of a sample gets a value without meaning, which is masked, as in rows."""
    return _picked(x_BT, jnp.roll(trie.own_BA, -1, -1))


def samples(trie: Trie, segment_BA):
    """Number of samples that share each place, i32[B, T]; 0 on padding."""
    B, T = trie.first_BT.shape
    row_B1 = jnp.arange(B)[:, None]
    return jnp.zeros((B, T), jnp.int32).at[row_B1, trie.own_BA].add((segment_BA > 0).astype(jnp.int32))


def _picked(x, index, fill=None):
    """x at an index of its second axis; `fill` where that is negative."""
    tail = (1,) * (x.ndim - 2)
    out = jnp.take_along_axis(x, jnp.maximum(index, 0).reshape(*index.shape, *tail), 1)
    return out if fill is None else jnp.where((index >= 0).reshape(*index.shape, *tail), out, fill)
