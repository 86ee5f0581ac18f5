"""Fused MLPs of experts, a piece of an expert's rows at a time: with a gate three matmuls forward, six backward.

Intermediates stay in the core's cache, and tokens are gathered per piece: neither their K copies nor the activated
hidden layers are stored. Only the halves of the hidden layer before the activation are saved for the backward pass; the
gradient of a routing weight is computed from the hidden layer, so expert outputs need not be saved.

In training a piece has up to two blocks of rows, usually about as many as an expert has, rounded up to a quarter of a
block. Each size has its own loop, which updates its arrays in place; XLA copies them in the branches of a conditional.
"""

import functools
import operator
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.shapes import shaped
from ...parallel import experts
from . import grouped
from .mlp import Activation


@partial(jax.custom_vjp, nondiff_argnums=(5,))
@shaped
def mlps(x_AD, weight_AK, halves, down_EDF, plan: grouped.Plan, activation: Activation):
    """Sum over a token's experts of weight * activation(x @ gate^T, x @ up^T) @ down^T, [A, D], in x's dtype; sums over
    experts, and over tokens in weight gradients, are in fp32 or wider. Pairs outside the plan contribute nothing.

    Without gradients every product has a block of rows: in generation, the bits of a token's result must not depend on
    how many other tokens choose its expert.

    Args:
      halves: the matrix [E, F, D] and the bias [E, F], or None, of gate and up; without a gate, only of up.
    """
    whole = lambda block: range(block, block + 1, block)
    return _compute(x_AD, weight_AK, halves, down_EDF, plan, activation, whole)[0]


def _forward(x_AD, weight_AK, halves, down_EDF, plan, activation):
    return _compute(x_AD, weight_AK, halves, down_EDF, plan, activation, sizes)


def _compute(x_AD, weight_AK, halves, down_EDF, plan, activation, sizes):
    K, R = weight_AK.shape[1], len(plan.pair_R)
    token_R = plan.pair_R // K

    def piece(e, cut, put, made):
        x_CD = grouped.take(x_AD, cut(token_R))

        def half(w_EFD, b_EF):
            half_CF = x_CD @ w_EFD[e].T
            return half_CF if b_EF is None else half_CF + b_EF[e][None]

        inner = [half(*both) for both in halves]
        return tuple(map(put, made, (*inner, activation(*inner) @ down_EDF[e].T)))

    empty = lambda size: jnp.zeros((R, size), x_AD.dtype)
    start = *(empty(down_EDF.shape[2]) for _ in halves), empty(x_AD.shape[1])
    *inner, out_RD = _by_pieces(piece, plan, sizes, start)
    inner = tuple(checkpoint_name(half_RF, "mlp_gate_up") for half_RF in inner)
    return grouped.combine(out_RD, weight_AK, plan), (x_AD, weight_AK, halves, down_EDF, plan, inner)


def _backward(activation, kept, dout_AD):
    x_AD, weight_AK, halves, down_EDF, plan, inner = kept
    R, K, D = len(plan.pair_R), weight_AK.shape[1], x_AD.shape[1]
    wide = jnp.promote_types(x_AD.dtype, jnp.float32)
    outer = lambda a_CF, b_CD: jnp.einsum("CF,CD->FD", a_CF, b_CD, preferred_element_type=wide)

    def piece(e, cut, put, grads):
        dx_RD, dweight_R, dhalves, ddown_EDF = grads
        pair_C = cut(plan.pair_R)
        x_CD, dout_CD = grouped.take(x_AD, pair_C // K), grouped.take(dout_AD, pair_C // K)
        weight_C1 = grouped.take(weight_AK.reshape(-1, 1), pair_C)
        hidden_CF, back = jax.vjp(activation, *map(cut, inner))
        dhidden_CF = dout_CD @ down_EDF[e]  # without the routing weight
        dweight_C = jnp.einsum("CF,CF->C", dhidden_CF, hidden_CF, preferred_element_type=wide)
        dinner = back(dhidden_CF * weight_C1)
        dx = [d_CF @ w_EFD[e] for d_CF, (w_EFD, _) in zip(dinner, halves, strict=True)]

        def add(d_CF, half):
            dw_EFD, db_EF = half
            db_EF = None if db_EF is None else db_EF.at[e].add(jnp.sum(d_CF, 0, dtype=wide))
            return dw_EFD.at[e].add(outer(d_CF, x_CD)), db_EF

        return (
            put(dx_RD, functools.reduce(operator.add, dx)),
            put(dweight_R, dweight_C),
            tuple(map(add, dinner, dhalves)),
            ddown_EDF.at[e].add(outer(dout_CD, hidden_CF * weight_C1)),
        )

    weights = halves, down_EDF
    start = jnp.zeros((R, D), x_AD.dtype), jnp.zeros(R, wide), *_zeros(weights, wide)
    dx_RD, dweight_R, *dweights = _by_pieces(piece, plan, sizes, start)
    dx_AD = grouped.sums(dx_RD, plan.row_P.reshape(-1, K)).astype(x_AD.dtype)
    dweight_AK = grouped.take(dweight_R[:, None], plan.row_P).reshape(weight_AK.shape).astype(weight_AK.dtype)
    return dx_AD, dweight_AK, *jax.tree.map(lambda d, w: d.astype(w.dtype), tuple(dweights), weights), None


def sizes(block: int) -> range:
    """Sizes of pieces in training: up to two blocks, in steps of a quarter of a block but at least 8 rows."""
    unit = max(block // 4, experts.BLOCKS[0])
    return range(unit, 2 * block + 1, unit)


def _by_pieces(piece, plan: grouped.Plan, sizes, carry):
    """Loops `piece(e, cut, put, carry) -> carry` over the pieces of all experts, from the smallest size to the largest.

    Args:
      piece: computes a piece of expert e: `cut(x_R)` returns its rows, `put(x_R, new_C)` replaces them.
      sizes: of pieces, by the size of a block, as `sizes`.
    """
    each = sizes(len(plan.pair_R) // len(plan.expert_S))
    expert_T, row_T, begin = pieces(plan, each)

    def at(rows, t, carry):
        cut = lambda x_R: jax.lax.dynamic_slice_in_dim(x_R, row_T[t], rows)
        put = lambda x_R, new_C: jax.lax.dynamic_update_slice_in_dim(x_R, new_C, row_T[t], 0)
        return piece(expert_T[t], cut, put, carry)

    for i, rows in enumerate(each):
        carry = jax.lax.fori_loop(begin[i], begin[i + 1], partial(at, rows), carry)
    return carry


def pieces(plan: grouped.Plan, sizes: range):
    """(expert_T, row_T, begin): the expert and the first row of each piece, sorted by size; those of size i are
    begin[i] to begin[i + 1].

    All pieces of an expert but its last have the largest size.
    """
    most, E = sizes[-1], len(plan.count_E)
    T = len(plan.pair_R) // most + E
    pieces_E = -(-plan.count_E // most)
    end_E = jnp.cumsum(pieces_E)
    expert_T = jnp.minimum(jnp.searchsorted(end_E, jnp.arange(T), side="right", method="compare_all"), E - 1)
    done_T = most * (jnp.arange(T) - (end_E - pieces_E)[expert_T])
    left_T = plan.count_E[expert_T] - done_T  # at most 0 in pieces that do not exist
    size_T = jnp.clip(-(-left_T // sizes.step), 0, len(sizes))
    order_T = jnp.sort(size_T * T + jnp.arange(T)) % T
    begin = jnp.searchsorted(size_T[order_T], jnp.arange(1, len(sizes) + 2), method="compare_all")
    row_T = (jnp.cumsum(plan.rows_E) - plan.rows_E)[expert_T] + done_T
    return expert_T[order_T], row_T[order_T], begin


def _zeros(tree, dtype):
    return jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), tree)


mlps.defvjp(_forward, _backward)
