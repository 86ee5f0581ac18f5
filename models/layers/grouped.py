"""Grouped matmul: rows sorted by expert, each group padded to whole blocks.

Kernels: "blocked", the reference, runs anywhere and computes only blocks in use, at most one extra block per expert.
"triton" is our GPU kernel. "megablox" is JAX's Pallas kernel for TPUs. "ragged_dot" is XLA's, for GPUs and TPUs; on a
CPU, and in the backward pass on a GPU, it costs as much as multiplying every row by every matrix. "auto" is megablox on
a TPU, but for float16, which its kernels do not load, else blocked: triton has been compiled for GPUs and run in
interpret mode, but not yet on a GPU.
"""

import functools
import operator
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ...core import hardware
from ...core.param import LoRAWeight
from ...core.shapes import shaped
from ...parallel import experts
from . import grouped_triton

Kernel = Literal["auto", "blocked", "triton", "megablox", "ragged_dot"]
PLATFORMS = {"triton": ("gpu",), "megablox": ("tpu",), "ragged_dot": ("gpu", "tpu")}
TILE = 128  # megablox's tile size in each dimension


class Plan(NamedTuple):
    """Permutation between (token, expert) pairs and rows sorted by expert.

    Attributes:
      row_P: row of each pair; at least R for pairs whose expert is on another device.
      pair_R: pair of each row; P for padding.
      expert_S: expert of each block.
      used: number of blocks that are not empty.
      rows_E: rows of each expert, padding included; experts are contiguous, in order.
      count_E: pairs of each expert, its rows without padding.
    """

    row_P: jax.Array
    pair_R: jax.Array
    expert_S: jax.Array
    used: jax.Array
    rows_E: jax.Array
    count_E: jax.Array


def plan(expert_P, E: int, parts: int = 1) -> Plan:
    """Sorts pairs by expert; pairs with an expert outside [0, E) are left out.

    Args:
      parts: as in `experts.blocks`, which gives the number of blocks; at most `experts.capacity` pairs are in.
    """
    P = len(expert_P)
    S, block = experts.blocks(P, E, parts)
    expert_P = jnp.where((expert_P >= 0) & (expert_P < E), expert_P, E)
    count_E = jnp.bincount(expert_P, length=E + 1)[:E]
    blocks_E = -(-count_E // block)
    end_E = jnp.cumsum(blocks_E)
    sorted_P, order_P = _by_expert(expert_P, E)
    begin_E = jnp.concatenate([(end_E - blocks_E) * block - (jnp.cumsum(count_E) - count_E), jnp.full(1, S * block)])
    place_P = jnp.arange(P) + begin_E[sorted_P]  # row of each sorted pair
    row_P = jnp.zeros(P, jnp.int32).at[order_P].set(place_P.astype(jnp.int32))
    pair_R = jnp.full(S * block, P, jnp.int32).at[place_P].set(order_P.astype(jnp.int32), mode="drop")
    expert_S = jnp.searchsorted(end_E, jnp.arange(S), side="right").astype(jnp.int32)
    rows_E, used, count_E = (x.astype(jnp.int32) for x in (blocks_E * block, end_E[-1], count_E))
    return Plan(row_P, pair_R, jnp.minimum(expert_S, E - 1), used, rows_E, count_E)


def _by_expert(expert_P, E: int):
    """Experts up to E and their pairs, sorted by expert, then by pair: as one number, which a CPU sorts four times as
    fast as numbers with an index."""
    P = len(expert_P)
    if (E + 1) * P > 1 << 32:
        raise ValueError(f"experts: {P} pairs of token and expert are too many for {E} experts; use fewer rows at once")
    key_P = jnp.sort(expert_P.astype(jnp.uint32) * P + jnp.arange(P, dtype=jnp.uint32))
    return (key_P // P).astype(jnp.int32), (key_P % P).astype(jnp.int32)


@shaped
def spread(x_AD, plan: Plan, K: int):
    """Tokens gathered in the plan's row order, [R, D]; zeros in padding."""
    return _spread(x_AD, plan.pair_R, plan.row_P, K)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x_AD, pair_R, row_P, K):
    return take(x_AD, pair_R // K)


def _collect(K, plan, dx_RD):
    """Backward of `_spread` as a gather: both permutations are known, so no scatter is needed."""
    _, row_P = plan
    return sums(dx_RD, row_P.reshape(-1, K)).astype(dx_RD.dtype), None, None


_spread.defvjp(lambda x_AD, pair_R, row_P, K: (_spread(x_AD, pair_R, row_P, K), (pair_R, row_P)), _collect)


def take(rows_AD, index_R):
    """Gathers rows; zeros for indices out of range."""
    return rows_AD.at[index_R].get(mode="fill", fill_value=0)


def sums(rows_RD, row_AK, weight_AK=None):
    """Each token's sum over its rows, times their weights if given, [A, D], in fp32 or wider: one expert of each token
    at a time, so that there is no array [A, K, D]."""
    wide = jnp.promote_types(rows_RD.dtype, jnp.float32)

    def one(k):
        rows_AD = take(rows_RD, row_AK[:, k]).astype(wide)
        return rows_AD if weight_AK is None else rows_AD * weight_AK[:, k, None].astype(wide)

    return functools.reduce(operator.add, map(one, range(row_AK.shape[1])))


@shaped
def combine(out_RD, weight_AK, plan: Plan):
    """Weighted sum over each token's rows, [A, D], accumulated in fp32 or wider, in out's dtype; neither it nor its
    backward pass has an array of all pairs [A, K, D]."""
    return _combine(out_RD, weight_AK, plan.row_P, plan.pair_R)


@jax.custom_vjp
def _combine(out_RD, weight_AK, row_P, pair_R):
    return sums(out_RD, row_P.reshape(weight_AK.shape), weight_AK).astype(out_RD.dtype)


def _split(kept, dout_AD):
    out_RD, weight_AK, row_P, pair_R = kept
    wide = jnp.promote_types(out_RD.dtype, jnp.float32)
    dout_RD = take(dout_AD, pair_R // weight_AK.shape[1])
    dweight_R1 = jnp.sum(dout_RD.astype(wide) * out_RD, -1, keepdims=True)
    dweight_AK = take(dweight_R1, row_P).reshape(weight_AK.shape).astype(weight_AK.dtype)
    return dout_RD * take(weight_AK.reshape(-1, 1), pair_R), dweight_AK, None, None


_combine.defvjp(lambda *inputs: (_combine(*inputs), inputs), _split)


def choose(kernel: Kernel, plan: Plan, w_EFD) -> Kernel:
    """Resolves "auto" by platform and checks the kernel.

    Raises:
      ValueError: the kernel does not support the mesh's platform, or this dtype or these sizes.
    """
    here, rows = hardware.platform(), len(plan.pair_R) // len(plan.expert_S)
    loads = here == "tpu" and w_EFD.dtype != jnp.float16
    if kernel == "auto":
        return "megablox" if loads else "blocked"
    if here not in PLATFORMS.get(kernel, (here,)):
        raise ValueError(f"expert_kernel: {kernel} runs on {' or '.join(PLATFORMS[kernel])}, got {here}; use blocked")
    if kernel == "megablox" and not loads:
        raise ValueError("expert_kernel: megablox needs bfloat16 or float32, got float16; use blocked")
    if kernel == "triton" and not grouped_triton.fits(rows, *w_EFD.shape[1:]):
        raise ValueError(
            f"expert_kernel: triton needs blocks and matrices in multiples of {grouped_triton.LEAST}, "
            f"got {rows} rows and {list(w_EFD.shape[1:])}; use blocked"
        )
    return kernel


def matmul(x_RD, w_EFD, plan: Plan, kernel: Kernel = "blocked"):
    """x @ w[expert of the row]^T, [R, F], in x's dtype, zero in rows of no expert; accumulates in fp32 or wider.

    Raises as `choose`.
    """
    if isinstance(w_EFD, LoRAWeight):
        low_RF = matmul(matmul(x_RD, w_EFD.a, plan, kernel) * w_EFD.scale, w_EFD.b, plan, kernel)
        return matmul(x_RD, w_EFD.weight, plan, kernel) + low_RF
    w_EFD = w_EFD.astype(x_RD.dtype)
    match choose(kernel, plan, w_EFD):
        case "blocked":
            return _matmul(x_RD, w_EFD, plan.expert_S, plan.used)
        case "triton":
            return grouped_triton.matmul(x_RD, w_EFD, plan.expert_S, plan.used, plan.rows_E)
        case "megablox":
            return megablox(x_RD, w_EFD, plan.rows_E)
    return ragged_dot(x_RD, w_EFD, plan.rows_E)


def biased(y_RF, bias_EF, plan: Plan):
    """y + bias[expert of the row]; y without a bias."""
    if bias_EF is None:
        return y_RF
    y_SCF = y_RF.reshape(len(plan.expert_S), -1, y_RF.shape[1])
    return (y_SCF + bias_EF.astype(y_RF.dtype)[plan.expert_S][:, None]).reshape(y_RF.shape)


def megablox(x_RD, w_EFD, rows_E, *, interpret: bool = False):
    """The grouped matmul by JAX's TPU kernel; with `interpret` on any platform."""
    from jax.experimental.pallas.ops.tpu.megablox import ops

    # In rows of no expert, the kernel leaves output and input gradient uninitialised.
    inside = lambda x: jnp.where((jnp.arange(len(x)) < jnp.sum(rows_E))[:, None], x, 0)
    padded_RD = jnp.pad(inside(x_RD), ((0, -len(x_RD) % TILE), (0, 0)))
    y_RF = ops.gmm(padded_RD, w_EFD, rows_E, x_RD.dtype, (TILE,) * 3, None, None, True, interpret)
    return inside(y_RF[: len(x_RD)])


def ragged_dot(x_RD, w_EFD, rows_E):
    """The grouped matmul by XLA's ragged_dot."""
    wide = jnp.promote_types(x_RD.dtype, jnp.float32)
    y_RF = jax.lax.ragged_dot(x_RD, w_EFD.swapaxes(1, 2), rows_E, preferred_element_type=wide)
    return y_RF.astype(x_RD.dtype)


@jax.custom_vjp
def _matmul(x_RD, w_EFD, expert_S, used):
    x_SCD = x_RD.reshape(len(expert_S), -1, x_RD.shape[1])

    def block(s, y_SCF):
        return y_SCF.at[s].set(x_SCD[s] @ w_EFD[expert_S[s]].T)

    y_SCF = jnp.zeros((*x_SCD.shape[:2], w_EFD.shape[1]), x_RD.dtype)
    return jax.lax.fori_loop(0, used, block, y_SCF).reshape(len(x_RD), -1)


def _forward(x_RD, w_EFD, expert_S, used):
    return _matmul(x_RD, w_EFD, expert_S, used), (x_RD, w_EFD, expert_S, used)


def _backward(kept, dy_RF):
    x_RD, w_EFD, expert_S, used = kept
    wide = jnp.promote_types(x_RD.dtype, jnp.float32)
    x_SCD, dy_SCF = (a.reshape(len(expert_S), -1, a.shape[1]) for a in (x_RD, dy_RF))

    def block(s, grads):
        dx_SCD, dw_EFD = grads
        e = expert_S[s]
        dx_SCD = dx_SCD.at[s].set(dy_SCF[s] @ w_EFD[e])
        return dx_SCD, dw_EFD.at[e].add(jnp.einsum("CF,CD->FD", dy_SCF[s], x_SCD[s], preferred_element_type=wide))

    start = jnp.zeros_like(x_SCD), jnp.zeros(w_EFD.shape, wide)
    dx_SCD, dw_EFD = jax.lax.fori_loop(0, used, block, start)
    return dx_SCD.reshape(x_RD.shape), dw_EFD.astype(w_EFD.dtype), None, None


_matmul.defvjp(_forward, _backward)
