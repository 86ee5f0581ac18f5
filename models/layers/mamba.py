"""Mamba 2's recurrence (arXiv:2405.21060): whole rows in chunks, decoding by single tokens.

A head's state S [P, N] is 0 before each sequence; A < 0, dt >= 0:

    S_t = e^(dt_t A) S_(t-1) + dt_t x_t B_t^T,   out_t = S_t C_t + D x_t

Convolution, softplus and limits of dt, gate and norm are the caller's. States and sums are in fp32 or wider. In shapes
H are heads, P their size, G groups of heads that share B and C, N their size.
"""

import jax.numpy as jnp

from ...core.shapes import shaped
from . import recurrence


def chunked(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, D_H, segment_BT, chunk: int | None = None, parent_BT=None):
    """out_BTHP of `prefill`."""
    return prefill(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, D_H, segment_BT, chunk, parent_BT=parent_BT)[0]


@shaped
def prefill(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, D_H, segment_BT, chunk: int | None = None, state=None, parent_BT=None):
    """The recurrence over packed rows, each sequence by itself; its tokens must be contiguous.

    Tokens with dt = 0 leave the state as it is, so that of a prompt survives its padding, if that has the prompt's
    segment.

    Args:
      B_BTGN, C_BTGN: heads [i H / G, (i + 1) H / G) share those of group i.
      chunk: tokens per chunk; None = 32 on a CPU, 64 elsewhere.
      state: state_BHPN before each row, which then has only one sequence; None = 0.
      parent_BT: of tries, as in `recurrence.run`; padding needs dt = 0.

    Returns:
      out_BTHP, in x's dtype; state_BHPN after each row, None over tries.
    """
    wide = jnp.promote_types(x_BTHP.dtype, jnp.float32)
    dt_BTH = dt_BTH.astype(wide)
    inputs = C_BTGN, B_BTGN, x_BTHP, dt_BTH, dt_BTH * A_H.astype(wide)[None, None]
    state_BHNP = None if state is None else state.mT
    out_BTHP, state_BHNP = recurrence.run(_prepare, inputs, segment_BT, chunk, state_BHNP, parent_BT)
    out_BTHP = out_BTHP + D_H.astype(wide)[None, None, :, None] * x_BTHP
    return out_BTHP.astype(x_BTHP.dtype), None if state_BHNP is None else state_BHNP.mT


def _prepare(q, k, x, dt, g, segment_MBC, before_MB):
    q, k, x = (each.astype(dt.dtype) for each in (q, k, x))
    pair, start, end, whole = recurrence.decays(g, segment_MBC, before_MB)
    return recurrence.Chunks(q, k, pair * (q @ k.mT), start, end, whole, dt[..., None] * x)


@shaped
def step(state_SHPN, x_SHP, dt_SH, A_H, B_SGN, C_SGN, D_H):
    """One token of each of S sequences. Returns (state_SHPN, out_SHP), the output in x's dtype."""
    wide, H = state_SHPN.dtype, state_SHPN.shape[1]
    heads = lambda x_SGN: jnp.repeat(x_SGN.astype(wide), H // x_SGN.shape[1], 1)
    x_SHP1, dt_SH11 = x_SHP.astype(wide)[..., None], dt_SH.astype(wide)[..., None, None]
    decay_SH11 = jnp.exp(dt_SH11 * A_H.astype(wide)[None, :, None, None])
    state_SHPN = decay_SH11 * state_SHPN + dt_SH11 * x_SHP1 * heads(B_SGN)[:, :, None]
    out_SHP1 = state_SHPN @ heads(C_SGN)[..., None] + D_H.astype(wide)[None, :, None, None] * x_SHP1
    return state_SHPN, out_SHP1[..., 0].astype(x_SHP.dtype)
