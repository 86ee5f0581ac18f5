"""Score centering (arXiv:2609.20807): each token's update less its mean under the sampler.

If sampler and trainer compute differently, that mean is not 0 even where all advantages are equal, and adds up over
batches. It is taken over the tokens that the sampler reported as its likeliest.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .shapes import shaped

IDS, LOGP = "sampler_ids", "sampler_logp"  # of arrays in `Batch.target`: i32 and f32 [B, T, K], nats
SURROGATES = "score", "clip", "cispo", "sapo"  # whose gain depends on the token's own ratio, and averages not to 0
LEAST = 1e-6  # probability of all tokens that the sampler did not report, at least


@shaped
def logp_of(logits_CV, target_C, ids_CK):
    """Log-probabilities of `ids_CK`, [C, K], for `models.score(per_chunk=, beside=)`; with gradients."""
    return jnp.take_along_axis(logits_CV, ids_CK, 1) - jax.nn.logsumexp(logits_CV, 1, keepdims=True)


def mass(sampler_BTK):
    """The probability that the sampler gave to the tokens that it reported, [B, T]."""
    return jnp.sum(jnp.exp(sampler_BTK), -1)


def expected(slope: Callable, logp_BTK, sampler_BTK):
    """sum over v of stop(q slope(p / q) - rho slope(1 / rho) p) log p, [B, T], v the tokens that the sampler reported.

    Its gradient is the mean of slope(p / q) grad log p under the sampler q, whose other tokens are taken to have
    probability rho p, rho = (1 - sum q) / (1 - sum p): as sum p grad log p = 0 over all tokens, those outside enter by
    those inside.

    Args:
      slope: [B, T, L] log ratios of policy and sampler -> derivative of the gain by the token's log-probability.
      logp_BTK, sampler_BTK: log-probabilities of the tokens under policy and sampler, over the whole vocabulary;
        gradients flow into logp_BTK alone.
    """
    fixed_BTK = jax.lax.stop_gradient(logp_BTK)
    p_BTK, q_BTK = jnp.exp(fixed_BTK), jnp.exp(sampler_BTK)
    rest = lambda x_BTK: jnp.log(jnp.maximum(1 - jnp.sum(x_BTK, -1, keepdims=True), LEAST))
    log_rho_BT1 = rest(q_BTK) - rest(p_BTK)
    others_BT1 = jnp.exp(log_rho_BT1) * slope(-log_rho_BT1)
    weight_BTK = q_BTK * slope(fixed_BTK - sampler_BTK) - others_BT1 * p_BTK
    return jnp.sum(jax.lax.stop_gradient(weight_BTK) * logp_BTK, -1)
