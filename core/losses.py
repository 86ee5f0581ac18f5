"""Objectives: a frozen specification with two pure functions.

`prepare(batch, scores)` sees the whole batch (any leading axes) and does what needs it: advantages, corrections, masks,
and `weight_BT` with the global denominator folded in. `loss(out, batch)` is a plain sum over one microbatch, so that
microbatches, devices and processes add up exactly. `scores` is `models.score` of the batch at the current weights,
or None where `needs_scores` is False.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from . import metrics
from .batch import Batch
from .policy import Policy


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


# -- policies ------------------------------------------------------------------------------------
#
# Each has w = proximal / behaviour beside what its paper says of fresh samples; proximal="behaviour" leaves it out.


def _preset(name: str, changes: dict, *, note: str = "", **defaults) -> Policy:
    """`Policy` with other defaults, which keywords change."""
    return Policy(**{"name": name, "note": note, **defaults, **changes})


def REINFORCE(**changes) -> Policy:
    """Rewards as they are, no ratio (Williams 1992); mean over sequences of the sum over tokens."""
    return _preset("REINFORCE", changes, mean="none", std="none", surrogate="score", denominator="sequence_sum")


def RLOO(**changes) -> Policy:
    """REINFORCE against the mean of the other rollouts of the group (arXiv:2402.14740)."""
    return _preset("RLOO", changes, std="none", leave_one_out=True, surrogate="score", denominator="sequence_sum")


def OPO(**changes) -> Policy:
    """REINFORCE against the length-weighted mean of the group, the baseline of least variance (arXiv:2505.23585)."""
    return _preset("OPO", changes, std="none", length_weighted=True, surrogate="score", denominator="sequence_sum")


def GPG(**changes) -> Policy:
    """A log pi against the mean of the group (arXiv:2504.02546)."""
    note = "no weight that makes up for groups of equal rewards"
    return _preset("GPG", changes, note=note, std="none", surrogate="score")


def GRPO(**changes) -> Policy:
    """Rewards standardised in the group (arXiv:2402.03300), with what its followers have made of it.

    Bounds apart (clip-higher) and the mean over all tokens of the batch as in DAPO, no KL.
    """
    note = "clip_high 0.2, denominator sequence and kl_coef 0.04 there"
    return _preset("GRPO", changes, note=note)


def DrGRPO(**changes) -> Policy:
    """GRPO without its biases: no deviation, a constant in the place of lengths (arXiv:2503.20783).

    The constant, `denominator_tokens`, is the longest completion; it scales the loss alone.
    """
    return _preset("DrGRPO", changes, std="none", clip_high=0.2, denominator="constant", denominator_tokens=1024)


def DAPO(**changes) -> Policy:
    """Clip-higher and the token mean (arXiv:2503.14476); dynamic sampling and length penalty are not part of a loss."""
    note = "the mean is over the batch's tokens, as in its authors' code; the formula has denominator prompt"
    return _preset("DAPO", changes, note=note, clip_low=0.2, clip_high=0.28, denominator="token")


def LitePPO(**changes) -> Policy:
    """Mean of the group, deviation of the batch, token mean (arXiv:2508.08221)."""
    return _preset("LitePPO", changes, std="batch", clip_high=0.2)


def GSPO(**changes) -> Policy:
    """One ratio a sequence (arXiv:2507.18071); ratio="sequence_token" is its token form."""
    return _preset("GSPO", changes, ratio="sequence", clip_low=3e-4, clip_high=4e-4, denominator="sequence")


def LUSPO(**changes) -> Policy:
    """GSPO whose sequences weigh what they are long (arXiv:2602.05261)."""
    return _preset("LUSPO", changes, ratio="sequence", clip_low=3e-4, clip_high=4e-4, denominator="sequence_sum")


def GMPO(**changes) -> Policy:
    """The geometric mean of a sequence's ratios, each clipped by itself (arXiv:2507.20673)."""
    return _preset("GMPO", changes, surrogate="geometric", clip_low=0.4, clip_high=0.4, denominator="sequence")


def CISPO(**changes) -> Policy:
    """Bounded weights on A log pi; no token's gradient is cut (MiniMax-M1, arXiv:2506.13585).

    r is at most 1 + clip_high = 5 and has no bound below; other systems give 5 itself.
    """
    note = "the mean is over the batch's tokens; the formula has denominator prompt"
    return _preset("CISPO", changes, note=note, surrogate="cispo", clip_low=1.0, clip_high=4.0)


def SAPO(**changes) -> Policy:
    """A soft gate in the place of the clip, narrower for negative advantages (arXiv:2511.20347)."""
    return _preset("SAPO", changes, surrogate="sapo", denominator="sequence")


POLICIES = {
    preset.__name__: preset
    for preset in (REINFORCE, RLOO, OPO, GPG, GRPO, DrGRPO, DAPO, LitePPO, GSPO, LUSPO, GMPO, CISPO, SAPO)
}
