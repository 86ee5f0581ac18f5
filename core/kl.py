"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

J. Schulman, "Approximating KL divergence" (2020). With r = reference / policy, log r = ref - logp:
k1 = -log r (unbiased, high variance), k2 = (log r)^2 / 2 (biased, low variance), k3 = r - 1 - log r (unbiased
within +-20 nats, to which log r is clipped; never negative). Their expected gradients as a loss term, on policy: k1 has
0, only noise; k2 has that of the reverse KL(policy || reference); k3 has that of the forward KL(reference || policy).
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from .checks import validate
from .clipping import bounded_log
from .shapes import shaped

CERTAIN = -1e-6  # nats


@dataclass(frozen=True)
class KL:
    """Options of the KL penalty that keeps the policy close to a reference.

    Attributes:
      coef: KL coefficient (beta, kl_loss_coef elsewhere); 0 = off, no reference model (ref_model) is needed.
      estimator: "k1", "k2", "k3", or "k3_k2": the value of k3 with the gradient of k2.
      place: "loss" adds coef x estimate to the loss; "reward" subtracts it from the reward of each sampled token before
        advantages are computed (arXiv:1909.08593), between proximal policy and reference, without a gradient.
      over: for k2 in the loss: of each "token", or of the log ratio of the whole "sequence", of which each learnt token
        has an equal part (regression to the optimal advantage, A*-PO, arXiv:2505.20686).
      ratio: for k1 and k3 in the loss: multiplies by policy / behaviour, with its gradient, so that the expected
        gradient is that of the reverse KL, off policy too (DeepSeek-V3.2, arXiv:2512.02556).
      target: divergence, in nats per token, towards which the coefficient adapts (arXiv:1909.08593); 0 = fixed.
      horizon: number of batches in which the coefficient can change by about a fifth.
    """

    coef: float = 0.0
    estimator: Literal["k1", "k2", "k3", "k3_k2"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    over: Literal["token", "sequence"] = "token"
    ratio: bool = False
    target: float = 0.0
    horizon: int = 10

    def __post_init__(self):
        rules = (
            ("coef", self.coef >= 0, "at least 0"),
            (
                "coef",
                self.coef > 0 or (self.estimator, self.place, self.ratio, self.over) == ("k3", "loss", False, "token"),
                "above 0 if estimator, place, ratio or over is set",
            ),
            ("over", self.over in ("token", "sequence"), "token or sequence"),
            (
                "over",
                self.over == "token" or (self.estimator == "k2" and self.place == "loss"),
                'token unless the estimator is k2 and the place "loss"',
            ),
            ("estimator", self.estimator in ESTIMATORS, f"one of {', '.join(ESTIMATORS)}"),
            ("place", self.place in ("loss", "reward"), "loss or reward"),
            ("ratio", not (self.ratio and self.place == "reward"), 'False with place "reward"'),
            ("ratio", not self.ratio or self.estimator in ("k1", "k3"), "False unless the estimator is k1 or k3"),
            ("target", self.target == 0 or (self.target > 0 and self.coef > 0), "0, or above 0 with a coef above 0"),
            ("horizon", self.horizon >= 1, "at least 1"),
            ("horizon", self.horizon == KL.horizon or self.target > 0, f"{KL.horizon} without a target to adapt to"),
        )
        validate(self, rules)

    def adapt(self, coef: float, kl: float) -> float:
        """The coefficient for the next batch, given this batch's divergence `kl` (nats per token)."""
        if not self.target:
            return coef
        return coef * (1 + min(max(kl / self.target - 1, -0.2), 0.2) / self.horizon)


@shaped
def k1(logp_BT, ref_BT):
    """logp - ref, nats per token; gradients flow into both arguments."""
    return logp_BT - ref_BT


@shaped
def k2(logp_BT, ref_BT):
    """(logp - ref)^2 / 2; on tokens that the policy samples, its expected gradient is that of KL(policy, reference)."""
    return jnp.square(logp_BT - ref_BT) / 2


@shaped
def k3(logp_BT, ref_BT):
    """exp(log r) - 1 - log r; log r = ref - logp is clipped to +-20, without gradient beyond, and expm1 keeps it exact
    near 0."""
    log_BT = bounded_log(ref_BT - logp_BT)
    return jnp.expm1(log_BT) - log_BT


@shaped
def k3_k2(logp_BT, ref_BT):
    """The value of k3, the gradient of k2."""
    gradient_BT = k2(logp_BT, ref_BT)
    return gradient_BT + jax.lax.stop_gradient(k3(logp_BT, ref_BT) - gradient_BT)


@shaped
def binary(p_BT, q_BT):
    """KL(p || q), in nats, of two distributions that know only whether a token is drawn, from its log-probabilities.

    A lower bound of the divergence over the whole vocabulary. Probabilities count as at most 1 - 1e-6: closer to 1
    the difference to it is rounding error.
    """
    p_BT, q_BT = (jnp.minimum(x_BT, CERTAIN) for x_BT in (p_BT, q_BT))
    others_BT = jnp.log(-jnp.expm1(p_BT)) - jnp.log(-jnp.expm1(q_BT))
    return jnp.exp(p_BT) * (p_BT - q_BT) - jnp.expm1(p_BT) * others_BT


ESTIMATORS = {f.__name__: f for f in (k1, k2, k3, k3_k2)}
