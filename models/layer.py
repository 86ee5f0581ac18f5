"""What a layer's tokens see of each other: a record per layer, and the functions that a family's block gets for it.

Training and decoding build a `Mixer` for each layer from its record, so that a block is written once: attention over
packed rows and over a KV cache look the same to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp

from .attention.pattern import PLAIN, Pattern
from .layers import rope as rotary


@dataclass(frozen=True)
class Growth:
    """Queries are multiplied by 1 + rate ln(1 + floor((position + shift) / length)), as scores flatten in long
    sequences (Llama 4, Ministral 3)."""

    rate: float
    length: int
    shift: int = 0


@dataclass(frozen=True)
class Attention:
    """One layer's attention.

    Attributes:
      heads, kv_heads: number of query heads, and of heads of keys and values.
      key_dim, value_dim: size of a head of queries and keys, and of values.
      rope: rotary embedding of queries and keys; None = no positions (NoPE, arXiv:2305.19466).
      rope_dim: size of what is rotated as a whole, `key_dim` but in multi-head latent attention.
      pattern: which keys a query attends to, and how scores are computed.
      growth: of queries with their position; None = none.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rope: rotary.Rope | None
    rope_dim: int
    pattern: Pattern = PLAIN
    growth: Growth | None = None


def attention(heads: int, kv_heads: int, head_dim: int, rope, pattern: Pattern, growth=None) -> Attention:
    """The record of ordinary attention, whose keys and values have the same size."""
    return Attention(heads, kv_heads, head_dim, head_dim, rope, head_dim, pattern, growth)


@dataclass(frozen=True)
class Mixer:
    """What a block does with the tokens of one layer.

    Attributes:
      layer: the layer's record.
      rotate: `rotate(x_BTNH) -> x_BTNH` applies the layer's rotary embedding.
      grow: `grow(q_BTNH) -> q_BTNH` applies the layer's `Growth`.
      attend: `attend(q_BTNH, k_BTKH, v_BTKV, sinks_N=None) -> out_BTNV` applies the mask, or the KV cache in decoding.
    """

    layer: Attention
    rotate: Callable
    grow: Callable
    attend: Callable


def mixers(layers: Sequence[Attention], position_BT) -> Callable[[Attention, Callable], Mixer]:
    """Returns `mixer(layer, attend)` for tokens at these positions.

    cos and sin are computed here, once for each rotary embedding, so that a scan over layers does not repeat them.
    """
    tables: dict[Any, Any] = {}
    for layer in layers:
        at = layer.rope, layer.rope_dim
        if layer.rope is not None and at not in tables:
            tables[at] = rotary.tables(position_BT, *at)

    def rotate(layer, x_BTNH):
        if layer.rope is None:
            return x_BTNH
        return rotary.rotate(x_BTNH, *tables[layer.rope, layer.rope_dim], pairs=layer.rope.pairs)

    def grow(layer, q_BTNH):
        if (by := layer.growth) is None:
            return q_BTNH
        steps_BT = jnp.floor((position_BT + by.shift).astype(jnp.float32) / by.length)
        return q_BTNH * (1 + by.rate * jnp.log1p(steps_BT)).astype(q_BTNH.dtype)[..., None, None]

    return lambda layer, attend: Mixer(layer, partial(rotate, layer), partial(grow, layer), attend)
