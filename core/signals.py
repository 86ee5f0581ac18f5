"""Training metrics: trainer-sampler mismatch, size of the update, and what corrections mask.

All are kept as sums, counts and moments, so any split of a batch gives the same values; `finalize_metrics` computes
what depends on several of them. Unless stated otherwise, metrics are per learnt token.
"""

import math

import jax.numpy as jnp
import numpy as np

from . import kl, metrics
from .clipping import BOUND, bounded_exp, bounded_log
from .metrics import Metric, Moments
from .segments import last, to_tokens, total

RATIO_EDGES = tuple(np.round(np.arange(0.5, 1.5001, 0.05), 2).tolist())
ENTROPY_EDGES = (0.0, *np.round(np.geomspace(0.01, 12.0, 40), 4).tolist())


def agreement(prox_BT, sampler_BT, mask_BT, segment_BT, J: int) -> dict[str, Metric | Moments]:
    """Mismatch of the trainer's and the sampler's log-probabilities (nats): numerical differences and staleness."""
    log_BT = jnp.where(mask_BT, prox_BT - sampler_BT, 0)
    p_BT, q_BT = jnp.exp(prox_BT), jnp.exp(sampler_BT)
    sequence_BT = to_tokens(total(log_BT, segment_BT, J), segment_BT)
    of = lambda x_BT: metrics.of(x_BT, mask_BT)
    return {
        "mismatch_k3": of(kl.k3(sampler_BT, prox_BT)),
        "logp_diff": of(jnp.abs(log_BT)),
        "prob_diff": of(jnp.abs(p_BT - q_BT)),
        "prob_error": of(bounded_exp(jnp.abs(log_BT))),
        "chi2_token": of(jnp.expm1(2 * bounded_log(log_BT))),
        "chi2_sequence": metrics.of(jnp.expm1(2 * bounded_log(sequence_BT)), last(mask_BT, segment_BT)),
        "moment_prob": metrics.moments(p_BT, q_BT, mask_BT),
        "moment_log": of(log_BT),
    }


def weights(ratio_BT, weight_BT, kept_BT, mask_BT, segment_BT, J: int) -> dict[str, Metric]:
    """Importance weights before and after bounding, and the fraction of tokens and sequences that they drop."""
    learns_BT = kept_BT & (weight_BT != 0)
    left_BJ = total(jnp.where(mask_BT & learns_BT, 1.0, 0.0), segment_BT, J)
    return {
        "importance_weight": metrics.of(ratio_BT, mask_BT, edges=RATIO_EDGES),
        "moment_weight": metrics.of(weight_BT, mask_BT & kept_BT),
        "moment_weight2": metrics.of(jnp.square(weight_BT), mask_BT & kept_BT),
        "bounded_fraction": metrics.of(weight_BT != ratio_BT, mask_BT),
        "dropped_fraction": metrics.of(~learns_BT, mask_BT),
        "dropped_sequences": metrics.of(to_tokens(left_BJ, segment_BT) == 0, last(mask_BT, segment_BT)),
    }


def effective(adv_BT, weight_BT, mask_BT, segment_BT, J: int) -> Metric:
    """Fraction of sequences with a learnt token whose advantage and weight are both nonzero."""
    moves_BJ = total(jnp.where(mask_BT & (adv_BT != 0) & (weight_BT != 0), 1.0, 0.0), segment_BT, J)
    return metrics.of(to_tokens(moves_BJ, segment_BT) > 0, last(mask_BT, segment_BT))


def movement(ratio_BT, gap_BT, cut_BT, adv_BT, entropy_BT, mask_BT) -> dict[str, Metric]:
    """Ratio, entropy, advantage and clipping; cut_BT = where the surrogate cuts the gradient, or None."""
    where = lambda rule_BT: mask_BT & rule_BT
    report = {
        "ratio": metrics.of(ratio_BT, mask_BT),
        "ppo_kl": metrics.of(-gap_BT, mask_BT),
        "entropy": metrics.of(entropy_BT, mask_BT, edges=ENTROPY_EDGES),
        "entropy_positive": metrics.of(entropy_BT, where(adv_BT > 0)),
        "entropy_negative": metrics.of(entropy_BT, where(adv_BT < 0)),
        "advantage": metrics.of(jnp.abs(adv_BT), mask_BT),
    }
    if cut_BT is not None:
        report |= {
            "clip_fraction": metrics.of(cut_BT, mask_BT),
            "clip_high_fraction": metrics.of(cut_BT & (adv_BT > 0), mask_BT),
            "clip_low_fraction": metrics.of(cut_BT & (adv_BT < 0), mask_BT),
        }
    return report


def finalize_metrics(report: dict[str, Metric | Moments]) -> dict:
    """Host values for the log, as `metrics.to_dict`, plus metrics derived from several sums.

    ess: (sum w)^2 / (n sum w^2). prob_pearson: correlation of the trainer's and the sampler's probabilities.
    perplexity_ratio: exp of the mean log (trainer / sampler), clipped to +-20, because a server may report any
    log-probability. explained_variance: 1 - E (R - V)^2 / var R.
    """
    out = metrics.to_dict({name: m for name, m in report.items() if not name.startswith("moment_")})
    plain = {name: m for name, m in report.items() if isinstance(m, Metric)}
    mean = {name: float(m.sum) / float(m.count) for name, m in plain.items() if float(m.count)}
    if "ratio" in mean:
        out["ratio_min"] = float(plain["ratio"].min)
    if mean.get("moment_weight2"):
        out["ess"] = mean["moment_weight"] ** 2 / mean["moment_weight2"]
    if isinstance(prob := report.get("moment_prob"), Moments):
        if _varies(prob.xx, prob.x, prob.count) and _varies(prob.yy, prob.y, prob.count):
            out["prob_pearson"] = float(prob.xy) / math.sqrt(float(prob.xx) * float(prob.yy))
    if "moment_log" in mean:
        out["perplexity_ratio"] = math.exp(min(max(mean["moment_log"], -BOUND), BOUND))
    if isinstance(returns := report.get("moment_return"), Moments) and _varies(returns.xx, returns.x, returns.count):
        out["explained_variance"] = 1 - float(plain["value_error"].sum) / float(returns.xx)
    if "entropy" in mean and plain["entropy"].edges:
        out |= {f"entropy_p{share}": _quantile(plain["entropy"], share / 100) for share in (10, 90)}
    return out


def _varies(squares, mean, count) -> bool:
    """Whether a sum of squares about the mean is more than the rounding of equal fp32 numbers."""
    return float(squares) > float(count) * (2.0**-22 * float(mean)) ** 2


def _quantile(m: Metric, share: float) -> float:
    """Quantile of a histogram, by linear interpolation within its bin."""
    counts, edges = np.asarray(m.bins, float), np.asarray(m.edges)
    ends = np.concatenate([[0.0], np.cumsum(counts)])
    return float(np.interp(share * ends[-1], ends, edges))
