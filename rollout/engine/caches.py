"""The memory of the engine's slots, layer by layer; a slot is a row of every array.

A layer with attention has keys and values in segments of positions, each twice as long as the one before: pairs
`keys [slot, kv_head, key_dim, L]`, `values [slot, kv_head, L, value_dim]`, so that attention reads whole arrays in
place and few empty ones. A recurrent layer has {name: state [slot, ...]}, in fp32, which a step replaces: unlike keys
and values it cannot be cut back to a prompt.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from ...models.attention.segments import segments
from ...models.layer import Attention


def empty(config, slots: int, context: int, dtype):
    """Empty caches of all layers."""
    lengths = [part.stop - part.start for part in segments(context)]

    def one(layer):
        if isinstance(layer, Attention) and layer.source is not None:
            return []  # those of another layer
        if isinstance(layer, Attention):
            K, H, V = layer.cached
            return [(jnp.zeros((slots, K, H, L), dtype), jnp.zeros((slots, K, L, V), dtype)) for L in lengths]
        return {name: jnp.zeros((slots, *shape), jnp.float32) for name, shape in layer.state}

    return [one(layer) for layer in config.records]


def least_bytes(config, slots: int, context: int, itemsize: int) -> int:
    """Bytes of `empty` with entries of `itemsize`, if the segments end with the context; else it has more."""

    def one(layer):
        if not isinstance(layer, Attention):
            return sum(4 * math.prod(shape) for _, shape in layer.state)
        K, H, V = layer.cached
        return K * (H + V) * context * itemsize if layer.source is None else 0

    return slots * sum(map(one, config.records))


def spans(cache) -> list[slice]:
    """The positions of each segment of a layer with attention; none of a recurrent one."""
    ends = [] if isinstance(cache, dict) else list(itertools.accumulate(keys.shape[-1] for keys, _ in cache))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@functools.partial(jax.jit, donate_argnames=("caches",))
def wipe(caches, filled):
    """Zeroes the first `filled` positions of the cached values, and states. Keys may stay: scores of masked positions
    are replaced, but a non-finite value would survive a weight of 0."""

    def clean(values_SKLV, start, C):
        S, K, L, V = values_SKLV.shape
        zero_SKCV = jnp.zeros((S, K, C, V), values_SKLV.dtype)
        put = lambda i, values_SKLV: jax.lax.dynamic_update_slice(values_SKLV, zero_SKCV, (0, 0, i * C, 0))
        return jax.lax.fori_loop(0, -(-jnp.clip(filled - start, 0, L) // C), put, values_SKLV)

    def layer(cache):
        if isinstance(cache, dict):
            return jax.tree.map(jnp.zeros_like, cache)
        if not (places := spans(cache)):
            return cache
        C = places[0].stop  # all segment lengths are multiples of this
        return [(keys, clean(values, at.start, C)) for (keys, values), at in zip(cache, places, strict=True)]

    return [layer(cache) for cache in caches]


def insert(caches, made, row_S, slot_S, count):
    """Writes row row_S[i] of what a prefill made to slot slot_S[i], for i < count: keys and values of the first
    segments, or states."""

    def put(i, caches):
        def one(x, cache):
            start = (slot_S[i], *[0] * (cache.ndim - 1))
            return jax.lax.dynamic_update_slice(cache, x[row_S[i]][None].astype(cache.dtype), start)

        def layer(new, cache):
            if isinstance(cache, dict):
                return {name: one(new[name], cache[name]) for name in cache}
            return jax.tree.map(one, new, cache[: len(new)]) + cache[len(new) :]

        return [layer(new, cache) for new, cache in zip(made, caches, strict=True)]

    return jax.lax.fori_loop(0, count, put, caches)


@functools.partial(jax.jit, static_argnames=("length",), donate_argnames=("caches",))
def copy(caches, source_S, target_S, count, *, length: int):
    """Copies the first `length` positions (a bucket) of slot source_S[i] to slot target_S[i], for i < count, of layers
    with attention; states stay."""

    def step(i, caches):
        def move(cache, place, axis):
            sizes = [1, *cache.shape[1:]]
            sizes[axis] = min(place.stop, length) - place.start
            part = jax.lax.dynamic_slice(cache, (source_S[i], 0, 0, 0), sizes)
            return jax.lax.dynamic_update_slice(cache, part, (target_S[i], 0, 0, 0))

        both = lambda pair, place: (move(pair[0], place, 3), move(pair[1], place, 2)) if place.start < length else pair
        layer = lambda cache: [both(pair, place) for pair, place in zip(cache, spans(cache), strict=True)]
        return [cache if isinstance(cache, dict) else layer(cache) for cache in caches]

    return jax.lax.fori_loop(0, count, step, caches)


def write(keys_SKHL, values_SKLV, k_SKH, v_SKV, at_S):
    """Writes a key and a value at index at_S[s] of each slot of a segment; indices outside it are ignored."""
    L, slot_S = keys_SKHL.shape[-1], jnp.arange(len(at_S))
    at_S = jnp.where(at_S < 0, L, at_S)  # out of bounds is dropped, but a negative index would count from the end
    keys_SKHL = keys_SKHL.at[slot_S, :, :, at_S].set(k_SKH, mode="drop")
    return keys_SKHL, values_SKLV.at[slot_S, :, at_S].set(v_SKV, mode="drop")
