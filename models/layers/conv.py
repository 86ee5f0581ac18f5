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


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _with_bias(y, bias_C):
    return y if bias_C is None else y + bias_C[(None,) * (y.ndim - 1)]
