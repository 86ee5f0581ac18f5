"""Objectives: frozen dataclasses with two pure functions, `prepare` and `loss`.

`prepare(batch, scores)` runs on the whole batch (any leading axes) and computes what depends on all of it: advantages,
corrections, masks, and `weight_BT` with the global denominator folded in. `loss(out, batch)` is a plain sum over one
microbatch, so microbatches, devices and processes add up exactly. `scores` is `models.score` of the batch at the
current weights, or None if `needs_scores` is False.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import jax.numpy as jnp

from . import metrics
from .batch import Batch
from .checks import validate
from .distill import Distill as Distill  # an objective like those below
from .options import PolicyOptions, PreferenceOptions
from .policy import Policy
from .preference import BCO, KTO, Preference, RewardModel
from .process_reward import ProcessReward as ProcessReward
from .surrogates import description


@dataclass(frozen=True)
class SFT:
    """Negative log-likelihood of the learnt tokens, mean over all tokens of the batch (weighted by `weight_BT`)."""

    needs_scores = False

    def __str__(self):
        return "SFT: minimise -sum_t w_t log pi(y_t | y_<t) / sum_t w_t"

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Folds 1 / (sum of weights) into the weights; they stay 0 in a batch without learnt tokens.

        A batch that was not prepared gets the sum in place of the mean.
        """
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
class PerToken:
    """A function as a loss: minimise sum_t w_t f(log pi, batch)_t over the learnt tokens; `token_losses` has some.

    Attributes:
      function: f(logp_BT, batch) -> loss_BT, of a microbatch; log-probabilities are 0 off the mask. Gradients flow
        through logp_BT. `batch.logp_BT` are the sampler's, `batch.target[name]` the samples' arrays of that name.
      reduce: "mean" divides by sum_t w_t over the whole batch; "sum" divides by nothing, so that losses and gradients
        of several batches add up. w is `weight_BT`, the weight of the token's sample.
    """

    function: Callable
    reduce: Literal["mean", "sum"] = "mean"

    needs_scores = False

    def __post_init__(self):
        validate(
            self,
            [
                ("function", callable(self.function), "f(logp_BT, batch) -> loss_BT"),
                ("reduce", self.reduce in ("mean", "sum"), "mean or sum"),
            ],
        )

    def __str__(self):
        share = " / sum_t w_t" if self.reduce == "mean" else ""
        return f"PerToken: minimise sum_t w_t f_t{share}\n  f = {description(self.function)}"

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Sets the weights to 0 off the mask, and for the mean divides them by their sum."""
        if self.reduce == "mean":
            return SFT().prepare(batch)
        return batch.replace(weight_BT=jnp.where(batch.mask_BT, batch.weight_BT, 0))

    def of_tokens(self, out, batch: Batch):
        """The function's value at each token, [B, T], 0 off the mask.

        Raises:
          ValueError: the function returns another shape.
        """
        loss_BT = self.function(jnp.where(batch.mask_BT, out.logp_BT, 0), batch)
        if jnp.shape(loss_BT) != batch.mask_BT.shape:
            raise ValueError(
                f"PerToken: function must return a loss per token, {batch.mask_BT.shape}, got {jnp.shape(loss_BT)}"
            )
        return jnp.where(batch.mask_BT, loss_BT, 0)

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics `token_loss` and `entropy`); gradients flow into `out.logp_BT`.

        Raises:
          ValueError: as `of_tokens`.
        """
        loss_BT = self.of_tokens(out, batch)
        report = {
            "token_loss": metrics.of(loss_BT, batch.mask_BT),
            "entropy": metrics.of(out.entropy_BT, batch.mask_BT),
        }
        return jnp.sum(loss_BT * batch.weight_BT), report


# -- policies ------------------------------------------------------------------------------------
#
# Papers describe fresh samples; each preset adds the weight w = proximal / behaviour. proximal="behaviour" disables it.


def _preset(name: str, changes: PolicyOptions, *, note: str = "", **defaults) -> Policy:
    """`Policy` with the preset's defaults, overridden by `changes`; a mapping overrides single fields of a part.

    Raises:
      TypeError: there is no such option.
      ValueError: a part is neither a mapping nor of its class.
    """
    policy = Policy(name=name, note=note)
    for changed in (defaults, changes):
        parts = {key: _part(getattr(policy, key, None), value, f"{name}: {key}") for key, value in changed.items()}
        policy = _replaced(policy, parts, name)
    return policy


def _part(part: Any, value: Any, where: str) -> Any:
    if not dataclasses.is_dataclass(part) or isinstance(value, type(part)):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where} must be a mapping of its options or of type {type(part).__name__}, got {value!r:.80}"
        )
    return _replaced(part, value, where)


def _replaced(options: Any, values: Mapping[str, Any], where: str) -> Any:
    known = [field.name for field in dataclasses.fields(options)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise TypeError(f"{where}: there is no option {key}" + (f"; did you mean {near[0]}?" if near else ""))
    return dataclasses.replace(options, **values)


def REINFORCE(**changes: Unpack[PolicyOptions]) -> Policy:
    """Raw rewards as advantages, no ratio (Williams 1992); mean over sequences of the sum over tokens."""
    plain = dict(mean="none", std="none")
    return _preset("REINFORCE", changes, advantage=plain, surrogate="score", denominator="sequence_sum")


def ReinforcePlusPlus(**changes: Unpack[PolicyOptions]) -> Policy:
    """Per-token returns, whitened over the batch, with PPO's clip (REINFORCE++, arXiv:2501.03262).

    For REINFORCE++-baseline, `advantage={"mean": "group"}` subtracts the group's mean before whitening.
    """
    returns = dict(credit="return", mean="none", std="none", whiten="token")
    note = 'no KL in the reward; for the paper\'s, kl={"coef": 0.001, "estimator": "k1", "place": "reward"}'
    return _preset("ReinforcePlusPlus", changes, note=note, advantage=returns, clip_high=0.2)


def ReMax(**changes: Unpack[PolicyOptions]) -> Policy:
    """REINFORCE with the reward of greedy decoding as baseline (arXiv:2310.10505): one more completion per prompt."""
    greedy = dict(mean="greedy", std="none")
    return _preset("ReMax", changes, advantage=greedy, surrogate="score", denominator="sequence_sum")


def RLOO(**changes: Unpack[PolicyOptions]) -> Policy:
    """REINFORCE with the mean of the group's other rollouts as baseline (arXiv:2402.14740)."""
    others = dict(std="none", leave_one_out=True)
    return _preset("RLOO", changes, advantage=others, surrogate="score", denominator="sequence_sum")


def OPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """REINFORCE with the group's length-weighted mean, the minimum-variance baseline (arXiv:2505.23585)."""
    weighted = dict(std="none", length_weighted=True)
    return _preset("OPO", changes, advantage=weighted, surrogate="score", denominator="sequence_sum")


def GPG(**changes: Unpack[PolicyOptions]) -> Policy:
    """A log pi with the group's mean as baseline (arXiv:2504.02546)."""
    note = "no rescaling for groups with equal rewards"
    return _preset("GPG", changes, note=note, advantage=dict(std="none"), surrogate="score")


def PPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """Clipped ratio with a critic's GAE advantages (arXiv:1707.06347), as for language models (arXiv:2203.02155)."""
    critic = dict(credit="gae", mean="none", std="none", lam=0.95, whiten="token")
    note = "the mean is over the batch's tokens; no entropy bonus"
    return _preset("PPO", changes, note=note, advantage=critic, clip_high=0.2)


def GRPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """Rewards standardised within the group (arXiv:2402.03300), with today's usual changes.

    Asymmetric clipping (clip-higher) and the mean over all tokens of the batch as in DAPO; no KL.
    """
    note = "the paper has clip_high 0.2, denominator sequence and KL coef 0.04"
    return _preset("GRPO", changes, note=note)


def DrGRPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """GRPO without its biases: no division by the deviation, a constant instead of lengths (arXiv:2503.20783).

    The constant, `denominator_tokens`, is the maximum completion length; it only scales the loss.
    """
    return _preset(
        "DrGRPO", changes, advantage=dict(std="none"), clip_high=0.2, denominator="constant", denominator_tokens=1024
    )


def DAPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """Clip-higher, token mean, dynamic sampling (arXiv:2503.14476).

    Its soft overlong penalty depends on the maximum completion length: set `shaping={"overlong_tokens": ...,
    "overlong_buffer": ...}`, 20480 and 4096 in the paper.
    """
    note = "the mean is over the batch's tokens, as in the authors' code; the formula has denominator prompt"
    shaping = dict(dynamic_sampling=True)
    return _preset("DAPO", changes, note=note, shaping=shaping, clip_low=0.2, clip_high=0.28, denominator="token")


def LitePPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """Mean of the group, standard deviation of the batch, token mean (arXiv:2508.08221)."""
    return _preset("LitePPO", changes, advantage=dict(std="batch"), clip_high=0.2)


def GSPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """One ratio per sequence (arXiv:2507.18071); ratio="sequence_token" is GSPO-token."""
    return _preset("GSPO", changes, ratio="sequence", clip_low=3e-4, clip_high=4e-4, denominator="sequence")


def LUSPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """GSPO with sequences weighted by their length (arXiv:2602.05261)."""
    return _preset("LUSPO", changes, ratio="sequence", clip_low=3e-4, clip_high=4e-4, denominator="sequence_sum")


def GMPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """Geometric mean of a sequence's individually clipped ratios (arXiv:2507.20673)."""
    return _preset("GMPO", changes, surrogate="geometric", clip_low=0.4, clip_high=0.4, denominator="sequence")


def CISPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """Clipped importance weights on A log pi; no token loses its gradient (MiniMax-M1, arXiv:2506.13585).

    r is at most 1 + clip_high = 5, without a lower bound; other systems take the 5 itself as their option.
    """
    note = "the mean is over the batch's tokens; the formula has denominator prompt"
    return _preset("CISPO", changes, note=note, surrogate="cispo", clip_low=1.0, clip_high=4.0)


def SAPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """A soft gate instead of the clip, narrower for negative advantages (arXiv:2511.20347)."""
    return _preset("SAPO", changes, surrogate="sapo", denominator="sequence")


def M2PO(**changes: Unpack[PolicyOptions]) -> Policy:
    """r A, masking the batch's tokens of largest squared log ratio (arXiv:2510.01161)."""
    note = "tokens are masked by w, before the update and over the batch, independent of microbatches"
    moment = dict(second_moment=0.04, cap=math.inf)
    return _preset("M2PO", changes, note=note, correction=moment, surrogate="ratio")


def VESPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """A log pi, smoothly weighted by the whole sequence's ratio (arXiv:2602.10693)."""
    note = "advantages and token mean as in GRPO here"
    behaviour = dict(proximal="behaviour")
    return _preset("VESPO", changes, note=note, correction=behaviour, ratio="product", surrogate="vespo")


def ClipCov(**changes: Unpack[PolicyOptions]) -> Policy:
    """PPO's clip, with the gradient of a few high-covariance tokens cut (arXiv:2505.22617)."""
    return _preset("ClipCov", changes, surrogate="clip_cov", clip_high=0.2)


def KLCov(**changes: Unpack[PolicyOptions]) -> Policy:
    """No clip; a KL penalty on the few tokens of highest covariance (arXiv:2505.22617)."""
    return _preset("KLCov", changes, surrogate="kl_cov", cov_fraction=2e-3)


def DPPO(**changes: Unpack[PolicyOptions]) -> Policy:
    """Masks tokens whose probability, rather than ratio, has moved too far (arXiv:2602.04879).

    surrogate="dppo_kl" measures that by the binary KL divergence instead of the total variation.
    """
    note = "divergence by the sampled token; the squared log ratio is prime-rl's"
    behaviour = dict(proximal="behaviour")
    return _preset("DPPO", changes, note=note, correction=behaviour, surrogate="dppo")


POLICIES = {
    preset.__name__: preset
    for preset in (
        REINFORCE, ReinforcePlusPlus, ReMax, RLOO, OPO, GPG, PPO, GRPO, DrGRPO, DAPO, LitePPO, GSPO, LUSPO, GMPO,
        CISPO, SAPO, M2PO, VESPO, ClipCov, KLCov, DPPO,
    )
}  # fmt: skip


# -- preferences ---------------------------------------------------------------------------------


def _pairwise(name: str, changes: PreferenceOptions, *, note: str = "", **defaults) -> Preference:
    """`Preference` with the preset's defaults, overridden by `changes`."""
    return _replaced(Preference(), {"name": name, "note": note, **defaults, **changes}, name)


def DPO(**changes: Unpack[PreferenceOptions]) -> Preference:
    """Logistic loss on the difference of a pair's log-ratios (arXiv:2305.18290). label_smoothing makes it conservative
    DPO, score "mean" normalises lengths, sft_coef keeps the chosen completion likely."""
    return _pairwise("DPO", changes)


def IPO(**changes: Unpack[PreferenceOptions]) -> Preference:
    """Regresses the difference of a pair's log-ratios to 1 / (2 beta) (arXiv:2310.12036)."""
    note = 's is a mean over tokens, as in TRL; the formula has score "sum"'
    note = note if changes.get("score", "mean") == "mean" else ""
    return _pairwise("IPO", changes, note=note, link="square", score="mean")


def SimPO(**changes: Unpack[PreferenceOptions]) -> Preference:
    """Logistic loss on mean log-probabilities with a margin, no reference (arXiv:2405.14734)."""
    return _pairwise("SimPO", changes, score="mean", reference=False, beta=2.0, gamma=1.0)


def CPO(**changes: Unpack[PreferenceOptions]) -> Preference:
    """DPO with a uniform reference, plus the chosen completion's negative log-likelihood (arXiv:2401.08417)."""
    note = "the likelihood term is a mean over tokens; the formula has the sum"
    return _pairwise("CPO", changes, note=note, reference=False, sft_coef=1.0)


def ORPO(**changes: Unpack[PreferenceOptions]) -> Preference:
    """SFT on the chosen completion plus a loss on the odds ratio of the pair, no reference (arXiv:2403.07691)."""
    return _pairwise("ORPO", changes, score="odds", reference=False, beta=1.0, coef=0.1, sft_coef=1.0)


PREFERENCES = {preset.__name__: preset for preset in (DPO, IPO, SimPO, CPO, ORPO, KTO, BCO, RewardModel)}
