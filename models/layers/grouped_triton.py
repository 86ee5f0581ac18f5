"""Grouped matmul for GPUs in Pallas for Triton; each program computes one output tile.

`grouped.plan` gives each expert whole blocks of rows, so no tile spans two experts.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

ROWS, WIDTH, DEPTH = 128, 128, 64  # maximum tile size, and contraction size per iteration
LEAST = 16  # minimum size of each dimension of a matmul


def fits(rows: int, *sizes: int) -> bool:
    """Whether blocks of `rows` rows and matrices of these sizes can be tiled."""
    return rows % LEAST == 0 and all(size % LEAST == 0 for size in sizes)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def matmul(x_RD, w_EFD, expert_S, used, rows_E, interpret: bool = False):
    """`grouped.matmul`, accumulated in fp32.

    Args:
      interpret: runs in interpret mode on any platform, for tests.
    """
    return _rows(x_RD, w_EFD, expert_S, used, False, interpret)


def _forward(x_RD, w_EFD, expert_S, used, rows_E, interpret):
    kept = x_RD, w_EFD, expert_S, used, rows_E
    return matmul(*kept, interpret), kept


def _backward(interpret, kept, dy_RF):
    x_RD, w_EFD, expert_S, used, rows_E = kept
    dx_RD = _rows(dy_RF, w_EFD, expert_S, used, True, interpret)
    return dx_RD, _matrices(dy_RF, x_RD, w_EFD, rows_E, len(expert_S), interpret), None, None, None


matmul.defvjp(_forward, _backward)


def _rows(x_RI, w_EFD, expert_S, used, turned, interpret):
    """x @ w^T with each row's matrix, [R, O]; `turned`: x @ w."""
    (R, I), O = x_RI.shape, w_EFD.shape[2 if turned else 1]
    block = R // len(expert_S)
    rows, width, depth = gcd(block, ROWS), gcd(O, WIDTH), gcd(I, DEPTH)
    end_S = jnp.where(jnp.arange(len(expert_S)) < used, jnp.int32(I // depth), 0)  # unused blocks are zeros

    def kernel(x_ref, w_ref, expert_ref, end_ref, y_ref):
        s = jax.lax.div(pl.program_id(0) * rows, block)
        e = expert_ref[s]

        def add(i, y_RO):
            at = pl.ds(i * depth, depth)
            w_IO = w_ref[e, at, :] if turned else w_ref[e, :, at].T
            return y_RO + jnp.dot(x_ref[:, at], w_IO, preferred_element_type=jnp.float32)

        y_RO = jax.lax.fori_loop(0, end_ref[s], add, jnp.zeros((rows, width), jnp.float32))
        y_ref[...] = y_RO.astype(y_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(R // rows, O // width),
        in_specs=[
            pl.BlockSpec((rows, I), lambda r, o: (r, 0)),
            pl.BlockSpec((len(w_EFD), I, width), lambda r, o: (0, 0, o))
            if turned
            else pl.BlockSpec((len(w_EFD), width, I), lambda r, o: (0, o, 0)),
            *[pl.BlockSpec(expert_S.shape, lambda r, o: (0,))] * 2,
        ],
        out_specs=pl.BlockSpec((rows, width), lambda r, o: (r, o)),
        out_shape=jax.ShapeDtypeStruct((R, O), x_RI.dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if rows * width >= 128 * 128 else 4, num_stages=3),
        interpret=interpret,
        name="grouped_turned" if turned else "grouped",
    )(x_RI, w_EFD, expert_S, end_S)


def _matrices(dy_RF, x_RD, w_EFD, rows_E, blocks, interpret):
    """Weight gradients: dy^T x summed over each expert's rows, [E, F, D], in w's dtype."""
    E, F, D = w_EFD.shape
    rows, width, depth = gcd(len(x_RD) // blocks, DEPTH), gcd(F, WIDTH), gcd(D, WIDTH)
    end_E = (jnp.cumsum(rows_E) // rows).astype(jnp.int32)

    def kernel(dy_ref, x_ref, begin_ref, end_ref, dw_ref):
        e = pl.program_id(2)

        def add(i, dw_FD):
            at = pl.ds(i * rows, rows)
            return dw_FD + jnp.dot(dy_ref[at, :].T, x_ref[at, :], preferred_element_type=jnp.float32)

        dw_FD = jax.lax.fori_loop(begin_ref[e], end_ref[e], add, jnp.zeros((width, depth), jnp.float32))
        dw_ref[...] = dw_FD.astype(dw_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(F // width, D // depth, E),
        in_specs=[
            pl.BlockSpec((len(dy_RF), width), lambda f, d, e: (0, f)),
            pl.BlockSpec((len(x_RD), depth), lambda f, d, e: (0, d)),
            pl.BlockSpec((E,), lambda f, d, e: (0,)),
            pl.BlockSpec((E,), lambda f, d, e: (0,)),
        ],
        out_specs=pl.BlockSpec((None, width, depth), lambda f, d, e: (e, f, d)),
        out_shape=jax.ShapeDtypeStruct(w_EFD.shape, w_EFD.dtype),
        compiler_params=triton.CompilerParams(num_warps=8 if width * depth >= 128 * 128 else 4, num_stages=3),
        interpret=interpret,
        name="grouped_matrices",
    )(dy_RF, x_RD, jnp.concatenate([jnp.zeros(1, jnp.int32), end_E[:-1]]), end_E)
