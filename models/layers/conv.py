"""Causal depthwise convolution over the last W tokens of a sequence; [C, W] weights, the last tap for the token itself.

Sums are in fp32 or wider, results in x's dtype. An activation is the caller's.
"""

import jax.numpy as jnp

from ...core.shapes import shaped


@shaped
def convolve(x_BTC, weight_CW, segment_BT, bias_C=None):
    """y_t = sum over s < W of weight[:, W - 1 - s] x_(t - s) + bias over packed rows, [B, T, C]; tokens of other
    segments count as 0."""
    T, W = x_BTC.shape[1], weight_CW.shape[1]
    y_BTC = _with_bias(weight_CW[None, None, :, -1] * _wide(x_BTC), bias_C)
    for s in range(1, min(W, T)):
        own_BT1 = (segment_BT[:, s:] == segment_BT[:, :-s])[..., None]
        tap_BTC = jnp.where(own_BT1, weight_CW[None, None, :, -1 - s] * _wide(x_BTC[:, :-s]), 0)
        y_BTC = y_BTC + jnp.pad(tap_BTC, ((0, 0), (s, 0), (0, 0)))
    return y_BTC.astype(x_BTC.dtype)


@shaped
def over_tries(x_BTC, weight_CW, parent_BT, chunk: int, bias_C=None):
    """`convolve` over tries, where x_(t - s) is the token s steps before in the sample.

    Only the W - 1 tokens before each chunk are gathered: all others are next to those that read them.

    Args:
      parent_BT: that of a `Trie` whose nodes begin at multiples of `chunk`.
    """
    (B, T, C), W = x_BTC.shape, weight_CW.shape[1]
    place_BXU = _before(parent_BT, chunk, W)
    before_BUC = jnp.take_along_axis(x_BTC, jnp.maximum(place_BXU, 0).reshape(B, -1, 1), 1, mode="clip")
    before_BXUC = jnp.where(place_BXU[..., None] >= 0, before_BUC.reshape(*place_BXU.shape, C), 0)
    own_BXSC = jnp.pad(x_BTC, ((0, 0), (0, -T % chunk), (0, 0))).reshape(B, -1, chunk, C)
    x_BXSC = jnp.concatenate([before_BXUC, own_BXSC], 2)
    y_BXSC = sum(
        weight_CW[None, None, None, :, W - 1 - s] * _wide(x_BXSC[:, :, W - 1 - s :][:, :, :chunk]) for s in range(W)
    )
    return _with_bias(y_BXSC.reshape(B, -1, C)[:, :T], bias_C).astype(x_BTC.dtype)


@shaped
def step(x_SC, weight_CW, state_SCX, bias_C=None):
    """One token of each of S sequences, whose last X = W - 1 inputs are the state. Returns (y_SC, state_SCX)."""
    seen_SCW = jnp.concatenate([state_SCX, x_SC[..., None].astype(state_SCX.dtype)], -1)
    y_SC = _with_bias(jnp.sum(weight_CW[None] * _wide(seen_SCW), -1), bias_C)
    return y_SC.astype(x_SC.dtype), seen_SCW[..., 1:]


@shaped
def tail(x_BTC, length_B, W: int):
    """The state after the first `length` tokens of each row, which must be one sequence: its last W - 1 inputs,
    [B, C, W - 1], 0 before its start."""
    index_BX = length_B[:, None] + jnp.arange(1 - W, 0)[None]
    x_BXC = jnp.take_along_axis(x_BTC, jnp.maximum(index_BX, 0)[..., None], 1)
    return jnp.where(index_BX[..., None] >= 0, x_BXC, 0).swapaxes(1, 2)


def _before(parent_BT, chunk: int, W: int):
    """Places of the W - 1 tokens before each chunk's first, i32[B, X, W - 1]; -1 = none."""
    B, T = parent_BT.shape
    place_BX = jnp.broadcast_to(jnp.arange(0, T, chunk, dtype=parent_BT.dtype)[None], (B, -(-T // chunk)))
    found = [place_BX]
    for _ in range(1, W):
        before_BX = jnp.take_along_axis(parent_BT, jnp.maximum(place_BX, 0), 1)
        place_BX = jnp.where((place_BX < 0) | (before_BX == place_BX), -1, before_BX)
        found.append(place_BX)
    return jnp.stack(found[::-1], -1)[..., : W - 1]


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _with_bias(y, bias_C):
    return y if bias_C is None else y + bias_C[(None,) * (y.ndim - 1)]
