"""Dropless mixture of experts: every token is processed by its top_k experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.param import LoRAWeight
from ...parallel import experts
from . import blockwise, grouped
from .linear import linear
from .mlp import gated_mlp


@dataclass(frozen=True)
class Routing:
    """Inputs and options of MoE layers.

    Attributes:
      real_BT: tokens included in the statistics; None = all.
      chosen_BTK: experts to use instead of the router's choice (routing replay); their weights still come from the
        router. Tokens with a negative entry are routed as usual. None = all are.
      dispatch: how tokens reach experts on other devices, see `parallel.experts`.
      kernel: grouped matmul kernel, see `grouped`.
    """

    real_BT: Any = None
    chosen_BTK: Any = None
    dispatch: experts.Method = "gather"
    kernel: grouped.Kernel = "blocked"


def mlp(x_BTD, w, *, top_k: int, norm_top_k: bool, routing: Routing | None = None):
    """Sum over a token's experts of weight x gated MLP (arXiv:2101.03961 with top_k experts), in x's dtype.

    If the weights exist, `router_bias` affects only which experts are chosen (arXiv:2408.15664), and a shared expert is
    added for every token (arXiv:2401.06066), scaled by the sigmoid of `shared_router` (Qwen2-MoE, arXiv:2407.10671).

    Returns:
      out_BTD; the `statistics`, plus "experts": the chosen experts, i32[B, T, top_k].
    """
    routing = routing or Routing()
    logits_BTE, prob_BTE = probabilities(x_BTD, w["router"])
    index_BTK = choose(prob_BTE, top_k, w.get("router_bias"), routing.chosen_BTK)
    weight_BTK = weigh(prob_BTE, index_BTK, norm_top_k).astype(x_BTD.dtype)
    matrices = w["expert_gate"], w["expert_up"], w["expert_down"]
    local = partial(compute, kernel=routing.kernel)
    out_BTD = experts.dispatch(local, x_BTD, index_BTK, weight_BTK, matrices, routing.dispatch)
    if "shared_gate" in w:
        out_BTD = out_BTD + shared(x_BTD, w)
    return out_BTD, statistics(logits_BTE, prob_BTE, index_BTK, routing.real_BT) | {"experts": index_BTK}


def probabilities(x_BTD, router_ED):
    """The router's (logits, softmax over all experts), each [B, T, E], in fp32 or wider."""
    logits_BTE = linear(x_BTD, router_ED)
    logits_BTE = logits_BTE.astype(jnp.promote_types(logits_BTE.dtype, jnp.float32))
    return logits_BTE, jax.nn.softmax(logits_BTE)


def choose(prob_BTE, top_k: int, bias_E=None, chosen_BTK=None):
    """Experts of each token, i32[B, T, top_k]: the top_k by probability + bias, or those given. No gradient."""
    score_BTE = jax.lax.stop_gradient(prob_BTE)
    if bias_E is not None:
        score_BTE = score_BTE + bias_E.astype(score_BTE.dtype)[None, None]
    index_BTK = experts.top(score_BTE, top_k)
    if chosen_BTK is None:
        return index_BTK
    routed_BT1 = jnp.any(chosen_BTK < 0, -1, keepdims=True)
    return jnp.where(routed_BT1, index_BTK, chosen_BTK.astype(index_BTK.dtype))


def weigh(prob_BTE, index_BTK, norm_top_k: bool):
    """The router's probabilities of these experts, [B, T, K], with `norm_top_k` normalised to sum 1; NaN for experts
    out of range."""
    weight_BTK = jnp.take_along_axis(prob_BTE, index_BTK, -1, mode="fill")
    return weight_BTK / jnp.sum(weight_BTK, -1, keepdims=True) if norm_top_k else weight_BTK


def statistics(logits_BTE, prob_BTE, index_BTK, real_BT=None):
    """Sums over the real tokens: times each expert is chosen "load" [E], its probability "prob" [E], squared
    log-sum-exp of the router's logits "lse2", and number of "tokens". Gradients flow through "prob" and "lse2"."""
    real_BT = jnp.ones(index_BTK.shape[:2], bool) if real_BT is None else real_BT
    count_BTE = jnp.sum(jax.nn.one_hot(index_BTK, prob_BTE.shape[-1], dtype=prob_BTE.dtype), 2)
    over_tokens = lambda x: jnp.sum(jnp.where(real_BT.reshape(*real_BT.shape, *[1] * (x.ndim - 2)), x, 0), (0, 1))
    return {
        "load": over_tokens(count_BTE),
        "prob": over_tokens(prob_BTE),
        "lse2": over_tokens(jnp.square(jax.nn.logsumexp(logits_BTE, -1))),
        "tokens": over_tokens(jnp.ones(real_BT.shape, prob_BTE.dtype)),
    }


def shared(x_BTD, w):
    """The shared expert, a gated MLP for every token, scaled by sigmoid(x @ shared_router^T) if the weight exists."""
    out_BTD = gated_mlp(x_BTD, {name: w[f"shared_{name}"] for name in ("gate", "up", "down")})
    if "shared_router" not in w:
        return out_BTD
    return out_BTD * jax.nn.sigmoid(linear(x_BTD, w["shared_router"]))


def compute(x_AD, index_AK, weight_AK, matrices, first, parts=1, *, kernel: grouped.Kernel = "blocked"):
    """Each token's weighted sum over the experts [first, first + E), whose matrices are given, [A, D].

    Args:
      parts: number of devices that share these (token, expert) pairs.
    """
    gate_EFD, up_EFD, down_EDF = matrices
    E, K = gate_EFD.shape[0], index_AK.shape[1]
    plan = grouped.plan((index_AK - first).reshape(-1), E, parts)
    plain = not any(isinstance(w, LoRAWeight) for w in matrices)
    if plain and grouped.choose(kernel, plan, gate_EFD) == "blocked":
        return blockwise.mlps(x_AD, weight_AK, *(w.astype(x_AD.dtype) for w in matrices), plan)
    product = partial(grouped.matmul, plan=plan, kernel=kernel)
    rows_RD = grouped.spread(x_AD, plan, K)
    gate_RF, up_RF = (checkpoint_name(product(rows_RD, w), "mlp_gate_up") for w in (gate_EFD, up_EFD))
    return grouped.combine(product(jax.nn.silu(gate_RF) * up_RF, down_EDF), weight_AK, plan)
