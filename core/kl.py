"""Estimators of KL(policy || reference) from log-probabilities of tokens that the policy sampled.

J. Schulman, "Approximating KL divergence" (2020). With r = reference / policy, log r = ref - logp:
k1 = -log r (unbiased, high variance), k2 = (log r)^2 / 2 (biased, low variance), k3 = r - 1 - log r (unbiased,
never negative). As a loss term, k2's gradient is that of the reverse KL on policy; k3's is that of the forward KL.
"""

import jax.numpy as jnp

from .shapes import shaped


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


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
