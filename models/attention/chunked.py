"""Chunked causal attention over packed rows: each query chunk reads only keys it may attend to; no [T, T] array."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.shapes import shaped
from ...parallel import ring as rings

OUTPUT = "attention"  # checkpoint name of the residuals of the backward pass, for rematerialisation policies
CHUNK = 64, 128  # min and max queries per chunk; between them a quarter of the row
RUNS = 16  # max runs of a row: each is compiled for the keys up to its end and loops over its chunks
# If its sequences are short enough, a chunk looks back only this many chunks, in longer rows this many 32nds of the
# row, otherwise to the start of the row. Choosing costs a few percent of a step, so a run does so only where it can
# skip half its keys: rows of 768 tokens gain nothing; a step on 64 sequences of 180 tokens in rows of 4,096 takes 0.55
# of the time.
NEAR = 2, 5
ELSEWHERE = (512, 512), 4, ()  # CHUNK, RUNS and NEAR off the CPU: no cache to fit, and every matmul is slow to compile
FITS = 1 << 19  # scores: 2 MB in fp32


@shaped
def causal(
    q_BTNH, k_BSKH, v_BSKH, segment_BT, index_BT, *, key_segment_BS=None, key_index_BS=None,
    window: int | None = None, chunk: int | None = None,
):  # fmt: skip
    """Causal grouped-query attention within segments.

    The tokens of a segment are contiguous and in order, so a chunk of queries needs no key after it or before the start
    of its first query's sequence. Memory is linear in T: the backward pass recomputes the scores of a chunk from the
    log-sum-exp of each row (FlashAttention-2, arXiv:2307.08691). Padding (segment 0) attends to padding. Softmax in
    fp32 or wider; scores are scaled by H^-1/2. Differentiable once, in reverse mode.

    Args:
      key_segment_BS, key_index_BS: segments and indices of the keys if they differ from the queries'; must include
        every query's own token.
      window: sliding window: a token attends to itself and the window - 1 tokens before it; None = no limit
        (arXiv:2004.05150).
      chunk: queries per chunk; None = 64 to 128 on a CPU, 512 elsewhere.

    Returns:
      out_BTNH, in q's dtype.
    """
    here = segment_BT, index_BT
    there = here if key_index_BS is None else (key_segment_BS, key_index_BS)
    out_BKGTH = _causal(*_heads_first(q_BTNH, k_BSKH, v_BSKH), here, there, window, chunk, key_index_BS is None)
    return _heads_last(out_BKGTH)


@shaped
def ring(
    q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT, *, axis: str, window: int | None = None, chunk: int | None = None
):
    """`causal` over rows whose positions are sharded over a mesh axis, in the order of `ring.order`."""
    keep = partial(checkpoint_name, name=OUTPUT)
    how = dict(window=window, chunk=chunk)
    attend = rings.attention(partial(forward, **how), partial(backward, **how), keep, axis)
    return _heads_last(attend(*_heads_first(q_BTNH, k_BTKH, v_BTKH), (segment_BT, index_BT)))


def _heads_first(q_BTNH, k_BSKH, v_BSKH):
    """Transposes to (batch, head)-major for plain batched matmuls, and scales the queries."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * H**-0.5
    return q_BKGTH, k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)


def _heads_last(out_BKGTH):
    B, K, G, T, H = out_BKGTH.shape
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _causal(q_BKGTH, k_BKSH, v_BKSH, here, there, window, chunk, aligned):
    return _causal_forward(q_BKGTH, k_BKSH, v_BKSH, here, there, window, chunk, aligned)[0]


def _causal_forward(q_BKGTH, k_BKSH, v_BKSH, here, there, window, chunk, aligned):
    block = q_BKGTH, k_BKSH, v_BKSH, here, there
    made = _by_rows(partial(forward, window=window, chunk=chunk, aligned=aligned), chunk, *block)
    out_BKGTH, lse_BKGT1 = (checkpoint_name(x, OUTPUT) for x in made)
    return out_BKGTH, (*block, out_BKGTH, lse_BKGT1)


def _causal_backward(window, chunk, aligned, kept, dout_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, here, there, out_BKGTH, lse_BKGT1 = kept
    inner_BKGT1 = jnp.sum(dout_BKGTH.astype(lse_BKGT1.dtype) * out_BKGTH, -1, keepdims=True)
    block = q_BKGTH, k_BKSH, v_BKSH, here, there
    more = lse_BKGT1, inner_BKGT1, dout_BKGTH
    grads = _by_rows(partial(backward, window=window, chunk=chunk, aligned=aligned), chunk, *block, *more)
    return *(dx.astype(x.dtype) for dx, x in zip(grads, kept, strict=False)), None, None


_causal.defvjp(_causal_forward, _causal_backward)


def _by_rows(fn, chunk, *block):
    """fn(*block), on a CPU a few rows at a time, so that a chunk's scores stay in the core's cache and the keys to read
    depend on these rows only."""
    (B, K, G, T, _), S = block[0].shape, block[1].shape[2]
    limit = FITS // (K * G * _size(T, chunk) * S) if jax.default_backend() == "cpu" else B
    rows = max(n for n in range(1, B + 1) if B % n == 0 and n <= max(limit, 1))
    if rows == B:
        return fn(*block)
    parts = jax.tree.map(lambda x: x.reshape(B // rows, rows, *x.shape[1:]), block)
    made = jax.lax.map(lambda part: fn(*part), parts)
    return jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), made)


def forward(q_BKGTH, k_BKSH, v_BKSH, here, there, *, window, chunk, aligned):
    """One block: (out_BKGTH, lse_BKGT1) of queries at `here` over keys at `there`, each (segment, index).

    Args:
      aligned: queries and keys are the same tokens, in order, so a chunk needs no key after it or before the window or
        the sequence of its first query. Indices may have gaps between adjacent slots.
    """
    size = _size(q_BKGTH.shape[3], chunk)

    def run(queries, keys, reach):
        q_BKGQH, places = q_BKGTH[:, :, :, queries], [x[:, queries] for x in here]
        k_BKXH, v_BKXH, there_BX = k_BKSH[:, :, keys], v_BKSH[:, :, keys], [x[:, keys] for x in there]

        def attend(cut, look):
            places_BC, there_BY = [cut(x, 1) for x in places], [look(x, 1) for x in there_BX]
            score_BKGCY = _scores(cut(q_BKGQH, 3), look(k_BKXH, 2), places_BC, there_BY, window)
            top_BKGC1 = score_BKGCY.max(-1, keepdims=True)
            weight_BKGCY = jnp.exp(score_BKGCY - top_BKGC1)
            sum_BKGC1 = weight_BKGCY.sum(-1, keepdims=True)
            mean_BKRH = _rows(weight_BKGCY).astype(v_BKXH.dtype) @ look(v_BKXH, 2)
            out_BKGCH = (mean_BKRH.reshape(*score_BKGCY.shape[:-1], -1) / sum_BKGC1).astype(v_BKXH.dtype)
            return (), (out_BKGCH, top_BKGC1 + jnp.log(sum_BKGC1))

        return _by_chunks(attend, q_BKGQH.shape[3], size, k_BKXH.shape[2], reach)[1]

    made = [
        _with_fewest_keys(partial(run, queries), ways, queries, here, size)
        for queries, ways in _runs(q_BKGTH.shape[3], k_BKSH.shape[2], window, size, aligned)
    ]
    return tuple(jnp.concatenate(x, 3) for x in zip(*made, strict=True))


def backward(q_BKGTH, k_BKSH, v_BKSH, here, there, lse_BKGT1, inner_BKGT1, dout_BKGTH, *, window, chunk, aligned):
    """Gradients (dq, dk, dv) of one block, in fp32 or wider.

    Args:
      lse_BKGT1: log-sum-exp of each query's scores over all its keys, those of other blocks included.
      inner_BKGT1: sum over H of dout * out.
    """
    wide, narrow = lse_BKGT1.dtype, q_BKGTH.dtype
    product = partial(jnp.einsum, preferred_element_type=wide)
    size = _size(q_BKGTH.shape[3], chunk)

    # Sums over queries are [head, key]: matmuls without transposed operands are twice as fast on CPUs.
    q_BKHGT, dout_BKHGT = (x_BKGTH.transpose(0, 1, 4, 2, 3) for x_BKGTH in (q_BKGTH, dout_BKGTH))

    def run(queries, seen, keys, reach):
        of_queries = q_BKGTH, dout_BKGTH, lse_BKGT1, inner_BKGT1
        q_BKGQH, dout_BKGQH, lse_BKGQ1, inner_BKGQ1 = (x[:, :, :, queries] for x in of_queries)
        q_BKHGQ, dout_BKHGQ, places = q_BKHGT[..., queries], dout_BKHGT[..., queries], [x[:, queries] for x in here]
        k_BKXH, v_BKXH, there_BX = k_BKSH[:, :, keys], v_BKSH[:, :, keys], [x[:, keys] for x in there]

        def attend(cut, look):
            k_BKYH, v_BKYH, there_BY = look(k_BKXH, 2), look(v_BKXH, 2), [look(x, 1) for x in there_BX]
            score_BKGCY = _scores(cut(q_BKGQH, 3), k_BKYH, [cut(x, 1) for x in places], there_BY, window)
            prob_BKRY = _rows(jnp.exp(score_BKGCY - cut(lse_BKGQ1, 3)))
            dprob_BKRY = product("BKRH,BKYH->BKRY", _rows(cut(dout_BKGQH, 3)), v_BKYH)
            dscore_BKRY = (prob_BKRY * (dprob_BKRY - _rows(cut(inner_BKGQ1, 3)))).astype(narrow)
            q_BKHR, dout_BKHR = (cut(x, 4).reshape(*x.shape[:3], -1) for x in (q_BKHGQ, dout_BKHGQ))
            dv_BKHY = product("BKHR,BKRY->BKHY", dout_BKHR, prob_BKRY.astype(narrow))
            dk_BKHY = product("BKHR,BKRY->BKHY", q_BKHR, dscore_BKRY)
            dq_BKRH = product("BKRY,BKYH->BKRH", dscore_BKRY, k_BKYH)
            return (dk_BKHY, dv_BKHY), (dq_BKRH.reshape(*score_BKGCY.shape[:-1], -1),)

        sums, (dq_BKGQH,) = _by_chunks(attend, q_BKGQH.shape[3], size, k_BKXH.shape[2], reach)
        before = (0, 0), (0, 0), (0, 0), (keys.start - seen.start, 0)
        return dq_BKGQH, *(jnp.pad(x_BKHX, before) for x_BKHX in sums)

    dq = []
    B, K, S, H = k_BKSH.shape
    dk_BKHS, dv_BKHS = jnp.zeros((2, B, K, H, S), wide)
    for queries, ways in _runs(q_BKGTH.shape[3], S, window, size, aligned):
        seen = ways[0][0]
        dq_BKGQH, *more = _with_fewest_keys(partial(run, queries, seen), ways, queries, here, size)
        dk_BKHS, dv_BKHS = (x.at[..., seen].add(new) for x, new in zip((dk_BKHS, dv_BKHS), more, strict=True))
        dq.append(dq_BKGQH)
    return jnp.concatenate(dq, 3), dk_BKHS.swapaxes(2, 3), dv_BKHS.swapaxes(2, 3)


def _size(T, chunk):
    """Queries per chunk."""
    (low, high), _, _ = _platform_sizes()
    return min(chunk or max(low, min(high, T // 4)), T)


def _platform_sizes():
    """(range of queries per chunk, max runs, reaches to try) of this platform."""
    return (CHUNK, RUNS, NEAR) if jax.default_backend() == "cpu" else ELSEWHERE


def _runs(T, S, window, size, aligned):
    """(queries, ways) of each run of full chunks, and of the remainder.

    Ways are (keys, reach), most keys first: each chunk of the run attends to its own keys and the `reach` keys before
    it, or to all `keys` if `reach` is None.
    """
    _, runs, nears = _platform_sizes()
    length = size * -(-T // (size * runs))
    bounds = sorted({*range(0, T, length), T // size * size, T})
    queries = [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    if not aligned:
        return [(each, [(slice(0, S), None)]) for each in queries]
    limit = T if window is None else window - 1
    reaches = sorted((near * max(size, T // 32) for near in nears), reverse=True)

    def ways(each):
        widest = (slice(0, each.stop), None) if limit >= each.start else (slice(each.start - limit, each.stop), limit)
        near = [reach for reach in reaches if 2 * reach <= min(limit, each.start)]
        return [widest, *((slice(each.start - reach, each.stop), reach) for reach in near)]

    return [(each, ways(each)) for each in queries]


def _by_chunks(attend, length, size, keys, reach):
    """Loops `attend(cut, look) -> (sums, outs)` over the chunks of a run: sums are added up at their keys' positions,
    outs concatenated on axis 3. `cut(x, axis)` slices the chunk's queries, `look(x, axis)` its keys; the run has `keys`
    keys."""
    if length <= size:
        return attend(lambda x, axis: x, lambda x, axis: x)
    count = keys if reach is None else reach + size
    part = lambda begin, count: lambda x, axis: jax.lax.dynamic_slice_in_dim(x, begin, count, axis)
    at = lambda start, begin: attend(part(start, size), part(begin, count))

    def add(sums, start):
        begin = 0 if reach is None else start
        new, outs = at(start, begin)
        plus = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, part(begin, count)(x, 3) + new, begin, 3)
        return jax.tree.map(plus, sums, new), outs

    zeros = jax.tree.map(lambda x: jnp.zeros((*x.shape[:3], keys), x.dtype), jax.eval_shape(at, 0, 0)[0])
    sums, outs = jax.lax.scan(add, zeros, jnp.arange(0, length, size))
    return sums, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], length, x.shape[5]), outs)


def _with_fewest_keys(attend, ways, queries, here, size):
    """`attend(*way)` with the fewest keys that still cover the sequences of every chunk of the run."""
    branches = [partial(attend, *way) for way in ways]
    if len(ways) == 1:
        return branches[0]()
    _, index_BT = here
    before = index_BT[:, queries.start : queries.stop : size].max()  # most keys that a chunk needs before its own
    return jax.lax.switch(sum((before <= reach).astype(jnp.int32) for _, reach in ways[1:]), branches)


def _rows(x_BKGCX):
    """Merges the query heads of a kv head into the rows of one matmul."""
    B, K, G, C, X = x_BKGCX.shape
    return x_BKGCX.reshape(B, K, G * C, X)


def _scores(q_BKGCH, k_BKXH, here, there, window):
    """Scores of a chunk of queries over its keys, with -1e30 added where masked."""
    wide = jnp.promote_types(q_BKGCH.dtype, jnp.float32)
    segment_BC1, index_BC1 = (x[:, :, None] for x in here)
    segment_B1X, index_B1X = (x[:, None, :] for x in there)
    sees_BCX = (segment_BC1 == segment_B1X) & (index_BC1 >= index_B1X)
    if window is not None:
        sees_BCX &= index_BC1 - index_B1X < window
    mask_BCX = jnp.where(sees_BCX, 0, wide.type(-1e30))
    score_BKRX = jnp.einsum("BKRH,BKXH->BKRX", _rows(q_BKGCH), k_BKXH, preferred_element_type=wide)
    return score_BKRX.reshape(*q_BKGCH.shape[:-1], -1) + mask_BCX[:, None, None]
