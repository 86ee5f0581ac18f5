"""The gated delta rule (arXiv:2412.06464), in chunks for whole rows and by single tokens for decoding.

A head's state S [K, V] starts at 0 with each sequence:

    S_t = e^(g_t) S_(t-1) + k_t (beta_t (v_t - e^(g_t) S_(t-1)^T k_t))^T,   out_t = S_t^T q_t
"""

from functools import partial

import jax
import jax.numpy as jnp

from ...core.shapes import shaped
from . import recurrence


def l2_norm(x, eps: float = 1e-6):
    """x / sqrt(sum of x^2 + eps) over the last axis, in fp32 or wider, and returned so."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), -1, keepdims=True) + eps)


def chunked(q_BTNK, k_BTNK, v_BTNV, beta_BTN, g_BTN, segment_BT, chunk: int | None = None):
    """out_BTNV of `prefill` alone."""
    return prefill(q_BTNK, k_BTNK, v_BTNV, beta_BTN, g_BTN, segment_BT, chunk)[0]


@shaped
def prefill(q_BTNK, k_BTNK, v_BTNV, beta_BTN, g_BTN, segment_BT, chunk: int | None = None):
    out_BTNV, state_BNRKV = recurrence.run(_prepare, (q_BTNK, k_BTNK, v_BTNV, beta_BTN, g_BTN), segment_BT, chunk)
    return out_BTNV.astype(v_BTNV.dtype), state_BNRKV[:, :, 0]


def _prepare(q_MBNCK, k_MBNCK, v_MBNCV, beta_MBNC, g_MBNC, *where):
    wide = jnp.promote_types(v_MBNCV.dtype, jnp.float32)
    q, k, v, beta, g = (x.astype(wide) for x in (q_MBNCK, k_MBNCK, v_MBNCV, beta_MBNC, g_MBNC))
    pair, start, end, whole = recurrence.decays(g, *where)
    a = beta[..., None] * (k @ k.mT) * pair
    b = beta[..., None] * jnp.concatenate([v, start[..., None] * k], -1)
    x = jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True, unit_diagonal=True)
    u, y = jnp.split(x, [v.shape[-1]], -1)
    one = lambda x: jnp.expand_dims(x, 3)
    return recurrence.Chunks(q, k, one((q @ k.mT) * pair), one(start), one(end), one(whole), one(u), one(y))
