"""Prefix tries of packed samples: tokens that samples share are stored once, and computed once.

A row of tries has two axes. T are places, one for each token of its tries: models compute these. A are the tokens of
flattened samples, as rows without tries have them: objectives, metrics and all other fields of a `Batch` use these.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trie:
    """The layout of rows of tries; `packing.pack_tries` adds a leading microbatch axis M. All arrays are i32.

    Places are in depth-first preorder: those of a subtree are adjacent, and every token comes after its parent, the
    token before it in its samples. Roots are the first tokens of samples.

    Attributes:
      first_BT: index in A of the place's token, in the first of the samples that share it; -1 = padding.
      parent_BT: place of the parent; at roots and padding their own place.
      until_BT: end of the place's subtree, exclusive; at padding the next place. The token at place i sees the one at
        place j iff `j <= i < until[j]`.
      place_BA: place of each sample's token; 0 at padding.
      align: every node (tokens up to a fork, or to the end of a sample) begins at a multiple of it.
      apart: samples of more than one of these numbers of tokens share nothing with samples of fewer or as many.
    """

    first_BT: Array
    parent_BT: Array
    until_BT: Array
    place_BA: Array
    align: int = field(default=1, metadata={"static": True})
    apart: tuple[int, ...] = field(default=(), metadata={"static": True})


def to_places(trie: Trie, x_BA, fill=0):
    """Moves values of samples' tokens to places, [B, T, ...], from the first of the samples that share one; `fill` at
    padding."""
    return _picked(x_BA, trie.first_BT, fill)


def targets_to_places(trie: Trie, x_BA, fill=0):
    """Moves values of a prediction, such as its target, from the token that predicts, as in `Batch`, to the place of
    the predicted one, [B, T, ...]; `fill` at roots, which nothing predicts, and padding."""
    root_BT = trie.parent_BT == jnp.arange(trie.parent_BT.shape[-1])[None]
    return _picked(x_BA, jnp.where(root_BT, -1, trie.first_BT - 1), fill)


def from_parents(trie: Trie, x_BT):
    """The value of each place's parent, [B, T, ...], which predicts the token there; at roots their own. Gradients of
    all children add up."""
    return _picked(x_BT, trie.parent_BT)


def to_samples(trie: Trie, x_BT):
    """Moves values of places to the samples' tokens, [B, A, ...]. Gradients of all samples that share one add up."""
    return _picked(x_BT, trie.place_BA)


def predictions_to_samples(trie: Trie, x_BT):
    """Moves values of predictions from the places of the predicted tokens to the samples' tokens that predict them,
    [B, A, ...]: token t gets that of t + 1. What the last token of a sample gets has no meaning, as in rows, and is
    masked."""
    return _picked(x_BT, jnp.roll(trie.place_BA, -1, -1))


def sample_counts(trie: Trie, segment_BA):
    """Number of samples that share each place, i32[B, T]; 0 at padding."""
    B, T = trie.first_BT.shape
    row_B1 = jnp.arange(B)[:, None]
    return jnp.zeros((B, T), jnp.int32).at[row_B1, trie.place_BA].add((segment_BA > 0).astype(jnp.int32))


def learnt_places(trie: Trie, mask_BA):
    """Whether any of the samples learns the prediction at each place, bool[B, T]; `mask_BA` as in `Batch`."""
    row_B1 = jnp.arange(mask_BA.shape[0])[:, None]
    return jnp.zeros(trie.first_BT.shape, bool).at[row_B1, jnp.roll(trie.place_BA, -1, -1)].max(mask_BA > 0)


def _picked(x, index, fill=None):
    """x at an index of its second axis; `fill` where that is negative."""
    tail = (1,) * (x.ndim - 2)
    out = jnp.take_along_axis(x, jnp.maximum(index, 0).reshape(*index.shape, *tail), 1, mode="clip")
    return out if fill is None else jnp.where((index >= 0).reshape(*index.shape, *tail), out, fill)
