"""Flash attention (arXiv:2205.14135, 2307.08691) over packed rows for GPUs, in Pallas for Triton.

Segments, windows and chunks are encoded as the first and last key that each query attends to; all keys between them are
seen. Blocks of keys that no query of a block attends to, and blocks of queries that attend to no key of a block, are
skipped.
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
from ...parallel import ring as rings
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


def causal(
    q_BTNH, k_BSKH, v_BSKV, segment_BT, sinks_N=None, *, index_BT=None, key_segment_BS=None, key_index_BS=None,
    pattern: Pattern = PLAIN, interpret: bool = False,
):  # fmt: skip
    """`chunked.causal`; without separate keys, a padding token attends only to itself.

    Args:
      index_BT: only read with separate keys; the keys that a query sees must be adjacent.
      interpret: runs in interpret mode on any platform, for tests.
    """
    T, V = q_BTNH.shape[1], v_BSKV.shape[3]
    if key_index_BS is not None:
        seen = _seen_keys((segment_BT, index_BT), (key_segment_BS, key_index_BS), pattern)
    elif pattern.bidirectional:
        here = segment_BT, segment_index(segment_BT)
        seen = _seen_keys(here, here, pattern)
    else:
        segment_BT = _rows(segment_BT)
        row_BT = jnp.broadcast_to(jnp.arange(segment_BT.shape[1], dtype=jnp.int32), segment_BT.shape)
        seen = _first(segment_BT, pattern), row_BT
    how = pattern.factor(q_BTNH.shape[3]), pattern.softcap, interpret
    out_BTNV, lse_BNT = _causal(*map(_fill, (q_BTNH, k_BSKH, v_BSKV)), seen, *how)
    return sinks.add(out_BTNV[:, :T, :, :V], lse_BNT[:, :, :T].swapaxes(1, 2), sinks_N)


def ring(
    q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N=None, *, axis: str, pattern: Pattern = PLAIN,
    interpret: bool = False,
):  # fmt: skip
    """`causal` over rows whose positions are sharded over a mesh axis, in the order of `ring.order`."""
    how = dict(pattern=pattern, interpret=interpret)
    keep = partial(checkpoint_name, name=OUTPUT)
    attend = rings.attention(partial(forward, **how), partial(backward, **how), keep, axis, (1, 1))
    out_BTNV, lse_BTN1 = attend(q_BTNH, k_BTKH, v_BTKV, (segment_BT, index_BT))
    return sinks.add(out_BTNV, lse_BTN1[..., 0], sinks_N)


def forward(q_BTNH, k_BSKH, v_BSKV, here, there, *, pattern, interpret, aligned):
    """One block: (out_BTNV, lse_BTN1) of queries at `here` over keys at `there`, each (segment, index), `aligned` or
    not. A query that sees no key gets a log-sum-exp of -7e29, and any output."""
    T, V, how = q_BTNH.shape[1], v_BSKV.shape[3], (pattern.factor(q_BTNH.shape[3]), pattern.softcap, interpret)
    seen = _seen_keys(here, there, pattern)
    out_BTNV, lse2_BNT = _over_queries(_fill(q_BTNH), _fill(k_BSKH), _fill(v_BSKV), seen, *how)
    return out_BTNV[:, :T, :, :V], (lse2_BNT * log(2))[:, :, :T].swapaxes(1, 2)[..., None]


def backward(
    q_BTNH, k_BSKH, v_BSKV, here, there, lse_BTN1, inner_BTN1, dout_BTNV, *, pattern, interpret, aligned
):  # fmt: skip
    """Gradients (dq, dk, dv) of one block in fp32; arguments as of `chunked.backward`."""
    how = pattern.factor(q_BTNH.shape[3]), pattern.softcap, interpret
    inputs = _fill(q_BTNH), _fill(k_BSKH), _fill(v_BSKV), _fill(dout_BTNV)
    by_head = lambda x_BTN1: _rows(x_BTN1[..., 0]).swapaxes(1, 2)
    grads = _gradients(
        *inputs, by_head(lse_BTN1 / log(2)), by_head(inner_BTN1), _seen_keys(here, there, pattern), *how, jnp.float32
    )
    return tuple(dx[:, : x.shape[1], :, : x.shape[3]] for dx, x in zip(grads, (q_BTNH, k_BSKH, v_BSKV), strict=True))


def _rows(x_BT, value=0):
    """Pads rows to whole blocks."""
    return jnp.pad(x_BT, [(0, 0), (0, -x_BT.shape[1] % ROWS)] + [(0, 0)] * (x_BT.ndim - 2), constant_values=value)


def _fill(x_BTNH):
    """Pads rows, and heads to a power of two."""
    size = x_BTNH.shape[3]
    return _rows(jnp.pad(x_BTNH, [(0, 0)] * 3 + [(0, max(LEAST, pl.next_power_of_2(size)) - size)]))


def _first(segment_BT, pattern):
    """Position of the first key that each query attends to, among its own row."""
    at_BT = jnp.broadcast_to(jnp.arange(segment_BT.shape[1], dtype=jnp.int32), segment_BT.shape)
    index_BT = jnp.where(segment_BT > 0, segment_index(segment_BT), 0)
    return at_BT - index_BT + jnp.maximum(pattern.first(index_BT), 0)


def _seen_keys(here, there, pattern):
    """Positions of the first and the last key that each query attends to, [B, T] in whole blocks; of none, and for rows
    that are added, a first one behind all keys, and -1.

    Comparisons and reductions alone, for XLA to fuse on a GPU; a CPU, where only tests run this, makes an array
    [B, T, S] of it.
    """
    (segment_BT1, index_BT1), (segment_B1S, index_B1S) = (x[:, :, None] for x in here), (x[:, None] for x in there)
    sees_BTS = (segment_BT1 == segment_B1S) & pattern.sees(index_BT1, index_B1S)
    S, place_S = segment_B1S.shape[2], jnp.arange(segment_B1S.shape[2], dtype=jnp.int32)
    first_BT = jnp.min(jnp.where(sees_BTS, place_S[None, None], S), -1)
    last_BT = jnp.max(jnp.where(sees_BTS, place_S[None, None], -1), -1)
    return _rows(first_BT, S), _rows(last_BT, -1)


def _blocks(x_BTNH):
    """Blocks of the forward, dq and dkv kernels, sized for Hopper's registers."""
    if x_BTNH.shape[3] * x_BTNH.dtype.itemsize > 256:
        return Block(64, 32, 4, 2), Block(32, 32, 4, 2), Block(32, 32, 4, 2)
    return Block(64, 64, 4, 3), Block(64, 64, 4, 2), Block(64, 64, 4, 2)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _causal(q_BTNH, k_BSKH, v_BSKV, seen, scale, softcap, interpret):
    return _forward(q_BTNH, k_BSKH, v_BSKV, seen, scale, softcap, interpret)[0]


def _forward(q_BTNH, k_BSKH, v_BSKV, seen, scale, softcap, interpret):
    made = _over_queries(q_BTNH, k_BSKH, v_BSKV, seen, scale, softcap, interpret)
    out_BTNV, lse2_BNT = (checkpoint_name(x, OUTPUT) for x in made)
    return (out_BTNV, lse2_BNT * log(2)), (q_BTNH, k_BSKH, v_BSKV, seen, out_BTNV, lse2_BNT)


def _backward(scale, softcap, interpret, kept, given):
    q_BTNH, k_BSKH, v_BSKV, seen, out_BTNV, lse2_BNT = kept
    dout_BTNV, dlse_BNT = given
    inner_BNT = jnp.einsum("BTNV,BTNV->BNT", dout_BTNV, out_BTNV, preferred_element_type=jnp.float32) - dlse_BNT
    how = scale, softcap, interpret
    return *_gradients(q_BTNH, k_BSKH, v_BSKV, dout_BTNV, lse2_BNT, inner_BNT, seen, *how), None


_causal.defvjp(_forward, _backward)


def _over_queries(q_BTNH, k_BSKH, v_BSKV, seen, scale, softcap, interpret):
    """(out_BTNV, lse_BNT in base 2) of whole blocks."""
    (B, T, N, H), (_, S, K, V) = q_BTNH.shape, v_BSKV.shape
    block, _, _ = _blocks(q_BTNH)
    tile, full, row, places = _by_queries(block, T, S, N // K)
    return pl.pallas_call(
        partial(_forward_kernel, block=block, scale=scale, softcap=softcap),
        grid=(T // block.queries, B, N), in_specs=[tile(H), full(H), full(V), *places], out_specs=[tile(V), row],
        out_shape=[jax.ShapeDtypeStruct((B, T, N, V), q_BTNH.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        **_options("forward", block, interpret),
    )(q_BTNH, k_BSKH, v_BSKV, *seen, *_keys(seen, block))  # fmt: skip


def _gradients(
    q_BTNH, k_BSKH, v_BSKV, dout_BTNV, lse2_BNT, inner_BNT, seen, scale, softcap, interpret, dtype=None
):  # fmt: skip
    """(dq, dk, dv) of whole blocks, in this dtype; None = each in that of its input."""
    (B, T, N, H), (_, S, K, V) = q_BTNH.shape, v_BSKV.shape
    inputs = q_BTNH, k_BSKH, v_BSKV, dout_BTNV, lse2_BNT, inner_BNT, *seen
    how, like = dict(scale=scale, softcap=softcap), lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    _, of_queries, of_keys = _blocks(q_BTNH)
    tile, full, row, places = _by_queries(of_queries, T, S, N // K)
    dq_BTNH = pl.pallas_call(
        partial(_dq_kernel, block=of_queries, **how), grid=(T // of_queries.queries, B, N),
        in_specs=[tile(H), full(H), full(V), tile(V), row, row, *places], out_specs=tile(H),
        out_shape=like(q_BTNH), **_options("dq", of_queries, interpret),
    )(*inputs, *_keys(seen, of_queries))  # fmt: skip
    tile, group, row, places = _by_keys(of_keys, T, S, N // K)
    dk_BSKH, dv_BSKV = pl.pallas_call(
        partial(_dkv_kernel, block=of_keys, **how), grid=(S // of_keys.keys, B, K),
        in_specs=[group(H), tile(H), tile(V), group(V), row, row, *places], out_specs=[tile(H), tile(V)],
        out_shape=[like(k_BSKH), like(v_BSKV)], **_options("dkv", of_keys, interpret),
    )(*inputs, *_queries(seen, of_keys, S))  # fmt: skip
    return dq_BTNH, dk_BSKH, dv_BSKV


def _forward_kernel(
    q_ref, k_ref, v_ref, first_ref, last_ref, begin_ref, end_ref, out_ref, lse_ref, *, block, scale, softcap
):
    i = pl.program_id(0)
    q_QH, first_Q, last_Q = q_ref[...], first_ref[...], last_ref[...]

    def look(j, carry):
        out_QV, top_Q, sum_Q = carry
        at = pl.ds(j * block.keys, block.keys)
        seen_QS = _seen(first_Q[:, None], last_Q[:, None], _at(j, block.keys)[None, :])
        score_QS = jnp.where(seen_QS, _scores(_dot(q_QH, k_ref[at, :].T), scale, softcap)[0], UNSEEN)
        new_Q = jnp.maximum(top_Q, score_QS.max(1))
        # 1 while a row has seen no key yet; the block with its first key multiplies that by 0.
        prob_QS, shrink_Q = jnp.exp2(score_QS - new_Q[:, None]), jnp.exp2(top_Q - new_Q)
        more_QV = _dot(prob_QS.astype(v_ref.dtype), v_ref[at, :])
        return out_QV * shrink_Q[:, None] + more_QV, new_Q, sum_Q * shrink_Q + prob_QS.sum(1)

    full = lambda value, *shape: jnp.full(shape, value, jnp.float32)
    start = full(0, *out_ref.shape), full(UNSEEN, block.queries), full(0, block.queries)
    out_QV, top_Q, sum_Q = jax.lax.fori_loop(begin_ref[i], end_ref[i], look, start)
    sum_Q = jnp.where(sum_Q > 0, sum_Q, 1)  # of no key at all
    out_ref[...] = (out_QV / sum_Q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top_Q + jnp.log2(sum_Q)


def _dq_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, inner_ref, first_ref, last_ref, begin_ref, end_ref, dq_ref, *, block, scale,
    softcap,
):  # fmt: skip
    i = pl.program_id(0)
    q_QH, dout_QV, first_Q, last_Q = q_ref[...], dout_ref[...], first_ref[...], last_ref[...]
    lse_Q1, inner_Q1 = lse_ref[...][:, None], inner_ref[...][:, None]

    def look(j, dq_QH):
        at = pl.ds(j * block.keys, block.keys)
        k_SH = k_ref[at, :]
        seen_QS = _seen(first_Q[:, None], last_Q[:, None], _at(j, block.keys)[None, :])
        score_QS, slope_QS = _scores(_dot(q_QH, k_SH.T), scale, softcap)
        prob_QS = jnp.where(seen_QS, jnp.exp2(score_QS - lse_Q1), 0)
        dscore_QS = prob_QS * (_dot(dout_QV, v_ref[at, :].T) - inner_Q1)
        dscore_QS = dscore_QS if slope_QS is None else dscore_QS * slope_QS
        return dq_QH + _dot(dscore_QS.astype(k_SH.dtype), k_SH)

    dq_QH = jax.lax.fori_loop(begin_ref[i], end_ref[i], look, jnp.zeros(q_QH.shape, jnp.float32))
    dq_ref[...] = (dq_QH * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, inner_ref, first_ref, last_ref, begin_ref, end_ref, dk_ref, dv_ref, *,
    block, scale, softcap,
):  # fmt: skip
    j = pl.program_id(0)
    k_SH, v_SV, column_S = k_ref[...], v_ref[...], _at(j, block.keys)

    def head(g, sums):
        def look(i, sums):
            dk_SH, dv_SV = sums
            at = pl.ds(i * block.queries, block.queries)
            q_QH, dout_QV = q_ref[at, g, :], dout_ref[at, g, :]
            seen_SQ = _seen(first_ref[at][None, :], last_ref[at][None, :], column_S[:, None])
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


def _seen(first, last, column):
    return (first <= column) & (column <= last)


def _keys(seen, block):
    """Range [begin, end) of key blocks for each block of queries, each [B, blocks of queries]."""
    first_BI, last_BI = _bounds(seen, block)
    return first_BI // block.keys, last_BI // block.keys + 1


def _queries(seen, block, S):
    """Range [begin, end) of query blocks for each block of keys, each [B, blocks of keys]."""
    first_BI1, last_BI1 = (x[:, :, None] for x in _bounds(seen, block))
    begins_J, count = jnp.arange(0, S, block.keys, dtype=jnp.int32), first_BI1.shape[1]
    sees_BIJ = (first_BI1 < (begins_J + block.keys)[None, None]) & (last_BI1 >= begins_J[None, None])
    at_I1 = jnp.arange(count, dtype=jnp.int32)[None, :, None]
    return jnp.min(jnp.where(sees_BIJ, at_I1, count), 1), jnp.max(jnp.where(sees_BIJ, at_I1 + 1, 0), 1)


def _bounds(seen, block):
    """Positions of the first and the last key of each block of queries, each [B, blocks of queries]."""
    first_BT, last_BT = seen
    part = lambda x_BT: x_BT.reshape(x_BT.shape[0], -1, block.queries)
    return part(first_BT).min(-1), part(last_BT).max(-1)


def _by_queries(block, T, S, group):
    """Block specs of a program for one head's block of queries: functions of the head size that give those of its
    queries and of all keys; those of its rows and of the bounds."""
    tile = lambda H: pl.BlockSpec((None, block.queries, None, H), lambda i, b, n: (b, i, n, 0))
    full = lambda H: pl.BlockSpec((None, S, None, H), lambda i, b, n: (b, 0, jax.lax.div(n, group), 0))
    row = pl.BlockSpec((None, None, block.queries), lambda i, b, n: (b, n, i))
    place = pl.BlockSpec((None, block.queries), lambda i, b, n: (b, i))
    bound = pl.BlockSpec((None, T // block.queries), lambda i, b, n: (b, 0))
    return tile, full, row, (place, place, bound, bound)


def _by_keys(block, T, S, group):
    """Block specs of a program for one kv head's block of keys: functions of the head size that give those of its keys
    and of all its queries; those of its rows and of the bounds."""
    tile = lambda H: pl.BlockSpec((None, block.keys, None, H), lambda j, b, k: (b, j, k, 0))
    queries = lambda H: pl.BlockSpec((None, T, group, H), lambda j, b, k: (b, 0, k, 0))
    row = pl.BlockSpec((None, group, T), lambda j, b, k: (b, k, 0))
    place = pl.BlockSpec((None, T), lambda j, b, k: (b, 0))
    bound = pl.BlockSpec((None, S // block.keys), lambda j, b, k: (b, 0))
    return tile, queries, row, (place, place, bound, bound)


def _options(name, block, interpret):
    params = triton.CompilerParams(num_warps=block.warps, num_stages=block.stages)
    return {"compiler_params": params, "interpret": interpret, "name": f"attention_{name}"}
