"""Flash attention over packed rows for GPUs: the kernels' mask of segments, windows and chunks.

They are encoded as the first and last key that each query attends to; all keys between them are seen. Blocks of keys
that no query of a block attends to, and blocks of queries that attend to no key of a block, are skipped.
"""

from functools import partial
from math import log

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from ...core.segments import segment_index
from ...parallel import ring as rings
from . import sinks
from . import triton_kernels as kernels
from .chunked import OUTPUT
from .pattern import PLAIN, Pattern
from .triton_tree import tree as tree


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
        segment_BT = kernels.rows(segment_BT)
        row_BT = jnp.broadcast_to(jnp.arange(segment_BT.shape[1], dtype=jnp.int32), segment_BT.shape)
        seen = _first(segment_BT, pattern), row_BT
    how = RANGE, pattern.factor(q_BTNH.shape[3]), pattern.softcap, interpret
    out_BTNV, lse_BNT = kernels.attention(*map(kernels.fill, (q_BTNH, k_BSKH, v_BSKV)), seen, *how)
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
    T, V, how = q_BTNH.shape[1], v_BSKV.shape[3], (RANGE, pattern.factor(q_BTNH.shape[3]), pattern.softcap, interpret)
    seen = _seen_keys(here, there, pattern)
    inputs = kernels.fill(q_BTNH), kernels.fill(k_BSKH), kernels.fill(v_BSKV)
    out_BTNV, lse2_BNT = kernels.over_queries(*inputs, seen, *how)
    return out_BTNV[:, :T, :, :V], (lse2_BNT * log(2))[:, :, :T].swapaxes(1, 2)[..., None]


def backward(
    q_BTNH, k_BSKH, v_BSKV, here, there, lse_BTN1, inner_BTN1, dout_BTNV, *, pattern, interpret, aligned
):  # fmt: skip
    """Gradients (dq, dk, dv) of one block in fp32; arguments as of `chunked.backward`."""
    how = RANGE, pattern.factor(q_BTNH.shape[3]), pattern.softcap, interpret
    inputs = kernels.fill(q_BTNH), kernels.fill(k_BSKH), kernels.fill(v_BSKV), kernels.fill(dout_BTNV)
    by_head = lambda x_BTN1: kernels.rows(x_BTN1[..., 0]).swapaxes(1, 2)
    grads = kernels.gradients(
        *inputs, by_head(lse_BTN1 / log(2)), by_head(inner_BTN1), _seen_keys(here, there, pattern), *how, jnp.float32
    )
    return tuple(dx[:, : x.shape[1], :, : x.shape[3]] for dx, x in zip(grads, (q_BTNH, k_BSKH, v_BSKV), strict=True))


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
    return kernels.rows(first_BT, S), kernels.rows(last_BT, -1)


def _for_queries(seen, block, S):
    return seen, _keys(seen, block)


def _for_keys(seen, block, S):
    return (), (*seen, *_queries(seen, block, S))


def _walk_keys(i, block, first_ref, last_ref, begin_ref, end_ref):
    first_Q, last_Q = first_ref[...], last_ref[...]
    seen_QS = lambda j: _seen(first_Q[:, None], last_Q[:, None], kernels.positions(j, block.keys)[None, :])
    return kernels.Walk(begin_ref[i], end_ref[i], lambda step: step, seen_QS)


def _walk_queries(j, block, first_ref, last_ref, begin_ref, end_ref):
    column_S = kernels.positions(j, block.keys)

    def seen_SQ(i):
        at = pl.ds(i * block.queries, block.queries)
        return _seen(first_ref[at][None, :], last_ref[at][None, :], column_S[:, None])

    return kernels.Walk(begin_ref[j], end_ref[j], lambda step: step, seen_SQ)


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


RANGE = kernels.Mask(_for_queries, _for_keys, _walk_keys, _walk_queries)
