"""Flash attention over tries for GPUs: the kernels' mask of `core.trie`.

A key is seen by the queries in its subtree, which is one range of places. A block of keys is visited iff one of its
keys is seen by a query of the block, so a branch costs its own path, however many branches a row has.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from . import sinks
from . import triton_kernels as kernels
from .pattern import PLAIN, Pattern


def tree(
    q_BTNH, k_BSKH, v_BSKV, place_BT, position_BT, until_BS, position_BS, sinks_N=None, *, pattern: Pattern = PLAIN,
    interpret: bool = False,
):  # fmt: skip
    """`tree.tree`; the caller has refused bidirectional patterns.

    Args:
      interpret: runs in interpret mode on any platform, for tests.
    """
    T, V = q_BTNH.shape[1], v_BSKV.shape[3]
    read = 1 if pattern.span is None else 2  # depths only for windows and chunks
    queries, keys = (place_BT, pattern.first(position_BT))[:read], (until_BS, position_BS)[:read]
    # Rows that are added to fill a block see what the last one does, and are cut off; keys that are added are not seen.
    seen = tuple(map(_repeat_last, queries)), tuple(map(kernels.rows, keys))
    how = TRIE, pattern.factor(q_BTNH.shape[3]), pattern.softcap, interpret
    out_BTNV, lse_BNT = kernels.attention(*map(kernels.fill, (q_BTNH, k_BSKH, v_BSKV)), seen, *how)
    return sinks.add(out_BTNV[:, :T, :, :V], lse_BNT[:, :, :T].swapaxes(1, 2), sinks_N)


def _repeat_last(x_BT):
    return jnp.pad(x_BT, ((0, 0), (0, -x_BT.shape[1] % kernels.ROWS)), mode="edge")


def _for_queries(seen, block, S):
    queries, keys = seen
    return queries, (*keys, *_listed(_needed(seen, block)))


def _for_keys(seen, block, S):
    queries, keys = seen
    return keys, (*queries, *_listed(_needed(seen, block).swapaxes(1, 2)))


def _needed(seen, block):
    """Whether a query of a block may see a key of a block, bool[B, blocks of queries, blocks of keys]. Exact without
    windows and chunks; with them, a block of several branches may be visited in vain."""
    (place_BT, *first), (until_BS, *position) = seen
    of_queries = lambda x_BT: x_BT.reshape(x_BT.shape[0], -1, 1, block.queries)
    of_keys = lambda x_BS: x_BS.reshape(x_BS.shape[0], 1, -1, block.keys)
    begins_J = jnp.arange(0, until_BS.shape[1], block.keys, dtype=jnp.int32)
    needed_BIJ = begins_J[None, None] <= of_queries(place_BT).max(-1)
    needed_BIJ &= of_queries(place_BT).min(-1) < of_keys(until_BS).max(-1)
    for first_BT, position_BS in zip(first, position, strict=True):
        needed_BIJ &= of_queries(first_BT).min(-1) <= of_keys(position_BS).max(-1)
    return needed_BIJ


def _listed(needed_BXY):
    """The needed blocks Y of each X, first in i32[B, X, Y], and their number, i32[B, X]."""
    order_BXY = jnp.argsort(~needed_BXY, axis=-1, stable=True).astype(jnp.int32)
    return order_BXY, needed_BXY.sum(-1, dtype=jnp.int32)


def _walk_keys(i, block, *arrays):
    *refs, order_ref, count_ref = arrays
    half = len(refs) // 2
    queries, of_keys = [ref[...][:, None] for ref in refs[:half]], refs[half:]

    def seen_QS(j):
        at = pl.ds(j * block.keys, block.keys)
        return _seen(queries, [ref[at][None, :] for ref in of_keys], kernels.positions(j, block.keys)[None, :])

    return kernels.Walk(0, count_ref[i], lambda step: order_ref[i, step], seen_QS)


def _walk_queries(j, block, *arrays):
    *refs, order_ref, count_ref = arrays
    half = len(refs) // 2
    keys, of_queries = [ref[...][:, None] for ref in refs[:half]], refs[half:]
    column_S1 = kernels.positions(j, block.keys)[:, None]

    def seen_SQ(i):
        at = pl.ds(i * block.queries, block.queries)
        return _seen([ref[at][None, :] for ref in of_queries], keys, column_S1)

    return kernels.Walk(0, count_ref[j], lambda step: order_ref[j, step], seen_SQ)


def _seen(queries, keys, column):
    """Which keys of places `column` the queries see; the arrays broadcast against each other."""
    (place, *first), (until, *position) = queries, keys
    seen = (column <= place) & (place < until)
    for least, own in zip(first, position, strict=True):
        seen &= least <= own
    return seen


TRIE = kernels.Mask(_for_queries, _for_keys, _walk_keys, _walk_queries)
