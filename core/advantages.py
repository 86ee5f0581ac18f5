"""Advantage estimators: relative to a group or batch, leave-one-out, greedy baseline, returns and GAE.

Groups are given by explicit ids, so they may have any size and order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from . import shaping as shapings
from .batch import Batch
from .checks import one_of, validate
from .returns import gae, of_turns, returns
from .segments import by_id, numbered, segment_index, to_tokens, total
from .shapes import shaped
from .shaping import Shaping

PER_SAMPLE = "greedy", "moving", "optimal_value"  # baselines that come with each sample, as the component of that name


@dataclass(frozen=True)
class Advantage:
    """Options of the advantage estimator.

    Attributes:
      credit: "rollout" assigns the rollout's advantage to each of its tokens; "return" the discounted rewards from the
        token on, minus the rollout's undiscounted baseline (REINFORCE++, arXiv:2501.03262); "gae" generalised advantage
        estimation with a critic (arXiv:1506.02438).
      mean: the baseline: the mean reward of the prompt's "group" or of the "batch", or "none". With "greedy" the
        component "greedy", the reward of a greedy completion (ReMax, arXiv:2310.10505); with "moving" the component
        "moving", the moving average of the seat's rewards before (RAE, arXiv:2506.24119); with "optimal_value" the
        component "optimal_value", of the reference policy's rewards (`optimal_value`, A*-PO, arXiv:2505.20686). With
        "optimal_token", for credit "return", the mean of the group's returns from the same token on, weighted by
        `by_energy` (OTB, arXiv:2602.07078).
      std: what advantages are divided by: the rewards' standard deviation in the "group" or the "batch", or "none"
        (TRL's scale_rewards); or their "mean" in the group, for rewards of at least 0: the advantage is 0 where it is
        not above 0, and prompts that are rarely solved count the more (MaxRL, arXiv:2602.02710).
      leave_one_out: excludes the rollout itself from its baseline (RLOO, arXiv:2402.14740).
      length_weighted: weights the rewards in the baseline by the rollouts' learnt tokens (OPO, arXiv:2505.23585).
      ddof: delta degrees of freedom of the standard deviation: it divides by n - ddof.
      eps: added to the standard deviation, in units of reward.
      components: reward components whose advantages are computed separately and then summed (GDPO, arXiv:2601.05242);
        NaN in any of them makes the rollout unscorable. Empty = one advantage, of the total reward.
      component_weights: weights of these advantages in the sum; empty = all 1.
      whiten: normalises advantages to mean 0 and standard deviation 1 over all learnt tokens, or all rollouts, of the
        batch.
      gamma: discount per sampled token, of "return" and "gae".
      lam: lambda of "gae": 0 = one step ahead, 1 = the whole return.
      lam_alpha: replaces `lam` by 1 - 1 / (lam_alpha x sampled tokens of the sequence), at least 0: the longer, the
        nearer to 1 (VAPO, arXiv:2504.05118, which has 0.05); 0 = off.
      moving_decay: for mean "moving": average = moving_decay x average + (1 - moving_decay) x reward.
      value_temperature: of the rewards in an "optimal_value" (beta1 in A*-PO, which has 0.5).
      state_coef: coefficient of a second advantage, that of each turn among the group's turns of the same state, by
        their discounted rewards from then on (GiGPO, arXiv:2505.10978, which has 1; `by_state`); 0 = off. Needs
        `target["state"]`. Divided by their standard deviation with std "group".
      state_gamma: discount per turn of these rewards.
      teacher: coefficient of log (teacher / proximal), clipped to 20 nats, added to each token's advantage at the end:
        distillation by the reverse KL of sampled tokens. Needs `target["teacher"]`. For a teacher with another
        tokenizer (`teacher_rows`) the log ratio is that of the token's span; of tokens in none the mean of all others.
    """

    credit: Literal["rollout", "return", "gae"] = "rollout"
    mean: Literal["group", "batch", "none", "greedy", "moving", "optimal_value", "optimal_token"] = "group"
    std: Literal["group", "batch", "none", "mean"] = "group"
    leave_one_out: bool = False
    length_weighted: bool = False
    ddof: int = 1
    eps: float = 1e-6
    components: tuple[str, ...] = ()
    component_weights: tuple[float, ...] = ()
    whiten: Literal["none", "token", "rollout"] = "none"
    gamma: float = 1.0
    lam: float = 1.0
    lam_alpha: float = 0.0
    moving_decay: float = 0.95
    value_temperature: float = 0.5
    state_coef: float = 0.0
    state_gamma: float = 0.95
    teacher: float = 0.0

    def __post_init__(self):
        rollout, gae, means = self.credit == "rollout", self.credit == "gae", self.mean in ("group", "batch")
        fields = Advantage.__dataclass_fields__
        weighted = len(self.component_weights) in (0, len(self.components))
        rules = (
            ("credit", self.credit in ("rollout", "return", "gae"), "one of rollout, return, gae"),
            ("mean", self.mean in get_args(fields["mean"].type), f"one of {', '.join(get_args(fields['mean'].type))}"),
            ("mean", self.mean != "optimal_token" or self.credit == "return", 'another one unless credit is "return"'),
            ("std", self.std in ("group", "batch", "none", "mean"), "one of group, batch, none, mean"),
            ("std", self.std != "mean" or self.mean == "group", 'group, batch or none unless mean is "group"'),
            ("leave_one_out", self.std != "mean" or not self.leave_one_out, 'False with std "mean"'),
            ("length_weighted", self.std != "mean" or not self.length_weighted, 'False with std "mean"'),
            ("std", self.mean not in PER_SAMPLE[1:] or self.std == "none", f'none with mean "{self.mean}"'),
            ("std", self.mean != "greedy" or self.std != "batch", 'group or none with mean "greedy"'),
            ("std", not (self.mean == "batch" and self.std == "group"), 'batch or none with mean "batch"'),
            ("mean", not gae or self.mean == "none", 'none with credit "gae", whose baseline is the critic'),
            ("std", rollout or self.std == "none", 'none unless credit is "rollout"; whiten does it over tokens'),
            ("leave_one_out", means or not self.leave_one_out, "False without a mean"),
            ("length_weighted", means or not self.length_weighted, "False without a mean"),
            ("length_weighted", not (self.length_weighted and self.leave_one_out), "False with leave_one_out"),
            ("eps", self.eps >= 0, "at least 0"),
            ("components", rollout or not self.components, 'empty unless credit is "rollout"'),
            ("components", self.mean not in PER_SAMPLE or not self.components, f'empty with mean "{self.mean}"'),
            ("component_weights", weighted, f"one for each of {len(self.components)} components, or none"),
            ("whiten", self.whiten in ("none", "token", "rollout"), "one of none, token, rollout"),
            ("whiten", rollout or self.whiten != "rollout", 'token or none unless credit is "rollout"'),
            ("gamma", 0 <= self.gamma <= 1, "between 0 and 1"),
            ("gamma", self.gamma == 1 or not rollout, '1 with credit "rollout"'),
            ("lam", 0 <= self.lam <= 1, "between 0 and 1"),
            ("lam", self.lam == 1 or gae, '1 unless credit is "gae"'),
            ("lam_alpha", self.lam_alpha >= 0, "at least 0"),
            ("lam_alpha", self.lam_alpha == 0 or gae, '0 unless credit is "gae"'),
            ("moving_decay", 0 <= self.moving_decay < 1, "at least 0 and below 1"),
            ("moving_decay", self.mean == "moving" or self.moving_decay == fields["moving_decay"].default,
             'left out unless mean is "moving"'),
            ("value_temperature", self.value_temperature > 0, "above 0"),
            ("value_temperature",
             self.mean == "optimal_value" or self.value_temperature == fields["value_temperature"].default,
             'left out unless mean is "optimal_value"'),
            ("state_coef", self.state_coef >= 0, "at least 0"),
            ("state_coef", self.state_coef == 0 or (rollout and self.std in ("group", "none")),
             '0 unless credit is "rollout" and std group or none'),
            ("state_gamma", 0 <= self.state_gamma <= 1, "between 0 and 1"),
            ("state_gamma", self.state_coef or self.state_gamma == fields["state_gamma"].default,
             "left out without a state_coef"),
        )  # fmt: skip
        validate(self, rules)

    @property
    def by_reward(self) -> bool:
        """Whether groups of equal rewards have zero advantage and so teach nothing."""
        others = self.components or self.teacher or self.state_coef
        return self.credit == "rollout" and self.mean == "group" and not others

    @property
    def needs(self) -> tuple[str, ...]:
        """Reward components that the batch must have."""
        return self.components + (self.mean,) * (self.mean in PER_SAMPLE)


def scorable(spec: Advantage, batch: Batch, reward_BJ):
    """The rewards, set to NaN where a component in `spec.needs` is NaN.

    Raises:
      ValueError: the batch lacks a component.
    """
    for name in spec.needs:
        if name not in batch.component:
            raise ValueError(f"advantages: the batch needs the component {name}, got {sorted(batch.component)}")
        reward_BJ = jnp.where(jnp.isnan(batch.component[name]), jnp.nan, reward_BJ)
    return reward_BJ


def of(
    spec: Advantage, batch: Batch, reward_BT, reward_BJ, sampled_BT, mask_BT, *, shaping: Shaping, energy_BT=None
):  # fmt: skip
    """Computes (adv_BT, return_BT) of a whole batch; return_BT is the critic's target, advantage + value, or None.

    Args:
      reward_BT, reward_BJ: shaped rewards, reward_BJ as returned by `scorable`; NaN = unscorable.
      sampled_BT: the sampled tokens, which are the steps of each episode.
      mask_BT: the learnt tokens among them, over which "token" whitens.
      shaping: the shaping of the rewards, applied to baselines of PER_SAMPLE as well.
      energy_BT: for mean "optimal_token": 1 - 2 pi + sum of pi^2 of each token, as of `squares`.

    Raises:
      ValueError: credit is "gae" and the batch has no values of a critic; a state_coef, and no array "state".
    """
    if spec.state_coef and "state" not in batch.target:
        raise ValueError(
            f'advantages: state_coef {spec.state_coef:g} needs target["state"], got the arrays {sorted(batch.target)}; '
            "take a workflow of several turns"
        )
    if spec.credit == "gae" and batch.value_BT is None:
        raise ValueError('advantages: credit "gae" needs value_BT of a critic, got None')
    segment_BT, J = batch.segment_BT, reward_BJ.shape[-1]
    length_BJ = total(jnp.where(mask_BT, 1.0, 0.0), segment_BT, J) if spec.length_weighted else None
    compare = lambda reward_BJ, **how: group(reward_BJ, batch.group_BJ, batch.rollout_BJ, **how)
    how = dict(
        mean=spec.mean if spec.mean in ("group", "batch") else "none", leave_one_out=spec.leave_one_out,
        length_BJ=length_BJ, eps=spec.eps, ddof=spec.ddof,
    )  # fmt: skip
    base_BJ = 0.0
    if spec.mean in PER_SAMPLE:
        base_BJ = shapings.bounded(shaping, batch.component[spec.mean])
    if spec.components:
        weights = spec.component_weights or (1.0,) * len(spec.components)
        part = lambda name: jnp.where(jnp.isnan(reward_BJ), jnp.nan, batch.component[name])
        adv_BJ = sum(
            w * compare(part(name), std=spec.std, **how) for w, name in zip(weights, spec.components, strict=True)
        )
    else:
        adv_BJ = compare(reward_BJ - base_BJ, std=spec.std, **how)
    if spec.whiten == "rollout":
        adv_BJ = compare(
            jnp.where(jnp.isnan(reward_BJ), jnp.nan, adv_BJ), mean="batch", std="batch", eps=spec.eps, ddof=spec.ddof
        )
    adv_BT, return_BT = to_tokens(adv_BJ, segment_BT), None
    steps_BT = batch.mask_BT & to_tokens(~jnp.isnan(reward_BJ), segment_BT)  # of what counts in baselines
    group_BT = to_tokens(batch.group_BJ, segment_BT)
    if spec.state_coef:
        how = dict(gamma=spec.state_gamma, std=spec.std, eps=spec.eps, ddof=spec.ddof)
        adv_BT += spec.state_coef * by_state(reward_BT, batch.target["state"], steps_BT, segment_BT, group_BT, **how)
    if spec.credit == "gae":
        lam = spec.lam
        if spec.lam_alpha:
            length_BJ = total(jnp.where(sampled_BT, 1.0, 0.0), segment_BT, J)
            lam = to_tokens(jnp.maximum(1 - 1 / (spec.lam_alpha * jnp.maximum(length_BJ, 1)), 0), segment_BT)
        adv_BT = gae(reward_BT, batch.value_BT, sampled_BT, segment_BT, gamma=spec.gamma, lam=lam)
        return_BT = adv_BT + jnp.where(sampled_BT, batch.value_BT, 0)
    elif spec.mean == "optimal_token":
        after_BT = returns(reward_BT, steps_BT, segment_BT, gamma=spec.gamma)
        adv_BT = by_energy(after_BT, energy_BT, steps_BT, segment_BT, group_BT)
    elif spec.credit == "return":
        baseline_BJ = jnp.where(jnp.isnan(reward_BJ), 0, reward_BJ - adv_BJ)
        adv_BT = returns(reward_BT, sampled_BT, segment_BT, gamma=spec.gamma) - to_tokens(baseline_BJ, segment_BT)
    adv_BT = jnp.where(mask_BT, adv_BT, 0)
    if spec.whiten == "token":
        count = jnp.sum(jnp.where(mask_BT, 1.0, 0.0))
        mean = jnp.sum(adv_BT) / jnp.maximum(count, 1)
        variance = jnp.sum(jnp.where(mask_BT, jnp.square(adv_BT - mean), 0)) / jnp.maximum(count - spec.ddof, 1)
        high, low = (f(jnp.where(mask_BT, adv_BT, sign * jnp.inf)) for f, sign in ((jnp.max, -1), (jnp.min, 1)))
        differs_BT = mask_BT & (high > low)  # otherwise rounding errors would be amplified
        adv_BT = jnp.where(differs_BT, (adv_BT - mean) / (jnp.sqrt(variance) + spec.eps), 0)
    return adv_BT, return_BT


def optimal_value(rewards: Sequence[float], temperature: float) -> float:
    """T log mean exp(R / T) of rewards R of the reference policy's completions: the value of the policy that is optimal
    at a KL penalty of T (A*-PO, arXiv:2505.20686). From their mean at large T to the largest at small T."""
    high = max(rewards)
    return high + temperature * math.log(sum(math.exp((x - high) / temperature) for x in rewards) / len(rewards))


def squares(logits_CV, target_C, beside):
    """Sum of the squared probabilities of all tokens, [C], for `models.score(per_chunk=)`."""
    lse = lambda x_CV: jax.nn.logsumexp(x_CV, -1)
    return jnp.exp(lse(2 * logits_CV) - 2 * lse(logits_CV))


@shaped
def by_energy(return_BT, energy_BT, sampled_BT, segment_BT, group_BT):
    """Returns less the optimal token baseline (OTB, arXiv:2602.07078), [B, T], 0 off the sampled tokens.

    A_t = G_t - sum_i G_t W_t / sum_i W_t over the group's sequences i that have a t-th sampled token, with W_t the sum
    of the energies of the sampled tokens up to t: the squared norm of grad log pi in the logits, in place of that in
    the weights. Where all G_t are equal, or only one sequence is left, A_t is 0.

    Args:
      energy_BT: 1 - 2 pi + sum of pi^2 of each token.
      sampled_BT: the sampled tokens.
      group_BT: id of the group of each token.
    """
    flat = lambda x_BT: x_BT.reshape(-1)
    energy_BT = jnp.where(sampled_BT, jnp.maximum(energy_BT, 0), 0)  # rounding makes those near 0 negative
    weight_A, count_A = (flat(_so_far(x_BT, segment_BT)) for x_BT in (energy_BT, jnp.where(sampled_BT, 1.0, 0.0)))
    sampled_A, return_A = flat(sampled_BT), flat(return_BT)
    id_A = numbered(flat(group_BT), count_A, sampled_A)
    over = lambda x_A: by_id(jnp.where(sampled_A, x_A, 0), id_A, id_A.size)
    all_A = over(weight_A)
    baseline_A = over(weight_A * return_A) / jnp.where(all_A > 0, all_A, 1)
    differs_A = sampled_A & _differs(return_A, id_A)
    return jnp.where(differs_A, return_A - baseline_A, 0).reshape(return_BT.shape)


def _so_far(x_BT, segment_BT):
    """Sum of x over the tokens of the segment up to each one."""
    first_BT = segment_index(segment_BT) == 0
    join = lambda left, right: (left[0] | right[0], jnp.where(right[0], 0, left[1]) + right[1])
    return jax.lax.associative_scan(join, (first_BT, x_BT), axis=x_BT.ndim - 1)[1]


def _differs(x_A, id_A):
    """Whether not all x of the same id are equal."""
    high_A, low_A = (f(x_A, id_A, id_A.size)[id_A] for f in (jax.ops.segment_max, jax.ops.segment_min))
    return high_A > low_A


@shaped
def by_state(reward_BT, state_BT, sampled_BT, segment_BT, group_BT, *, gamma: float, std, eps: float, ddof: int):
    """Advantage of each turn among those of the same group and state (GiGPO, arXiv:2505.10978), at its tokens.

    A turn is a run of sampled tokens of one state. Its return is the sum of its rewards and, discounted by gamma for
    each turn, of those after it in the row. Turns of no state, or of one that no other turn of the group has, get 0.

    Args:
      state_BT: number of the state in which the turn began; 0 = none.
      sampled_BT: the sampled tokens of scorable rows.
      group_BT: id of the group of each token.
      std, eps, ddof: as of `group`.
    """
    no, A = jnp.zeros((*segment_BT.shape[:-1], 1), bool), segment_BT.size
    goes_on = lambda x_BT: jnp.concatenate([no, x_BT[..., 1:] == x_BT[..., :-1]], -1)
    before_BT = jnp.concatenate([no, sampled_BT[..., :-1]], -1)
    first_BT = sampled_BT & ~(before_BT & goes_on(segment_BT) & goes_on(state_BT))
    return_BT = of_turns(jnp.where(sampled_BT, reward_BT, 0), first_BT, segment_BT, gamma=gamma)
    begins_BT = first_BT & (state_BT != 0)
    id_A = numbered(group_BT.reshape(-1), state_BT.reshape(-1))
    own_A = jnp.where(begins_BT.reshape(-1), jnp.arange(A), -1)
    adv_BT = group(
        return_BT, id_A.reshape(return_BT.shape), own_A.reshape(return_BT.shape), std=std, eps=eps, ddof=ddof
    )
    t_BT = jnp.broadcast_to(jnp.arange(segment_BT.shape[-1]), segment_BT.shape)
    place_BT = jax.lax.cummax(jnp.where(first_BT, t_BT, 0), axis=segment_BT.ndim - 1)
    return jnp.where(sampled_BT, jnp.take_along_axis(adv_BT, place_BT, -1), 0)


@shaped
def group(
    reward_BJ,
    group_BJ,
    rollout_BJ,
    *,
    mean: Literal["group", "batch", "none"] = "group",
    std: Literal["group", "batch", "none", "mean"] = "group",
    leave_one_out: bool = False,
    length_BJ=None,
    eps: float = 1e-6,
    ddof: int = 1,
):
    """(reward - baseline) / (std + eps) per segment (GRPO, arXiv:2402.03300; without std Dr. GRPO, arXiv:2503.20783).

    A rollout counts once however many rows it spans; its rows must agree in reward. NaN rewards are unscorable: they
    enter no mean or standard deviation and get advantage 0. A group with a single scorable rollout, or whose rewards
    are all equal, has advantage 0.

    Args:
      reward_BJ: reward of each segment's rollout; NaN = unscorable.
      group_BJ, rollout_BJ: ids >= 0, -1 in empty slots; less than B * J.
      mean: what the baseline is averaged over; "none" = no baseline.
      std: what the standard deviation is taken over; "none" = no division; "mean" = divided by the baseline instead, 0
        where that is not above 0 (MaxRL, arXiv:2602.02710).
      leave_one_out: excludes the rollout itself from its baseline (RLOO, arXiv:2402.14740).
      length_BJ: learnt tokens of each segment; weights the rewards in the baseline if given (OPO, arXiv:2505.23585).
      eps: added to the standard deviation, in units of reward.
      ddof: delta degrees of freedom of the standard deviation.

    Returns:
      adv_BJ, f32 or wider, 0 in empty and unscorable slots. Not meant to be differentiated.
    """
    one_of("group: mean", mean, Literal["group", "batch", "none"])
    one_of("group: std", std, Literal["group", "batch", "none", "mean"])
    shape, size = reward_BJ.shape, reward_BJ.size
    reward_A, group_A, rollout_A = (jnp.asarray(x).reshape(-1) for x in (reward_BJ, group_BJ, rollout_BJ))
    scorable_A = (rollout_A >= 0) & ~jnp.isnan(reward_A)
    value_A = jnp.where(scorable_A, reward_A, 0)
    # Each row of a rollout of k rows counts 1/k.
    rows_A = by_id(scorable_A.astype(value_A.dtype), rollout_A, size)
    share_A = jnp.where(scorable_A, 1 / jnp.maximum(rows_A, 1), 0)

    def over(kind, x_A):
        """Sum over the rollout's group, or over the batch, counting each rollout once."""
        if kind == "group":
            return by_id(x_A * share_A, group_A, size)
        return jnp.broadcast_to(jnp.sum(x_A * share_A), x_A.shape)

    ones_A = jnp.ones_like(value_A)
    baseline_A = jnp.zeros_like(value_A)
    if mean != "none":
        n_A, total_A = over(mean, ones_A), over(mean, value_A)
        if length_BJ is not None:
            tokens_A = jnp.where(scorable_A, length_BJ.reshape(-1), 0) / jnp.where(share_A > 0, share_A, 1)
            baseline_A = over(mean, tokens_A * value_A) / jnp.maximum(over(mean, tokens_A), 1)
        elif leave_one_out:
            own_A = by_id(value_A * share_A, rollout_A, size)  # the rollout's reward, the mean of its rows
            baseline_A = (total_A - own_A) / jnp.maximum(n_A - 1, 1)
        else:
            baseline_A = total_A / jnp.maximum(n_A, 1)
    adv_A = value_A - baseline_A
    if std == "mean":
        adv_A = jnp.where(baseline_A > 0, adv_A / jnp.where(baseline_A > 0, baseline_A, 1), 0)
    elif std != "none":
        n_A = over(std, ones_A)
        centred_A = value_A - over(std, value_A) / jnp.maximum(n_A, 1)
        variance_A = over(std, jnp.square(centred_A)) / jnp.maximum(n_A - ddof, 1)
        adv_A = adv_A / (jnp.sqrt(variance_A) + eps)
    if mean != "none" or std != "none":
        # Exact zeros where all rewards are equal: a tiny deviation would amplify rounding errors.
        among = mean if mean != "none" else std
        id_A = jnp.where(scorable_A, group_A if among == "group" else 0, size)
        high_A = jax.ops.segment_max(value_A, id_A, size + 1)[id_A]
        low_A = jax.ops.segment_min(value_A, id_A, size + 1)[id_A]
        scorable_A &= high_A > low_A
    return jnp.where(scorable_A, adv_A, 0).reshape(shape)
