"""The policy-gradient objective; the algorithms in `losses` are presets of it.

Composed of parts with a file each: reward shaping (`shaping`), advantage estimation (`advantages`), off-policy
correction from the sampling to the proximal policy (`corrections`), the ratio policy / proximal and the surrogate that
bounds it (`surrogates`), loss aggregation (`denominators`), KL penalty (`kl`), entropy bonus (`entropy`) and likelihood
of observations (`observation`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from . import (
    advantages,
    centering,
    corrections,
    entropy,
    formula,
    kl,
    metrics,
    observation,
    segments,
    shaping,
    signals,
    surrogates,
    teacher_rows,
)
from .advantages import PER_SAMPLE, Advantage
from .batch import Batch
from .checks import validate
from .clipping import bounded_exp, bounded_log
from .corrections import Correction
from .denominators import Denominator, share
from .entropy import Entropy
from .kl import KL
from .observation import Observation
from .segments import over_rollout, to_tokens, total
from .shaping import Shaping
from .surrogates import SURROGATES, USED_BY_SOME, Choice, Now

VALUED = 1e18  # of a critic's value: float32 holds sums of squares of smaller ones


@dataclass(frozen=True)
class Policy:
    """A policy-gradient objective for samples of any age.

    maximise sum_t share_t w_t gain(r_t, A_t): A is the advantage; r = policy / proximal; w = proximal / behaviour
    corrects for the staleness of samples (decoupled PPO, arXiv:2110.00641, as used for asynchronous training in
    arXiv:2505.24298) and carries no gradient; share is the token's share of the mean. KL and entropy terms weigh tokens
    by share, without w. A log ratio policy / proximal beyond +-20 is clipped and has no gradient.

    Attributes:
      name: the algorithm, for people.
      note: where it departs from its paper, for people.
      shaping: what is done to rewards before they are compared.
      advantage: what rewards are compared with, and how the difference is spread over tokens.
      correction: importance sampling for samples of older weights, or of a sampler that computes differently.
      kl: the penalty that keeps the policy close to a reference.
      entropy: the entropy bonus.
      observation: the likelihood of what the environment answered.
      ratio: "token"; "sequence": geometric mean over the sequence's learnt tokens (GSPO, arXiv:2507.18071; TRL's
        importance_sampling_level); "sequence_token": its value with each token's gradient (GSPO-token); "product":
        product over the sequence.
      surrogate: name of a function in `surrogates`; formulas and papers are there. In Python also a function like
        those, f(spec, now) -> (gain_BT, cut_BT).
      clip_low: lower bound of the clipping: r is clipped to at least 1 - clip_low (epsilon in TRL), with "geometric"
        log r to at least -clip_low.
      clip_high: upper bound of the clipping: r is clipped to at most 1 + clip_high (epsilon_high in TRL), with
        "geometric" log r to at most clip_high.
      dual_clip: for "clip": the gain is at least dual_clip A if A < 0; 0 = off.
      ratio_cap: for "clip": upper bound of r where the clip does not apply; 0 = off.
      tau_pos: for "sapo": tau if A > 0.
      tau_neg: for "sapo": tau if A <= 0.
      vespo_pos: for "vespo": (k, lambda) if A >= 0.
      vespo_neg: for "vespo": (k, lambda) if A < 0.
      cov_fraction: for "clip_cov" and "kl_cov": fraction of tokens chosen.
      cov_low: for "clip_cov": smallest covariance of the tokens from which it draws.
      cov_high: for "clip_cov": largest covariance of the tokens from which it draws.
      cov_coef: for "kl_cov": coefficient of the penalty on the chosen tokens.
      tv_low: for "dppo": how far a token's probability may fall.
      tv_high: for "dppo": how far a token's probability may rise.
      tv_coef: for "dppo" and "dppo_kl": coefficient of log(r)^2.
      binary_kl_low: for "dppo_kl": nats of divergence up to which a token's probability may fall.
      binary_kl_high: for "dppo_kl": nats of divergence up to which a token's probability may rise.
      score_centering: subtracts from each gain what the sampler's distribution gives on average (arXiv:2609.20807,
        `centering`), of surrogates "score", "clip", "cispo" and "sapo" without a proximal policy. Needs the arrays
        `target["sampler_ids"]` and "sampler_logp", which servers report, and their log-probabilities as `extra` of the
        scores that `loss` gets, as `models.score_centred` gives them.
      denominator: loss aggregation: the mean over all learnt tokens of the batch ("token", DAPO); over sequences of the
        mean of their tokens ("sequence", GRPO), of their sum ("sequence_sum"), of their sum / `denominator_tokens`
        ("constant", Dr. GRPO); or over rollouts or prompts of the mean of their tokens ("rollout", "prompt").
      denominator_tokens: divisor of denominator "constant".
    """

    name: str = "Policy"
    note: str = ""
    shaping: Shaping = Shaping()
    advantage: Advantage = Advantage()
    correction: Correction = Correction()
    ratio: Literal["token", "sequence", "sequence_token", "product"] = "token"
    surrogate: Choice = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    ratio_cap: float = 0.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    vespo_pos: tuple[float, float] = (2.0, 3.0)
    vespo_neg: tuple[float, float] = (3.0, 2.0)
    cov_fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_coef: float = 1.0
    tv_low: float = 0.2
    tv_high: float = 0.2
    tv_coef: float = 1e-3
    binary_kl_low: float = 0.05
    binary_kl_high: float = 0.05
    score_centering: bool = False
    denominator: Denominator = "token"
    denominator_tokens: int = 0
    kl: KL = KL()
    entropy: Entropy = Entropy()
    observation: Observation = Observation()

    def __post_init__(self):
        constant = self.denominator == "constant"
        counts = self.denominator_tokens > 0 if constant else self.denominator_tokens == 0
        named = isinstance(self.surrogate, str)
        free = not named or self.surrogate == "geometric"  # clip_low bounds something else than a ratio from below
        compared = self.advantage.components or self.advantage.mean in PER_SAMPLE
        centred = self.surrogate in centering.SURROGATES and self.ratio == "token"
        early = self.advantage.teacher or (self.kl.coef and self.kl.place == "reward")
        rules = {
            "surrogate": (self.surrogate in SURROGATES if named else callable(self.surrogate),
                          f"one of {', '.join(SURROGATES)}, or a function"),
            "clip_low": (0 <= self.clip_low and (self.clip_low <= 1 or free), "between 0 and 1"),
            "clip_high": (self.clip_high >= 0, "at least 0"),
            "dual_clip": (self.dual_clip == 0 or self.dual_clip > 1, "0, or above 1"),
            "ratio_cap": (self.ratio_cap == 0 or self.ratio_cap > 1, "0, or above 1"),
            "tau_pos": (self.tau_pos > 0, "above 0"),
            "tau_neg": (self.tau_neg > 0, "above 0"),
            "cov_fraction": (0 <= self.cov_fraction <= 1, "between 0 and 1"),
            "cov_low": (self.cov_low <= self.cov_high, f"at most cov_high {self.cov_high:g}"),
            "tv_low": (self.tv_low >= 0, "at least 0"),
            "tv_high": (self.tv_high >= 0, "at least 0"),
            "binary_kl_low": (self.binary_kl_low >= 0, "at least 0"),
            "binary_kl_high": (self.binary_kl_high >= 0, "at least 0"),
            "score_centering": (not self.score_centering or (centred and self.correction.proximal == "behaviour"),
                                'False unless the surrogate is score, clip, cispo or sapo, the ratio "token", and '
                                'correction.proximal "behaviour"'),
            "denominator_tokens": (counts, 'above 0 with denominator "constant", 0 with others'),
            "shaping": (not self.advantage.components or self.shaping.plain,
                        "without changes to the reward if the advantage has components; shape the components"),
            "correction": (self.correction.proximal != "interpolate" or not early,
                           'with proximal "recompute" for a teacher or KL in the reward, applied before the update'),
            "advantage": (not self.shaping.dynamic_sampling or self.advantage.by_reward,
                          'with credit "rollout", mean "group", no components and no teacher for dynamic_sampling'),
            "kl": (not (compared and self.kl.place == "reward" and self.kl.coef),
                   f'with place "loss" if the advantage has components or mean {" or ".join(PER_SAMPLE)}'),
        }  # fmt: skip
        uses = surrogates.of(self).uses if not named or self.surrogate in SURROGATES else USED_BY_SOME
        unused = [name for name in USED_BY_SOME if name not in uses and getattr(self, name) != getattr(Policy, name)]
        if unused:
            raise ValueError(
                f"{self.name}: the surrogate {self.surrogate} does not use {unused[0]}, got "
                f"{getattr(self, unused[0])}; leave it out, or choose another surrogate"
            )
        choices = {f.name: get_args(f.type) for f in dataclasses.fields(self)}
        known = {
            name: (getattr(self, name) in options, f"one of {', '.join(options)}")
            for name, options in choices.items()
            if options and isinstance(options[0], str)
        }
        validate(self, [(field, *rule) for field, rule in [*known.items(), *rules.items()]], name=self.name)

    @property
    def needs_scores(self) -> bool:
        """Whether `prepare` needs scores of the current weights."""
        return self.correction.proximal == "recompute" or self.entropy.floor > 0 or self.needs_squares

    @property
    def needs_squares(self) -> bool:
        """Whether these scores must have `advantages.squares` as `extra`."""
        return self.advantage.mean == "optimal_token"

    @property
    def needs_reference(self) -> bool:
        """Whether the batch must have `ref_BT`."""
        return self.kl.coef > 0

    @property
    def needs_values(self) -> bool:
        """Whether the batch must have a critic's `value_BT`; the critic is then trained on the returns."""
        return self.advantage.credit == "gae"

    @property
    def corrects(self) -> bool:
        """Whether stale samples are corrected for, by w, by the ratio or by score centering."""
        return self.correction.proximal != "behaviour" or self.surrogate != "score" or self.score_centering

    def __str__(self):
        return formula.of(self)

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Sets `adv_BT`, `prox_BT`, `weight_BT` = share x w, `return_BT` with a critic, and what KL and entropy need.

        Segments with a NaN reward or a critic's value beyond VALUED, and tokens whose behaviour, reference or
        teacher log-probability is not finite, are excluded from the loss and its denominator. `scalars["kl_coef"]`, if
        present, overrides the coefficient; "interpolate" needs `scalars["version"]`, the version of the weights to be
        updated.

        Raises:
          ValueError: scores, reference, values, teacher, components or version are needed and missing.
        """
        self._check_inputs(batch, scores)
        how, segment_BT, J = self.correction, batch.segment_BT, batch.reward_BJ.shape[-1]
        reward_BT, reward_BJ, learn_BJ = shaping.shape(self.shaping, batch)
        reward_BJ = advantages.scorable(self.advantage, batch, reward_BJ)
        learns_BJ = jnp.where(jnp.isnan(reward_BJ) | ~learn_BJ, 0.0, 1.0)
        sampled_BT = batch.mask_BT & (to_tokens(learns_BJ, segment_BT) > 0)
        finite_BT = jnp.isfinite(batch.logp_BT)
        if self.needs_reference:
            finite_BT &= jnp.isfinite(batch.ref_BT)
        if self.advantage.teacher:
            finite_BT &= jnp.isfinite(batch.target["teacher"])
        if self.score_centering:
            finite_BT &= jnp.isfinite(batch.target[centering.LOGP]).all(-1)
        if batch.value_BT is not None:  # each advantage of a segment depends on all values after it
            valued_BT = jnp.abs(batch.value_BT) < VALUED
            lost_BJ = total(jnp.where(sampled_BT & ~valued_BT, 1.0, 0.0), segment_BT, J)
            finite_BT &= to_tokens(lost_BJ, segment_BT) == 0
            batch = batch.replace(value_BT=jnp.where(valued_BT, batch.value_BT, 0))
        mask_BT = sampled_BT & finite_BT
        prox_BT = scores.logp_BT if how.proximal == "recompute" else batch.logp_BT
        prox_BT = jax.lax.stop_gradient(jnp.where(mask_BT, prox_BT, 0))
        if self.kl.coef and self.kl.place == "reward":
            kl_BT = jnp.where(
                mask_BT, kl.ESTIMATORS[self.kl.estimator](prox_BT, jnp.where(mask_BT, batch.ref_BT, 0)), 0
            )
            kl_BT *= _shared(batch, "kl_coef", self.kl.coef)
            reward_BT -= kl_BT
            reward_BJ -= over_rollout(total(kl_BT, segment_BT, J), batch.rollout_BJ)
        energy_BT = 1 - 2 * jnp.exp(scores.logp_BT) + scores.extra if self.needs_squares else None
        adv_BT, return_BT = advantages.of(
            self.advantage, batch, reward_BT, reward_BJ, sampled_BT, mask_BT, shaping=self.shaping, energy_BT=energy_BT
        )
        if self.advantage.teacher:
            teacher_BT = jnp.where(mask_BT, batch.target["teacher"], 0)
            gap_BT = bounded_log(teacher_BT - prox_BT)
            if teacher_rows.SPAN in batch.target:
                sum_BT, whole_BT = teacher_rows.over_spans(teacher_BT - prox_BT, batch, mask_BT)
                gap_BT, rest_BT = bounded_log(sum_BT), mask_BT & ~whole_BT
                count = jnp.maximum(jnp.sum(jnp.where(whole_BT, 1.0, 0.0)), 1)
                # With 0, above most others, what the teacher cannot read would be the policy's way out.
                gap_BT = jnp.where(rest_BT, jnp.sum(jnp.where(whole_BT, gap_BT, 0)) / count, gap_BT)
            adv_BT += self.advantage.teacher * gap_BT
        log_BT = jnp.where(mask_BT, prox_BT - batch.logp_BT, 0)
        kept_BT = corrections.kept(how, prox_BT, log_BT, adv_BT, mask_BT, segment_BT, J)
        counted_BT = mask_BT if how.count_masked else kept_BT
        share_BT = share(batch, counted_BT, self.denominator, self.denominator_tokens)
        weight_BT = corrections.bounded(how, corrections.ratio(how, log_BT, mask_BT, segment_BT, J))
        if how.normalise:
            mean = jnp.sum(jnp.where(kept_BT, weight_BT, 0)) / jnp.maximum(jnp.sum(jnp.where(kept_BT, 1.0, 0.0)), 1)
            weight_BT /= jnp.where(mean > 0, mean, 1)
        extras = {"share_BT": share_BT, "kept_BT": kept_BT, "unusable_BT": sampled_BT & ~finite_BT}
        if how.proximal == "interpolate":
            age_BT = _shared(batch, "version", 0) - batch.version_BT
            extras["way_BT"] = jnp.where(mask_BT & (age_BT > 0), age_BT / (age_BT + 1), 0)
        if self.entropy.coef:
            before_BT = scores.entropy_BT if self.entropy.floor else None
            extras["entropy_weight_BT"] = entropy.weights(self.entropy, batch, before_BT, mask_BT, share_BT)
        if self.observation.coef:
            extras[observation.WEIGHT] = observation.weights(self.observation, batch)
        return batch.replace(
            mask_BT=mask_BT, adv_BT=adv_BT, prox_BT=prox_BT, return_BT=return_BT,
            weight_BT=share_BT * jnp.where(kept_BT, weight_BT, 0), target={**batch.target, **extras},
        )  # fmt: skip

    def _check_inputs(self, batch: Batch, scores):
        for missing, needs, what in (
            (self.needs_scores and scores is None, "recompute or an entropy floor",
             "scores of the current weights, from step.make_scores"),
            (self.needs_reference and batch.ref_BT is None, f"kl coef {self.kl.coef:g}", "ref_BT"),
            (self.advantage.teacher and "teacher" not in batch.target, "a teacher", 'target["teacher"]'),
            (self.correction.proximal == "interpolate" and "version" not in batch.scalars, "interpolate",
             'scalars["version"]'),
            (self.score_centering and not {centering.IDS, centering.LOGP} <= batch.target.keys(), "score_centering",
             'target["sampler_ids"] and "sampler_logp", from generate(top_logprobs=)'),
            (self.needs_squares and scores is not None and scores.extra is None, "mean optimal_token",
             "scores of models.score(per_chunk=advantages.squares)"),
        ):  # fmt: skip
            if missing:
                raise ValueError(f"{self.name}.prepare: {needs} needs {what}, got None")

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.logp_BT`, with a bonus also `out.entropy_BT`."""
        mask_BT, adv_BT, segment_BT, J = batch.mask_BT, batch.adv_BT, batch.segment_BT, batch.reward_BJ.shape[-1]
        if "share_BT" not in batch.target:
            raise ValueError(f"{self.name}: the batch must come from {self.name}.prepare, got one that does not")
        how, target, share_BT = self.correction, batch.target, batch.target["share_BT"]
        # Values off the mask are replaced before any exponential, so that NaN cannot leak.
        logp_BT, sampler_BT = jnp.where(mask_BT, out.logp_BT, 0), jnp.where(mask_BT, batch.logp_BT, 0)
        prox_BT, weight_BT = batch.prox_BT, batch.weight_BT
        if how.proximal == "interpolate":
            prox_BT = sampler_BT + target["way_BT"] * (jax.lax.stop_gradient(logp_BT) - sampler_BT)
        age_BT = jnp.where(mask_BT, prox_BT - sampler_BT, 0)
        ratio_BT = corrections.ratio(how, age_BT, mask_BT, segment_BT, J)
        bounded_BT = corrections.bounded(how, ratio_BT)
        if how.proximal == "interpolate":
            weight_BT *= bounded_BT
        now = self._now(logp_BT, logp_BT - prox_BT, batch)
        gain_BT, cut_BT = self._gain(now)
        if self.score_centering:
            gain_BT -= self._expected(now, out, jnp.where(mask_BT[..., None], target[centering.LOGP], 0))
        loss = -jnp.sum(weight_BT * jnp.where(mask_BT, gain_BT, 0))
        unusable_BT = target["unusable_BT"]
        # Without scores from before the update, use the current ones.
        seen_BT = prox_BT if how.proximal == "recompute" else jax.lax.stop_gradient(logp_BT)
        report = {
            **signals.agreement(seen_BT, sampler_BT, mask_BT, segment_BT, J),
            **signals.weights(ratio_BT, bounded_BT, target["kept_BT"], mask_BT, segment_BT, J),
            **signals.movement(now.ratio_BT, now.gap_BT, cut_BT, adv_BT, out.entropy_BT, mask_BT),
            "effective_fraction": signals.effective(adv_BT, weight_BT, mask_BT, segment_BT, J),
            "unusable_fraction": metrics.of(unusable_BT, mask_BT | unusable_BT),
        }
        if self.score_centering:
            report["sampler_mass"] = metrics.of(centering.mass(target[centering.LOGP]), mask_BT)
        if self.advantage.teacher and teacher_rows.SPAN in target:
            report["unaligned_fraction"] = metrics.of(target[teacher_rows.SPAN] == 0, mask_BT)
        if self.dual_clip:
            report["dual_clip_fraction"] = metrics.of((adv_BT < 0) & (now.ratio_BT > self.dual_clip), mask_BT)
        if self.kl.coef:
            ref_BT = jnp.where(mask_BT, batch.ref_BT, 0)
            kl_BT = kl.ESTIMATORS[self.kl.estimator](logp_BT, ref_BT)
            report |= {
                "kl": metrics.of(kl_BT, mask_BT),
                "kl_k1": metrics.of(kl.k1(logp_BT, ref_BT), mask_BT),
                "kl_k3": metrics.of(kl.k3(logp_BT, ref_BT), mask_BT),
            }
            if self.kl.ratio:
                kl_BT *= bounded_exp(logp_BT - sampler_BT)
            if self.kl.over == "sequence":
                gap_BJ = total(jnp.where(mask_BT, logp_BT - ref_BT, 0), segment_BT, J)
                tokens_BJ = total(jnp.where(mask_BT, 1.0, 0.0), segment_BT, J)
                kl_BT = to_tokens(jnp.square(gap_BJ) / 2 / jnp.maximum(tokens_BJ, 1), segment_BT)
                kl_BT = jnp.where(mask_BT, kl_BT, 0)
            if self.kl.place == "loss":
                loss += jnp.sum(_shared(batch, "kl_coef", self.kl.coef) * share_BT * kl_BT)
        if self.entropy.coef:
            loss -= jnp.sum(target["entropy_weight_BT"] * jnp.where(mask_BT, out.entropy_BT, 0))
        if self.observation.coef:
            observed_BT = target[observation.WEIGHT] != 0
            nll_BT = jnp.where(observed_BT, -out.logp_BT, 0)
            loss += jnp.sum(target[observation.WEIGHT] * nll_BT)
            report["observation_nll"] = metrics.of(nll_BT, observed_BT)
        return loss, report

    def _gain(self, now: Now):
        got = surrogates.of(self).gain(self, now)
        of_tokens = lambda x: jnp.shape(x) == now.logp_BT.shape
        right = isinstance(got, tuple) and len(got) == 2 and of_tokens(got[0]) and (got[1] is None or of_tokens(got[1]))
        if not right:
            raise ValueError(
                f"{self.name}: surrogate must return (gain_BT, cut_BT or None) of shape {now.logp_BT.shape}, "
                f"got {jax.tree.map(jnp.shape, got)}"
            )
        return got

    def _expected(self, now: Now, out, sampler_BTK):
        """The gain's mean under the sampler, by its gradient (`centering.expected`)."""
        if (got := getattr(out.extra, "shape", None)) != sampler_BTK.shape:
            raise ValueError(
                f"{self.name}: score_centering needs log-probabilities of sampler_ids, {sampler_BTK.shape}, as "
                f"`extra` of the scores, got {got}; use models.score_centred"
            )

        def gain(log_BTL):
            adv_BTL = jnp.broadcast_to(now.adv_BT[..., None], log_BTL.shape)
            each = now._replace(logp_BT=log_BTL, gap_BT=log_BTL, ratio_BT=bounded_exp(log_BTL), adv_BT=adv_BTL)
            return jnp.sum(surrogates.of(self).gain(self, each)[0])

        return centering.expected(jax.grad(gain), out.extra, sampler_BTK)

    def _now(self, logp_BT, gap_BT, batch: Batch) -> Now:
        mask_BT, segment_BT, J = batch.mask_BT, batch.segment_BT, batch.reward_BJ.shape[-1]
        over_sequence = lambda x_BT: segments.mean(x_BT, mask_BT, segment_BT, J)
        if self.ratio == "token":
            ratio_BT = bounded_exp(gap_BT)
        elif self.ratio == "product":
            ratio_BT = bounded_exp(to_tokens(total(jnp.where(mask_BT, gap_BT, 0), segment_BT, J), segment_BT))
        else:
            ratio_BT = bounded_exp(over_sequence(gap_BT))
        if self.ratio == "sequence_token":
            ratio_BT = jax.lax.stop_gradient(ratio_BT) * jnp.exp(logp_BT - jax.lax.stop_gradient(logp_BT))
        return Now(logp_BT, gap_BT, ratio_BT, batch.adv_BT, mask_BT, batch.logp_BT, batch.index_BT, over_sequence)


def _shared(batch: Batch, name: str, default):
    """A batch-wide value, the same in each microbatch, shaped to broadcast over its tokens."""
    x = batch.scalars.get(name, default)
    return jnp.reshape(x, (*jnp.shape(x), 1, 1)) if jnp.ndim(x) else x
