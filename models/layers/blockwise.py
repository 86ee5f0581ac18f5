"""Fused MLPs of experts, one block of an expert's tokens at a time: with a gate three matmuls forward, six backward.

Intermediates stay in the core's cache, and tokens are gathered per block: neither their K copies nor the activated
hidden layers are stored. Only the halves of the hidden layer before the activation are saved for the backward pass; the
gradient of a routing weight is computed from the hidden layer, so expert outputs need not be saved.
"""

import functools
import operator
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.shapes import shaped
from . import grouped
from .mlp import Activation


@partial(jax.custom_vjp, nondiff_argnums=(5,))
@shaped
def mlps(x_AD, weight_AK, halves, down_EDF, plan: grouped.Plan, activation: Activation):
    """Sum over a token's experts of weight * activation(x @ gate^T, x @ up^T) @ down^T, [A, D], in x's dtype; sums over
    experts, and over tokens in weight gradients, are in fp32 or wider. Pairs outside the plan contribute nothing.

    Args:
      halves: the matrix [E, F, D] and the bias [E, F], or None, of gate and up; without a gate, only of up.
    """
    return _forward(x_AD, weight_AK, halves, down_EDF, plan, activation)[0]


def _forward(x_AD, weight_AK, halves, down_EDF, plan, activation):
    S, K = len(plan.expert_S), weight_AK.shape[1]
    token_SC = plan.pair_R.reshape(S, -1) // K

    def block(s, carry):
        inner, out_SCD = carry
        e, x_CD = plan.expert_S[s], grouped.take(x_AD, token_SC[s])

        def half(w_EFD, b_EF):
            half_CF = x_CD @ w_EFD[e].T
            return half_CF if b_EF is None else half_CF + b_EF[e][None]

        each = [half(*both) for both in halves]
        out_CD = activation(*each) @ down_EDF[e].T
        put = lambda all_SCF, one_CF: all_SCF.at[s].set(one_CF)
        return tuple(map(put, inner, each)), out_SCD.at[s].set(out_CD)

    empty = lambda size: jnp.zeros((*token_SC.shape, size), x_AD.dtype)
    start = tuple(empty(down_EDF.shape[2]) for _ in halves), empty(x_AD.shape[1])
    inner, out_SCD = jax.lax.fori_loop(0, plan.used, block, start)
    inner = tuple(checkpoint_name(half_SCF, "mlp_gate_up") for half_SCF in inner)
    out_AD = grouped.combine(out_SCD.reshape(plan.pair_R.shape[0], -1), weight_AK, plan)
    return out_AD, (x_AD, weight_AK, halves, down_EDF, plan, inner)


def _backward(activation, kept, dout_AD):
    x_AD, weight_AK, halves, down_EDF, plan, inner = kept
    (S, C, _), K, D = inner[0].shape, weight_AK.shape[1], x_AD.shape[1]
    wide = jnp.promote_types(x_AD.dtype, jnp.float32)
    pair_SC = plan.pair_R.reshape(S, C)
    outer = lambda a_CF, b_CD: jnp.einsum("CF,CD->FD", a_CF, b_CD, preferred_element_type=wide)

    def block(s, carry):
        dx_SCD, dweight_SC, dhalves, ddown_EDF = carry
        e, pair_C = plan.expert_S[s], pair_SC[s]
        x_CD, dout_CD = grouped.take(x_AD, pair_C // K), grouped.take(dout_AD, pair_C // K)
        weight_C1 = grouped.take(weight_AK.reshape(-1, 1), pair_C)
        hidden_CF, back = jax.vjp(activation, *(half_SCF[s] for half_SCF in inner))
        dhidden_CF = dout_CD @ down_EDF[e]  # without the routing weight
        dweight_C = jnp.einsum("CF,CF->C", dhidden_CF, hidden_CF, preferred_element_type=wide)
        dinner = back(dhidden_CF * weight_C1)
        dx = [d_CF @ w_EFD[e] for d_CF, (w_EFD, _) in zip(dinner, halves, strict=True)]

        def add(d_CF, half):
            dw_EFD, db_EF = half
            db_EF = None if db_EF is None else db_EF.at[e].add(jnp.sum(d_CF, 0, dtype=wide))
            return dw_EFD.at[e].add(outer(d_CF, x_CD)), db_EF

        return (
            dx_SCD.at[s].set(functools.reduce(operator.add, dx)),
            dweight_SC.at[s].set(dweight_C),
            tuple(map(add, dinner, dhalves)),
            ddown_EDF.at[e].add(outer(dout_CD, hidden_CF * weight_C1)),
        )

    weights = halves, down_EDF
    start = jnp.zeros((S, C, D), x_AD.dtype), jnp.zeros((S, C), wide), *_zeros(weights, wide)
    dx_SCD, dweight_SC, *dweights = jax.lax.fori_loop(0, plan.used, block, start)
    dx_AD = grouped.sums(dx_SCD.reshape(S * C, D), plan.row_P.reshape(-1, K)).astype(x_AD.dtype)
    dweight_AK = grouped.take(dweight_SC.reshape(S * C, 1), plan.row_P).reshape(weight_AK.shape).astype(weight_AK.dtype)
    return dx_AD, dweight_AK, *jax.tree.map(lambda d, w: d.astype(w.dtype), tuple(dweights), weights), None


def _zeros(tree, dtype):
    return jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), tree)


mlps.defvjp(_forward, _backward)
