"""Segment sums over packed rows, and broadcasting them back to tokens."""

import jax
import jax.numpy as jnp

from .shapes import shaped


@shaped
def total(x_BT, segment_BT, J: int):
    """Sum of x over the tokens of each segment, [B, J]; padding is ignored. Gradients flow into x."""
    front, T = segment_BT.shape[:-1], segment_BT.shape[-1]
    x_AT, segment_AT = x_BT.reshape(-1, T), segment_BT.reshape(-1, T)
    slot_AT = segment_AT + (J + 1) * jnp.arange(len(segment_AT))[:, None]  # slot 0 of a row is its padding
    sums = jax.ops.segment_sum(x_AT.reshape(-1), slot_AT.reshape(-1), len(segment_AT) * (J + 1))
    return sums.reshape(*front, J + 1)[..., 1:]


@shaped
def to_tokens(x_BJ, segment_BT):
    """Broadcasts each segment's value to its tokens; 0 on padding."""
    spread_BT = jnp.take_along_axis(x_BJ, jnp.maximum(segment_BT - 1, 0), axis=-1)
    return jnp.where(segment_BT > 0, spread_BT, 0)


@shaped
def mean(x_BT, mask_BT, segment_BT, J: int):
    """Mean of x over the unmasked tokens of each segment, at all its tokens; 0 in segments without any."""
    count_BJ = total(jnp.where(mask_BT, 1, 0).astype(x_BT.dtype), segment_BT, J)
    sum_BJ = total(jnp.where(mask_BT, x_BT, 0), segment_BT, J)
    return to_tokens(sum_BJ / jnp.maximum(count_BJ, 1), segment_BT)


def by_id(x_A, id_A, size: int):
    """Sum of x over positions with the same id, at each position; ids are below `size`, negative ids share one bin."""
    bin_A = jnp.where(id_A >= 0, id_A, size)
    return jax.ops.segment_sum(x_A, bin_A, size + 1)[bin_A]


def numbered(*keys_A):
    """A number for each distinct combination of the keys, from 0 on, at each position."""
    order_A = jnp.lexsort(keys_A)
    new_A = jnp.zeros(order_A.shape, bool)
    for key_A in keys_A:
        new_A |= key_A[order_A] != key_A[jnp.roll(order_A, 1)]
    number_A = jnp.cumsum(new_A.at[0].set(False), dtype=jnp.int32)
    return jnp.zeros(order_A.shape, jnp.int32).at[order_A].set(number_A)


def over_rollout(x_BJ, rollout_BJ):
    """Sum of x over the segments of each rollout, at each of its segments."""
    return by_id(x_BJ.reshape(-1), rollout_BJ.reshape(-1), rollout_BJ.size).reshape(x_BJ.shape)


def divisor(x):
    """x if above 0, else 1: a safe divisor for sums that may be empty."""
    return jnp.where(x > 0, x, 1)


@shaped
def last(mask_BT, segment_BT):
    """Whether each token is the last unmasked one of its segment."""
    T = segment_BT.shape[-1]
    t_BT = jnp.broadcast_to(jnp.arange(T), segment_BT.shape)
    next_T = jax.lax.cummin(jnp.where(mask_BT, t_BT, T), axis=mask_BT.ndim - 1, reverse=True)
    after_BT = jnp.concatenate([next_T[..., 1:], jnp.full_like(next_T[..., :1], T)], -1)
    other_BT = jnp.take_along_axis(segment_BT, jnp.minimum(after_BT, T - 1), -1) != segment_BT
    return mask_BT & ((after_BT == T) | other_BT)


@shaped
def segment_index(segment_BT):
    """Index of each token within its segment: 0, 1, ... from where the segment id changes."""
    T = segment_BT.shape[-1]
    t_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), segment_BT.shape)
    first = jnp.ones((*segment_BT.shape[:-1], 1), bool)
    new_BT = jnp.concatenate([first, segment_BT[..., 1:] != segment_BT[..., :-1]], -1)
    return t_BT - jax.lax.cummax(jnp.where(new_BT, t_BT, 0), axis=segment_BT.ndim - 1)


@shaped
def at_last(x_BT, segment_BT):
    """The value at the last token of each segment, at all its tokens; segments as in `segment_index`."""
    behind_BT = jnp.flip(segment_index(jnp.flip(segment_BT, -1)), -1)  # tokens of the segment behind each
    t_BT = jnp.broadcast_to(jnp.arange(segment_BT.shape[-1], dtype=jnp.int32), segment_BT.shape)
    return jnp.take_along_axis(x_BT, t_BT + behind_BT, -1)
