"""What a layer's tokens see of each other: a record per layer, and the functions that a family's block gets for it.

Training and decoding build a `Mixer` for each layer from its record, so that a block is written once: attention over
packed rows and over a KV cache look the same to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .attention.pattern import Pattern
from .layers import rope as rotary


@dataclass(frozen=True)
class Attention:
    """One layer's attention.

    Attributes:
      heads, kv_heads: number of query heads, and of heads of keys and values.
      key_dim, value_dim: size of a head of queries and keys, and of values.
      rope: rotary embedding of queries and keys; None = no positions (NoPE, arXiv:2305.19466).
      rope_dim: size of what is rotated as a whole, `key_dim` but in multi-head latent attention.
      pattern: which keys a query attends to, and how scores are computed.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rope: rotary.Rope | None
    rope_dim: int
    pattern: Pattern = Pattern()


def attention(heads: int, kv_heads: int, head_dim: int, rope, pattern: Pattern) -> Attention:
    """The record of ordinary attention, whose keys and values have the same size."""
    return Attention(heads, kv_heads, head_dim, head_dim, rope, head_dim, pattern)


@dataclass(frozen=True)
class Mixer:
    """What a block does with the tokens of one layer.

    Attributes:
      layer: the layer's record.
      rotate: `rotate(x_BTNH) -> x_BTNH` applies the layer's rotary embedding.
      attend: `attend(q_BTNH, k_BTKH, v_BTKV, sinks_N=None) -> out_BTNV` applies the mask, or the KV cache in decoding.
    """

    layer: Attention
    rotate: Callable
    attend: Callable


def rotations(layers: Sequence[Attention], position_BT) -> dict[Attention, Callable]:
    """`Mixer.rotate` of each record; cos and sin are computed once for each rotary embedding."""
    tables: dict[Any, Any] = {}
    for layer in layers:
        at = layer.rope, layer.rope_dim
        if layer.rope is not None and at not in tables:
            tables[at] = rotary.tables(position_BT, *at)

    def rotate(layer, x_BTNH):
        return x_BTNH if layer.rope is None else rotary.rotate(x_BTNH, *tables[layer.rope, layer.rope_dim])

    return {layer: partial(rotate, layer) for layer in layers}
