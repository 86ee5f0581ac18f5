"""Flash attention (arXiv:2205.14135, 2307.08691) over packed rows for GPUs, in Pallas for Triton.

Segments, windows and chunks are encoded as the first key that each query attends to. It never decreases along a row,
so blocks of keys before it, and blocks of queries after the last that attends to a key, are skipped.
"""

from functools import partial
from math import e, log, log2
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...core.segments import segment_index
from . import sinks
from .chunked import OUTPUT
from .pattern import PLAIN, Pattern

UNSEEN = -1e30
LEAST = 16  # minimum size of each dimension of a matmul
ROWS = 128  # rows are padded to a multiple of it; all block sizes divide it


class Block(NamedTuple):
    """Block sizes, warps and pipeline stages of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


def causal(q_BTNH, k_BTKH, v_BTKV, segment_BT, sinks_N=None, *, pattern: Pattern = PLAIN, interpret: bool = False):
    """`chunked.causal` without separate keys; a padding token attends only to itself.

    Args:
      interpret: runs in interpret mode on any platform, for tests.
    """
    (_, T, _, H), V = q_BTNH.shape, v_BTKV.shape[3]
    rows = -T % ROWS
    columns = lambda size: max(LEAST, pl.next_power_of_2(size)) - size
    fill = lambda x: jnp.pad(x, [(0, 0), (0, rows), (0, 0), (0, columns(x.shape[3]))])
    first_BT = _first(jnp.pad(segment_BT, [(0, 0), (0, rows)]), pattern)
    heads = fill(q_BTNH), fill(k_BTKH), fill(v_BTKV)
    out_BTNV, lse_BNT = _causal(*heads, first_BT, pattern.factor(H), pattern.softcap, interpret)
    return sinks.add(out_BTNV[:, :T, :, :V], lse_BNT[:, :, :T].swapaxes(1, 2), sinks_N)


def _first(segment_BT, pattern):
    """Position of the first key that each query attends to."""
    at_BT = jnp.broadcast_to(jnp.arange(segment_BT.shape[1], dtype=jnp.int32), segment_BT.shape)
    index_BT = jnp.where(segment_BT > 0, segment_index(segment_BT), 0)
    return at_BT - index_BT + jnp.maximum(pattern.first(index_BT), 0)


def _blocks(x_BTNH):
    """Blocks of the forward, dq and dkv kernels, sized for Hopper's registers."""
    if x_BTNH.shape[3] * x_BTNH.dtype.itemsize > 256:
        return Block(64, 32, 4, 2), Block(32, 32, 4, 2), Block(32, 32, 4, 2)
    return Block(64, 64, 4, 3), Block(64, 64, 4, 2), Block(64, 64, 4, 2)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _causal(q_BTNH, k_BTKH, v_BTKV, first_BT, scale, softcap, interpret):
    return _forward(q_BTNH, k_BTKH, v_BTKV, first_BT, scale, softcap, interpret)[0]


def _forward(q_BTNH, k_BTKH, v_BTKV, first_BT, scale, softcap, interpret):
    (B, T, N, H), (_, _, K, V) = q_BTNH.shape, v_BTKV.shape
    block, _, _ = _blocks(q_BTNH)
    tile, full, row, places = _by_queries(block, T, N // K)
    out_BTNV, lse2_BNT = pl.pallas_call(
        partial(_forward_kernel, block=block, scale=scale, softcap=softcap),
        grid=(T // block.queries, B, N), in_specs=[tile(H), full(H), full(V), *places], out_specs=[tile(V), row],
        out_shape=[jax.ShapeDtypeStruct((B, T, N, V), q_BTNH.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        **_options("forward", block, interpret),
    )(q_BTNH, k_BTKH, v_BTKV, first_BT, *_keys(first_BT, block))  # fmt: skip
    out_BTNV, lse2_BNT = (checkpoint_name(x, OUTPUT) for x in (out_BTNV, lse2_BNT))
    return (out_BTNV, lse2_BNT * log(2)), (q_BTNH, k_BTKH, v_BTKV, first_BT, out_BTNV, lse2_BNT)


def _backward(scale, softcap, interpret, kept, given):
    *inputs, first_BT, out_BTNV, lse2_BNT = kept
    dout_BTNV, dlse_BNT = given
    q_BTNH, k_BTKH, v_BTKV = inputs
    (B, T, N, H), (_, _, K, V) = q_BTNH.shape, v_BTKV.shape
    inner_BNT = jnp.einsum("BTNV,BTNV->BNT", dout_BTNV, out_BTNV, preferred_element_type=jnp.float32) - dlse_BNT
    inputs += dout_BTNV, lse2_BNT, inner_BNT, first_BT
    how = dict(scale=scale, softcap=softcap)
    _, of_queries, of_keys = _blocks(q_BTNH)
    tile, full, row, places = _by_queries(of_queries, T, N // K)
    dq_BTNH = pl.pallas_call(
        partial(_dq_kernel, block=of_queries, **how), grid=(T // of_queries.queries, B, N),
        in_specs=[tile(H), full(H), full(V), tile(V), row, row, *places], out_specs=tile(H),
        out_shape=_like(q_BTNH), **_options("dq", of_queries, interpret),
    )(*inputs, *_keys(first_BT, of_queries))  # fmt: skip
    tile, group, row, places = _by_keys(of_keys, T, N // K)
    dk_BTKH, dv_BTKV = pl.pallas_call(
        partial(_dkv_kernel, block=of_keys, **how), grid=(T // of_keys.keys, B, K),
        in_specs=[group(H), tile(H), tile(V), group(V), row, row, *places], out_specs=[tile(H), tile(V)],
        out_shape=[_like(k_BTKH), _like(v_BTKV)], **_options("dkv", of_keys, interpret),
    )(*inputs, *_queries(first_BT, of_keys))  # fmt: skip
    return dq_BTNH, dk_BTKH, dv_BTKV, None


_causal.defvjp(_forward, _backward)


def _forward_kernel(q_ref, k_ref, v_ref, first_ref, begin_ref, end_ref, out_ref, lse_ref, *, block, scale, softcap):
    i = pl.program_id(0)
    q_QH, first_Q, row_Q = q_ref[...], first_ref[...], _at(i, block.queries)

    def look(j, carry):
        out_QV, top_Q, sum_Q = carry
        at = pl.ds(j * block.keys, block.keys)
        seen_QS = _seen(first_Q[:, None], row_Q[:, None], _at(j, block.keys)[None, :])
        score_QS = jnp.where(seen_QS, _scores(_dot(q_QH, k_ref[at, :].T), scale, softcap)[0], UNSEEN)
        new_Q = jnp.maximum(top_Q, score_QS.max(1))
        # 1 while a row has seen no key yet; the block with its first key multiplies that by 0.
        prob_QS, shrink_Q = jnp.exp2(score_QS - new_Q[:, None]), jnp.exp2(top_Q - new_Q)
        more_QV = _dot(prob_QS.astype(v_ref.dtype), v_ref[at, :])
        return out_QV * shrink_Q[:, None] + more_QV, new_Q, sum_Q * shrink_Q + prob_QS.sum(1)

    full = lambda value, *shape: jnp.full(shape, value, jnp.float32)
    start = full(0, *out_ref.shape), full(UNSEEN, block.queries), full(0, block.queries)
    out_QV, top_Q, sum_Q = jax.lax.fori_loop(begin_ref[i], end_ref[i], look, start)
    out_ref[...] = (out_QV / sum_Q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top_Q + jnp.log2(sum_Q)


def _dq_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, inner_ref, first_ref, begin_ref, end_ref, dq_ref, *, block, scale, softcap
):
    i = pl.program_id(0)
    q_QH, dout_QV, first_Q, row_Q = q_ref[...], dout_ref[...], first_ref[...], _at(i, block.queries)
    lse_Q1, inner_Q1 = lse_ref[...][:, None], inner_ref[...][:, None]

    def look(j, dq_QH):
        at = pl.ds(j * block.keys, block.keys)
        k_SH = k_ref[at, :]
        seen_QS = _seen(first_Q[:, None], row_Q[:, None], _at(j, block.keys)[None, :])
        score_QS, slope_QS = _scores(_dot(q_QH, k_SH.T), scale, softcap)
        prob_QS = jnp.where(seen_QS, jnp.exp2(score_QS - lse_Q1), 0)
        dscore_QS = prob_QS * (_dot(dout_QV, v_ref[at, :].T) - inner_Q1)
        dscore_QS = dscore_QS if slope_QS is None else dscore_QS * slope_QS
        return dq_QH + _dot(dscore_QS.astype(k_SH.dtype), k_SH)

    dq_QH = jax.lax.fori_loop(begin_ref[i], end_ref[i], look, jnp.zeros(q_QH.shape, jnp.float32))
    dq_ref[...] = (dq_QH * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, inner_ref, first_ref, begin_ref, end_ref, dk_ref, dv_ref, *, block, scale,
    softcap,
):  # fmt: skip
    j = pl.program_id(0)
    k_SH, v_SV, column_S = k_ref[...], v_ref[...], _at(j, block.keys)

    def head(g, sums):
        def look(i, sums):
            dk_SH, dv_SV = sums
            at = pl.ds(i * block.queries, block.queries)
            q_QH, dout_QV = q_ref[at, g, :], dout_ref[at, g, :]
            seen_SQ = _seen(first_ref[at][None, :], _at(i, block.queries)[None, :], column_S[:, None])
            score_SQ, slope_SQ = _scores(_dot(k_SH, q_QH.T), scale, softcap)
            prob_SQ = jnp.where(seen_SQ, jnp.exp2(score_SQ - lse_ref[g, at][None, :]), 0)
            dscore_SQ = prob_SQ * (_dot(v_SV, dout_QV.T) - inner_ref[g, at][None, :])
            dscore_SQ = dscore_SQ if slope_SQ is None else dscore_SQ * slope_SQ
            dv_SV += _dot(prob_SQ.astype(dout_QV.dtype), dout_QV)
            return dk_SH + _dot(dscore_SQ.astype(q_QH.dtype), q_QH), dv_SV

        return jax.lax.fori_loop(begin_ref[j], end_ref[j], look, sums)

    zeros = jnp.zeros(k_SH.shape, jnp.float32), jnp.zeros(v_SV.shape, jnp.float32)
    dk_SH, dv_SV = jax.lax.fori_loop(0, q_ref.shape[1], head, zeros)
    dk_ref[...] = (dk_SH * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_SV.astype(dv_ref.dtype)


def _scores(product, scale, softcap):
    """(scores times log2(e), for exp2; the softcap's derivative or None)."""
    if softcap is None:
        return product * (scale * log2(e)), None
    bent = jnp.tanh(product * (scale / softcap))
    return bent * (softcap * log2(e)), 1 - bent * bent


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _at(block, size):
    """Positions of a block."""
    return block * size + jnp.arange(size, dtype=jnp.int32)


def _seen(first, row, column):
    return (first <= column) & (column <= row)


def _keys(first_BT, block):
    """Range [begin, end) of key blocks for each block of queries, each [B, blocks of queries]."""
    ends_I = jnp.arange(block.queries, first_BT.shape[1] + 1, block.queries, dtype=jnp.int32)
    begin_BI = first_BT[:, :: block.queries] // block.keys
    return begin_BI, jnp.broadcast_to(-(-ends_I // block.keys), begin_BI.shape)


def _queries(first_BT, block):
    """Range [begin, end) of query blocks for each block of keys, each [B, blocks of keys]."""
    begins_J = jnp.arange(0, first_BT.shape[1], block.keys, dtype=jnp.int32)
    last_BJ = (first_BT[:, None, :] < (begins_J + block.keys)[None, :, None]).sum(-1, dtype=jnp.int32)
    end_BJ = -(-last_BJ // block.queries)
    return jnp.broadcast_to(begins_J // block.queries, end_BJ.shape), end_BJ


def _by_queries(block, T, group):
    """Block specs of a program for one head's block of queries: functions of the head size that give those of its
    queries and of all keys; those of its rows and of the bounds."""
    tile = lambda H: pl.BlockSpec((None, block.queries, None, H), lambda i, b, n: (b, i, n, 0))
    full = lambda H: pl.BlockSpec((None, T, None, H), lambda i, b, n: (b, 0, jax.lax.div(n, group), 0))
    row = pl.BlockSpec((None, None, block.queries), lambda i, b, n: (b, n, i))
    first = pl.BlockSpec((None, block.queries), lambda i, b, n: (b, i))
    bound = pl.BlockSpec((None, T // block.queries), lambda i, b, n: (b, 0))
    return tile, full, row, (first, bound, bound)


def _by_keys(block, T, group):
    """Block specs of a program for one kv head's block of keys: functions of the head size that give those of its keys
    and of all its queries; those of its rows and of the bounds."""
    tile = lambda H: pl.BlockSpec((None, block.keys, None, H), lambda j, b, k: (b, j, k, 0))
    queries = lambda H: pl.BlockSpec((None, T, group, H), lambda j, b, k: (b, 0, k, 0))
    row = pl.BlockSpec((None, group, T), lambda j, b, k: (b, k, 0))
    first = pl.BlockSpec((None, T), lambda j, b, k: (b, 0))
    bound = pl.BlockSpec((None, T // block.keys), lambda j, b, k: (b, 0))
    return tile, queries, row, (first, bound, bound)


def _options(name, block, interpret):
    params = triton.CompilerParams(num_warps=block.warps, num_stages=block.stages)
    return {"compiler_params": params, "interpret": interpret, "name": f"attention_{name}"}


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
