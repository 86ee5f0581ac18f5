"""A mixture of experts: each token goes to its top_k experts, none is ever dropped."""

import jax
import jax.numpy as jnp

from ..parallel import experts
from . import grouped, layers


def mlp(x_BTD, w, *, top_k: int, norm_top_k: bool):
    """Sum over a token's experts of weight x gated MLP (arXiv:2101.03961 with top_k experts), in x's dtype.

    The router is a softmax over all experts in fp32 or wider; with `norm_top_k` the chosen weights are scaled to sum 1.
    """
    index_BTK, weight_BTK = route(x_BTD, w["router"], top_k, norm_top_k)
    matrices = w["expert_gate"], w["expert_up"], w["expert_down"]
    return experts.dispatch(compute, x_BTD, index_BTK, weight_BTK, matrices)


def route(x_BTD, router_ED, top_k: int, norm_top_k: bool):
    """(expert, weight) of each token's choices, [B, T, top_k] each; weights in x's dtype."""
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    logits_BTE = layers.linear(x_BTD, router_ED).astype(wide)
    weight_BTK, index_BTK = jax.lax.top_k(jax.nn.softmax(logits_BTE), top_k)
    if norm_top_k:
        weight_BTK = weight_BTK / jnp.sum(weight_BTK, -1, keepdims=True)
    return index_BTK, weight_BTK.astype(x_BTD.dtype)


def compute(x_AD, index_AK, weight_AK, matrices, first):
    """Of each token the part of its mixture that the experts [first, first + E) of these matrices give, [A, D]."""
    gate_EFD, up_EFD, down_EDF = matrices
    E, K = len(gate_EFD), index_AK.shape[1]
    plan = grouped.plan((index_AK - first).reshape(-1), E)
    rows_RD = grouped.spread(x_AD, plan, K)
    hidden_RF = jax.nn.silu(grouped.matmul(rows_RD, gate_EFD, plan)) * grouped.matmul(rows_RD, up_EFD, plan)
    out_RD = grouped.matmul(hidden_RF, down_EDF, plan)
    return grouped.combine(out_RD, weight_AK, plan)
