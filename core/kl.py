"""The divergence KL(policy || reference), estimated from log-probabilities of tokens that were sampled.

J. Schulman, "Approximating KL divergence" (2020). With r = reference / policy, log r = ref - logp:
k1 = -log r (unbiased, high variance), k2 = (log r)^2 / 2 (biased, low variance), k3 = r - 1 - log r (unbiased,
never negative). Their gradients as a loss term, on policy: k1's is 0 in the mean, noise that holds nothing back; k2's
is that of the reverse KL(policy || reference); k3's is that of the forward KL(reference || policy).
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from .checks import must
from .shapes import shaped


@dataclass(frozen=True)
class KL:
    """How far the policy may move from a reference.

    Attributes:
      coef: 0 = no reference is needed.
      estimator: "k1", "k2", "k3", or "k3_k2": the value of k3 with the gradient of k2.
      place: "loss" adds coef x estimate to the loss; "reward" takes it from the reward of each sampled token before
        advantages (arXiv:1909.08593), estimated between proximal policy and reference, without a gradient.
      ratio: of k1 and k3 as a loss: times policy / behaviour, which stays differentiable, so that both have in the mean
        the gradient of the reverse KL, off policy too (DeepSeek-V3.2, arXiv:2512.02556).
      target: nats a token; the coefficient moves towards what keeps the divergence there (arXiv:1909.08593); 0 = fixed.
      horizon: batches in which a coefficient at its fastest grows by a fifth.
    """

    coef: float = 0.0
    estimator: Literal["k1", "k2", "k3", "k3_k2"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    ratio: bool = False
    target: float = 0.0
    horizon: int = 10

    def __post_init__(self):
        rules = (
            ("coef", self.coef >= 0, "at least 0"),
            (
                "coef",
                self.coef > 0 or (self.estimator, self.place, self.ratio) == ("k3", "loss", False),
                "above 0 where an estimator, a place or the ratio is chosen",
            ),
            ("estimator", self.estimator in ESTIMATORS, f"one of {', '.join(ESTIMATORS)}"),
            ("place", self.place in ("loss", "reward"), "loss or reward"),
            ("ratio", not (self.ratio and self.place == "reward"), 'False with place "reward"'),
            ("ratio", not self.ratio or self.estimator in ("k1", "k3"), "False unless the estimator is k1 or k3"),
            ("target", self.target == 0 or (self.target > 0 and self.coef > 0), "0, or above 0 with a coef above 0"),
            ("horizon", self.horizon >= 1, "at least 1"),
        )
        must(self, rules)

    def adapt(self, coef: float, kl: float) -> float:
        """The next batch's coefficient after one of divergence `kl` (nats a token)."""
        if not self.target:
            return coef
        return coef * (1 + min(max(kl / self.target - 1, -0.2), 0.2) / self.horizon)


@shaped
def k1(logp_BT, ref_BT):
    """logp - ref, nats a token; gradients flow into both arguments."""
    return logp_BT - ref_BT


@shaped
def k2(logp_BT, ref_BT):
    """(logp - ref)^2 / 2."""
    return jnp.square(logp_BT - ref_BT) / 2


@shaped
def k3(logp_BT, ref_BT):
    """exp(ref - logp) - 1 - (ref - logp); expm1 keeps it exact near 0."""
    return jnp.expm1(ref_BT - logp_BT) - (ref_BT - logp_BT)


@shaped
def k3_k2(logp_BT, ref_BT):
    """The value of k3, the gradient of k2."""
    gradient_BT = k2(logp_BT, ref_BT)
    return gradient_BT + jax.lax.stop_gradient(k3(logp_BT, ref_BT) - gradient_BT)


ESTIMATORS = {f.__name__: f for f in (k1, k2, k3, k3_k2)}
