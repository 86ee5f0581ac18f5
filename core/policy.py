"""One specification of policy-gradient objectives, of which the algorithms in `losses` are presets.

An objective is put together of five choices: the advantage of a rollout, the correction from the policy that sampled
to the proximal one, the level of the ratio policy / proximal, the surrogate that bounds it, and the denominator.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from . import advantages, kl, metrics, segments
from .batch import Batch
from .denominators import Denominator, share
from .segments import to_tokens, total
from .surrogates import FORMULAS, SURROGATES, Now

RATIO_EDGES = tuple(np.round(np.arange(0.5, 1.5001, 0.05), 2).tolist())


@dataclass(frozen=True)
class Policy:
    """A policy-gradient objective for samples of any age.

    maximise sum_t share_t w_t gain(r_t, A_t): A compares rollouts, r = policy / proximal, w = proximal / behaviour
    corrects for the age of a sample (decoupled PPO, arXiv:2110.00641, as used for asynchronous training in
    arXiv:2505.24298) and carries no gradient, share is the denominator.

    Attributes:
      name, note: the algorithm's, and in what it departs from its paper; for people.
      mean, std, leave_one_out, length_weighted, ddof: how `advantages.group` compares rollouts.
      ratio: "token"; "sequence" is the geometric mean over a sequence's learnt tokens (GSPO, arXiv:2507.18071);
        "sequence_token" has its value and the gradient of each token (GSPO-token).
      surrogate: score, clip, cispo, sapo or geometric, functions of `surrogates`, which have the formulas and papers.
      clip_low, clip_high: r is clipped to [1 - clip_low, 1 + clip_high]; with "geometric" log r to
        [-clip_low, clip_high].
      dual_clip: with "clip", the gain is at least dual_clip A for A < 0; 0 = without.
      ratio_cap: with "clip", r is at most this where it is not clipped; 0 = without.
      tau_pos, tau_neg: of "sapo", for A > 0 and for the others.
      proximal: "recompute" takes log-probabilities of the weights before this update; "behaviour" takes the sampled
        ones: r then corrects alone, w is 1.
      weight: level of w: each token's ratio, the product of a sequence's ("sequence"), or its geometric mean.
      weight_action: outside [weight_low, weight_cap] "mask" leaves a token without gradient (IcePop); "truncate" has w
        at most weight_cap (TIS).
      weight_low, weight_cap: bounds on the ratio proximal / behaviour.
      denominator: what the loss is a mean of: `denominators`. Tokens that `weight_action` masks stay in it.
      denominator_tokens: of "constant".
      kl_coef, kl_estimator: coefficient of KL(policy || reference) as a loss; needs `ref_BT`.
      entropy_coef: coefficient of the entropy bonus.
    """

    name: str = "Policy"
    note: str = ""
    mean: Literal["group", "batch", "none"] = "group"
    std: Literal["group", "batch", "none"] = "group"
    leave_one_out: bool = False
    length_weighted: bool = False
    ddof: int = 1
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    ratio_cap: float = 0.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    proximal: Literal["recompute", "behaviour"] = "recompute"
    weight: Literal["token", "sequence", "geometric"] = "token"
    weight_action: Literal["mask", "truncate"] = "mask"
    weight_low: float = 0.0
    weight_cap: float = 5.0
    denominator: Denominator = "token"
    denominator_tokens: int = 0
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self):
        clips, counts = self.surrogate == "clip", (self.denominator_tokens > 0) == (self.denominator == "constant")
        below_one = self.surrogate in ("clip", "cispo")
        rules = {
            "surrogate": (self.surrogate in SURROGATES, f"one of {', '.join(SURROGATES)}"),
            "clip_low": (0 <= self.clip_low and (self.clip_low <= 1 or not below_one), "between 0 and 1"),
            "clip_high": (self.clip_high >= 0, "at least 0"),
            "dual_clip": (self.dual_clip == 0 or (clips and self.dual_clip > 1), '0, or above 1 with surrogate "clip"'),
            "ratio_cap": (self.ratio_cap == 0 or (clips and self.ratio_cap > 1), '0, or above 1 with surrogate "clip"'),
            "tau_pos": (self.tau_pos > 0, "above 0"),
            "tau_neg": (self.tau_neg > 0, "above 0"),
            "weight_low": (0 <= self.weight_low <= 1, "between 0 and 1"),
            "weight_cap": (self.weight_cap >= 1, "at least 1"),
            "denominator_tokens": (counts, 'above 0 with denominator "constant", 0 with others'),
            "length_weighted": (not (self.length_weighted and self.leave_one_out), "False with leave_one_out"),
            "kl_coef": (self.kl_coef >= 0, "at least 0"),
        }  # fmt: skip
        for field in dataclasses.fields(self):
            if choices := get_args(field.type):
                rules[field.name] = (getattr(self, field.name) in choices, f"one of {', '.join(choices)}")
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{self.name}: {name} must be {rule}, got {getattr(self, name)}")
        if self.ratio != "token" and not clips:
            raise ValueError(f'{self.name}: ratio must be "token" unless the surrogate is "clip", got {self.ratio}')

    @property
    def needs_scores(self) -> bool:
        return self.proximal == "recompute"

    @property
    def corrects(self) -> bool:
        """Samples of older weights are corrected for, by w or by the ratio."""
        return self.needs_scores or self.surrogate != "score"

    def __str__(self):
        return "\n".join([f"{self.name}: maximise sum_t share_t w_t gain_t", *map("  {}".format, _formula(self))])

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Sets `adv_BT`, `prox_BT` and `weight_BT` = share x w, and what the terms beside need.

        Segments with a NaN reward, and tokens whose behaviour or reference log-probability is not finite, learn nothing
        and do not count in the denominator.

        Raises:
          ValueError: proximal log-probabilities are to be recomputed and `scores` is None, or KL without `ref_BT`.
        """
        if self.needs_scores and scores is None:
            raise ValueError(f'{self.name}.prepare: proximal="recompute" needs scores of the current weights, got None')
        if self.kl_coef and batch.ref_BT is None:
            raise ValueError(f"{self.name}.prepare: kl_coef {self.kl_coef:g} needs ref_BT, got None")
        J = batch.reward_BJ.shape[-1]
        finite_BT = jnp.isfinite(batch.logp_BT)
        if self.kl_coef:
            finite_BT &= jnp.isfinite(batch.ref_BT)
        scorable_BJ = jnp.where(jnp.isnan(batch.reward_BJ), 0.0, 1.0)
        sampled_BT = batch.mask_BT & (to_tokens(scorable_BJ, batch.segment_BT) > 0)
        mask_BT = sampled_BT & finite_BT
        adv_BJ = advantages.group(
            batch.reward_BJ, batch.group_BJ, batch.rollout_BJ, mean=self.mean, std=self.std, ddof=self.ddof,
            leave_one_out=self.leave_one_out,
            length_BJ=total(jnp.where(mask_BT, 1.0, 0.0), batch.segment_BT, J) if self.length_weighted else None,
        )  # fmt: skip
        prox_BT = scores.logp_BT if self.needs_scores else batch.logp_BT
        prox_BT = jax.lax.stop_gradient(jnp.where(mask_BT, prox_BT, 0))
        share_BT = share(batch, mask_BT, self.denominator, self.denominator_tokens)
        gap_BT = jnp.where(mask_BT, prox_BT - batch.logp_BT, 0)
        return batch.replace(
            mask_BT=mask_BT,
            adv_BT=to_tokens(adv_BJ, batch.segment_BT),
            prox_BT=prox_BT,
            weight_BT=share_BT * self._bounded(self._weight(gap_BT, mask_BT, batch.segment_BT, J)),
            target={**batch.target, "share_BT": share_BT, "unusable_BT": sampled_BT & ~finite_BT},
        )

    def _weight(self, gap_BT, mask_BT, segment_BT, J):
        """Proximal / behaviour of each token at the level of w, from its logarithm."""
        if self.weight == "sequence":
            gap_BT = to_tokens(total(gap_BT, segment_BT, J), segment_BT)
        elif self.weight == "geometric":
            gap_BT = segments.mean(gap_BT, mask_BT, segment_BT, J)
        return jnp.exp(gap_BT)

    def _bounded(self, weight_BT):
        """w: what `weight_action` makes of it."""
        if self.weight_action == "truncate":
            return jnp.minimum(weight_BT, self.weight_cap)
        return jnp.where((self.weight_low <= weight_BT) & (weight_BT <= self.weight_cap), weight_BT, 0)

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.logp_BT` and, with a bonus, the entropy."""
        mask_BT, adv_BT, segment_BT, J = batch.mask_BT, batch.adv_BT, batch.segment_BT, batch.reward_BJ.shape[-1]
        # Off the mask everything is replaced before it enters an exponential, so that NaN cannot leak.
        logp_BT = jnp.where(mask_BT, out.logp_BT, 0)
        gap_BT = logp_BT - batch.prox_BT
        over_sequence = lambda x_BT: segments.mean(x_BT, mask_BT, segment_BT, J)
        ratio_BT = jnp.exp(gap_BT if self.ratio == "token" else over_sequence(gap_BT))
        if self.ratio == "sequence_token":
            ratio_BT = jax.lax.stop_gradient(ratio_BT) * jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
        now = Now(logp_BT, gap_BT, ratio_BT, adv_BT, over_sequence)
        gain_BT, cut_BT = SURROGATES[self.surrogate](self, now)
        loss = -jnp.sum(batch.weight_BT * jnp.where(mask_BT, gain_BT, 0))
        age_BT = jnp.where(mask_BT, batch.prox_BT - batch.logp_BT, 0)
        weight_BT = self._weight(age_BT, mask_BT, segment_BT, J)
        unusable_BT = batch.target["unusable_BT"]
        report = {
            "ratio": metrics.of(ratio_BT, mask_BT),
            "importance_weight": metrics.of(weight_BT, mask_BT, edges=RATIO_EDGES),
            "dropped_fraction": metrics.of(self._bounded(weight_BT) == 0, mask_BT),
            "mismatch_k3": metrics.of(jnp.expm1(age_BT) - age_BT, mask_BT),
            "entropy": metrics.of(out.entropy_BT, mask_BT),
            "advantage": metrics.of(jnp.abs(adv_BT), mask_BT),
            "unusable_fraction": metrics.of(unusable_BT, mask_BT | unusable_BT),
        }
        if cut_BT is not None:
            report["clip_fraction"] = metrics.of(cut_BT, mask_BT)
        share_BT = batch.target["share_BT"]
        if self.kl_coef:
            ref_BT = jnp.where(mask_BT, batch.ref_BT, 0)
            kl_BT = kl.ESTIMATORS[self.kl_estimator](logp_BT, ref_BT)
            loss += self.kl_coef * jnp.sum(share_BT * kl_BT)
            report["kl"] = metrics.of(kl_BT, mask_BT)
        if self.entropy_coef:
            entropy_BT = jnp.where(mask_BT, out.entropy_BT, 0)
            loss -= self.entropy_coef * jnp.sum(share_BT * entropy_BT)
        return loss, report


# What `__str__` says of the options.
RATIOS = {
    "token": "",
    "sequence": ", geometric mean over the sequence",
    "sequence_token": ", of the sequence in value, of the token in gradient",
}
WEIGHTS = {"token": "", "sequence": ", product over the sequence", "geometric": ", geometric mean over the sequence"}
SHARES = {
    "token": "1 / learnt tokens of the batch",
    "sequence": "1 / (tokens of the sequence x sequences)",
    "sequence_sum": "1 / sequences",
    "constant": "1 / ({tokens} x sequences)",
    "rollout": "1 / (tokens of the rollout x rollouts)",
    "prompt": "1 / (tokens of the prompt's samples x prompts)",
}


def _formula(p: Policy) -> list[str]:
    """The objective, a line a part."""
    gain = FORMULAS[p.surrogate].format(**vars(p))
    if p.ratio_cap:
        gain = gain.replace("min(r A", f"min(min(r, {p.ratio_cap:g}) A")
    if p.dual_clip:
        gain += f", at least {p.dual_clip:g} A if A < 0"
    kind = "length-weighted mean" if p.length_weighted else "mean of the others" if p.leave_one_out else "mean"
    advantage = "R" if p.mean == "none" else f"(R - {kind} of the {p.mean})"
    advantage += "" if p.std == "none" else f" / (standard deviation of the {p.std} + eps)"
    prox = "the policy before the update" if p.needs_scores else "the policy that sampled"
    lines = [f"gain = {gain}", f"A = {advantage}"]
    if p.surrogate != "score":
        lines.append(f"r = pi / {prox}{RATIOS[p.ratio]}")
    bound = {"mask": f"0 outside [{p.weight_low:g}, {p.weight_cap:g}]", "truncate": f"at most {p.weight_cap:g}"}
    corrected = f"{prox} / the policy that sampled{WEIGHTS[p.weight]}, {bound[p.weight_action]}"
    lines.append(f"w = {corrected}, for samples older than the weights" if p.needs_scores else "w = 1")
    lines.append(f"share = {SHARES[p.denominator].format(tokens=p.denominator_tokens)}")
    if p.kl_coef:
        lines.append(f"- {p.kl_coef:g} {p.kl_estimator}(pi, reference)")
    if p.entropy_coef:
        lines.append(f"+ {p.entropy_coef:g} entropy")
    return lines + [f"not as in the paper: {p.note}"] * bool(p.note)
