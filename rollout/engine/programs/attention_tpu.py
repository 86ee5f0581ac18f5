"""The online softmax of `attention` over pages for TPUs, in Pallas.

The pages of a sequence are read one after another, each with all its heads, while the one before is multiplied.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from ....models.attention.pattern import Pattern

UNSEEN = -1e30
LANES, ROWS = 128, 16  # of a register; a multiple of the rows of one
MEMORY = 8 << 20  # bytes of on-chip memory for pages, queries and outputs, of 16 MB


def supports(keys_PKHC, values_PKCV) -> bool:
    """Whether the kernel reads such pages: whole registers, of which two pages fit into on-chip memory."""
    keys, values = (math.prod(x.shape[1:]) * x.dtype.itemsize for x in (keys_PKHC, values_PKCV))
    return keys_PKHC.shape[3] % LANES == 0 and 2 * (keys + values) <= MEMORY


def read(q_BKRH, pages, table_BX, at_BR, first_B, count_B, *, pattern: Pattern, interpret: bool = False):
    """As `attention_gpu.read`."""
    (B, K, R, H), (_, _, C, V), X = q_BKRH.shape, pages[1].shape, table_BX.shape[1]
    rows = -R % ROWS
    q_BKRH = jnp.pad(q_BKRH, [(0, 0), (0, 0), (0, rows), (0, 0)])
    at_BR1 = jnp.pad(at_BR, [(0, 0), (0, rows)], mode="edge")[..., None]
    block = lambda *sizes: pl.BlockSpec((1, *sizes), lambda b, x, *_: (b, *[0] * len(sizes)))

    def page(b, x, table_BX, first_B, count_B):
        last = jnp.maximum(first_B[b] + count_B[b] - 1, 0)  # the one before again, which is not copied twice
        return table_BX[b, jnp.minimum(first_B[b] + x, last)], 0, 0, 0

    like = lambda size: jax.ShapeDtypeStruct((B, K, R + rows, size), jnp.float32)
    most, sums, out_BKRV = pl.pallas_call(
        partial(_kernel, pattern=pattern),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, X),
            in_specs=[
                block(K, R + rows, H),
                pl.BlockSpec((1, K, H, C), page),
                pl.BlockSpec((1, K, C, V), page),
                block(R + rows, 1),
            ],
            out_specs=[block(K, R + rows, LANES), block(K, R + rows, LANES), block(K, R + rows, V)],
        ),
        out_shape=[like(LANES), like(LANES), like(V)],
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="attention_pages",
    )(table_BX, first_B, count_B, q_BKRH, *pages, at_BR1)
    return most[:, :, :R, :1], sums[:, :, :R, :1], out_BKRV[:, :, :R]


def _kernel(table_ref, first_ref, count_ref, q_ref, k_ref, v_ref, at_ref, most_ref, sum_ref, out_ref, *, pattern):
    b, x = pl.program_id(0), pl.program_id(1)

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
        key_C1 = (first_ref[b] + x) * C + jax.lax.broadcasted_iota(jnp.int32, (C, 1), 0)
        read_C1 = key_C1 <= jnp.max(at_R1)  # what was not written yet may be not finite, which survives a weight of 0
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
            value_CV = jnp.where(read_C1, v_ref[0, k].astype(jnp.float32), 0).astype(q_ref.dtype)
            out_ref[0, k] = out_ref[0, k] * keep_R1 + _dot(prob_RC.astype(q_ref.dtype), value_CV)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
