"""Objectives: a frozen specification with two pure functions.

`prepare(batch, scores)` sees the whole batch (any leading axes) and does what needs it: advantages, corrections, masks,
and `weight_BT` with the global denominator folded in. `loss(out, batch)` is a plain sum over one microbatch, so that
microbatches, devices and processes add up exactly. `scores` is `models.score` of the batch at the current weights,
or None where `needs_scores` is False.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from . import advantages, kl, metrics
from .batch import Batch

RATIO_EDGES = tuple(np.round(np.arange(0.5, 1.5001, 0.05), 2).tolist())


@dataclass(frozen=True)
class SFT:
    """Negative log-likelihood of the learnt tokens, mean over all tokens of the batch (weighted by `weight_BT`)."""

    needs_scores = False

    def __str__(self):
        return "SFT: minimise -sum_t w_t log pi(y_t | y_<t) / sum_t w_t"

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Folds 1 / (sum of weights) into the weights; a batch that learns nothing keeps weights of 0."""
        weight_BT = jnp.where(batch.mask_BT, batch.weight_BT, 0)
        total = jnp.sum(weight_BT)
        return batch.replace(weight_BT=weight_BT / jnp.where(total > 0, total, 1))

    def loss(self, out, batch: Batch):
        """(sum of weighted negative log-likelihoods in nats, metrics); gradients flow into `out.logp_BT`."""
        nll_BT = jnp.where(batch.mask_BT, -out.logp_BT, 0)
        report = {
            "nll": metrics.of(nll_BT, batch.mask_BT),
            "entropy": metrics.of(out.entropy_BT, batch.mask_BT),
        }
        return jnp.sum(nll_BT * batch.weight_BT), report


@dataclass(frozen=True)
class GRPO:
    """Group-relative policy optimisation (arXiv:2402.03300) for samples of any age.

    The clipped surrogate with separate bounds (clip-higher, DAPO, arXiv:2503.14476) is taken around a proximal policy,
    and an importance weight corrects from the policy that sampled to the proximal one (decoupled PPO, arXiv:2110.00641,
    as used for asynchronous training in arXiv:2505.24298). The mean runs over all learnt tokens of the batch.

    Attributes:
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      mean, std, leave_one_out, ddof: how `advantages.group` compares rollouts.
      proximal: "recompute" takes log-probabilities of the weights before this update; "behaviour" takes the sampled
        ones (plain PPO: right only when the sampling weights are the current ones).
      weight_cap: tokens whose importance weight proximal / behaviour exceeds it get no gradient.
      kl_coef, kl_estimator: coefficient of KL(policy || reference) as a loss; needs `ref_BT`.
      entropy_coef: coefficient of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    mean: Literal["group", "batch", "none"] = "group"
    std: Literal["group", "batch", "none"] = "group"
    leave_one_out: bool = False
    ddof: int = 1
    proximal: Literal["recompute", "behaviour"] = "recompute"
    weight_cap: float = 5.0
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self):
        rules = {
            "clip_low": (0 <= self.clip_low <= 1, "between 0 and 1"),
            "clip_high": (self.clip_high >= 0, "at least 0"),
            "weight_cap": (self.weight_cap >= 1, "at least 1"),
            "kl_coef": (self.kl_coef >= 0, "at least 0"),
            "kl_estimator": (self.kl_estimator in kl.ESTIMATORS, f"one of {list(kl.ESTIMATORS)}"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"GRPO: {name} must be {rule}, got {getattr(self, name)}")

    @property
    def needs_scores(self) -> bool:
        return self.proximal == "recompute"

    def __str__(self):
        centre = {"group": "mean_group(R)", "batch": "mean_batch(R)", "none": "0"}[self.mean]
        scale = "" if self.std == "none" else f" / (std_{self.std}(R) + eps)"
        prox = "pi_now" if self.proximal == "recompute" else "pi_sampled"
        lines = [
            "GRPO: maximise sum_t w_t min(r_t A_t, clip(r_t, "
            f"{1 - self.clip_low:g}, {1 + self.clip_high:g}) A_t) / (learnt tokens of the batch)",
            f"  A = (R - {centre}){scale}, r_t = pi / {prox}",
        ]
        if self.needs_scores:
            lines.append(f"  w_t = {prox} / pi_sampled, 0 above {self.weight_cap:g}")
        if self.kl_coef:
            lines.append(f"  - {self.kl_coef:g} {self.kl_estimator}(pi, reference)")
        if self.entropy_coef:
            lines.append(f"  + {self.entropy_coef:g} entropy")
        return "\n".join(lines)

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Sets `adv_BT`, `prox_BT` and `weight_BT` = importance weight x sample weight / learnt tokens.

        Segments with a NaN reward learn nothing and do not count in the denominator; tokens above `weight_cap` do.

        Raises:
          ValueError: proximal log-probabilities are to be recomputed and `scores` is None, or KL without `ref_BT`.
        """
        if self.needs_scores and scores is None:
            raise ValueError('GRPO.prepare: proximal="recompute" needs scores of the current weights, got None')
        if self.kl_coef and batch.ref_BT is None:
            raise ValueError(f"GRPO.prepare: kl_coef {self.kl_coef:g} needs ref_BT, got None")
        adv_BJ = advantages.group(
            batch.reward_BJ, batch.group_BJ, batch.rollout_BJ,
            mean=self.mean, std=self.std, leave_one_out=self.leave_one_out, ddof=self.ddof,
        )  # fmt: skip
        scorable_BJ = jnp.where(jnp.isnan(batch.reward_BJ), 0.0, 1.0)
        mask_BT = batch.mask_BT & (advantages.to_tokens(scorable_BJ, batch.segment_BT) > 0)
        base_BT = jnp.where(mask_BT, batch.weight_BT, 0)
        denominator = jnp.maximum(jnp.sum(base_BT), 1e-9)
        prox_BT = scores.logp_BT if self.needs_scores else batch.logp_BT
        prox_BT = jax.lax.stop_gradient(jnp.where(mask_BT, prox_BT, 0))
        ratio_BT = jnp.exp(jnp.where(mask_BT, prox_BT - batch.logp_BT, 0))
        kept_BT = jnp.where(ratio_BT <= self.weight_cap, ratio_BT, 0)
        return batch.replace(
            mask_BT=mask_BT,
            adv_BT=advantages.to_tokens(adv_BJ, batch.segment_BT),
            prox_BT=prox_BT,
            weight_BT=base_BT * kept_BT / denominator,
            target={**batch.target, "share_BT": base_BT / denominator},
        )

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.logp_BT` and, with a bonus, the entropy."""
        mask_BT, adv_BT = batch.mask_BT, batch.adv_BT
        # Off the mask everything is replaced before it enters an exponential, so that NaN cannot leak.
        logp_BT = jnp.where(mask_BT, out.logp_BT, 0)
        ratio_BT = jnp.exp(logp_BT - batch.prox_BT)
        clipped_BT = jnp.clip(ratio_BT, 1 - self.clip_low, 1 + self.clip_high)
        gain_BT = jnp.minimum(ratio_BT * adv_BT, clipped_BT * adv_BT)
        total = -jnp.sum(batch.weight_BT * gain_BT)
        gap_BT = jnp.where(mask_BT, batch.prox_BT - batch.logp_BT, 0)
        report = {
            "ratio": metrics.of(ratio_BT, mask_BT),
            "clip_fraction": metrics.of(ratio_BT * adv_BT > clipped_BT * adv_BT, mask_BT),
            "importance_weight": metrics.of(jnp.exp(gap_BT), mask_BT, edges=RATIO_EDGES),
            "dropped_fraction": metrics.of(jnp.exp(gap_BT) > self.weight_cap, mask_BT),
            "mismatch_k3": metrics.of(jnp.expm1(gap_BT) - gap_BT, mask_BT),
            "entropy": metrics.of(out.entropy_BT, mask_BT),
            "advantage": metrics.of(jnp.abs(adv_BT), mask_BT),
        }
        share_BT = batch.target["share_BT"]
        if self.kl_coef:
            ref_BT = jnp.where(mask_BT, batch.ref_BT, 0)
            kl_BT = kl.ESTIMATORS[self.kl_estimator](logp_BT, ref_BT)
            total += self.kl_coef * jnp.sum(share_BT * kl_BT)
            report["kl"] = metrics.of(kl_BT, mask_BT)
        if self.entropy_coef:
            entropy_BT = jnp.where(mask_BT, out.entropy_BT, 0)
            total -= self.entropy_coef * jnp.sum(share_BT * entropy_BT)
        return total, report
