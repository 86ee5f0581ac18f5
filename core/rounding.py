"""Stochastic rounding to narrow dtypes: up or down at random, so that the expectation is the number itself.

Small changes, which rounding to the nearest would lose at every step, add up (arXiv:1502.02551, arXiv:2010.06192).
"""

import jax
import jax.numpy as jnp

SEED = 0x5EED0000  # apart from the seeds of moments


def random_bits(shape: tuple[int, ...], seed):
    """u32 for each entry, a hash of its index and `seed`: the same on any mesh, and cheaper than `jax.random`."""
    place, size = jnp.zeros((1,) * len(shape), jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place += jnp.uint32(size % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        size *= shape[axis]
    x = place ^ (jnp.asarray(seed).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # "lowbias32" of Ellis' hash-prospector
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def to_bfloat16(x, seed):
    """Rounds fp32 to bf16 stochastically: adds random bits below the last that is kept, then cuts them off.

    Numbers that are not finite stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    up = bits + (random_bits(x.shape, seed) & jnp.uint32(0xFFFF))
    cut = jax.lax.bitcast_convert_type(up & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def to_float8(x, seed):
    """Rounds fp32 of at most 448 in magnitude to float8_e4m3fn stochastically; its smallest step is 2^-9."""
    size = jnp.abs(x)
    exponent = jnp.maximum(jax.lax.bitcast_convert_type(size, jnp.uint32) >> 23, jnp.uint32(121))  # of 2^-6 at least
    step = jax.lax.bitcast_convert_type((exponent - 3) << 23, jnp.float32)
    fraction = (random_bits(x.shape, seed) >> 8).astype(jnp.float32) * 2.0**-24  # in [0, 1)
    rounded = jnp.floor(size / step + fraction) * step
    return (jnp.sign(x) * jnp.minimum(rounded, 448)).astype(jnp.float8_e4m3fn)


def add(a, b, seed):
    """a + b in a's dtype; to bf16 the sum is rounded stochastically."""
    if a.dtype != jnp.bfloat16:
        return a + b.astype(a.dtype)
    return to_bfloat16(a.astype(jnp.float32) + b.astype(jnp.float32), seed)


def apply_updates(params, updates, step):
    """Weights plus updates, in the weights' dtypes: those in bf16 are rounded stochastically.

    Args:
      step: a seed, different for every update.
    """
    leaves, tree = jax.tree.flatten(params)
    pairs = zip(leaves, jax.tree.leaves(updates), strict=True)
    seed = SEED + step * len(leaves)
    return jax.tree.unflatten(tree, [add(p, u, seed + i) for i, (p, u) in enumerate(pairs)])
