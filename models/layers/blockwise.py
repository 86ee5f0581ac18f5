"""Fused gated MLPs of experts, one block of an expert's tokens at a time: three matmuls forward, six backward.

Intermediates stay in the core's cache, and tokens are gathered per block: neither their K copies nor the activated
hidden layers are stored. Only the two halves of the hidden layer before the activation are saved for the backward pass;
the gradient of a routing weight is computed from the hidden layer, so expert outputs need not be saved.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.shapes import shaped
from . import grouped


@jax.custom_vjp
@shaped
def mlps(x_AD, weight_AK, gate_EFD, up_EFD, down_EDF, plan: grouped.Plan):
    """Sum over a token's experts of weight * (silu(x @ gate^T) * (x @ up^T)) @ down^T, [A, D], in x's dtype; sums over
    experts, and over tokens in weight gradients, are in fp32 or wider. Pairs outside the plan contribute nothing."""
    return _forward(x_AD, weight_AK, gate_EFD, up_EFD, down_EDF, plan)[0]


def _activate(gate_CF, up_CF):
    return jax.nn.silu(gate_CF) * up_CF


def _forward(x_AD, weight_AK, gate_EFD, up_EFD, down_EDF, plan):
    S, K = len(plan.expert_S), weight_AK.shape[1]
    token_SC = plan.pair_R.reshape(S, -1) // K

    def block(s, carry):
        gate_SCF, up_SCF, out_SCD = carry
        e, x_CD = plan.expert_S[s], grouped.take(x_AD, token_SC[s])
        gate_CF, up_CF = x_CD @ gate_EFD[e].T, x_CD @ up_EFD[e].T
        out_CD = _activate(gate_CF, up_CF) @ down_EDF[e].T
        return gate_SCF.at[s].set(gate_CF), up_SCF.at[s].set(up_CF), out_SCD.at[s].set(out_CD)

    empty = lambda size: jnp.zeros((*token_SC.shape, size), x_AD.dtype)
    start = empty(gate_EFD.shape[1]), empty(gate_EFD.shape[1]), empty(x_AD.shape[1])
    gate_SCF, up_SCF, out_SCD = jax.lax.fori_loop(0, plan.used, block, start)
    gate_SCF, up_SCF = (checkpoint_name(half_SCF, "mlp_gate_up") for half_SCF in (gate_SCF, up_SCF))
    out_AD = grouped.combine(out_SCD.reshape(plan.pair_R.shape[0], -1), weight_AK, plan)
    return out_AD, (x_AD, weight_AK, gate_EFD, up_EFD, down_EDF, plan, gate_SCF, up_SCF)


def _backward(kept, dout_AD):
    x_AD, weight_AK, gate_EFD, up_EFD, down_EDF, plan, gate_SCF, up_SCF = kept
    (S, C, _), K, D = gate_SCF.shape, weight_AK.shape[1], x_AD.shape[1]
    wide = jnp.promote_types(x_AD.dtype, jnp.float32)
    pair_SC = plan.pair_R.reshape(S, C)
    outer = lambda a_CF, b_CD: jnp.einsum("CF,CD->FD", a_CF, b_CD, preferred_element_type=wide)

    def block(s, carry):
        dx_SCD, dweight_SC, dgate_EFD, dup_EFD, ddown_EDF = carry
        e, pair_C = plan.expert_S[s], pair_SC[s]
        x_CD, dout_CD = grouped.take(x_AD, pair_C // K), grouped.take(dout_AD, pair_C // K)
        weight_C1 = grouped.take(weight_AK.reshape(-1, 1), pair_C)
        hidden_CF, activation = jax.vjp(_activate, gate_SCF[s], up_SCF[s])
        dhidden_CF = dout_CD @ down_EDF[e]  # without the routing weight
        dweight_C = jnp.einsum("CF,CF->C", dhidden_CF, hidden_CF, preferred_element_type=wide)
        dgate_CF, dup_CF = activation(dhidden_CF * weight_C1)
        return (
            dx_SCD.at[s].set(dgate_CF @ gate_EFD[e] + dup_CF @ up_EFD[e]),
            dweight_SC.at[s].set(dweight_C),
            dgate_EFD.at[e].add(outer(dgate_CF, x_CD)),
            dup_EFD.at[e].add(outer(dup_CF, x_CD)),
            ddown_EDF.at[e].add(outer(dout_CD, hidden_CF * weight_C1)),
        )

    matrices = gate_EFD, up_EFD, down_EDF
    start = jnp.zeros((S, C, D), x_AD.dtype), jnp.zeros((S, C), wide), *(jnp.zeros(w.shape, wide) for w in matrices)
    dx_SCD, dweight_SC, *dmatrices = jax.lax.fori_loop(0, plan.used, block, start)
    dx_AD = jnp.sum(grouped.gather(dx_SCD.reshape(S * C, D), plan, K), 1, dtype=wide).astype(x_AD.dtype)
    dweight_AK = grouped.gather(dweight_SC.reshape(S * C, 1), plan, K)[..., 0].astype(weight_AK.dtype)
    return dx_AD, dweight_AK, *(dw.astype(w.dtype) for dw, w in zip(dmatrices, matrices, strict=True)), None


mlps.defvjp(_forward, _backward)
