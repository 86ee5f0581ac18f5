"""The online softmax of `attention` over pages for GPUs, in Pallas for Triton.

A program reads the pages of one sequence and one head of keys and values in place, for a block of queries. Steps of
decoding have few queries: SPLITS programs share the pages of each sequence by their numbers, modulo SPLITS, so that the
order of a query's sum depends on its position alone (arXiv:2311.01282 describes such splits).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ....core import hardware
from ....models.attention.pattern import Pattern

UNSEEN = -1e30
LEAST, MOST = 16, 64  # queries of a block
SPLITS = 8
WIDEST = 256  # keys or values of a program


def supports(keys_PKHC, values_PKCV) -> bool:
    """Whether the kernel reads such pages: Triton multiplies blocks of powers of two of at least 16, of which one and a
    page fit into shared memory, and not all GPUs convert float8."""
    H, (C, V), kept = keys_PKHC.shape[2], values_PKCV.shape[2:], values_PKCV.dtype.itemsize
    if any(size % 16 for size in (H, C, V)) or max(H, V) > WIDEST or (kept == 1 and not hardware.converts_float8()):
        return False
    return block(1, (H, C, V), 4 if kept == 1 else kept, kept) is not None


def block(R: int, sizes: tuple[int, int, int], itemsize: int, kept: int) -> tuple[int, int] | None:
    """(queries of a block, stages) of the kernel for R queries of each sequence; None = nothing fits.

    What Triton takes of shared memory was read from its errors for many sizes: only Hopper's products of 64 queries in
    16 bits read keys and values there while the next page is copied.

    Args:
      sizes: H, C and V of the pages.
      itemsize, kept: bytes of an entry of queries, and of pages.
    """
    (H, C, V), Q = sizes, min(MOST, max(LEAST, pl.next_power_of_2(R)))
    wide = H + C if itemsize == 2 else H + V + max(sizes)
    while Q >= LEAST:
        for stages in (2, 1):
            pages = stages if Q == MOST and itemsize == 2 else 1
            if pages * C * (H + V) * kept + Q * wide * itemsize <= hardware.shared_memory():
                return Q, stages
        Q //= 2
    return None


def read(q_BKRH, pages, table_BX, at_BR, first_B, count_B, *, pattern: Pattern, interpret: bool = False):
    """The softmax of R queries of each sequence over `count` pages from its `first`.

    Args:
      q_BKRH: queries, times the pattern's factor.
      at_BR: position of each.
      interpret: runs in interpret mode on any platform, for tests.

    Returns:
      (most_BKR1, sum_BKR1, out_BKRV) in fp32: the largest score, the sum of exp(score - most), and the sum of values
      weighted by that. A query that sees no key gets (-1e30, 0, 0).
    """
    (B, K, R, H), (P, _, C, V), X = q_BKRH.shape, pages[1].shape, table_BX.shape[1]
    fitting = block(R, (H, C, V), q_BKRH.dtype.itemsize, pages[0].dtype.itemsize)
    assert fitting, "supports"
    Q, stages = fitting
    rows = -R % Q
    q_BKRH = jnp.pad(q_BKRH, [(0, 0), (0, 0), (0, rows), (0, 0)])
    at_BR = jnp.pad(at_BR, [(0, 0), (0, rows)], mode="edge")
    tiles = (R + rows) // Q
    splits = SPLITS if tiles == 1 else 1
    tile = lambda size: pl.BlockSpec((None, None, Q, size), lambda b, k, i: (b, k, jax.lax.div(i, splits), 0))
    of_pages = lambda *sizes: pl.BlockSpec((P, None, *sizes), lambda b, k, i: (0, k, 0, 0))
    out = lambda *sizes: pl.BlockSpec(
        (None, None, None, Q, *sizes),
        lambda b, k, i: (b, k, jax.lax.rem(i, splits), jax.lax.div(i, splits), 0)[: 4 + len(sizes)],
    )
    place = pl.BlockSpec((None, Q), lambda b, k, i: (b, jax.lax.div(i, splits)))
    whole = lambda size: pl.BlockSpec((None, size), lambda b, k, i: (b, 0))
    like = lambda *sizes: jax.ShapeDtypeStruct((B, K, splits, R + rows, *sizes), jnp.float32)
    most_BKSR, sum_BKSR, out_BKSRV = pl.pallas_call(
        partial(_kernel, splits=splits, pattern=pattern),
        grid=(B, K, tiles * splits),
        in_specs=[tile(H), of_pages(H, C), of_pages(C, V), place, whole(X), whole(1), whole(1)],
        out_specs=[out(), out(), out(V)],
        out_shape=[like(), like(), like(V)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="attention_pages",
    )(q_BKRH, *pages, at_BR, table_BX, first_B[:, None], count_B[:, None])
    most_BKR = jnp.max(most_BKSR, 2)
    share_BKSR = jnp.exp(most_BKSR - most_BKR[:, :, None])
    sum_BKR = jnp.sum(share_BKSR * sum_BKSR, 2)
    out_BKRV = jnp.sum(share_BKSR[..., None] * out_BKSRV, 2)
    return most_BKR[:, :, :R, None], sum_BKR[:, :, :R, None], out_BKRV[:, :, :R]


def _kernel(
    q_ref, k_ref, v_ref, at_ref, table_ref, first_ref, count_ref, most_ref, sum_ref, out_ref, *, splits, pattern
):
    split, C = jax.lax.rem(pl.program_id(2), splits), v_ref.shape[1]
    at_Q, first, count = at_ref[...], first_ref[0], count_ref[0]
    begin = first + jax.lax.rem(split + splits - jax.lax.rem(first, splits), splits)  # the first number of this split
    last = at_Q.max()
    of_keys, of_values = _parts(k_ref.shape[1]), _parts(v_ref.shape[2])
    q = [q_ref[:, part] for part in of_keys]

    def look(i, carry):
        most_Q, sum_Q, *out = carry
        number = begin + i * splits
        page = table_ref[number]
        keys = [k_ref[page, part, :].astype(q_ref.dtype) for part in of_keys]
        score_QC = sum(map(_dot, q, keys))
        if pattern.softcap is not None:
            score_QC = pattern.softcap * jnp.tanh(score_QC / pattern.softcap)
        key_1C = (number * C + jnp.arange(C, dtype=jnp.int32))[None]
        seen_QC = key_1C <= at_Q[:, None]
        if pattern.span is not None:
            seen_QC &= key_1C >= pattern.first(at_Q)[:, None]
        score_QC = jnp.where(seen_QC, score_QC, UNSEEN)
        new_Q = jnp.maximum(most_Q, score_QC.max(1))
        keep_Q = jnp.exp(most_Q - new_Q)
        prob_QC = jnp.where(seen_QC, jnp.exp(score_QC - new_Q[:, None]), 0)
        read_C1 = (number * C + jnp.arange(C, dtype=jnp.int32))[:, None] <= last
        values = [_values(v_ref.at[page, :, part], read_C1, q_ref.dtype) for part in of_values]
        more = [_dot(prob_QC.astype(q_ref.dtype), value_CV) for value_CV in values]
        out = [x_QV * keep_Q[:, None] + y_QV for x_QV, y_QV in zip(out, more, strict=True)]
        return new_Q, sum_Q * keep_Q + prob_QC.sum(1), *out

    full = lambda value, *shape: jnp.full((at_Q.shape[0], *shape), value, jnp.float32)
    turns = jax.lax.div(jnp.maximum(first + count - begin, 0) + splits - 1, splits)
    start = full(UNSEEN), full(0), *(full(0, part.size) for part in of_values)
    most_ref[...], sum_ref[...], *out = jax.lax.fori_loop(0, turns, look, start)
    for part, x_QV in zip(of_values, out, strict=True):
        out_ref[:, part] = x_QV


def _parts(size: int) -> list:
    """Cuts a size into slices of powers of two."""
    powers = [1 << i for i in reversed(range(size.bit_length())) if size >> i & 1]
    return [pl.ds(sum(powers[:i]), power) for i, power in enumerate(powers)]


def _values(v_ref, read_C1, dtype):
    """Values that were written; others may be not finite, which survives a weight of 0."""
    if v_ref.dtype.itemsize == 1:  # Triton has no zero of float8 for what is not loaded
        return jnp.where(read_C1, v_ref[...].astype(dtype), 0)
    # A choice behind the load would take shared memory of its own.
    return triton.load(v_ref, mask=jnp.broadcast_to(read_C1, v_ref.shape), other=0.0).astype(dtype)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
