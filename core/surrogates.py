"""Policy-gradient surrogates, to be maximised: functions of a token's ratio, log-probability and advantage.

Each takes (spec, now) and returns (gain_BT, cut_BT): cut_BT marks tokens whose gradient is cut, None if the surrogate
never does. At ratio 1 the gradient of each is A grad logp, averaged over the sequence if the ratio is per sequence.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from . import clipping, kl
from .clipping import bounded_exp


class Now(NamedTuple):
    """Per-token inputs of a surrogate for one microbatch; log-probabilities are 0 off the mask.

    Attributes:
      logp_BT: log-probability under the policy; gradients flow into it, and through it into gap_BT and ratio_BT.
      gap_BT: log (policy / proximal) of each token.
      ratio_BT: policy / proximal at the objective's level (`Policy.ratio`).
      adv_BT: advantage.
      mask_BT: the learnt tokens.
      sampler_BT, index_BT: log-probability under the sampling policy, and index within the sequence.
      mean: x_BT -> its mean over the learnt tokens of each sequence, at each of its tokens.
    """

    logp_BT: Any
    gap_BT: Any
    ratio_BT: Any
    adv_BT: Any
    mask_BT: Any
    sampler_BT: Any
    index_BT: Any
    mean: Callable


Gain = Callable[[Any, Now], tuple[Any, Any]]  # f(spec, now) -> (gain_BT, cut_BT)
if TYPE_CHECKING:
    Choice = str | Gain
else:
    Choice = str  # what reads options at run time, from the command line or a file, reads names


def score(spec, now: Now):
    """A log pi (REINFORCE, Williams 1992), without the ratio."""
    return now.adv_BT * now.logp_BT, None


def ratio(spec, now: Now):
    """r A: importance sampling without clipping."""
    return now.ratio_BT * now.adv_BT, None


def clip(spec, now: Now):
    """min(r A, clip(r) A) (PPO, arXiv:1707.06347), with separate bounds (DAPO, arXiv:2503.14476).

    At a bound the gradient is that of r A, so that with a bound of 1 fresh samples, whose r is 1, still teach.
    `ratio_cap` bounds r in the first term, which matters for A < 0, where large ratios are not clipped (and for A > 0
    only if it is below 1 + clip_high). `dual_clip` bounds the gain from below for A < 0 (arXiv:1912.09729).
    """
    ratio_BT, adv_BT = now.ratio_BT, now.adv_BT
    free_BT = clipping.clip(ratio_BT, 0, spec.ratio_cap) if spec.ratio_cap else ratio_BT
    clipped_BT = clipping.clip(ratio_BT, 1 - spec.clip_low, 1 + spec.clip_high)
    gain_BT = jnp.minimum(free_BT * adv_BT, clipped_BT * adv_BT)
    if spec.dual_clip:
        floor_BT = spec.dual_clip * adv_BT
        gain_BT = jnp.where((adv_BT < 0) & (gain_BT < floor_BT), floor_BT, gain_BT)
    return gain_BT, gain_BT != ratio_BT * adv_BT


def cispo(spec, now: Now):
    """stop(clip(r)) A log pi (MiniMax-M1, arXiv:2506.13585): bounds the weight, cuts no token's gradient."""
    weight_BT = clipping.clip(jax.lax.stop_gradient(now.ratio_BT), 1 - spec.clip_low, 1 + spec.clip_high)
    return weight_BT * now.adv_BT * now.logp_BT, None


def sapo(spec, now: Now):
    """4 / tau sigmoid(tau (r - 1)) A (SAPO, arXiv:2511.20347): fades out, faster where tau is larger."""
    tau_BT = jnp.where(now.adv_BT > 0, spec.tau_pos, spec.tau_neg)
    return 4 / tau_BT * jax.nn.sigmoid(tau_BT * (now.ratio_BT - 1)) * now.adv_BT, None


def geometric(spec, now: Now):
    """A times the geometric mean of a sequence's clipped ratios (GMPO, arXiv:2507.20673).

    Log ratios are clipped to at most clip_high if A >= 0, to at least -clip_low if A < 0.
    """
    clipped_BT = clipping.clip(now.gap_BT, -spec.clip_low, spec.clip_high)
    bound = lambda f: f(now.gap_BT, clipped_BT)
    bounded_BT = jnp.where(now.adv_BT >= 0, bound(jnp.minimum), bound(jnp.maximum))
    return bounded_exp(now.mean(bounded_BT)) * now.adv_BT, bounded_BT != now.gap_BT


def vespo(spec, now: Now):
    """stop(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W the sequence's ratio (VESPO, arXiv:2602.10693).

    phi is 1 at W = 1 and goes to 0 at both ends; k and lambda depend on the sign of A.
    """
    (k_pos, lam_pos), (k_neg, lam_neg) = spec.vespo_pos, spec.vespo_neg
    k_BT, lam_BT = (jnp.where(now.adv_BT >= 0, *pair) for pair in ((k_pos, k_neg), (lam_pos, lam_neg)))
    ratio_BT = jax.lax.stop_gradient(now.ratio_BT)
    return jnp.power(ratio_BT, k_BT) * jnp.exp(lam_BT * (1 - ratio_BT)) * now.adv_BT * now.logp_BT, None


def clip_cov(spec, now: Now):
    """PPO's clip, cutting the gradient of a few high-covariance tokens to slow entropy collapse (Clip-Cov,
    arXiv:2505.22617).

    Draws cov_fraction of the learnt tokens, at least one, from the unclipped tokens whose covariance
    (log pi - mean)(A - mean) lies between cov_low and cov_high; their gain is 0. Uses the current policy and draws in
    each microbatch separately.
    """
    gain_BT, clipped_BT = clip(spec, now)
    cov_BT = covariance(now)
    among_BT = now.mask_BT & ~clipped_BT & (cov_BT > spec.cov_low) & (cov_BT < spec.cov_high)
    chosen_BT = among_BT & _largest(jnp.where(among_BT, draws(now), -jnp.inf), now.mask_BT, spec.cov_fraction)
    return jnp.where(chosen_BT, 0, gain_BT), clipped_BT | chosen_BT


def kl_cov(spec, now: Now):
    """r A, minus cov_coef |log r| at the few tokens of largest covariance (KL-Cov, arXiv:2505.22617).

    These are cov_fraction of the learnt tokens, at least one, in each microbatch.
    """
    cov_BT = jnp.where(now.mask_BT, covariance(now), -jnp.inf)
    chosen_BT = now.mask_BT & _largest(cov_BT, now.mask_BT, spec.cov_fraction)
    distance_BT = jnp.sign(jax.lax.stop_gradient(now.gap_BT)) * now.gap_BT  # |.| with slope 0 at 0
    return now.ratio_BT * now.adv_BT - jnp.where(chosen_BT, spec.cov_coef * distance_BT, 0), None


def dppo(spec, now: Now):
    """r A - tv_coef log(r)^2, without the first term where pi - proximal is too large (DPPO, arXiv:2602.04879).

    Too large: above tv_high if A > 0, below -tv_low if A < 0. Probability differences are a lower bound of the total
    variation, of which ratios of rare tokens say little.
    """
    pi_BT = jax.lax.stop_gradient(jnp.exp(now.logp_BT))
    moved_BT = pi_BT * -jnp.expm1(jax.lax.stop_gradient(-now.gap_BT))
    return _within(spec, now, moved_BT > spec.tv_high, moved_BT < -spec.tv_low)


def dppo_kl(spec, now: Now):
    """As `dppo`, by KL(proximal || pi) as far as the sampled token shows it (`kl.binary`).

    Too large: above binary_kl_high if A > 0 and pi has risen, above binary_kl_low if A < 0 and pi has fallen.
    """
    pi_BT, gap_BT = map(jax.lax.stop_gradient, (now.logp_BT, now.gap_BT))
    kl_BT = kl.binary(pi_BT - gap_BT, pi_BT)
    risen_BT, fallen_BT = (gap_BT > 0) & (kl_BT > spec.binary_kl_high), (gap_BT < 0) & (kl_BT > spec.binary_kl_low)
    return _within(spec, now, risen_BT, fallen_BT)


def _within(spec, now: Now, risen_BT, fallen_BT):
    """r A - tv_coef log(r)^2, without the first term where a probability has moved too far to the side of A."""
    far_BT = jnp.where(now.adv_BT > 0, risen_BT, (now.adv_BT < 0) & fallen_BT)
    gain_BT = jnp.where(far_BT, 0, now.ratio_BT * now.adv_BT)
    return gain_BT - spec.tv_coef * jnp.square(now.gap_BT), far_BT


def covariance(now: Now):
    """(log pi - mean)(A - mean) of each token, with means over the microbatch's learnt tokens; no gradient."""
    count = jnp.maximum(jnp.sum(jnp.where(now.mask_BT, 1.0, 0.0)), 1)
    centred = lambda x_BT: x_BT - jnp.sum(jnp.where(now.mask_BT, x_BT, 0)) / count
    return centred(jax.lax.stop_gradient(now.logp_BT)) * centred(now.adv_BT)


def draws(now: Now):
    """A uniform number in [0, 1) per token, seeded by its sampling log-probability and index, whatever the packing."""
    bits_BT = jax.lax.bitcast_convert_type(now.sampler_BT.astype(jnp.float32), jnp.uint32)
    one = lambda bits, index: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), bits), index))
    return jax.vmap(jax.vmap(one))(bits_BT, now.index_BT)


def _largest(x_BT, mask_BT, fraction: float):
    """Mask of the largest entries: `fraction` of the number of masked tokens, rounded down, at least one."""
    order_A = jnp.argsort(-x_BT.reshape(-1))
    count = jnp.maximum(jnp.floor(fraction * jnp.sum(jnp.where(mask_BT, 1.0, 0.0))), 1)
    rank_A = jnp.zeros(x_BT.size, order_A.dtype).at[order_A].set(jnp.arange(x_BT.size))
    return (rank_A < count).reshape(x_BT.shape)


class Surrogate(NamedTuple):
    """A surrogate by name: all that an objective knows of it.

    Attributes:
      gain: f(spec, now) -> (gain_BT, cut_BT).
      formula: formatted with the objective's fields and `prox`, the name of the proximal policy.
      uses: the fields of the objective that it reads, of those that not all surrogates do.
    """

    gain: Gain
    formula: str
    uses: tuple[str, ...] = ()


CLIP = "min(r A, clip(r, 1 - {clip_low:g}, 1 + {clip_high:g}) A)"
SURROGATES = {
    "score": Surrogate(score, "A log pi"),
    "ratio": Surrogate(ratio, "r A", ("ratio",)),
    "clip": Surrogate(clip, CLIP, ("ratio", "clip_low", "clip_high", "dual_clip", "ratio_cap")),
    "cispo": Surrogate(cispo, "stop(clip(r, 1 - {clip_low:g}, 1 + {clip_high:g})) A log pi", ("clip_low", "clip_high")),
    "sapo": Surrogate(
        sapo,
        "4 / tau sigmoid(tau (r - 1)) A, tau = {tau_pos:g} if A > 0 else {tau_neg:g}",
        ("tau_pos", "tau_neg"),
    ),
    "geometric": Surrogate(
        geometric,
        "A exp(mean over the sequence of log r, bounded on A's side of [-{clip_low:g}, {clip_high:g}])",
        ("clip_low", "clip_high"),
    ),
    "vespo": Surrogate(
        vespo,
        "stop(r^k exp(lambda (1 - r))) A log pi, (k, lambda) = {vespo_pos} if A >= 0 else {vespo_neg}",
        ("ratio", "vespo_pos", "vespo_neg"),
    ),
    "clip_cov": Surrogate(
        clip_cov,
        CLIP + ", but 0 for {cov_fraction:g} of the tokens, drawn where {cov_low:g} < cov(log pi, A) < {cov_high:g}",
        ("clip_low", "clip_high", "cov_fraction", "cov_low", "cov_high"),
    ),
    "kl_cov": Surrogate(
        kl_cov,
        "r A, minus {cov_coef:g} |log r| for the {cov_fraction:g} of the tokens with the largest cov(log pi, A)",
        ("cov_fraction", "cov_coef"),
    ),
    "dppo": Surrogate(
        dppo,
        "r A, but 0 where pi - {prox} is above {tv_high:g} for A > 0 or below -{tv_low:g} for A < 0; minus "
        "{tv_coef:g} log(r)^2",
        ("tv_low", "tv_high", "tv_coef"),
    ),
    "dppo_kl": Surrogate(
        dppo_kl,
        "r A, but 0 where the binary KL({prox} || pi) is above {binary_kl_high:g} for A > 0 < log r or "
        "{binary_kl_low:g} for A < 0 > log r; minus {tv_coef:g} log(r)^2",
        ("tv_coef", "binary_kl_low", "binary_kl_high"),
    ),
}
USED_BY_SOME = tuple(sorted({field for surrogate in SURROGATES.values() for field in surrogate.uses}))


def of(spec) -> Surrogate:
    """The surrogate of an objective: the one of that name, or a function, which may read any field."""
    if isinstance(spec.surrogate, str):
        return SURROGATES[spec.surrogate]
    formula = description(spec.surrogate).replace("{", "{{").replace("}", "}}")
    return Surrogate(spec.surrogate, formula, USED_BY_SOME)


def description(function: Callable) -> str:
    """The first line of a function's docstring, else its name."""
    inner = getattr(function, "func", function)  # of a functools.partial
    return (inner.__doc__ or "").strip().partition("\n")[0] or inner.__name__
