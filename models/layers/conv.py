"""Causal depthwise convolution over the last W tokens of a sequence; [C, W] weights, the last tap for the token itself.

Sums are in fp32 or wider, results in x's dtype. An activation is the caller's.
"""

import jax.numpy as jnp

from ...core.shapes import shaped


@shaped
def convolve(x_BTC, weight_CW, segment_BT, bias_C=None, parent_BT=None):
    """y_t = sum over s < W of weight[:, W - 1 - s] x_(t - s) + bias over packed rows, [B, T, C]; tokens of other
    segments count as 0.

    Over tries, given `parent_BT` (that of a `Trie`), x_(t - s) is the token s steps before in the sample; `segment_BT`
    is not read.
    """
    T, W = x_BTC.shape[1], weight_CW.shape[1]
    y_BTC = _with_bias(weight_CW[None, None, :, -1] * _wide(x_BTC), bias_C)
    if parent_BT is not None:
        for s, (place_BT, known_BT) in enumerate(_before(parent_BT, W), 1):
            seen_BTC = jnp.take_along_axis(x_BTC, place_BT[..., None], 1)
            y_BTC = y_BTC + jnp.where(known_BT[..., None], weight_CW[None, None, :, -1 - s] * _wide(seen_BTC), 0)
        return y_BTC.astype(x_BTC.dtype)
    for s in range(1, min(W, T)):
        own_BT1 = (segment_BT[:, s:] == segment_BT[:, :-s])[..., None]
        tap_BTC = jnp.where(own_BT1, weight_CW[None, None, :, -1 - s] * _wide(x_BTC[:, :-s]), 0)
        y_BTC = y_BTC + jnp.pad(tap_BTC, ((0, 0), (s, 0), (0, 0)))
    return y_BTC.astype(x_BTC.dtype)


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


def _before(parent_BT, W: int):
    """(place, whether there is one) of the token 1 to W - 1 steps before each place of tries."""
    place_BT = jnp.broadcast_to(jnp.arange(parent_BT.shape[1])[None], parent_BT.shape)
    known_BT = jnp.ones(parent_BT.shape, bool)
    for _ in range(1, W):
        before_BT = jnp.take_along_axis(parent_BT, place_BT, 1)
        known_BT, place_BT = known_BT & (before_BT != place_BT), before_BT
        yield place_BT, known_BT


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _with_bias(y, bias_C):
    return y if bias_C is None else y + bias_C[(None,) * (y.ndim - 1)]
