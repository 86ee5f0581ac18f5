"""Linear recurrences over packed rows whose state is a matrix per head, chunk by chunk: what the gated delta rule and
Mamba 2 share.

Within a chunk of C tokens all pairs are computed at once, for a block of chunks together; a scan carries the state
S [K, V] from chunk to chunk. With c_i the sum of the log decays g from the chunk's start to token i, itself included,
and d_ij that of the tokens after j up to i:

    W = U - Y S
    out_i = e^(c_i) q_i S + sum over j <= i of e^(d_ij) (q_i . k_j) W_j
    S' = e^(c_C) S + sum over j of e^(d_Cj) k_j^T W_j

A decay over the start of a sequence is 0, by masks: a large negative g would spoil the sums.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

STATES = "states"  # checkpoint name of the states at the starts of chunks, for rematerialisation policies
CHUNK, ELSEWHERE = 32, 64  # tokens per chunk on a CPU and off it
BLOCK = 256  # tokens computed at once, roughly


class Chunks(NamedTuple):
    """M chunks of B rows, in fp32 or wider. N heads share G keys, R = N / G each.

    Attributes:
      q_MBGCK, k_MBGCK: queries and keys.
      pair_MBGRCC: e^(d_ij) (q_i . k_j), 0 for j > i.
      start_MBGRC: e^(c_i); end_MBGRC: e^(d_Cj); whole_MBGR: e^(c_C).
      u_MBGRCV, y_MBGRCK: U and Y; no y = 0.
    """

    q_MBGCK: Any
    k_MBGCK: Any
    pair_MBGRCC: Any
    start_MBGRC: Any
    end_MBGRC: Any
    whole_MBGR: Any
    u_MBGRCV: Any
    y_MBGRCK: Any = None


def run(prepare, inputs, segment_BT, chunk: int | None):
    """Runs a recurrence over rows of packed sequences, from S = 0 at each sequence's start.

    The backward pass keeps the inputs and the state at each chunk's start; chunks are prepared again.

    Args:
      prepare: makes Chunks from the inputs, each [M, B, N, C, ...], segment_MBC, and before_MB, the segment of the
        token before each chunk.
      inputs: arrays [B, T, N, ...].
      chunk: tokens per chunk; None = 32 on a CPU, 64 elsewhere.

    Returns:
      out_BTNV; the state after each row, [B, G, R, K, V].
    """
    T = segment_BT.shape[1]
    C = min(chunk or (CHUNK if jax.default_backend() == "cpu" else ELSEWHERE), T)
    blocks = -(-T // max(BLOCK, C))
    fill = -T % (blocks * C)

    def split(x_BT, mode="constant"):
        x_BT = jnp.pad(x_BT, ((0, 0), (0, fill), *((0, 0),) * (x_BT.ndim - 2)), mode=mode)
        return x_BT.reshape(x_BT.shape[0], blocks, -1, C, *x_BT.shape[2:]).transpose(1, 2, 0, *range(3, x_BT.ndim + 2))

    segment_LMBC = split(segment_BT, "edge")
    last_LMB = segment_LMBC[..., -1]
    before_LMB = jnp.roll(last_LMB.reshape(-1, last_LMB.shape[-1]), 1, 0).reshape(last_LMB.shape)
    parts = tuple(split(x).swapaxes(3, 4) for x in inputs)
    out_LMBGRCV, state = _run(prepare, parts, (segment_LMBC, before_LMB))
    L, M, B, G, R, _, V = out_LMBGRCV.shape
    out_BTNV = out_LMBGRCV.transpose(2, 0, 1, 5, 3, 4, 6).reshape(B, L * M * C, G * R, V)[:, :T]
    return out_BTNV, state


def decays(g_MBNC, segment_MBC, before_MB):
    """(e^(d_ij) [M, B, N, C, C], e^(c_i) [M, B, N, C], e^(d_Cj) [M, B, N, C], e^(c_C) [M, B, N]).

    Each d_ij is a sum of its own: differences of running sums cancel, the more so the longer the chunk and the stronger
    the gates. One matmul with a constant of zeros and ones makes the sums.
    """
    C = g_MBNC.shape[-1]
    token, i, j = np.ogrid[:C, :C, :C]
    between_CX = ((j < token) & (token <= i)).reshape(C, C * C).astype(g_MBNC.dtype)
    sum_MBNCC = jax.lax.dot(g_MBNC.reshape(-1, C), between_CX, precision="highest").reshape(*g_MBNC.shape, C)
    sees_MBCC = (segment_MBC[..., None] == segment_MBC[..., None, :]) & np.tri(C, dtype=bool)[None, None]
    goes_on_MBC = segment_MBC == before_MB[..., None]
    pair_MBNCC = jnp.where(sees_MBCC[:, :, None], jnp.exp(sum_MBNCC), 0)
    start_MBNC = jnp.where(goes_on_MBC[:, :, None], jnp.exp(sum_MBNCC[..., 0] + g_MBNC[..., :1]), 0)
    return pair_MBNCC, start_MBNC, pair_MBNCC[..., -1, :], start_MBNC[..., -1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(prepare, parts, where):
    return _run_forward(prepare, parts, where)[0]


def _run_forward(prepare, parts, where):
    def block(state, given):
        parts, where = given
        chunks = prepare(*parts, *where)
        state, states = jax.lax.scan(lambda state, one: (_after(state, one), state), state, chunks)
        return state, (_out(states, chunks), states)

    one = jax.eval_shape(lambda parts, where: prepare(*parts, *where), *jax.tree.map(lambda x: x[0], (parts, where)))
    *front, _, V = one.u_MBGRCV.shape[1:]
    zero = jnp.zeros((*front, one.k_MBGCK.shape[-1], V), one.u_MBGRCV.dtype)
    last, (out, states) = jax.lax.scan(block, zero, (parts, where))
    return (out, last), (parts, where, checkpoint_name(states, STATES))


def _run_backward(prepare, kept, grads):
    parts, where, states = kept
    dout, dlast = grads

    def back(dafter, given):
        dread, one = given
        [dstate] = jax.vjp(lambda state: _after(state, one), jnp.zeros_like(dafter))[1](dafter)
        return dread + dstate, dafter

    def block(dlast, given):
        parts, where, states, dout = given
        chunks, to_parts = jax.vjp(lambda *parts: prepare(*parts, *where), *parts)
        [dread] = jax.vjp(lambda states: _out(states, chunks), states)[1](dout)
        dfirst, dafter = jax.lax.scan(back, dlast, (dread, chunks), reverse=True)
        [dchunks] = jax.vjp(lambda chunks: (_out(states, chunks), _after(states, chunks)), chunks)[1]((dout, dafter))
        return dfirst, to_parts(dchunks)

    _, dparts = jax.lax.scan(block, dlast, (parts, where, states, dout), reverse=True)
    return dparts, None


_run.defvjp(_run_forward, _run_backward)


def _written(state, one):
    """W."""
    return one.u_MBGRCV if one.y_MBGRCK is None else one.u_MBGRCV - one.y_MBGRCK @ state


def _out(state, one):
    read = jnp.einsum("...GCK,...GRKV->...GRCV", one.q_MBGCK, state)
    return one.start_MBGRC[..., None] * read + one.pair_MBGRCC @ _written(state, one)


def _after(state, one):
    """S'."""
    kept = one.end_MBGRC[..., None] * _written(state, one)
    return one.whole_MBGR[..., None, None] * state + jnp.einsum("...GCK,...GRCV->...GRKV", one.k_MBGCK, kept)
