"""What a token gains as the policy moves: functions of ratio, log-probability and advantage, to be maximised.

Each takes (spec, ratio_BT, logp_BT, adv_BT) and returns (gain_BT, cut_BT): `cut` where the gradient is cut, None where
none ever is. At ratio 1 the gradient of each is A grad logp.
"""

import jax
import jax.numpy as jnp

from .segments import to_tokens, total


def score(spec, ratio_BT, logp_BT, adv_BT):
    """A log pi (REINFORCE, Williams 1992): the ratio is not used."""
    return adv_BT * logp_BT, None


def clip(spec, ratio_BT, logp_BT, adv_BT):
    """min(r A, clip(r) A) (PPO, arXiv:1707.06347), the bounds apart (DAPO, arXiv:2503.14476).

    `ratio_cap` bounds r where it is not clipped, for A < 0; `dual_clip` bounds the gain from below there
    (arXiv:1912.09729).
    """
    free_BT = jnp.minimum(ratio_BT, spec.ratio_cap) if spec.ratio_cap else ratio_BT
    clipped_BT = jnp.clip(ratio_BT, 1 - spec.clip_low, 1 + spec.clip_high)
    gain_BT = jnp.minimum(free_BT * adv_BT, clipped_BT * adv_BT)
    if spec.dual_clip:
        gain_BT = jnp.where(adv_BT < 0, jnp.maximum(gain_BT, spec.dual_clip * adv_BT), gain_BT)
    return gain_BT, gain_BT != ratio_BT * adv_BT


def cispo(spec, ratio_BT, logp_BT, adv_BT):
    """stop(clip(r)) A log pi (MiniMax-M1, arXiv:2506.13585): the weight is bounded, no token's gradient is cut."""
    weight_BT = jnp.clip(jax.lax.stop_gradient(ratio_BT), 1 - spec.clip_low, 1 + spec.clip_high)
    return weight_BT * adv_BT * logp_BT, None


def sapo(spec, ratio_BT, logp_BT, adv_BT):
    """4 / tau sigmoid(tau (r - 1)) A (SAPO, arXiv:2511.20347): fades out, faster where tau is larger."""
    tau_BT = jnp.where(adv_BT > 0, spec.tau_pos, spec.tau_neg)
    return 4 / tau_BT * jax.nn.sigmoid(tau_BT * (ratio_BT - 1)) * adv_BT, None


SURROGATES = {"score": score, "clip": clip, "cispo": cispo, "sapo": sapo}


def sequence_mean(x_BT, mask_BT, segment_BT, J: int):
    """Mean of x over the learnt tokens of each sequence, at each of its tokens."""
    count_BJ = total(jnp.where(mask_BT, 1, 0).astype(x_BT.dtype), segment_BT, J)
    sum_BJ = total(jnp.where(mask_BT, x_BT, 0), segment_BT, J)
    return to_tokens(sum_BJ / jnp.maximum(count_BJ, 1), segment_BT)


def geometric(spec, gap_BT, adv_BT, mask_BT, segment_BT, J: int):
    """(gain, cut) of GMPO (arXiv:2507.20673): A times the geometric mean of a sequence's clipped ratios.

    Args:
      gap_BT: log ratios; they are clipped to [-clip_low, clip_high].
    """
    clipped_BT = jnp.clip(gap_BT, -spec.clip_low, spec.clip_high)
    bounded_BT = jnp.where(adv_BT >= 0, jnp.minimum(gap_BT, clipped_BT), jnp.maximum(gap_BT, clipped_BT))
    return jnp.exp(sequence_mean(bounded_BT, mask_BT, segment_BT, J)) * adv_BT, bounded_BT != gap_BT
