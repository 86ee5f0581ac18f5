"""What a token gains as the policy moves: functions of its ratio, log-probability and advantage, to be maximised.

Each takes (spec, now) and returns (gain_BT, cut_BT): `cut` where the gradient is cut, None where none ever is. At ratio
1 the gradient of each is A grad logp, a mean over the sequence where the ratio is one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Now(NamedTuple):
    """What a surrogate sees of a microbatch; off the mask log-probabilities are 0.

    Attributes:
      logp_BT: of the policy; gradients flow into it, and so into the next two.
      gap_BT: log (policy / proximal) of each token.
      ratio_BT: policy / proximal, at the level that the objective names.
      adv_BT: advantage.
      mean: x_BT -> its mean over the learnt tokens of each sequence, at each of its tokens.
    """

    logp_BT: Any
    gap_BT: Any
    ratio_BT: Any
    adv_BT: Any
    mean: Callable


def score(spec, now: Now):
    """A log pi (REINFORCE, Williams 1992): the ratio is not used."""
    return now.adv_BT * now.logp_BT, None


def clip(spec, now: Now):
    """min(r A, clip(r) A) (PPO, arXiv:1707.06347), the bounds apart (DAPO, arXiv:2503.14476).

    `ratio_cap` bounds r where it is not clipped, for A < 0; `dual_clip` bounds the gain from below there
    (arXiv:1912.09729).
    """
    ratio_BT, adv_BT = now.ratio_BT, now.adv_BT
    free_BT = jnp.minimum(ratio_BT, spec.ratio_cap) if spec.ratio_cap else ratio_BT
    clipped_BT = jnp.clip(ratio_BT, 1 - spec.clip_low, 1 + spec.clip_high)
    gain_BT = jnp.minimum(free_BT * adv_BT, clipped_BT * adv_BT)
    if spec.dual_clip:
        gain_BT = jnp.where(adv_BT < 0, jnp.maximum(gain_BT, spec.dual_clip * adv_BT), gain_BT)
    return gain_BT, gain_BT != ratio_BT * adv_BT


def cispo(spec, now: Now):
    """stop(clip(r)) A log pi (MiniMax-M1, arXiv:2506.13585): the weight is bounded, no token's gradient is cut."""
    weight_BT = jnp.clip(jax.lax.stop_gradient(now.ratio_BT), 1 - spec.clip_low, 1 + spec.clip_high)
    return weight_BT * now.adv_BT * now.logp_BT, None


def sapo(spec, now: Now):
    """4 / tau sigmoid(tau (r - 1)) A (SAPO, arXiv:2511.20347): fades out, faster where tau is larger."""
    tau_BT = jnp.where(now.adv_BT > 0, spec.tau_pos, spec.tau_neg)
    return 4 / tau_BT * jax.nn.sigmoid(tau_BT * (now.ratio_BT - 1)) * now.adv_BT, None


def geometric(spec, now: Now):
    """A times the geometric mean of a sequence's ratios, each clipped (GMPO, arXiv:2507.20673).

    Log ratios are clipped to [-clip_low, clip_high], on the side of the advantage.
    """
    clipped_BT = jnp.clip(now.gap_BT, -spec.clip_low, spec.clip_high)
    bound = lambda f: f(now.gap_BT, clipped_BT)
    bounded_BT = jnp.where(now.adv_BT >= 0, bound(jnp.minimum), bound(jnp.maximum))
    return jnp.exp(now.mean(bounded_BT)) * now.adv_BT, bounded_BT != now.gap_BT


SURROGATES = {f.__name__: f for f in (score, clip, cispo, sapo, geometric)}
FORMULAS = {  # with the fields of the objective
    "score": "A log pi",
    "clip": "min(r A, clip(r, 1 - {clip_low:g}, 1 + {clip_high:g}) A)",
    "cispo": "stop(clip(r, 1 - {clip_low:g}, 1 + {clip_high:g})) A log pi",
    "sapo": "4 / tau sigmoid(tau (r - 1)) A, tau = {tau_pos:g} if A > 0 else {tau_neg:g}",
    "geometric": "A exp(mean over the sequence of log r, bounded on A's side of [-{clip_low:g}, {clip_high:g}])",
}
