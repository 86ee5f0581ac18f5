"""MoE load balancing: auxiliary losses, bias updates without a gradient, and load metrics.

All are computed from the sums that MoE layers report in `Scores.aux`, stacked over these layers and taken over tokens
that are not padding: times each expert was chosen `load` [L, E], its summed probability `prob` [L, E], summed squared
log-sum-exp of the router's logits `lse2` [L], and the number of `tokens` [L].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp

from . import metrics
from .batch import Batch


@dataclass(frozen=True)
class Balance:
    """How experts are kept equally busy; 0 = off. `load` and `z` are coefficients of the auxiliary losses that `wrap`
    adds to an objective, means over layers; `bias` is for `adjust`.

    Attributes:
      load: coefficient of the load-balancing loss E sum_e f_e P_e (Switch, arXiv:2101.03961; transformers'
        router_aux_loss_coef): f_e = times expert e is chosen per token, summing to top_k; P_e = its mean probability.
        The loss is top_k when all experts are used equally. Gradients flow into P.
      z: coefficient of the router z-loss, the mean squared log-sum-exp of its logits (ST-MoE, arXiv:2202.08906), which
        keeps them small.
      bias: how far each step moves an expert's router bias against its load, without a loss (`update_biases`); 0 leaves
        it as loaded. DeepSeek-V3 was pre-trained with 0.001.
    """

    load: float = 0.0
    z: float = 0.0
    bias: float = 0.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"Balance: {name} must be at least 0 and finite, got {value}")


def wrap(objective, balance: Balance):
    """Adds the auxiliary losses to an objective; returns it unchanged if both coefficients are 0."""
    return Balanced(objective, balance) if balance.load or balance.z else objective


def adjust(balance: Balance) -> Callable:
    """The `adjust` of `step.make_step`: `update_biases` with the rate `bias`, nothing if that is 0."""
    return partial(update_biases, rate=balance.bias) if balance.bias else lambda params, aux: params


@dataclass(frozen=True)
class Balanced:
    """An objective plus the terms of `Balance`, both independent of the split into microbatches: f and the number of
    tokens are of the whole batch. f is of the weights behind `scores`: with one update per batch, the current ones."""

    objective: Any
    balance: Balance

    @property
    def needs_scores(self) -> bool:
        return self.balance.load > 0 or self.objective.needs_scores

    def __str__(self):
        lines = [str(self.objective)]
        if self.balance.load:
            lines.append(f"  + {self.balance.load:g} E sum_e f_e P_e, mean over layers with experts")
        if self.balance.z:
            lines.append(f"  + {self.balance.z:g} logsumexp(router)^2, mean over tokens and layers with experts")
        return "\n".join(lines)

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Prepares the batch for the objective and adds the batch-wide statistics of the terms.

        Raises:
          ValueError: as the objective; `load` is set and `scores` are missing or of a model without experts.
        """
        batch = self.objective.prepare(batch, scores)
        tokens = jnp.maximum(jnp.sum(batch.segment_BT > 0), 1).astype(jnp.float32)
        scalars = {"tokens": tokens}
        if self.balance.load:
            if scores is None or "load" not in scores.aux:
                raise ValueError(
                    "Balance: load needs scores of a model with experts, got "
                    f"{'none' if scores is None else 'those of a model without'}"
                )
            load_LE = scores.aux["load"]
            scalars["share_LE"] = jnp.sum(load_LE.reshape(-1, *load_LE.shape[-2:]), 0) / tokens
        return batch.with_scalars(**scalars)

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics) with the terms; metrics `balance_load`, `balance_z` omit coefficients."""
        if "prob" not in out.aux:
            raise ValueError("Balance: needs a model with experts, got one without; leave the coefficients at 0")
        total, report = self.objective.loss(out, batch)
        terms = {}
        if self.balance.load:
            prob_LE = out.aux["prob"]
            L, E = prob_LE.shape
            terms["balance_load"] = self.balance.load, E * jnp.sum(batch.scalars["share_LE"] * prob_LE) / L
        if self.balance.z:
            terms["balance_z"] = self.balance.z, jnp.mean(out.aux["lse2"])
        for name, (coefficient, part) in terms.items():
            total += coefficient * part / batch.scalars["tokens"]
            report[name] = metrics.of_sum(part, out.aux["tokens"][0])
        return total, report


def report(aux) -> dict[str, metrics.Metric]:
    """Load metrics per layer from the sums of a batch: `expert_load`, the largest load over the mean, and
    `expert_idle`, the fraction of experts that no token chose. Empty for a model without experts."""
    if "load" not in aux:
        return {}
    load_LE = aux["load"]
    mean_L = jnp.mean(load_LE, -1)
    return {
        "expert_load": metrics.of(jnp.max(load_LE, -1) / jnp.where(mean_L > 0, mean_L, 1), mean_L > 0),
        "expert_idle": metrics.of(jnp.mean(load_LE == 0, -1), mean_L > 0),
    }


def update_bias(bias_LE, load_LE, rate: float):
    """bias + rate sign(mean load - load): auxiliary-loss-free balancing (arXiv:2408.15664). The bias only affects which
    experts are chosen; `load_LE` counts the choices made with it."""
    more_LE = jnp.sum(load_LE, -1, keepdims=True) - load_LE.shape[-1] * load_LE  # exact, unlike a mean
    return bias_LE + rate * jnp.sign(more_LE).astype(bias_LE.dtype)


def update_biases(params, aux, rate: float):
    """Applies `update_bias` to every `router_bias` in the parameters; for `step.make_step(adjust=)`.

    Raises:
      ValueError: no layer has a router_bias.
    """
    stacks, first = [], 0
    for stack in params["stacks"]:
        if "router" in stack:
            load_LE = aux["load"][first : first + len(stack["router"])]
            first += len(load_LE)
            if "router_bias" in stack:
                stack = {**stack, "router_bias": update_bias(stack["router_bias"], load_LE, rate)}
        stacks.append(stack)
    if not any("router_bias" in stack for stack in stacks):
        raise ValueError("update_biases: needs a layer with router_bias, got none; declare it in the family's table")
    return {**params, "stacks": stacks}
