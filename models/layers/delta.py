"""The gated delta rule (arXiv:2412.06464): whole rows in chunks, decoding by single tokens.

A head's state S [K, V] is 0 before each sequence; g <= 0 is the log of a decay, beta the strength of a write:

    S_t = e^(g_t) S_(t-1) + k_t (beta_t (v_t - e^(g_t) S_(t-1)^T k_t))^T,   out_t = S_t^T q_t

Convolution, norms and the scale of queries are the caller's. States and sums are in fp32 or wider.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ...core.shapes import shaped
from . import recurrence

matmul = partial(jnp.matmul, precision="highest")  # of triangular systems, whose solvers do not round operands either


def l2_norm(x, eps: float = 1e-6):
    """x / sqrt(sum of x^2 + eps) over the last axis, in fp32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), -1, keepdims=True) + eps)


def chunked(q_BTGK, k_BTGK, v_BTNV, beta_BTN, g_BTN, segment_BT, chunk: int | None = None, parent_BT=None):
    """out_BTNV of `prefill`."""
    return prefill(q_BTGK, k_BTGK, v_BTNV, beta_BTN, g_BTN, segment_BT, chunk, parent_BT=parent_BT)[0]


@shaped
def prefill(q_BTGK, k_BTGK, v_BTNV, beta_BTN, g_BTN, segment_BT, chunk: int | None = None, state=None, parent_BT=None):
    """The rule over packed rows, each sequence by itself; its tokens must be contiguous.

    Tokens with beta = g = 0 leave the state as it is, so that of a prompt survives its padding, if that has the
    prompt's segment.

    Args:
      q_BTGK, k_BTGK: heads [i N / G, (i + 1) N / G) share queries and keys i.
      chunk: tokens per chunk; None = 32 on a CPU, 64 elsewhere.
      state: state_BNKV before each row, which then has only one sequence; None = 0.
      parent_BT: of tries, as in `recurrence.run`; padding needs beta = g = 0.

    Returns:
      out_BTNV, in v's dtype; state_BNKV after each row, None over tries.
    """
    inputs = q_BTGK, k_BTGK, v_BTNV, beta_BTN, g_BTN
    out_BTNV, state_BNKV = recurrence.run(_prepare, inputs, segment_BT, chunk, state, parent_BT)
    return out_BTNV.astype(v_BTNV.dtype), state_BNKV


def _prepare(q, k, v, beta, g, segment_MBC, before_MB):
    """The writes W of a chunk solve (I + A) W = beta (v - e^c k S), A_ij = beta_i e^(d_ij) k_i . k_j for j < i."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    q, k, v, beta, g = (x.astype(wide) for x in (q, k, v, beta[..., None], g))
    pair, start, end, whole = recurrence.decays(g, segment_MBC, before_MB)
    right = beta * jnp.concatenate([v, start[..., None] * k], -1)
    u, y = jnp.split(_solve(beta * pair * (k @ k.mT), right), [v.shape[-1]], -1)
    return recurrence.Chunks(q, k, pair * (q @ k.mT), start, end, whole, u, y)


@jax.custom_vjp
def _solve(a, right):
    """X of (I + A) X = right, where A is what `a` [..., C, C] has below its diagonal.

    By the inverse of I + A: `triangular_solve` waits, on a CPU, in a thread of XLA's pool for the same pool, so that as
    many at once as there are threads never end (jaxlib 0.10.2).
    """
    return _solve_forward(a, right)[0]


def _solve_forward(a, right):
    inverse = _inverse(a)
    solved = matmul(inverse, right)
    return solved, (inverse, solved)


def _solve_backward(kept, grad):
    inverse, solved = kept
    grad_right = matmul(inverse.mT, grad)
    return jnp.tril(-matmul(grad_right, solved.mT), -1), grad_right


_solve.defvjp(_solve_forward, _solve_backward)


def _inverse(a):
    """(I + A)^-1, lower triangular: that of [[P, 0], [Q, R]] is [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]."""
    C = a.shape[-1]
    missing = (1 << (C - 1).bit_length()) - C  # to a power of two
    padded = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, missing)] * 2)
    return _by_halves(padded)[..., :C, :C]


def _by_halves(a):
    half = a.shape[-1] // 2
    if half == 0:
        return jnp.ones_like(a)
    first, last = _by_halves(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    below = -matmul(last, matmul(a[..., half:, :half], first))
    return jnp.block([[first, jnp.zeros_like(first)], [below, last]])


@shaped
def step(state_SNKV, q_SGK, k_SGK, v_SNV, beta_SN, g_SN):
    """One token of each of S sequences. Returns (state_SNKV, out_SNV), the output in v's dtype."""
    S, N, _, _ = state_SNKV.shape
    wide = state_SNKV.dtype
    heads = lambda x_SG: jnp.repeat(x_SG.astype(wide), N // x_SG.shape[1], 1)
    q_SNK1, k_SNK1 = heads(q_SGK)[..., None], heads(k_SGK)[..., None]
    decayed_SNKV = jnp.exp(g_SN.astype(wide))[..., None, None] * state_SNKV
    change_SN1V = v_SNV.astype(wide)[:, :, None] - k_SNK1.mT @ decayed_SNKV
    state_SNKV = decayed_SNKV + k_SNK1 * (beta_SN.astype(wide)[..., None, None] * change_SN1V)
    return state_SNKV, (q_SNK1.mT @ state_SNKV)[:, :, 0].astype(v_SNV.dtype)
