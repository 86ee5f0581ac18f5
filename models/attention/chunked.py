"""Chunked attention over packed rows: each query chunk reads only keys it may attend to; no [T, T] array."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core import hardware
from ...core.shapes import shaped
from ...parallel import ring as rings
from . import sinks
from .pattern import PLAIN, Pattern

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
    q_BTNH, k_BSKH, v_BSKV, segment_BT, index_BT, sinks_N=None, *, key_segment_BS=None, key_index_BS=None,
    pattern: Pattern = PLAIN, query_chunk: int | None = None,
):  # fmt: skip
    """Grouped-query attention within segments, causal unless the pattern is bidirectional.

    The tokens of a segment are contiguous and in order, so a chunk of queries needs no key before the start of its
    first query's sequence, and none after itself, or if bidirectional after the end of its last query's. Memory is
    linear in T: the backward pass recomputes the scores of a chunk from the log-sum-exp of each row (FlashAttention-2,
    arXiv:2307.08691). Padding (segment 0) attends to padding. Softmax in
    fp32 or wider. Differentiable once, in reverse mode.

    Args:
      sinks_N: a logit per head that takes part in the softmax without a value, see `sinks`; None = none.
      key_segment_BS, key_index_BS: segments and indices of the keys if they differ from the queries'; must include
        every query's own token.
      pattern: which keys a query attends to, and how scores are made.
      query_chunk: queries per chunk; None = 64 to 128 on a CPU, 512 elsewhere.

    Returns:
      out_BTNV, in v's dtype.
    """
    here = segment_BT, index_BT
    there = here if key_index_BS is None else (key_segment_BS, key_index_BS)
    heads = heads_first(q_BTNH, k_BSKH, v_BSKV, pattern)
    out_BKGTV, lse_BKGT1 = _causal(*heads, here, there, pattern, query_chunk, key_index_BS is None)
    return sinks.add(heads_last(out_BKGTV), heads_last(lse_BKGT1)[..., 0], sinks_N)


@shaped
def ring(
    q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N=None, *, axis: str, pattern: Pattern = PLAIN,
    query_chunk: int | None = None,
):  # fmt: skip
    """`causal` over rows whose positions are sharded over a mesh axis, in the order of `ring.order`."""
    keep = partial(checkpoint_name, name=OUTPUT)
    how = dict(pattern=pattern, query_chunk=query_chunk)
    attend = rings.attention(partial(forward, **how), partial(backward, **how), keep, axis)
    out_BKGTV, lse_BKGT1 = attend(*heads_first(q_BTNH, k_BTKH, v_BTKV, pattern), (segment_BT, index_BT))
    return sinks.add(heads_last(out_BKGTV), heads_last(lse_BKGT1)[..., 0], sinks_N)


def heads_first(q_BTNH, k_BSKH, v_BSKV, pattern):
    """Transposes to (batch, head)-major for plain batched matmuls, and scales the queries."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * pattern.factor(H)
    return q_BKGTH, k_BSKH.transpose(0, 2, 1, 3), v_BSKV.transpose(0, 2, 1, 3)


def heads_last(out_BKGTV):
    B, K, G, T, V = out_BKGTV.shape
    return out_BKGTV.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, V)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _causal(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk, aligned):
    return _causal_forward(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk, aligned)[0]


def _causal_forward(q_BKGTH, k_BKSH, v_BKSV, here, there, pattern, query_chunk, aligned):
    block = q_BKGTH, k_BKSH, v_BKSV, here, there
    fn = partial(forward, pattern=pattern, query_chunk=query_chunk, aligned=aligned)
    out_BKGTV, lse_BKGT1 = (checkpoint_name(x, OUTPUT) for x in _by_rows(fn, query_chunk, *block))
    return (out_BKGTV, lse_BKGT1), (*block, out_BKGTV, lse_BKGT1)


def _causal_backward(pattern, query_chunk, aligned, kept, given):
    q_BKGTH, k_BKSH, v_BKSV, here, there, out_BKGTV, lse_BKGT1 = kept
    dout_BKGTV, dlse_BKGT1 = given
    inner_BKGT1 = jnp.sum(dout_BKGTV.astype(lse_BKGT1.dtype) * out_BKGTV, -1, keepdims=True) - dlse_BKGT1
    block = q_BKGTH, k_BKSH, v_BKSV, here, there
    more = lse_BKGT1, inner_BKGT1, dout_BKGTV
    fn = partial(backward, pattern=pattern, query_chunk=query_chunk, aligned=aligned)
    grads = _by_rows(fn, query_chunk, *block, *more)
    return *(dx.astype(x.dtype) for dx, x in zip(grads, kept, strict=False)), None, None


_causal.defvjp(_causal_forward, _causal_backward)


def _by_rows(fn, query_chunk, *block):
    """fn(*block), on a CPU a few rows at a time, so that a chunk's scores stay in the core's cache and the keys to read
    depend on these rows only."""
    (B, K, G, T, _), S = block[0].shape, block[1].shape[2]
    limit = FITS // (K * G * _size(T, query_chunk) * S) if hardware.platform() == "cpu" else B
    rows = max(n for n in range(1, B + 1) if B % n == 0 and n <= max(limit, 1))
    if rows == B:
        return fn(*block)
    parts = jax.tree.map(lambda x: x.reshape(B // rows, rows, *x.shape[1:]), block)
    made = jax.lax.map(lambda part: fn(*part), parts)
    return jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), made)


def forward(q_BKGTH, k_BKSH, v_BKSV, here, there, *, pattern, query_chunk, aligned):
    """One block: (out_BKGTV, lse_BKGT1) of queries at `here` over keys at `there`, each (segment, index).

    Args:
      aligned: queries and keys are the same tokens, in order, so a chunk needs no key after it, before the first
        that the pattern lets its first query see, or before that query's sequence; if bidirectional, none after the
        last that its last query sees. Indices may have gaps between adjacent slots.
    """
    size = _size(q_BKGTH.shape[3], query_chunk)

    def run(queries, keys, reach):
        q_BKGQH, places = q_BKGTH[:, :, :, queries], [x[:, queries] for x in here]
        k_BKXH, v_BKXV, there_BX = k_BKSH[:, :, keys], v_BKSV[:, :, keys], [x[:, keys] for x in there]

        def attend(cut, look):
            sees_BCY = _sees([cut(x, 1) for x in places], [look(x, 1) for x in there_BX], pattern)
            score_BKGCY, _ = scores(cut(q_BKGQH, 3), look(k_BKXH, 2), sees_BCY, pattern)
            top_BKGC1 = score_BKGCY.max(-1, keepdims=True)
            weight_BKGCY = jnp.exp(score_BKGCY - top_BKGC1)
            sum_BKGC1 = weight_BKGCY.sum(-1, keepdims=True)
            mean_BKRV = rows(weight_BKGCY).astype(v_BKXV.dtype) @ look(v_BKXV, 2)
            out_BKGCV = (mean_BKRV.reshape(*score_BKGCY.shape[:-1], -1) / sum_BKGC1).astype(v_BKXV.dtype)
            return (), (out_BKGCV, top_BKGC1 + jnp.log(sum_BKGC1))

        return _by_chunks(attend, q_BKGQH.shape[3], size, k_BKXH.shape[2], _count(reach, size, pattern))[1]

    made = [
        _with_fewest_keys(partial(run, queries), ways, queries, here, size, pattern)
        for queries, ways in _runs(
            q_BKGTH.shape[3], k_BKSH.shape[2], pattern.span, size, aligned, pattern.bidirectional
        )
    ]
    return tuple(jnp.concatenate(x, 3) for x in zip(*made, strict=True))


def backward(
    q_BKGTH, k_BKSH, v_BKSV, here, there, lse_BKGT1, inner_BKGT1, dout_BKGTV, *, pattern, query_chunk, aligned
):
    """Gradients (dq, dk, dv) of one block, in fp32 or wider.

    Args:
      lse_BKGT1: log-sum-exp of each query's scores over all its keys, those of other blocks included.
      inner_BKGT1: sum over V of dout * out, less the gradient of lse: a score's gradient is its probability times
        (dout v - inner).
    """
    size = _size(q_BKGTH.shape[3], query_chunk)

    q_BKHGT, dout_BKVGT = turned(q_BKGTH), turned(dout_BKGTV)

    def run(queries, seen, keys, reach):
        of_queries = q_BKGTH, dout_BKGTV, lse_BKGT1, inner_BKGT1
        q_BKGQH, dout_BKGQV, lse_BKGQ1, inner_BKGQ1 = (x[:, :, :, queries] for x in of_queries)
        q_BKHGQ, dout_BKVGQ, places = q_BKHGT[..., queries], dout_BKVGT[..., queries], [x[:, queries] for x in here]
        k_BKXH, v_BKXV, there_BX = k_BKSH[:, :, keys], v_BKSV[:, :, keys], [x[:, keys] for x in there]

        def attend(cut, look):
            sees_BCY = _sees([cut(x, 1) for x in places], [look(x, 1) for x in there_BX], pattern)
            of_queries = (q_BKGQH, 3), (q_BKHGQ, 4), (dout_BKGQV, 3), (dout_BKVGQ, 4), (lse_BKGQ1, 3), (inner_BKGQ1, 3)
            queries = tuple(cut(*x) for x in of_queries)
            dq_BKGCH, *sums = gradients(queries, look(k_BKXH, 2), look(v_BKXV, 2), sees_BCY, pattern)
            return sums, (dq_BKGCH,)

        count = _count(reach, size, pattern)
        sums, (dq_BKGQH,) = _by_chunks(attend, q_BKGQH.shape[3], size, k_BKXH.shape[2], count)
        around = (0, 0), (0, 0), (0, 0), (keys.start - seen.start, seen.stop - keys.stop)
        return dq_BKGQH, *(jnp.pad(x_BKHX, around) for x_BKHX in sums)

    dq = []
    B, K, S, H = k_BKSH.shape
    dk_BKHS, dv_BKVS = (jnp.zeros((B, K, each, S), lse_BKGT1.dtype) for each in (H, v_BKSV.shape[3]))
    for queries, ways in _runs(q_BKGTH.shape[3], S, pattern.span, size, aligned, pattern.bidirectional):
        seen = ways[0][0]
        dq_BKGQH, *more = _with_fewest_keys(partial(run, queries, seen), ways, queries, here, size, pattern)
        dk_BKHS, dv_BKVS = (x.at[..., seen].add(new) for x, new in zip((dk_BKHS, dv_BKVS), more, strict=True))
        dq.append(dq_BKGQH)
    return jnp.concatenate(dq, 3), dk_BKHS.swapaxes(2, 3), dv_BKVS.swapaxes(2, 3)


def _size(T, query_chunk):
    """Queries per chunk."""
    (low, high), _, _ = _platform_sizes()
    return min(query_chunk or max(low, min(high, T // 4)), T)


def _platform_sizes():
    """(range of queries per chunk, max runs, reaches to try) of this platform."""
    return (CHUNK, RUNS, NEAR) if hardware.platform() == "cpu" else ELSEWHERE


def _runs(T, S, span, size, aligned, bidirectional=False):
    """(queries, ways) of each run of full chunks, and of the remainder.

    Ways are (keys, reach), most keys first: each chunk of the run attends to its own keys and the `reach` keys before
    it, if bidirectional to as many after it, or to all `keys` if `reach` is None.
    """
    _, runs, nears = _platform_sizes()
    length = size * -(-T // (size * runs))
    limit = T if span is None else span - 1
    ends = {*range(0, T, length), T // size * size, T}
    if aligned and bidirectional and limit < T:  # the chunks at both ends of the row, whose reach is cut off
        edge = size * -(-limit // size)
        ends |= {at for at in (edge, T // size * size - edge) if 0 < at < T}
    bounds = sorted(ends)
    queries = [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    if not aligned:
        return [(each, [(slice(0, S), None)]) for each in queries]
    reaches = sorted((near * max(size, T // 32) for near in nears), reverse=True)

    def both_ways(each):
        inside = lambda reach: each.start >= reach and each.stop + reach <= T
        around = lambda reach: slice(max(each.start - reach, 0), min(each.stop + reach, T))
        near = [reach for reach in reaches if 2 * reach <= limit and 4 * reach <= T and inside(reach)]
        return [(around(limit), limit if inside(limit) else None), *((around(reach), reach) for reach in near)]

    def ways(each):
        widest = (slice(0, each.stop), None) if limit >= each.start else (slice(each.start - limit, each.stop), limit)
        near = [reach for reach in reaches if 2 * reach <= min(limit, each.start)]
        return [widest, *((slice(each.start - reach, each.stop), reach) for reach in near)]

    return [(each, both_ways(each) if bidirectional else ways(each)) for each in queries]


def _count(reach, size, pattern):
    """Keys of a chunk with this reach; None = all of its run."""
    return None if reach is None else reach * (1 + pattern.bidirectional) + size


def _by_chunks(attend, length, size, keys, count):
    """Loops `attend(cut, look) -> (sums, outs)` over the chunks of a run: sums are added up at their keys' positions,
    outs concatenated on axis 3. `cut(x, axis)` slices the chunk's queries, `look(x, axis)` its keys; the run has `keys`
    keys, a chunk `count` of them from its own place on, or all if it is None."""
    if length <= size:
        return attend(lambda x, axis: x, lambda x, axis: x)
    moves, count = count is not None, keys if count is None else count
    part = lambda begin, count: lambda x, axis: jax.lax.dynamic_slice_in_dim(x, begin, count, axis)
    at = lambda start, begin: attend(part(start, size), part(begin, count))

    def add(sums, start):
        begin = start if moves else 0
        new, outs = at(start, begin)
        plus = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, part(begin, count)(x, 3) + new, begin, 3)
        return jax.tree.map(plus, sums, new), outs

    zeros = jax.tree.map(lambda x: jnp.zeros((*x.shape[:3], keys), x.dtype), jax.eval_shape(at, 0, 0)[0])
    sums, outs = jax.lax.scan(add, zeros, jnp.arange(0, length, size))
    return sums, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], length, x.shape[5]), outs)


def _with_fewest_keys(attend, ways, queries, here, size, pattern):
    """`attend(*way)` with the fewest keys that still cover the sequences of every chunk of the run."""
    branches = [partial(attend, *way) for way in ways]
    if len(ways) == 1:
        return branches[0]()
    _, index_BT = here
    if pattern.bidirectional:
        needed = index_BT.max()  # most keys that a chunk needs on either side of its own, by the longest sequence
    else:
        needed = index_BT[:, queries.start : queries.stop : size].max()  # and before its own
    return jax.lax.switch(sum((needed <= reach).astype(jnp.int32) for _, reach in ways[1:]), branches)


def _sees(here, there, pattern):
    """Which keys each query sees, of its own segment and by the pattern: bool[B, C, X]."""
    segment_BC1, index_BC1 = (x[:, :, None] for x in here)
    segment_B1X, index_B1X = (x[:, None, :] for x in there)
    return (segment_BC1 == segment_B1X) & pattern.sees(index_BC1, index_B1X)


def rows(x_BKGCX):
    """Merges the query heads of a kv head into the rows of one matmul."""
    B, K, G, C, X = x_BKGCX.shape
    return x_BKGCX.reshape(B, K, G * C, X)


def turned(x_BKGTH):
    """Heads before queries: sums over queries are [head, key], because matmuls without transposed operands are twice as
    fast on CPUs."""
    return x_BKGTH.transpose(0, 1, 4, 2, 3)


def scores(q_BKGCH, k_BKXH, sees_BCX, pattern):
    """(scores of a chunk of queries over its keys, with -1e30 added where masked; the softcap's derivative or None)."""
    wide = jnp.promote_types(q_BKGCH.dtype, jnp.float32)
    mask_BCX = jnp.where(sees_BCX, 0, wide.type(-1e30))
    score_BKRX = jnp.einsum("BKRH,BKXH->BKRX", rows(q_BKGCH), k_BKXH, preferred_element_type=wide)
    score_BKGCX, slope_BKGCX = score_BKRX.reshape(*q_BKGCH.shape[:-1], -1), None
    if pattern.softcap is not None:
        bent_BKGCX = jnp.tanh(score_BKGCX / pattern.softcap)
        score_BKGCX, slope_BKGCX = pattern.softcap * bent_BKGCX, 1 - bent_BKGCX**2
    return score_BKGCX + mask_BCX[:, None, None], slope_BKGCX


def gradients(queries, k_BKXH, v_BKXV, sees_BCX, pattern):
    """dq_BKGCH, dk_BKHX, dv_BKVX of a chunk of queries over its keys, in fp32 or wider.

    Args:
      queries: queries and gradients of outputs, each as they are and `turned`; lse and inner, as in `backward`.
    """
    q_BKGCH, q_BKHGC, dout_BKGCV, dout_BKVGC, lse_BKGC1, inner_BKGC1 = queries
    wide, narrow = lse_BKGC1.dtype, q_BKGCH.dtype
    product = partial(jnp.einsum, preferred_element_type=wide)
    score_BKGCX, slope_BKGCX = scores(q_BKGCH, k_BKXH, sees_BCX, pattern)
    prob_BKRX = rows(jnp.exp(score_BKGCX - lse_BKGC1))
    dprob_BKRX = product("BKRV,BKXV->BKRX", rows(dout_BKGCV), v_BKXV)
    dscore_BKRX = prob_BKRX * (dprob_BKRX - rows(inner_BKGC1))
    dscore_BKRX = (dscore_BKRX if slope_BKGCX is None else dscore_BKRX * rows(slope_BKGCX)).astype(narrow)
    q_BKHR, dout_BKVR = (x.reshape(*x.shape[:3], -1) for x in (q_BKHGC, dout_BKVGC))
    dv_BKVX = product("BKVR,BKRX->BKVX", dout_BKVR, prob_BKRX.astype(narrow))
    dk_BKHX = product("BKHR,BKRX->BKHX", q_BKHR, dscore_BKRX)
    dq_BKRH = product("BKRX,BKXH->BKRH", dscore_BKRX, k_BKXH)
    return dq_BKRH.reshape(q_BKGCH.shape), dk_BKHX, dv_BKVX
