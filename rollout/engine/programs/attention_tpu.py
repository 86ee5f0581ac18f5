"""The online softmax of `attention` over pages for TPUs, in Pallas.

The pages of a sequence are read one after another, each with all its heads, while the one before is multiplied; again
for each tile of queries, of which there is one in steps of decoding.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from ....models.attention.pattern import Pattern

UNSEEN = -1e30
LANES, ROWS = 128, 16  # of a register; a multiple of the rows of one
MEMORY = 12 << 20  # bytes of on-chip memory for pages, queries and outputs, of 16 MB; scores need some, too


def supports(keys_PKHC, values_PKCV) -> bool:
    """Whether the kernel reads such pages: whole registers, of which two pages fit into on-chip memory with some
    queries. TPUs do not load float16."""
    whole = keys_PKHC.shape[3] % LANES == 0 and keys_PKHC.dtype != jnp.float16
    return whole and most_queries(keys_PKHC, values_PKCV, 4) >= ROWS


def most_queries(keys_PKHC, values_PKCV, itemsize: int) -> int:
    """How many queries of a sequence, whose entries have so many bytes, fit into on-chip memory with two pages: one is
    read while the other is multiplied, and so are queries and outputs."""
    (_, K, H, C), V = keys_PKHC.shape, values_PKCV.shape[3]
    H, V = (-(-size // LANES) * LANES for size in (H, V))
    page = K * C * (H * keys_PKHC.dtype.itemsize + V * values_PKCV.dtype.itemsize)
    query = K * (H * itemsize + 4 * (2 * LANES + V)) + 4 * LANES
    return max(0, MEMORY - 2 * page) // (2 * query) // ROWS * ROWS


def read(q_BKRH, pages, table_BX, at_BR, first_B, count_B, *, pattern: Pattern, interpret: bool = False):
    """As `attention_gpu.read`."""
    (B, K, R, H), (_, _, C, V), X = q_BKRH.shape, pages[1].shape, table_BX.shape[1]
    tiles = -(-R // max(ROWS, most_queries(pages[0], pages[1], q_BKRH.dtype.itemsize)))
    Q = -(-R // (tiles * ROWS)) * ROWS  # queries of a tile, for which pages are read
    rows = tiles * Q - R
    q_BKRH = jnp.pad(q_BKRH, [(0, 0), (0, 0), (0, rows), (0, 0)])
    at_BR1 = jnp.pad(at_BR, [(0, 0), (0, rows)], mode="edge")[..., None]
    tile = lambda size: pl.BlockSpec((1, K, Q, size), lambda b, i, x, *_: (b, 0, i, 0))

    def page(b, i, x, table_BX, first_B, count_B):
        last = jnp.maximum(first_B[b] + count_B[b] - 1, 0)  # the one before again, which is not copied twice
        return table_BX[b, jnp.minimum(first_B[b] + x, last)], 0, 0, 0

    # XLA keeps values that fill no register with their positions side by side, and would copy all pages to turn them.
    turned = V % LANES != 0
    keys_PKHC, values = pages[0], pages[1].swapaxes(2, 3) if turned else pages[1]
    like = lambda size: jax.ShapeDtypeStruct((B, K, R + rows, size), jnp.float32)
    most, sums, out_BKRV = pl.pallas_call(
        partial(_kernel, pattern=pattern, turned=turned),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, tiles, X),
            in_specs=[
                tile(H),
                pl.BlockSpec((1, K, H, C), page),
                pl.BlockSpec((1, *values.shape[1:]), page),
                pl.BlockSpec((1, Q, 1), lambda b, i, x, *_: (b, i, 0)),
            ],
            out_specs=[tile(LANES), tile(LANES), tile(V)],
        ),
        out_shape=[like(LANES), like(LANES), like(V)],
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="attention_pages",
    )(table_BX, first_B, count_B, q_BKRH, keys_PKHC, values, at_BR1)
    return most[:, :, :R, :1], sums[:, :, :R, :1], out_BKRV[:, :, :R]


def _kernel(
    table_ref, first_ref, count_ref, q_ref, k_ref, v_ref, at_ref, most_ref, sum_ref, out_ref, *, pattern, turned
):
    b, x = pl.program_id(0), pl.program_id(2)

    @pl.when(x == 0)
    def begin():
        most_ref[...] = jnp.full(most_ref.shape, UNSEEN, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    @pl.when(x < count_ref[b])
    def look():
        (_, K, R, _), C = q_ref.shape, k_ref.shape[3]
        key_RC = (first_ref[b] + x) * C + jax.lax.broadcasted_iota(jnp.int32, (R, C), 1)
        at_R1 = at_ref[0]
        seen_RC = key_RC <= at_R1
        if pattern.span is not None:
            seen_RC &= key_RC >= pattern.first(at_R1)
        place = jax.lax.broadcasted_iota(jnp.int32, (1, C) if turned else (C, 1), 1 if turned else 0)
        # What was not written yet may be not finite, which survives a weight of 0.
        read = (first_ref[b] + x) * C + place <= jnp.max(at_R1)
        for k in range(K):
            score_RC = _dot(q_ref[0, k], k_ref[0, k].astype(q_ref.dtype))
            if pattern.softcap is not None:
                score_RC = pattern.softcap * jnp.tanh(score_RC / pattern.softcap)
            score_RC = jnp.where(seen_RC, score_RC, UNSEEN)
            most_R1 = most_ref[0, k, :, :1]
            new_R1 = jnp.maximum(most_R1, jnp.max(score_RC, 1, keepdims=True))
            keep_R1 = jnp.exp(most_R1 - new_R1)
            prob_RC = jnp.where(seen_RC, jnp.exp(score_RC - new_R1), 0)
            sum_R1 = sum_ref[0, k, :, :1] * keep_R1 + jnp.sum(prob_RC, 1, keepdims=True)
            most_ref[0, k] = jnp.broadcast_to(new_R1, most_ref.shape[2:])
            sum_ref[0, k] = jnp.broadcast_to(sum_R1, sum_ref.shape[2:])
            value = jnp.where(read, v_ref[0, k].astype(jnp.float32), 0).astype(q_ref.dtype)
            out_ref[0, k] = out_ref[0, k] * keep_R1 + _dot(prob_RC.astype(q_ref.dtype), value, 1 if turned else 0)


def _dot(a, b, of_right: int = 0):
    """The product over the last axis of a, and this one of b."""
    return jax.lax.dot_general(a, b, (((1,), (of_right,)), ((), ())), preferred_element_type=jnp.float32)
