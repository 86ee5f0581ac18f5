"""Normalisation layers."""

import jax
import jax.numpy as jnp


def rms_norm(x, weight, eps: float, offset: float = 0.0):
    """x / rms(x) * (offset + weight) over the last axis (arXiv:1910.07467), in fp32 or wider, returned in x's dtype.

    Without a weight (None) it is x / rms(x).
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if weight is None:
        return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)).astype(x.dtype)
    weight = weight.astype(wide.dtype) + offset if offset else weight
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def layer_norm(x, weight, bias, eps: float):
    """(x - mean) / std * weight + bias over the last axis (arXiv:1607.06450), in fp32 or wider, returned in x's
    dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + eps)
    shaped = lambda w: w.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    return (centred * scale * shaped(weight) + shaped(bias)).astype(x.dtype)
