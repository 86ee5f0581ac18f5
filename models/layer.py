"""What a layer's tokens see of each other: a record per layer, and the functions that a family's block gets for it.

Training and decoding build a `Mixer` for each layer from its record, so that a block is written once: attention over
packed rows and over a KV cache look the same to it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from ..parallel import context
from .attention.pattern import PLAIN, Pattern
from .layers import conv, recurrence
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
      source: index of the layer whose keys and values are used; None = the layer's own.
      kept: later layers use this layer's keys and values; its block reports them as "keys_values".
      latent: size of the latent vectors from which keys and values are made, which decoding caches; None = none.
      deepstack: features of images are added behind the layer (arXiv:2406.04334).
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rope: rotary.Rope | None
    rope_dim: int
    pattern: Pattern = PLAIN
    growth: Growth | None = None
    source: int | None = None
    kept: bool = False
    latent: int | None = None
    deepstack: bool = False

    @property
    def cached(self) -> tuple[int, int, int]:
        """Number of heads and sizes of a key and a value that decoding caches for a token."""
        if self.latent is not None:
            return 1, self.latent + self.rope_dim, self.latent
        return self.kv_heads, self.key_dim, self.value_dim


def attention(heads: int, kv_heads: int, head_dim: int, rope, pattern: Pattern, growth=None) -> Attention:
    """The record of ordinary attention, whose keys and values have the same size."""
    return Attention(heads, kv_heads, head_dim, head_dim, rope, head_dim, pattern, growth)


@dataclass(frozen=True)
class Recurrent:
    """One layer that remembers the tokens before in a state of constant size, in place of keys and values.

    Attributes:
      state: name and shape of each array of a sequence's state, in fp32; none in `STATELESS`.
    """

    state: tuple[tuple[str, tuple[int, ...]], ...]


STATELESS = Recurrent(())  # a layer that is only an MLP or experts: its tokens see nothing of each other

Layer = Attention | Recurrent


def trie_alignment(config) -> int:
    """What the places of a trie's nodes must be multiples of (`packing.pack_tries`): the chunk of recurrent layers, in
    which there may be no tokens of two nodes; 1 without such layers."""
    stateful = any(isinstance(layer, Recurrent) and layer.state for layer in config.records)
    return recurrence.chunk_size() if stateful else 1


def rope_switches(layers: Sequence[Layer]) -> tuple[int, ...]:
    """The lengths in tokens above which a sequence's rotary embeddings depend on its length (`Rope.switch`)."""
    ropes = {layer.rope for layer in layers if isinstance(layer, Attention) and layer.rope is not None}
    return tuple(sorted({rope.switch for rope in ropes if rope.switch is not None}))


def trie_lengths(config) -> tuple[int, ...]:
    """Lengths in tokens such that a sample longer than one of them must share nothing with one that is not, as its
    rotary embeddings differ (`packing.pack_tries`); those of longrope."""
    return rope_switches(
        [r for r in config.records if isinstance(r, Attention) and r.rope and r.rope.kind != "dynamic"]
    )


def cached_bytes(layers: Sequence[Layer], itemsize: int, *, twice: bool = True) -> tuple[int, int]:
    """Bytes that decoding keeps (for each token, for each sequence whatever its length): keys and values, or latent
    vectors, with `itemsize` bytes an entry, in layers that do not use those of another, and states in fp32.

    Args:
      twice: latent vectors are kept as keys and as values, which the embedded engine does and other servers do not.
    """
    tokens = sequence = 0
    for layer in layers:
        if isinstance(layer, Recurrent):
            sequence += 4 * sum(math.prod(shape) for _, shape in layer.state)
        elif layer.source is None:
            heads, key, value = layer.cached
            tokens += heads * (key + (value if twice or layer.latent is None else 0)) * itemsize
    return tokens, sequence


@dataclass(frozen=True)
class Mixer:
    """What a block does with the tokens of a layer with attention.

    Attributes:
      layer: the layer's record.
      rotate: `rotate(x_BTNH) -> x_BTNH` applies the layer's rotary embedding.
      grow: `grow(q_BTNH) -> q_BTNH` applies the layer's `Growth`.
      attend: `attend(q_BTNH, k_BTKH, v_BTKV, sinks_N=None, latent=None) -> out_BTNV` applies the mask, or the KV cache
        in decoding: with `latent`, a `latent.Latent`, one of latent vectors. `attend(q_BTNH)` if keys and values are
        those of another layer.
    """

    layer: Attention
    rotate: Callable
    grow: Callable
    attend: Callable


@dataclass(frozen=True)
class Recurrence:
    """What a block does with the tokens of a recurrent layer; names are those of the layer's states.

    Attributes:
      layer: the layer's record.
      convolve: `convolve(name, x_BTC, weight_CW, bias_C=None) -> y_BTC` over the last W tokens (`layers.conv`).
      gate: `gate(x_BTN) -> x_BTN` prepares what decays or writes to a state: 0 in the padding behind a prompt, and of
        tries.
      recur: `recur(name, rule, *inputs) -> out_BTNV` by the functions of a module, `layers.delta` or `layers.mamba`.
        Inputs with tokens come from `convolve` or `gate`: with positions sharded over cp, both return whole rows, of
        which each device has some channels.
    """

    layer: Recurrent
    convolve: Callable
    gate: Callable
    recur: Callable


AnyMixer = Mixer | Recurrence


def mixers(
    layers: Sequence[Layer], position_BT, position_3BT=None, length_BT=None, needed=None
) -> Callable[[Attention, Callable], Mixer]:
    """Returns `mixer(layer, attend)` for tokens at these positions.

    cos and sin are computed here, once for each rotary embedding, so that a scan over layers does not repeat them.

    Args:
      position_3BT: positions in time, height and width, by which rotary embeddings turn; None = position_BT on each.
      length_BT: of each token's sequence, which layers with `rope_switches` need.
      needed: bool[], whether any token counts; the tables are then computed in a branch. Otherwise XLA fuses them into
        every layer on a CPU, unless the layers are in a scan.
    """
    turns = list(dict.fromkeys((x.rope, x.rope_dim) for x in layers if isinstance(x, Attention) and x.rope is not None))

    def made() -> list:
        if position_3BT is None:
            return [rotary.tables(position_BT, *each, length_BT) for each in turns]
        return [rotary.axis_tables(position_3BT, *each) for each in turns]

    if needed is None:
        found = jax.lax.optimization_barrier(made())
    else:
        found = jax.lax.cond(needed, made, lambda: jax.tree.map(jnp.zeros_like, jax.eval_shape(made)))
    tables = dict(zip(turns, found, strict=True))

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


def over_rows(layer: Recurrent, segment_BT, method: context.Method, parent_BT=None) -> Recurrence:
    """The recurrence over packed rows, each sequence by itself; positions may be sharded over cp.

    Args:
      segment_BT: 0 = padding.
      parent_BT: that of a `Trie` with nodes at multiples of `trie_alignment`; None = rows without tries.
    """
    into, back = context.whole_rows(method, segment_BT.shape[1])
    segment_BT = into(segment_BT)
    parent_BT = None if parent_BT is None else into(parent_BT)

    def convolve(name, x_BTC, weight_CW, bias_C=None):
        if parent_BT is not None:
            return conv.over_tries(into(x_BTC), weight_CW, parent_BT, recurrence.chunk_size(), bias_C)
        return conv.convolve(into(x_BTC), weight_CW, segment_BT, bias_C)

    def gate(x_BTN):
        return jnp.where((segment_BT > 0)[..., None], into(x_BTN), 0)

    def recur(name, rule, *inputs):
        return back(rule.chunked(*inputs, segment_BT, parent_BT=parent_BT))

    return Recurrence(layer, convolve, into if parent_BT is None else gate, recur)
