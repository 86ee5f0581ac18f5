"""Dropless mixture of experts: every token is processed by its top_k experts."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.param import LoRAWeight
from ...parallel import experts
from . import blockwise, grouped
from .linear import linear
from .mlp import SILU, Activation, gated_mlp
from .mlp import mlp as plain_mlp


@dataclass(frozen=True)
class Router:
    """How a layer chooses the experts of a token, and how it weighs them.

    Attributes:
      top_k: experts per token.
      score: an expert's score: "softmax" of the logits over all experts, or the "sigmoid" of its own.
      groups, kept_groups: experts are divided into this many equal groups, and chosen only from the best ones
        (DeepSeek-V2, arXiv:2405.04434).
      group_score: what a group is judged by: its "max" score, or the sum of its two best ("top2", DeepSeek-V3,
        arXiv:2412.19437).
      normalise: divides the weights of a token's experts by their sum + eps. With "softmax" that is the softmax over
        the chosen experts alone (Mixtral, GPT-OSS).
      scale: factor of the weights, behind the normalisation (routed_scaling_factor).
      fp32: also the product of tokens and router is in fp32, whatever their dtypes (DeepSeek, GLM); otherwise only what
        follows it.
      scaled_input: an expert's weight scales its input instead of its output (Llama 4).
    """

    top_k: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    normalise: bool = False
    eps: float = 0.0
    scale: float = 1.0
    fp32: bool = False
    scaled_input: bool = False

    def __post_init__(self):
        if not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"Router: kept_groups must be 1 to {self.groups}, the groups, got {self.kept_groups}")


@dataclass(frozen=True)
class Routing:
    """Inputs and options of MoE layers.

    Attributes:
      weight_BT: how often each token counts in the statistics, 0 = not at all; None = once.
      chosen_BTK: experts to use instead of the router's choice (routing replay); their weights still come from the
        router. Tokens with a negative entry are routed as usual. None = all are.
      dispatch: how tokens reach experts on other devices, see `parallel.experts`.
      kernel: grouped matmul kernel, see `grouped`.
    """

    weight_BT: Any = None
    chosen_BTK: Any = None
    dispatch: experts.Method = "gather"
    kernel: grouped.Kernel = "blocked"


def mlp(x_BTD, w, router: Router, activation: Activation = SILU, *, routing: Routing | None = None, choice_BTD=None):
    """Sum over a token's experts of weight x MLP (arXiv:2101.03961 with top_k experts), in x's dtype.

    Weights: `router` and the experts' `expert_up`, `expert_down`. If they exist: `router_logit_bias` is added to the
    logits; `router_bias` only to the scores by which experts are chosen (arXiv:2408.15664); `expert_gate`, and biases
    of the three (`expert_gate_bias`, ...); a `shared` expert for every token; `latent_down` and `latent_up`, between
    which routed experts work at another width (Nemotron-H); `router_weight` scales the weights of each expert.

    Args:
      choice_BTD: what the router reads; None = x.

    Returns:
      out_BTD; the `statistics`, plus "experts": the chosen experts, i32[B, T, top_k].
    """
    routing = routing or Routing()
    logits_BTE, score_BTE = scores(x_BTD if choice_BTD is None else choice_BTD, w, router)
    index_BTK = choose(score_BTE, router, w.get("router_bias"), routing.chosen_BTK)
    weight_BTK = weigh(score_BTE, index_BTK, router)
    if "router_weight" in w:
        weight_BTK = weight_BTK * w["router_weight"].astype(weight_BTK.dtype)[index_BTK]
    weight_BTK = weight_BTK.astype(x_BTD.dtype)
    mix = scaled_inputs if router.scaled_input else mixture
    if "latent_down" in w:
        low_BTH = linear(x_BTD, w["latent_down"], w.get("latent_down_bias"))
        low_BTH = mix(low_BTH, index_BTK, weight_BTK, w, activation, routing)
        out_BTD = linear(low_BTH, w["latent_up"], w.get("latent_up_bias"))
    else:
        out_BTD = mix(x_BTD, index_BTK, weight_BTK, w, activation, routing)
    if "shared_up" in w:
        out_BTD = out_BTD + shared(x_BTD, w, activation)
    prob_BTE = score_BTE if router.score == "softmax" else score_BTE / jnp.sum(score_BTE, -1, keepdims=True)
    return out_BTD, statistics(logits_BTE, prob_BTE, index_BTK, routing.weight_BT) | {"experts": index_BTK}


def scores(x_BTD, w, router: Router):
    """The router's (logits, scores), each [B, T, E], in fp32 or wider."""
    weights = w["router"], w.get("router_logit_bias")
    if router.fp32:
        with jax.default_matmul_precision("highest"):  # TPUs and GPUs may round fp32 operands
            logits_BTE = linear(x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32)), *weights)
    else:
        logits_BTE = linear(x_BTD, *weights)
    logits_BTE = logits_BTE.astype(jnp.promote_types(logits_BTE.dtype, jnp.float32))
    return logits_BTE, jax.nn.sigmoid(logits_BTE) if router.score == "sigmoid" else jax.nn.softmax(logits_BTE)


def choose(score_BTE, router: Router, bias_E=None, chosen_BTK=None):
    """Experts of each token, i32[B, T, top_k]: the top_k by score + bias, or those given. No gradient."""
    score_BTE = jax.lax.stop_gradient(score_BTE)
    if bias_E is not None:
        score_BTE = score_BTE + bias_E.astype(score_BTE.dtype)[None, None]
    index_BTK = experts.per_token(partial(_best, router=router), score_BTE)
    if chosen_BTK is None:
        return index_BTK
    routed_BT1 = jnp.any(chosen_BTK < 0, -1, keepdims=True)
    return jnp.where(routed_BT1, index_BTK, chosen_BTK.astype(index_BTK.dtype))


def _best(score_BTE, router: Router):
    if router.groups > 1:
        score_BTGE = score_BTE.reshape(*score_BTE.shape[:-1], router.groups, -1)
        group_BTG = jnp.sum(jax.lax.top_k(score_BTGE, {"max": 1, "top2": 2}[router.group_score])[0], -1)
        kept_BTK = jax.lax.top_k(group_BTG, router.kept_groups)[1]
        kept_BTG = jnp.any(kept_BTK[..., None] == jnp.arange(router.groups)[None, None, None], -2)
        score_BTE = jnp.where(kept_BTG[..., None], score_BTGE, -jnp.inf).reshape(score_BTE.shape)
    return jax.lax.top_k(score_BTE, router.top_k)[1]


def weigh(score_BTE, index_BTK, router: Router):
    """The weights of these experts, [B, T, K]: their scores, without any bias, as the router normalises and scales
    them; NaN for experts out of range."""
    weight_BTK = jnp.take_along_axis(score_BTE, index_BTK, -1, mode="fill")
    if router.normalise:
        weight_BTK = weight_BTK / (jnp.sum(weight_BTK, -1, keepdims=True) + router.eps)
    return weight_BTK * router.scale


def statistics(logits_BTE, prob_BTE, index_BTK, weight_BT=None):
    """Weighted sums over the tokens: times each expert is chosen "load" [E], its probability "prob" [E], squared
    log-sum-exp of the router's logits "lse2", and number of "tokens". Gradients flow through "prob" and "lse2".

    Args:
      prob_BTE: softmax scores; sigmoid scores divided by their sum over all experts, as in DeepSeek-V3's balance loss.
    """
    weight_BT = jnp.ones(index_BTK.shape[:2], bool) if weight_BT is None else weight_BT
    count_BTE = jnp.sum(jax.nn.one_hot(index_BTK, prob_BTE.shape[-1], dtype=prob_BTE.dtype), 2)

    def over_tokens(x):
        weight = weight_BT.reshape(*weight_BT.shape, *[1] * (x.ndim - 2))
        return jnp.sum(jnp.where(weight > 0, weight.astype(x.dtype) * x, 0), (0, 1))

    return {
        "load": over_tokens(count_BTE),
        "prob": over_tokens(prob_BTE),
        "lse2": over_tokens(jnp.square(jax.nn.logsumexp(logits_BTE, -1))),
        "tokens": over_tokens(jnp.ones(weight_BT.shape, prob_BTE.dtype)),
    }


def mixture(x_BTD, index_BTK, weight_BTK, w, activation: Activation, routing: Routing):
    """Each token's weighted sum over its experts, [B, T, D]."""
    held = {name: w[f"expert_{name}"] for name in experts.WEIGHTS if f"expert_{name}" in w}
    local = partial(compute, activation=activation, kernel=routing.kernel)
    out_BTD = experts.dispatch(local, x_BTD, index_BTK, weight_BTK, held, routing.dispatch)
    if "expert_down_bias" not in w:
        return out_BTD
    bias_ED = w["expert_down_bias"].astype(x_BTD.dtype)
    weight_BTE = jnp.sum(jax.nn.one_hot(index_BTK, len(bias_ED), dtype=x_BTD.dtype) * weight_BTK[..., None], 2)
    return out_BTD + weight_BTE @ bias_ED


def scaled_inputs(x_BTD, index_BTK, weight_BTK, w, activation: Activation, routing: Routing):
    """Each token's sum over its experts of what they make of weight * x, [B, T, D]."""
    B, T, K = index_BTK.shape
    apart = (x_BTD[:, :, None] * weight_BTK[..., None]).reshape(B, T * K, -1)
    ones = jnp.where(jnp.isnan(weight_BTK), weight_BTK, 1).reshape(B, T * K, 1)  # NaN: no such expert
    out_BSD = mixture(apart, index_BTK.reshape(B, T * K, 1), ones, w, activation, routing)
    return jnp.sum(out_BSD.reshape(B, T, K, -1), 2)


def shared(x_BTD, w, activation: Activation = SILU):
    """The shared expert, an MLP for every token, with a gate if it has one (arXiv:2401.06066); scaled by
    sigmoid(x @ shared_router^T) if that weight exists (Qwen2-MoE, arXiv:2407.10671)."""
    own = {name.removeprefix("shared_"): x for name, x in w.items() if name.startswith("shared_")}
    out_BTD = gated_mlp(x_BTD, own, activation) if "gate" in own else plain_mlp(x_BTD, own, activation)
    return out_BTD * jax.nn.sigmoid(linear(x_BTD, own["router"])) if "router" in own else out_BTD


def compute(
    x_AD, index_AK, weight_AK, w, first, parts=1, *, activation: Activation = SILU, kernel: grouped.Kernel = "blocked"
):
    """Each token's weighted sum over the experts [first, first + E), whose weights are given, [A, D].

    Args:
      w: {"up": w_EFD, "down": w_EDF}, and if they exist "gate", "gate_bias" and "up_bias".
      parts: number of devices that share these (token, expert) pairs.
    """
    K, names = index_AK.shape[1], [name for name in ("gate", "up") if name in w]
    plan = grouped.plan((index_AK - first).reshape(-1), w["up"].shape[0], parts)
    plain = not any(isinstance(x, LoRAWeight) for x in w.values())
    if plain and grouped.choose(kernel, plan, w["up"]) == "blocked":
        w = {name: x.astype(x_AD.dtype) for name, x in w.items()}
        halves = tuple((w[name], w.get(f"{name}_bias")) for name in names)
        return blockwise.mlps(x_AD, weight_AK, halves, w["down"], plan, activation)
    rows_RD = grouped.spread(x_AD, plan, K)
    product = partial(grouped.matmul, plan=plan, kernel=kernel)
    parts = (grouped.biased(product(rows_RD, w[name]), w.get(f"{name}_bias"), plan) for name in names)
    hidden_RF = activation(*(checkpoint_name(half_RF, "mlp_gate_up") for half_RF in parts))
    return grouped.combine(product(hidden_RF, w["down"]), weight_AK, plan)
