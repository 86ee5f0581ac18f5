"""Attention over tries: a token sees the tokens on its path from the root; no [T, S] array.

A row holds its tries in depth-first preorder (see `core.trie.Trie`). Each chunk of queries loops over the blocks of
keys that it needs, with an online softmax (FlashAttention-2, arXiv:2307.08691).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core import hardware
from ...core.shapes import shaped
from . import sinks
from .chunked import OUTPUT, gradients, heads_first, heads_last, rows, scores, turned
from .pattern import PLAIN, Pattern

ON_CPU = 64, 128  # queries of a chunk and keys of a block: scores stay in the core's cache
ELSEWHERE = 512, 512


@shaped
def tree(
    q_BTNH, k_BSKH, v_BSKV, place_BT, position_BT, until_BS, position_BS, sinks_N=None, *, pattern: Pattern = PLAIN,
    query_chunk: int | None = None,
):  # fmt: skip
    """Grouped-query attention over tries: the query at place i sees the key at place j iff `j <= i < until[j]`, and the
    pattern lets it.

    Blocks of keys that no query of a chunk sees are skipped, by bounds of their places and positions; the number of
    blocks that are read depends on the tries, the compiled program does not. Memory is linear in T + S: the backward
    pass recomputes scores from the log-sum-exp of each row. Softmax and sums in fp32 or wider, so that a prefix
    sums the gradients of all its branches in it. Differentiable once, in reverse mode.

    Args:
      place_BT: places of the queries in the row, ascending.
      position_BT, position_BS: positions of queries and keys in their samples, which windows and chunks count.
      until_BS: end of each key's subtree, exclusive; keys are a whole row, the key at index j at place j.
      sinks_N: a logit per head that takes part in the softmax without a value, see `sinks`; None = none.
      query_chunk: queries per chunk; None = 64 on a CPU, 512 elsewhere.

    Returns:
      out_BTNV, in v's dtype.

    Raises:
      ValueError: the pattern is bidirectional.
    """
    if pattern.bidirectional:
        raise ValueError("attention: tokens of a trie see only those before them, got a bidirectional pattern")
    heads = heads_first(q_BTNH, k_BSKH, v_BSKV, pattern)
    here, there = (place_BT, position_BT), (until_BS, position_BS)
    out_BKGTV, lse_BKGT1 = _tree(*heads, here, there, pattern, query_chunk)
    return sinks.add(heads_last(out_BKGTV), heads_last(lse_BKGT1)[..., 0], sinks_N)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _tree(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk):
    return _tree_forward(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk)[0]


def _tree_forward(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk):
    made = _forward(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk)
    out_BKGTV, lse_BKGT1 = (checkpoint_name(x, OUTPUT) for x in made)
    return (out_BKGTV, lse_BKGT1), (q_BKGTH, k_BKSH, v_BKSV, here, there, out_BKGTV, lse_BKGT1)


def _tree_backward(pattern, query_chunk, kept, given):
    q_BKGTH, k_BKSH, v_BKSV, here, there, out_BKGTV, lse_BKGT1 = kept
    dout_BKGTV, dlse_BKGT1 = given
    inner_BKGT1 = jnp.sum(dout_BKGTV.astype(lse_BKGT1.dtype) * out_BKGTV, -1, keepdims=True) - dlse_BKGT1
    of_scores = lse_BKGT1, inner_BKGT1
    grads = _backward(q_BKGTH, k_BKSH, v_BKSV, here, there, of_scores, dout_BKGTV, pattern, query_chunk)
    return *(dx.astype(x.dtype) for dx, x in zip(grads, kept, strict=False)), None, None


_tree.defvjp(_tree_forward, _tree_backward)


def _forward(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk):
    """(out_BKGTV, lse_BKGT1), the log-sum-exp of each query's scores."""
    (B, K, G, T, _), (_, _, S, V) = q_BKGTH.shape, v_BKSV.shape
    chunk, block = _sizes(T, S, query_chunk)
    wide = jnp.promote_types(q_BKGTH.dtype, jnp.float32)
    keys, needed = _keys(k_BKSH, v_BKSV, there, block), _needed(here, there, pattern, chunk, block)

    def attend(_, given):
        q_BKGCH, here_BC, needed = given

        def look(at, sums):
            out_BKGCV, top_BKGC1, sum_BKGC1 = sums
            k_BKXH, v_BKXV, sees_BCX = _seen(keys, at, here_BC, pattern)
            score_BKGCX, _ = scores(q_BKGCH, k_BKXH, sees_BCX, pattern)
            new_BKGC1 = jnp.maximum(top_BKGC1, score_BKGCX.max(-1, keepdims=True))
            # While a query has seen no key, both are 1; the block with its first key multiplies that by 0.
            weight_BKGCX, shrink_BKGC1 = jnp.exp(score_BKGCX - new_BKGC1), jnp.exp(top_BKGC1 - new_BKGC1)
            mean_BKRV = jnp.matmul(rows(weight_BKGCX).astype(v_BKXV.dtype), v_BKXV, preferred_element_type=wide)
            out_BKGCV = out_BKGCV * shrink_BKGC1 + mean_BKRV.reshape(out_BKGCV.shape)
            return out_BKGCV, new_BKGC1, sum_BKGC1 * shrink_BKGC1 + weight_BKGCX.sum(-1, keepdims=True)

        full = lambda value, size: jnp.full((1, K, G, chunk, size), value, wide)
        out_BKGCV, top_BKGC1, sum_BKGC1 = _over(needed, look, (full(0, V), full(-1e30, 1), full(0, 1)))
        return (), ((out_BKGCV / sum_BKGC1).astype(v_BKSV.dtype), top_BKGC1 + jnp.log(sum_BKGC1))

    _, made = jax.lax.scan(attend, (), (_parts(q_BKGTH, 3, chunk), _parts(here, 1, chunk), needed))
    return tuple(_whole(x, 3, B, T) for x in made)


def _backward(q_BKGTH, k_BKSH, v_BKSV, here, there, of_scores, dout_BKGTV, pattern, query_chunk):
    """(dq, dk, dv) in fp32 or wider; `of_scores` are lse and inner, as in `chunked.backward`."""
    (B, K, _, T, _), (_, _, S, H), V = q_BKGTH.shape, k_BKSH.shape, v_BKSV.shape[3]
    chunk, block = _sizes(T, S, query_chunk)
    wide = of_scores[0].dtype
    keys, needed = _keys(k_BKSH, v_BKSV, there, block), _needed(here, there, pattern, chunk, block)

    def attend(sums, given):
        (q_BKGCH, dout_BKGCV), of_scores, here_BC, needed = given
        queries = q_BKGCH, turned(q_BKGCH), dout_BKGCV, turned(dout_BKGCV), *of_scores

        def look(at, sums):
            k_BKXH, v_BKXV, sees_BCX = _seen(keys, at, here_BC, pattern)
            new = gradients(queries, k_BKXH, v_BKXV, sees_BCX, pattern)
            dq_BKGCH, dk, dv = sums
            return dq_BKGCH + new[0], dk.at[at].add(new[1]), dv.at[at].add(new[2])

        dq_BKGCH, *sums = _over(needed, look, (jnp.zeros(q_BKGCH.shape, wide), *sums))
        return sums, dq_BKGCH

    sums = [jnp.zeros((len(keys[0]), 1, K, size, block), wide) for size in (H, V)]
    of_queries = *(_parts(x, 3, chunk) for x in ((q_BKGTH, dout_BKGTV), of_scores)), _parts(here, 1, chunk)
    sums, dq = jax.lax.scan(attend, sums, (*of_queries, needed))
    return _whole(dq, 3, B, T), *(_whole(x, 3, B, S).swapaxes(2, 3) for x in sums)


def _sizes(T, S, query_chunk):
    """(queries per chunk, keys per block)."""
    chunk, block = ON_CPU if hardware.platform() == "cpu" else ELSEWHERE
    return min(query_chunk or chunk, T), min(block, S)


def _parts(tree, axis, size):
    """Parts of `size` along an axis, one after another, row by row: [B x parts, 1, ...]. The last one is filled with
    zeros."""

    def cut(x):
        x = jnp.pad(x, [(0, -x.shape[i] % size if i == axis else 0) for i in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis, 1)
        return x.reshape(-1, 1, *x.shape[2:])

    return jax.tree.map(cut, tree)


def _whole(parts, axis, B, length):
    """The array of B rows that `_parts` has cut along an axis into parts, without their filling."""
    x = jnp.moveaxis(parts.reshape(B, -1, *parts.shape[2:]), 1, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _keys(k_BKSH, v_BKSV, there, block):
    """Blocks of keys, values, and their places, untils and positions."""
    until_BS, position_BS = there
    place_BS = jnp.broadcast_to(jnp.arange(until_BS.shape[1], dtype=jnp.int32), until_BS.shape)
    return *_parts((k_BKSH, v_BKSV), 2, block), *_parts((place_BS, until_BS, position_BS), 1, block)


def _seen(keys, at, here_BC, pattern):
    """(k_BKXH, v_BKXV, sees_BCX) of one block."""
    k_BKXH, v_BKXV, *there = (x[at] for x in keys)
    place_BC1, position_BC1 = (x[:, :, None] for x in here_BC)
    place_B1X, until_B1X, position_B1X = (x[:, None, :] for x in there)
    on_path = (place_B1X <= place_BC1) & (place_BC1 < until_B1X)
    return k_BKXH, v_BKXV, on_path & pattern.sees(position_BC1, position_B1X)


def _needed(here, there, pattern, chunk, block):
    """(blocks, count) of each chunk of queries: the first `count` of its `blocks` are those that it needs."""
    (place_BT, position_BT), (until_BS, position_BS) = here, there
    B, S = until_BS.shape
    part = lambda x, size: _parts(x, 1, size).reshape(B, -1, size)
    edge = lambda x_BT: jnp.pad(x_BT, [(0, 0), (0, -x_BT.shape[1] % chunk)], mode="edge")
    place_BIC, position_BIC = part(edge(place_BT), chunk), part(edge(position_BT), chunk)
    first_BI1, last_BI1 = place_BIC.min(-1, keepdims=True), place_BIC.max(-1, keepdims=True)
    begin_11J = jnp.arange(0, S, block, dtype=jnp.int32)[None, None]
    on_path = (part(until_BS, block).max(-1)[:, None] > first_BI1) & (begin_11J <= last_BI1)
    if pattern.span is not None:
        # A token at position 0 sees only itself, in a block that is never skipped; padding is at 0 too, and would
        # else bring in all keys.
        least_BI1 = jnp.where(position_BIC > 0, position_BIC, jnp.iinfo(jnp.int32).max).min(-1, keepdims=True)
        near = part(position_BS, block).max(-1)[:, None] >= pattern.first(least_BI1)
        on_path &= near | (begin_11J + block > first_BI1)
    order_BIJ = jnp.argsort(~on_path, axis=-1, stable=True).astype(jnp.int32)
    own_B11 = jnp.arange(B, dtype=jnp.int32)[:, None, None] * order_BIJ.shape[2]  # blocks of the rows before
    return (order_BIJ + own_B11).reshape(-1, order_BIJ.shape[2]), on_path.sum(-1, dtype=jnp.int32).reshape(-1)


def _over(needed, body, start):
    """Loops over the needed blocks of a chunk."""
    blocks, count = needed
    return jax.lax.fori_loop(0, count, lambda i, sums: body(blocks[i], sums), start)
