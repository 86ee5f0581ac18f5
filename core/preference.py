"""Preference objectives: DPO-like losses on pairs, KTO and BCO on single labelled completions, and reward models.

`prepare` decides on the whole batch which pairs count and folds their number into `weight_BJ`; `loss` is a sum over a
microbatch, which holds both segments of a pair (`packing.pack` ensures it). A pair has the weight of its chosen sample.

A pair is left out, and counted in `left_out`, unless it is one chosen and one rejected segment of the same microbatch,
both with learnt tokens and a finite reference and margin. Metrics weight all pairs equally; the metric `loss` is for
held-out data: in a training step the sum over the batch replaces it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from . import metrics
from .batch import Batch
from .checks import validate
from .segments import by_id, divisor, to_tokens, total

LEFT_OUT = -2  # `pair_BJ` after `prepare` for pairs that do not count
BASELINE = -1  # label of completions used only for KTO's baseline


@dataclass(frozen=True)
class Preference:
    """A loss on the difference between the scores of the chosen and the rejected completion.

    minimise mean over pairs of coef link(s_c - s_r) + sft_coef nll_c

    Attributes:
      name: the algorithm, for people.
      note: where it departs from its paper, for people.
      score: s of a completion: "sum" or "mean" of log pi over its learnt tokens, or "odds", the log-odds
        log(p / (1 - p)) of p = exp(mean log pi) (ORPO, arXiv:2403.07691; p is at most 1 - the dtype's epsilon).
      reference: uses log(pi / reference) instead of log pi; needs `ref_BT` (from a ref_model).
      link: "sigmoid" is -log sigmoid(z), z = beta (s_c - s_r) - gamma (Bradley-Terry); "square" is
        (s_c - s_r - 1 / (2 beta))^2 (IPO, arXiv:2310.12036).
      beta: a larger beta keeps the policy closer to the reference; in SimPO and ORPO just the scale of s.
      gamma: target margin, subtracted in z (SimPO, arXiv:2405.14734).
      label_smoothing: assumed fraction of flipped labels: -(1 - fraction) log sigmoid(z) - fraction log sigmoid(-z),
        conservative DPO (E. Mitchell, "A note on DPO with noisy preferences", 2023).
      coef: coefficient of the link; ORPO's lambda.
      sft_coef: coefficient of the chosen completion's negative log-likelihood, mean over its tokens (iterative RPO,
        arXiv:2404.19733; rpo_alpha in TRL).
    """

    name: str = "Preference"
    note: str = ""
    score: Literal["sum", "mean", "odds"] = "sum"
    reference: bool = True
    link: Literal["sigmoid", "square"] = "sigmoid"
    beta: float = 0.1
    gamma: float = 0.0
    label_smoothing: float = 0.0
    coef: float = 1.0
    sft_coef: float = 0.0

    needs_scores = False

    def __post_init__(self):
        sigmoid = self.link == "sigmoid"
        rules = {
            "reference": (not (self.reference and self.score == "odds"), 'False with score "odds"'),
            "beta": (self.beta >= 0 if sigmoid else self.beta > 0, "at least 0" if sigmoid else "above 0"),
            "gamma": (sigmoid or self.gamma == 0, '0 with link "square"'),
            "label_smoothing": (
                0 <= self.label_smoothing <= 0.5 and (sigmoid or not self.label_smoothing),
                "between 0 and 0.5" if sigmoid else '0 with link "square"',
            ),
            "coef": (self.coef >= 0, "at least 0"),
            "sft_coef": (self.sft_coef >= 0, "at least 0"),
        }
        for field in dataclasses.fields(self):
            if choices := get_args(field.type):
                rules[field.name] = (getattr(self, field.name) in choices, f"one of {', '.join(choices)}")
        validate(self, [(field, *rule) for field, rule in rules.items()], name=self.name)

    @property
    def needs_reference(self) -> bool:
        return self.reference

    def __str__(self):
        return "\n".join([f"{self.name}: minimise the mean over pairs of", *map("  {}".format, _formula(self))])

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Restricts `mask_BT`, `pair_BJ` and `weight_BJ` to the pairs that count, see `_paired`.

        Raises:
          ValueError: `reference` is set and the batch has no `ref_BT`.
        """
        learns_BT, usable_BJ = _learning(batch, self.name if self.reference else None)
        batch = _paired(batch, usable_BJ)
        mask_BT = learns_BT & (to_tokens(jnp.where(batch.pair_BJ >= 0, 1, 0), batch.segment_BT) > 0)
        return batch.replace(mask_BT=mask_BT)

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.logp_BT`.

        Metrics per pair: loss, preference (the link), nll (of the chosen completion), preference_accuracy (s_c > s_r),
        margin = beta (s_c - s_r), reward_chosen and reward_rejected = beta s, logp_chosen and logp_rejected (sums,
        nats). Per token: entropy. Per segment of a pair: left_out.
        """
        logp_BJ, ratio_BJ, count_BJ = _sums(out, batch, self.reference)
        if self.score != "sum":
            ratio_BJ = ratio_BJ / count_BJ
        if self.score == "odds":
            ratio_BJ = _log_odds(ratio_BJ)
        chosen_BJ, gap_BJ = _compare(ratio_BJ, batch)
        link_BJ, nll_BJ = self._link(gap_BJ), -logp_BJ / count_BJ
        loss_BJ = self.coef * link_BJ + self.sft_coef * nll_BJ
        rejected_BJ = (batch.pair_BJ >= 0) & ~chosen_BJ
        report = {
            "loss": metrics.of(loss_BJ, chosen_BJ),
            "preference": metrics.of(link_BJ, chosen_BJ),
            "nll": metrics.of(nll_BJ, chosen_BJ),
            "preference_accuracy": metrics.of(gap_BJ > 0, chosen_BJ),
            "margin": metrics.of(self.beta * gap_BJ, chosen_BJ),
            "reward_chosen": metrics.of(self.beta * ratio_BJ, chosen_BJ),
            "reward_rejected": metrics.of(self.beta * ratio_BJ, rejected_BJ),
            "logp_chosen": metrics.of(logp_BJ, chosen_BJ),
            "logp_rejected": metrics.of(logp_BJ, rejected_BJ),
            "entropy": metrics.of(out.entropy_BT, batch.mask_BT),
            "left_out": metrics.of(batch.pair_BJ == LEFT_OUT, batch.pair_BJ != -1),
        }
        return jnp.sum(batch.weight_BJ * jnp.where(chosen_BJ, loss_BJ, 0)), report

    def _link(self, gap_BJ):
        if self.link == "square":
            return jnp.square(gap_BJ - 1 / (2 * self.beta))
        z_BJ = self.beta * gap_BJ - self.gamma
        right_BJ, wrong_BJ = jax.nn.log_sigmoid(z_BJ), jax.nn.log_sigmoid(-z_BJ)
        return -(1 - self.label_smoothing) * right_BJ - self.label_smoothing * wrong_BJ


@dataclass(frozen=True)
class KTO:
    """Kahneman-Tversky optimisation (arXiv:2402.01306): learns from desirable (label 1) and undesirable completions
    (label 0).

    minimise mean over completions of lambda (1 - sigmoid(z)), z = beta (s - z0) for desirable ones and beta (z0 - s)
    for the others, s = sum_t log(pi / reference). z0 estimates KL(policy || reference): the mean of s over the
    segments of label -1 in the whole batch (prompts with completions of other prompts, not trained on), clamped to at
    least 0; 0 without such segments. It uses the weights behind `scores` and carries no gradient.

    Attributes:
      beta: a larger beta keeps the policy closer to the reference.
      desirable_weight: lambda of desirable completions. The paper recommends a ratio between 1 and 4 / 3 of
        desirable_weight x desirable completions to undesirable_weight x undesirable ones.
      undesirable_weight: lambda of undesirable completions.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    name = "KTO"
    needs_scores = True
    needs_reference = True

    def __post_init__(self):
        validate(self, [(field, value >= 0, "at least 0") for field, value in vars(self).items()])

    def __str__(self):
        return (
            "KTO: minimise the mean over completions of\n"
            f"  {self.desirable_weight:g} (1 - sigmoid({self.beta:g} (s - z0))) if desirable\n"
            f"  {self.undesirable_weight:g} (1 - sigmoid({self.beta:g} (z0 - s))) if not\n"
            "  s = sum_t log(pi / reference)\n"
            "  z0 = max(0, mean of s over prompts with completions of others), without gradient"
        )

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Sets `scalars["z0"]` and restricts `mask_BT` and `weight_BJ` to completions that count; others get label NaN.

        Completions without learnt tokens, with another label or with a reference that is not finite are left out.

        Raises:
          ValueError: scores or `ref_BT` are missing.
        """
        if scores is None:
            raise ValueError(
                "KTO.prepare: the baseline needs scores of the current weights, from step.make_scores, got None"
            )
        batch = _labelled(batch, self.name, (0, 1, BASELINE))
        baseline_BJ = batch.label_BJ == BASELINE
        _, ratio_BJ, _ = _sums(scores, _only(batch, baseline_BJ), reference=True)
        z0 = jnp.maximum(_mean(ratio_BJ, baseline_BJ), 0)
        return _only(batch, batch.label_BJ >= 0).with_scalars(z0=jax.lax.stop_gradient(z0))

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.logp_BT`.

        Metrics per completion: loss, preference_accuracy (s > z0 if desirable, s < z0 if not), kl_baseline (z0),
        reward_chosen and reward_rejected = beta s of desirable and undesirable ones, logp_chosen and logp_rejected
        (sums, nats). Per token: entropy. Per segment: left_out.
        """
        logp_BJ, ratio_BJ, _ = _sums(out, batch, reference=True)
        good_BJ, z0 = batch.label_BJ == 1, batch.scalars["z0"]
        over_BJ = jnp.where(good_BJ, 1, -1) * (ratio_BJ - z0)
        scale_BJ = jnp.where(good_BJ, self.desirable_weight, self.undesirable_weight)
        loss_BJ = scale_BJ * jax.nn.sigmoid(-self.beta * over_BJ)
        told = {"kl_baseline": z0}
        return _over_completions(out, batch, loss_BJ, over_BJ > 0, self.beta * ratio_BJ, logp_BJ, told)


@dataclass(frozen=True)
class BCO:
    """Binary classifier optimisation (arXiv:2404.04656): the reward is the logit of a classifier of desirable (label 1)
    and undesirable completions (label 0).

    minimise mean over completions of -log sigmoid(r - delta) for desirable ones and -log sigmoid(delta - r) for the
    others, r = beta sum_t log(pi / reference). delta, the reward shift, is the mean of the average r of either side in
    the whole batch, or that of the only side there is; it uses the weights behind `scores` and carries no gradient.

    TRL's former trainer took the mean of r over all completions since the run began, which lags behind the policy. The
    paper's first version also weights undesirable completions by a classifier of prompts (underlying distribution
    matching), which is left out.

    Attributes:
      name: the algorithm, for people; in a file of options it tells BCO from other objectives that have a beta.
      beta: a larger beta keeps the policy closer to the reference.
    """

    name: str = "BCO"
    beta: float = 0.1

    needs_scores = True
    needs_reference = True

    def __post_init__(self):
        validate(self, [("beta", self.beta >= 0, "at least 0")])

    def __str__(self):
        return (
            "BCO: minimise the mean over completions of\n"
            "  -log sigmoid(r - delta) if desirable\n"
            "  -log sigmoid(delta - r) if not\n"
            f"  r = {self.beta:g} sum_t log(pi / reference)\n"
            "  delta = (mean r of desirable ones + mean r of the others) / 2, without gradient\n"
            "  not as in the paper: prompts of the two sides are not matched"
        )

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Sets `scalars["delta"]` and restricts `mask_BT` and `weight_BJ` to completions that count; others get label
        NaN.

        Completions without learnt tokens, with another label or with a reference that is not finite are left out.

        Raises:
          ValueError: scores or `ref_BT` are missing.
        """
        if scores is None:
            raise ValueError(
                "BCO.prepare: the reward shift needs scores of the current weights, from step.make_scores, got None"
            )
        batch = _labelled(batch, self.name, (0, 1))
        batch = _only(batch, batch.label_BJ >= 0)
        reward_BJ = self.beta * _sums(scores, batch, reference=True)[1]
        sides = [batch.label_BJ == label for label in (0, 1)]
        there = sum(jnp.where(jnp.any(side_BJ), 1, 0) for side_BJ in sides)
        delta = sum(_mean(reward_BJ, side_BJ) for side_BJ in sides) / jnp.maximum(there, 1)
        return batch.with_scalars(delta=jax.lax.stop_gradient(delta))

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.logp_BT`.

        Metrics per completion: loss, preference_accuracy (r > delta if desirable, r < delta if not), reward_shift
        (delta), reward_chosen and reward_rejected = r of desirable and undesirable ones, logp_chosen and logp_rejected
        (sums, nats). Per token: entropy. Per segment: left_out.
        """
        logp_BJ, ratio_BJ, _ = _sums(out, batch, reference=True)
        reward_BJ, delta = self.beta * ratio_BJ, batch.scalars["delta"]
        over_BJ = jnp.where(batch.label_BJ == 1, 1, -1) * (reward_BJ - delta)
        loss_BJ, told = -jax.nn.log_sigmoid(over_BJ), {"reward_shift": delta}
        return _over_completions(out, batch, loss_BJ, over_BJ > 0, reward_BJ, logp_BJ, told)


@dataclass(frozen=True)
class RewardModel:
    """Bradley-Terry: minimise mean over pairs of -log sigmoid(s_c - s_r - m) + center_coef (s_c + s_r)^2.

    s is `out.value_BT`, the output of the scalar head, at the last token of a segment.

    Attributes:
      margin: m is the difference of the samples' rewards, chosen minus rejected (Llama 2, arXiv:2307.09288); else 0.
      center_coef: coefficient of the term that centres scores at 0 (arXiv:2312.09244; TRL's
        center_rewards_coefficient).
    """

    margin: bool = False
    center_coef: float = 0.0

    name = "RewardModel"
    needs_scores = False
    needs_reference = False

    def __post_init__(self):
        validate(self, [("center_coef", self.center_coef >= 0, "at least 0")])

    def __str__(self):
        lines = [
            "RewardModel: minimise the mean over pairs of",
            f"  -log sigmoid(s_c - s_r{' - (R_c - R_r)' if self.margin else ''})",
        ]
        if self.center_coef:
            lines.append(f"  + {self.center_coef:g} (s_c + s_r)^2")
        return "\n".join([*lines, "  s = the score head at the last token"])

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Restricts `pair_BJ` and `weight_BJ` to the pairs that count, see `_paired`."""
        usable_BJ = _learning(batch)[1]
        if self.margin:
            usable_BJ &= jnp.isfinite(batch.reward_BJ)
        return _paired(batch, usable_BJ)

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.value_BT`.

        Metrics per pair: loss, preference_accuracy (s_c > s_r), margin = s_c - s_r, reward_chosen and reward_rejected
        = s. Per segment: score = s. Per segment of a pair: left_out.

        Raises:
          ValueError: the model has no scalar head.
        """
        if out.value_BT is None:
            raise ValueError('RewardModel: needs a model with a score head, got none; hf.load(init_missing=("score",))')
        kept_BJ = batch.pair_BJ >= 0
        last_BT = batch.index_BT == to_tokens(batch.length_BJ, batch.segment_BT) - 1
        keep_BT = last_BT & (to_tokens(jnp.where(kept_BJ, 1, 0), batch.segment_BT) > 0)
        score_BJ = total(jnp.where(keep_BT, out.value_BT, 0), batch.segment_BT, batch.pair_BJ.shape[-1])
        chosen_BJ, gap_BJ = _compare(score_BJ, batch)
        margin_BJ = _compare(jnp.where(kept_BJ, batch.reward_BJ, 0), batch)[1] if self.margin else 0
        loss_BJ = -jax.nn.log_sigmoid(gap_BJ - margin_BJ)
        if self.center_coef:
            loss_BJ += self.center_coef * jnp.square(_over_pair(score_BJ, batch))
        report = {
            "loss": metrics.of(loss_BJ, chosen_BJ),
            "preference_accuracy": metrics.of(gap_BJ > 0, chosen_BJ),
            "margin": metrics.of(gap_BJ, chosen_BJ),
            "score": metrics.of(score_BJ, kept_BJ),
            "reward_chosen": metrics.of(score_BJ, chosen_BJ),
            "reward_rejected": metrics.of(score_BJ, kept_BJ & ~chosen_BJ),
            "left_out": metrics.of(batch.pair_BJ == LEFT_OUT, batch.pair_BJ != -1),
        }
        return jnp.sum(batch.weight_BJ * jnp.where(chosen_BJ, loss_BJ, 0)), report


# -- pairs ---------------------------------------------------------------------------------------


def _paired(batch: Batch, usable_BJ) -> Batch:
    """Sets `pair_BJ` and `weight_BJ` of the whole batch for a loss over pairs.

    `pair_BJ`: for both segments of a pair that counts, the index of the chosen one among its microbatch's segments;
    `LEFT_OUT` for pairs that do not count, -1 for segments in no pair. `weight_BJ`: the pair's share of the mean, at
    the chosen segment.
    """
    slots = batch.pair_BJ.shape[-2] * batch.pair_BJ.shape[-1]  # of a microbatch
    pair_A, label_A, at_A = batch.pair_BJ.reshape(-1), batch.label_BJ.reshape(-1), jnp.arange(batch.pair_BJ.size)
    over = lambda x_A: by_id(jnp.where(pair_A >= 0, x_A, 0), pair_A, pair_A.size)
    chosen_A, rejected_A = label_A == 1, label_A == 0
    first_A, second_A = over(jnp.where(chosen_A, at_A, 0)), over(jnp.where(rejected_A, at_A, 0))
    ones = [over(jnp.where(x_A, 1, 0)) == 1 for x_A in (chosen_A, rejected_A)]
    twos = [over(x_A) == 2 for x_A in (jnp.ones_like(at_A), jnp.where(usable_BJ.reshape(-1), 1, 0))]
    together_A = first_A // slots == second_A // slots
    kept_A = (pair_A >= 0) & ones[0] & ones[1] & twos[0] & twos[1] & together_A
    weight_A = jnp.where(kept_A & chosen_A, batch.weight_BJ.reshape(-1), 0)
    place_A = jnp.where(kept_A, first_A % slots, jnp.where(pair_A >= 0, LEFT_OUT, -1))
    return batch.replace(
        pair_BJ=place_A.reshape(batch.pair_BJ.shape),
        weight_BJ=(weight_A / divisor(jnp.sum(weight_A))).reshape(batch.pair_BJ.shape),
    )


def _over_pair(x_BJ, batch: Batch):
    """Sum over the segments of each pair of a prepared microbatch, at each of its segments."""
    return by_id(x_BJ.reshape(-1), batch.pair_BJ.reshape(-1), x_BJ.size).reshape(x_BJ.shape)


def _compare(x_BJ, batch: Batch):
    """(mask of the chosen segments of a prepared microbatch, x chosen minus x rejected at these segments)."""
    chosen_BJ = (batch.pair_BJ >= 0) & (batch.label_BJ == 1)
    gap_BJ = _over_pair(jnp.where(chosen_BJ, x_BJ, -x_BJ), batch)
    return chosen_BJ, jnp.where(chosen_BJ, gap_BJ, 0)


# -- completions ---------------------------------------------------------------------------------


def _labelled(batch: Batch, name: str, labels: tuple[int, ...]) -> Batch:
    """Sets `mask_BT` of the whole batch to the learnt tokens, `label_BJ` to NaN for completions that do not count, and
    `weight_BJ` to the share in the mean over those of label 0 or 1.

    Args:
      name: of the objective, which needs a reference.
      labels: those that count.
    """
    learns_BT, usable_BJ = _learning(batch, name)
    label_BJ = jnp.where(usable_BJ & jnp.isin(batch.label_BJ, jnp.array(labels)), batch.label_BJ, jnp.nan)
    weight_BJ = jnp.where(label_BJ >= 0, batch.weight_BJ, 0)
    return batch.replace(mask_BT=learns_BT, label_BJ=label_BJ, weight_BJ=weight_BJ / divisor(jnp.sum(weight_BJ)))


def _only(batch: Batch, some_BJ) -> Batch:
    """The batch with the mask of these segments alone."""
    return batch.replace(mask_BT=batch.mask_BT & (to_tokens(jnp.where(some_BJ, 1, 0), batch.segment_BT) > 0))


def _mean(x_BJ, some_BJ):
    """Mean of x over these segments; 0 without any."""
    return jnp.sum(jnp.where(some_BJ, x_BJ, 0)) / jnp.maximum(jnp.sum(jnp.where(some_BJ, 1, 0)), 1)


def _over_completions(out, batch: Batch, loss_BJ, right_BJ, reward_BJ, logp_BJ, told: dict):
    """(weighted sum of the loss over labelled completions, metrics); `told` are scalars, reported as they are."""
    good_BJ, bad_BJ = batch.label_BJ == 1, batch.label_BJ == 0
    labelled_BJ = good_BJ | bad_BJ
    report = {
        "loss": metrics.of(loss_BJ, labelled_BJ),
        "preference_accuracy": metrics.of(right_BJ, labelled_BJ),
        **{name: metrics.of(jnp.broadcast_to(x, loss_BJ.shape), labelled_BJ) for name, x in told.items()},
        "reward_chosen": metrics.of(reward_BJ, good_BJ),
        "reward_rejected": metrics.of(reward_BJ, bad_BJ),
        "logp_chosen": metrics.of(logp_BJ, good_BJ),
        "logp_rejected": metrics.of(logp_BJ, bad_BJ),
        "entropy": metrics.of(out.entropy_BT, batch.mask_BT),
        "left_out": metrics.of(jnp.isnan(batch.label_BJ), batch.length_BJ > 0),
    }
    return jnp.sum(batch.weight_BJ * jnp.where(labelled_BJ, loss_BJ, 0)), report


# -- segments ------------------------------------------------------------------------------------


def _learning(batch: Batch, reference_of: str | None = None):
    """(mask of learnt tokens, mask of segments with learnt tokens and, if needed, a finite reference at all of them).

    Args:
      reference_of: name of the objective, if it needs a reference.
    """
    J = batch.pair_BJ.shape[-1]
    learns_BT = batch.mask_BT & (batch.weight_BT > 0)
    count = lambda x_BT: total(jnp.where(x_BT, 1, 0), batch.segment_BT, J)
    usable_BJ = count(learns_BT) > 0
    if reference_of:
        if batch.ref_BT is None:
            raise ValueError(f"{reference_of}.prepare: needs ref_BT, the reference's log-probabilities, got None")
        usable_BJ &= count(learns_BT & ~jnp.isfinite(batch.ref_BT)) == 0
    return learns_BT, usable_BJ


def _sums(out, batch: Batch, reference: bool):
    """Sums over the learnt tokens of each segment: log pi, log(pi / reference) (log pi without a reference), and their
    number, at least 1."""
    J = batch.pair_BJ.shape[-1]
    over = lambda x_BT: total(jnp.where(batch.mask_BT, x_BT, 0), batch.segment_BT, J)
    logp_BJ = over(out.logp_BT)
    ratio_BJ = logp_BJ - jax.lax.stop_gradient(over(batch.ref_BT)) if reference else logp_BJ
    return logp_BJ, ratio_BJ, jnp.maximum(over(jnp.ones_like(out.logp_BT)), 1)


def _log_odds(logp_BJ):
    """log(p / (1 - p)) of p = exp(logp), p clipped to at most 1 - eps of the dtype, without gradient there."""
    logp_BJ = jnp.minimum(logp_BJ, -jnp.finfo(logp_BJ.dtype).eps)
    return logp_BJ - jnp.log(-jnp.expm1(logp_BJ))


# -- formula -------------------------------------------------------------------------------------


def _formula(p: Preference) -> list[str]:
    """The objective's formula, one line per part."""
    z = f"{p.beta:g} (s_c - s_r)" + (f" - {p.gamma:g}" if p.gamma else "")
    if p.link == "square":
        link = f"(s_c - s_r - 1 / (2 {p.beta:g}))^2"
    elif p.label_smoothing:
        link = f"-{1 - p.label_smoothing:g} log sigmoid(z) - {p.label_smoothing:g} log sigmoid(-z), z = {z}"
    else:
        link = f"-log sigmoid({z})"
    lines = [link if p.coef == 1 else f"{p.coef:g} ({link})"]
    if p.sft_coef:
        lines.append(f"+ {p.sft_coef:g} mean_t -log pi(chosen)")
    of = "log(pi / reference)" if p.reference else "log pi"
    scores = {"sum": f"sum_t {of}", "mean": f"mean_t {of}", "odds": f"log(p / (1 - p)), p = exp(mean_t {of})"}
    return [*lines, f"s = {scores[p.score]}", *[f"not as in the paper: {p.note}"] * bool(p.note)]
