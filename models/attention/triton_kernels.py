"""Flash attention kernels (arXiv:2205.14135, 2307.08691) for GPUs, in Pallas for Triton, for any mask that says which
blocks a program visits: of keys for a block of queries, and in the backward pass of queries for a block of keys.
"""

from collections.abc import Callable
from functools import partial
from math import e, log, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .chunked import OUTPUT

UNSEEN = -1e30
LEAST = 16  # minimum size of each dimension of a matmul
ROWS = 128  # rows are padded to a multiple of it; all block sizes divide it


class Block(NamedTuple):
    """Block sizes, warps and pipeline stages of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


class Walk(NamedTuple):
    """The blocks that a program visits.

    Attributes:
      begin, end: range of its steps.
      block: f(step) -> number of the block.
      seen: f(number) -> which keys of the block the program's queries see, bool[queries, keys]; of a program for keys,
        which queries of the block see its keys, bool[keys, queries].
    """

    begin: Any
    end: Any
    block: Callable
    seen: Callable


class Mask(NamedTuple):
    """Which keys queries see: functions of `seen`, the arrays that say so for a row.

    Attributes:
      for_queries: f(seen, block, S) -> (arrays of which a program for a block of queries gets its block, arrays that it
        gets whole).
      for_keys: the same for a program for a block of keys.
      keys: f(i, block, *refs) -> `Walk` of a program for block i of queries; refs are those of the arrays.
      queries: the same of a program for block i of keys.
    """

    for_queries: Callable
    for_keys: Callable
    keys: Callable
    queries: Callable


def rows(x_BT, value=0):
    """Pads rows to whole blocks."""
    return jnp.pad(x_BT, [(0, 0), (0, -x_BT.shape[1] % ROWS)] + [(0, 0)] * (x_BT.ndim - 2), constant_values=value)


def fill(x_BTNH):
    """Pads rows, and heads to a power of two."""
    size = x_BTNH.shape[3]
    return rows(jnp.pad(x_BTNH, [(0, 0)] * 3 + [(0, max(LEAST, pl.next_power_of_2(size)) - size)]))


def positions(block, size):
    """Positions of a block."""
    return block * size + jnp.arange(size, dtype=jnp.int32)


def blocks(x_BTNH):
    """Blocks of the forward, dq and dkv kernels, sized for Hopper's registers."""
    if x_BTNH.shape[3] * x_BTNH.dtype.itemsize > 256:
        return Block(64, 32, 4, 2), Block(32, 32, 4, 2), Block(32, 32, 4, 2)
    return Block(64, 64, 4, 3), Block(64, 64, 4, 2), Block(64, 64, 4, 2)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def attention(q_BTNH, k_BSKH, v_BSKV, seen, mask, scale, softcap, interpret):
    """(out_BTNV, lse_BNT) of whole blocks, by a `Mask`; named for rematerialisation."""
    return _forward(q_BTNH, k_BSKH, v_BSKV, seen, mask, scale, softcap, interpret)[0]


def _forward(q_BTNH, k_BSKH, v_BSKV, seen, mask, scale, softcap, interpret):
    made = over_queries(q_BTNH, k_BSKH, v_BSKV, seen, mask, scale, softcap, interpret)
    out_BTNV, lse2_BNT = (checkpoint_name(x, OUTPUT) for x in made)
    return (out_BTNV, lse2_BNT * log(2)), (q_BTNH, k_BSKH, v_BSKV, seen, out_BTNV, lse2_BNT)


def _backward(mask, scale, softcap, interpret, kept, given):
    q_BTNH, k_BSKH, v_BSKV, seen, out_BTNV, lse2_BNT = kept
    dout_BTNV, dlse_BNT = given
    inner_BNT = jnp.einsum("BTNV,BTNV->BNT", dout_BTNV, out_BTNV, preferred_element_type=jnp.float32) - dlse_BNT
    how = mask, scale, softcap, interpret
    return *gradients(q_BTNH, k_BSKH, v_BSKV, dout_BTNV, lse2_BNT, inner_BNT, seen, *how), None


attention.defvjp(_forward, _backward)


def over_queries(q_BTNH, k_BSKH, v_BSKV, seen, mask, scale, softcap, interpret):
    """(out_BTNV, lse_BNT in base 2) of whole blocks."""
    (B, T, N, H), (_, S, K, V) = q_BTNH.shape, v_BSKV.shape
    block, _, _ = blocks(q_BTNH)
    tile, full, row = _by_queries(block, S, N // K)
    places, specs = _places(mask.for_queries(seen, block, S), block.queries)
    return pl.pallas_call(
        partial(_forward_kernel, mask=mask, block=block, scale=scale, softcap=softcap),
        grid=(T // block.queries, B, N), in_specs=[tile(H), full(H), full(V), *specs], out_specs=[tile(V), row],
        out_shape=[jax.ShapeDtypeStruct((B, T, N, V), q_BTNH.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        **_options("forward", block, interpret),
    )(q_BTNH, k_BSKH, v_BSKV, *places)  # fmt: skip


def gradients(
    q_BTNH, k_BSKH, v_BSKV, dout_BTNV, lse2_BNT, inner_BNT, seen, mask, scale, softcap, interpret, dtype=None
):  # fmt: skip
    """(dq, dk, dv) of whole blocks, summed in fp32 and returned in this dtype; None = each in that of its input."""
    (B, T, N, H), (_, S, K, V) = q_BTNH.shape, v_BSKV.shape
    inputs = q_BTNH, k_BSKH, v_BSKV, dout_BTNV, lse2_BNT, inner_BNT
    how, like = dict(mask=mask, scale=scale, softcap=softcap), lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    _, of_queries, of_keys = blocks(q_BTNH)
    tile, full, row = _by_queries(of_queries, S, N // K)
    places, specs = _places(mask.for_queries(seen, of_queries, S), of_queries.queries)
    dq_BTNH = pl.pallas_call(
        partial(_dq_kernel, block=of_queries, **how), grid=(T // of_queries.queries, B, N),
        in_specs=[tile(H), full(H), full(V), tile(V), row, row, *specs], out_specs=tile(H),
        out_shape=like(q_BTNH), **_options("dq", of_queries, interpret),
    )(*inputs, *places)  # fmt: skip
    tile, group, row = _by_keys(of_keys, T, N // K)
    places, specs = _places(mask.for_keys(seen, of_keys, S), of_keys.keys)
    dk_BSKH, dv_BSKV = pl.pallas_call(
        partial(_dkv_kernel, block=of_keys, **how), grid=(S // of_keys.keys, B, K),
        in_specs=[group(H), tile(H), tile(V), group(V), row, row, *specs], out_specs=[tile(H), tile(V)],
        out_shape=[like(k_BSKH), like(v_BSKV)], **_options("dkv", of_keys, interpret),
    )(*inputs, *places)  # fmt: skip
    return dq_BTNH, dk_BSKH, dv_BSKV


def _forward_kernel(q_ref, k_ref, v_ref, *refs, mask, block, scale, softcap):
    *places, out_ref, lse_ref = refs
    q_QH, walk = q_ref[...], mask.keys(pl.program_id(0), block, *places)

    def look(step, carry):
        out_QV, top_Q, sum_Q = carry
        j = walk.block(step)
        at = pl.ds(j * block.keys, block.keys)
        score_QS = jnp.where(walk.seen(j), _scores(_dot(q_QH, k_ref[at, :].T), scale, softcap)[0], UNSEEN)
        new_Q = jnp.maximum(top_Q, score_QS.max(1))
        # 1 while a row has seen no key yet; the block with its first key multiplies that by 0.
        prob_QS, shrink_Q = jnp.exp2(score_QS - new_Q[:, None]), jnp.exp2(top_Q - new_Q)
        more_QV = _dot(prob_QS.astype(v_ref.dtype), v_ref[at, :])
        return out_QV * shrink_Q[:, None] + more_QV, new_Q, sum_Q * shrink_Q + prob_QS.sum(1)

    full = lambda value, *shape: jnp.full(shape, value, jnp.float32)
    start = full(0, *out_ref.shape), full(UNSEEN, block.queries), full(0, block.queries)
    out_QV, top_Q, sum_Q = jax.lax.fori_loop(walk.begin, walk.end, look, start)
    sum_Q = jnp.where(sum_Q > 0, sum_Q, 1)  # of no key at all
    out_ref[...] = (out_QV / sum_Q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top_Q + jnp.log2(sum_Q)


def _dq_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, inner_ref, *refs, mask, block, scale, softcap
):  # fmt: skip
    *places, dq_ref = refs
    q_QH, dout_QV, walk = q_ref[...], dout_ref[...], mask.keys(pl.program_id(0), block, *places)
    lse_Q1, inner_Q1 = lse_ref[...][:, None], inner_ref[...][:, None]

    def look(step, dq_QH):
        j = walk.block(step)
        at = pl.ds(j * block.keys, block.keys)
        k_SH = k_ref[at, :]
        seen_QS = walk.seen(j)
        score_QS, slope_QS = _scores(_dot(q_QH, k_SH.T), scale, softcap)
        prob_QS = jnp.where(seen_QS, jnp.exp2(score_QS - lse_Q1), 0)
        dscore_QS = prob_QS * (_dot(dout_QV, v_ref[at, :].T) - inner_Q1)
        dscore_QS = dscore_QS if slope_QS is None else dscore_QS * slope_QS
        return dq_QH + _dot(dscore_QS.astype(k_SH.dtype), k_SH)

    dq_QH = jax.lax.fori_loop(walk.begin, walk.end, look, jnp.zeros(q_QH.shape, jnp.float32))
    dq_ref[...] = (dq_QH * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, inner_ref, *refs, mask, block, scale, softcap
):  # fmt: skip
    *places, dk_ref, dv_ref = refs
    k_SH, v_SV, walk = k_ref[...], v_ref[...], mask.queries(pl.program_id(0), block, *places)

    def head(g, sums):
        def look(step, sums):
            dk_SH, dv_SV = sums
            i = walk.block(step)
            at = pl.ds(i * block.queries, block.queries)
            q_QH, dout_QV = q_ref[at, g, :], dout_ref[at, g, :]
            seen_SQ = walk.seen(i)
            score_SQ, slope_SQ = _scores(_dot(k_SH, q_QH.T), scale, softcap)
            prob_SQ = jnp.where(seen_SQ, jnp.exp2(score_SQ - lse_ref[g, at][None, :]), 0)
            dscore_SQ = prob_SQ * (_dot(v_SV, dout_QV.T) - inner_ref[g, at][None, :])
            dscore_SQ = dscore_SQ if slope_SQ is None else dscore_SQ * slope_SQ
            dv_SV += _dot(prob_SQ.astype(dout_QV.dtype), dout_QV)
            return dk_SH + _dot(dscore_SQ.astype(q_QH.dtype), q_QH), dv_SV

        return jax.lax.fori_loop(walk.begin, walk.end, look, sums)

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


def _by_queries(block, S, group):
    """Block specs of a program for one head's block of queries: functions of the head size that give those of its
    queries and of all keys; that of its rows."""
    tile = lambda H: pl.BlockSpec((None, block.queries, None, H), lambda i, b, n: (b, i, n, 0))
    full = lambda H: pl.BlockSpec((None, S, None, H), lambda i, b, n: (b, 0, jax.lax.div(n, group), 0))
    return tile, full, pl.BlockSpec((None, None, block.queries), lambda i, b, n: (b, n, i))


def _by_keys(block, T, group):
    """Block specs of a program for one kv head's block of keys: functions of the head size that give those of its keys
    and of all its queries; that of its rows."""
    tile = lambda H: pl.BlockSpec((None, block.keys, None, H), lambda j, b, k: (b, j, k, 0))
    queries = lambda H: pl.BlockSpec((None, T, group, H), lambda j, b, k: (b, 0, k, 0))
    return tile, queries, pl.BlockSpec((None, group, T), lambda j, b, k: (b, k, 0))


def _places(arrays, size):
    """A mask's arrays and their block specs: those that are cut into blocks of this size, and those that are not."""
    cut, whole = arrays
    part = pl.BlockSpec((None, size), lambda i, b, head: (b, i))
    every = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda i, b, head: (b, *[0] * (x.ndim - 1)))
    return [*cut, *whole], [*[part] * len(cut), *map(every, whole)]


def _options(name, block, interpret):
    params = triton.CompilerParams(num_warps=block.warps, num_stages=block.stages)
    return {"compiler_params": params, "interpret": interpret, "name": f"attention_{name}"}
