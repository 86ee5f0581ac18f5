"""Off-policy correction: importance weights from the behaviour (sampling) to the proximal (pre-update) policy.

Chooses the proximal log-probabilities, weighs each token and masks outliers. Every bound is stated as a ratio
proximal / behaviour, whatever statistic is compared with it.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from . import kl, segments
from .checks import validate
from .clipping import bounded_exp, clip
from .segments import to_tokens, total

STATISTICS = {  # as functions of the log ratio
    "ratio": jnp.exp,
    "k1": lambda log: log,
    "k2": lambda log: jnp.square(log) / 2,
    "k3": lambda log: jnp.expm1(log) - log,
}


@dataclass(frozen=True)
class Correction:
    """Correction for samples of older weights or of another implementation (decoupled PPO, arXiv:2110.00641).

    Attributes:
      proximal: "recompute" computes log-probabilities under the weights before this update, with one more forward pass;
        "interpolate" approximates them without that pass by log-linear interpolation between behaviour and current
        policy, a / (a + 1) of the way for a token a versions older than the weights to be updated, which count as the
        next version once updated (A-3PO, arXiv:2512.06547); "behaviour" uses the sampled ones: the weight is 1, and
        only the ratio policy / proximal corrects.
      level: the weight is each token's ratio ("token"), the product over its sequence ("sequence"), or the sequence's
        geometric mean ("geometric").
      action: outside [low, cap] "mask" removes the token's gradient (IcePop), "truncate" caps the weight at cap (TIS),
        "clip" clips it to both bounds.
      low: lower bound of the weight, of actions "mask" and "clip".
      cap: upper bound of the weight.
      normalise: divides weights by their mean over the batch's unmasked tokens.
      mask: masks tokens whose statistic is out of bounds: "ratio", "k1" = log ratio, "k2" = (log ratio)^2 / 2,
        "k3" = ratio - 1 - log ratio.
      mask_over: tests each token separately, or masks whole sequences by the sum, mean or max over their tokens (with
        "max", "ratio" and "k1" test the min too).
      mask_low: lower bound, given as a ratio: the statistic must be at least its value at this ratio; 0 with k2 and
        k3, which are never negative.
      mask_high: upper bound, given as a ratio: the statistic must be at most its value at this ratio. "k1" with "mean"
        is the geometric mean of ratios, with "sum" their product.
      veto: masks a sequence if any token's ratio is below this; 0 = off.
      drift: masks the negative-advantage tokens of a sequence whose mean log (behaviour / proximal) exceeds this
        (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556); 0 = off.
      binary_kl: masks tokens for which the KL divergence between proximal and behaviour policy, as far as the sampled
        token shows it (`kl.binary`), exceeds this many nats in either direction (KPop, which has 0.1); 0 = off.
      second_moment: masks, after the other masks, the tokens of largest (log ratio)^2 until its mean over the rest of
        the batch is at most this (M2PO, arXiv:2510.01161); 0 = off.
      count_masked: masked tokens stay in the denominator; False renormalises over the rest. Tokens whose weight
        `action` sets to 0 always stay.
    """

    proximal: Literal["recompute", "interpolate", "behaviour"] = "recompute"
    level: Literal["token", "sequence", "geometric"] = "token"
    action: Literal["mask", "truncate", "clip"] = "mask"
    low: float = 0.0
    cap: float = 5.0
    normalise: bool = False
    mask: Literal["none", "ratio", "k1", "k2", "k3"] = "none"
    mask_over: Literal["token", "sum", "mean", "max"] = "token"
    mask_low: float = 0.0
    mask_high: float = 2.0
    veto: float = 0.0
    drift: float = 0.0
    binary_kl: float = 0.0
    second_moment: float = 0.0
    count_masked: bool = True

    def __post_init__(self):
        divergence, fields = self.mask in ("k2", "k3"), Correction.__dataclass_fields__
        default = lambda *names: all(getattr(self, name) == fields[name].default for name in names)
        unmasked = default("mask", "veto", "drift", "binary_kl", "second_moment", "normalise", "count_masked")
        behaviour, recompute = self.proximal == "behaviour", self.proximal == "recompute"
        rules = (
            ("low", 0 <= self.low <= 1, "between 0 and 1"),
            ("cap", self.cap >= 1, "at least 1"),
            ("low", self.low == 0 or self.action != "truncate", '0 with action "truncate"; "clip" has both bounds'),
            ("mask", self.mask != "none" or default("mask_over", "mask_low", "mask_high"),
             "a statistic where mask_over or its bounds are set"),
            ("mask_low", 0 <= self.mask_low <= 1, "between 0 and 1"),
            ("mask_low", self.mask_low == 0 or not divergence, "0 with k2 and k3, which are never negative"),
            ("mask_high", self.mask_high > 1, "above 1"),
            ("mask_over", self.mask != "ratio" or self.mask_over != "sum", 'token, mean or max with "ratio"'),
            ("veto", 0 <= self.veto < 1, "between 0 and 1"),
            ("drift", self.drift >= 0, "at least 0"),
            ("binary_kl", self.binary_kl >= 0, "at least 0"),
            ("second_moment", self.second_moment >= 0, "at least 0"),
            ("proximal", not behaviour or (unmasked and default("level", "action", "low", "cap")),
             '"recompute" with a weight or a mask: with "behaviour" the ratio already corrects'),
            ("proximal", recompute or unmasked, '"recompute" with masks and normalise, which apply before the update'),
        )  # fmt: skip
        validate(self, rules)


def ratio(spec: Correction, log_BT, mask_BT, segment_BT, J: int):
    """Ratio proximal / behaviour of each token at `spec.level`, from its logarithm per token."""
    if spec.level == "sequence":
        log_BT = to_tokens(total(jnp.where(mask_BT, log_BT, 0), segment_BT, J), segment_BT)
    elif spec.level == "geometric":
        log_BT = segments.mean(log_BT, mask_BT, segment_BT, J)
    return bounded_exp(log_BT)


def bounded(spec: Correction, ratio_BT):
    """The importance weight: the ratio after `spec.action`."""
    if spec.action == "mask":
        return jnp.where((spec.low <= ratio_BT) & (ratio_BT <= spec.cap), ratio_BT, 0)
    return clip(ratio_BT, spec.low if spec.action == "clip" else 0, spec.cap)


def kept(spec: Correction, prox_BT, log_BT, adv_BT, mask_BT, segment_BT, J: int):
    """Mask of the learnt tokens of a whole batch that every mask keeps; log_BT = log (proximal / behaviour)."""
    keep_BT = mask_BT
    drop = lambda bad_BT: to_tokens(total(jnp.where(mask_BT & bad_BT, 1.0, 0.0), segment_BT, J), segment_BT) == 0
    if spec.mask != "none":
        statistic = STATISTICS[spec.mask]
        low, high = (statistic(jnp.log(jnp.asarray(x, log_BT.dtype))) for x in (spec.mask_low, spec.mask_high))
        value_BT = statistic(log_BT)
        if spec.mask_over == "mean":
            value_BT = segments.mean(value_BT, mask_BT, segment_BT, J)
        elif spec.mask_over == "sum":
            value_BT = to_tokens(total(jnp.where(mask_BT, value_BT, 0), segment_BT, J), segment_BT)
        far_BT = value_BT > high
        if spec.mask in ("ratio", "k1"):
            far_BT |= value_BT < low
        keep_BT &= ~far_BT if spec.mask_over == "token" else drop(far_BT)
    if spec.veto:
        keep_BT &= drop(log_BT < jnp.log(spec.veto))
    if spec.drift:
        keep_BT &= ~((adv_BT < 0) & (segments.mean(-log_BT, mask_BT, segment_BT, J) > spec.drift))
    if spec.binary_kl:
        pair = prox_BT, prox_BT - log_BT
        keep_BT &= jnp.maximum(kl.binary(*pair), kl.binary(*pair[::-1])) <= spec.binary_kl
    if spec.second_moment:
        keep_BT = _smallest_with_mean(jnp.square(log_BT), keep_BT, spec.second_moment)
    return keep_BT


def _smallest_with_mean(x_BT, keep_BT, limit: float):
    """Keeps the smallest x, as many as have a mean of at most `limit`."""
    x_A = jnp.where(keep_BT, x_BT, jnp.inf).reshape(-1)
    order_A = jnp.argsort(x_A)
    mean_A = jnp.cumsum(x_A[order_A]) / (1 + jnp.arange(x_A.size))
    fits_A = mean_A <= limit  # running means of sorted numbers never decrease
    return keep_BT & jnp.zeros_like(fits_A).at[order_A].set(fits_A).reshape(keep_BT.shape)
