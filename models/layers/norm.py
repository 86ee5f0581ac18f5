"""Normalisation layers."""

import jax
import jax.numpy as jnp


def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight over the last axis (arXiv:1910.07467), in fp32 or wider, returned in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
