"""Advantage estimators: relative to a group or batch, leave-one-out, greedy baseline, returns and GAE.

Groups are given by explicit ids, so they may have any size and order.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from . import shaping as shapings
from .batch import Batch
from .checks import one_of, validate
from .returns import gae, returns
from .segments import by_id, to_tokens, total
from .shapes import shaped
from .shaping import Shaping


@dataclass(frozen=True)
class Advantage:
    """Options of the advantage estimator.

    Attributes:
      credit: "rollout" assigns the rollout's advantage to each of its tokens; "return" the discounted rewards from the
        token on, minus the rollout's undiscounted baseline (REINFORCE++, arXiv:2501.03262); "gae" generalised advantage
        estimation with a critic (arXiv:1506.02438).
      mean: the baseline: the mean reward of the prompt's "group" or of the "batch", "none", or with "greedy" the
        component "greedy", the reward of a greedy completion (ReMax, arXiv:2310.10505).
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
      teacher: coefficient of log (teacher / proximal), clipped to 20 nats, added to each token's advantage at the end:
        distillation by the reverse KL of sampled tokens. Needs `target["teacher"]`.
    """

    credit: Literal["rollout", "return", "gae"] = "rollout"
    mean: Literal["group", "batch", "none", "greedy"] = "group"
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
    teacher: float = 0.0

    def __post_init__(self):
        rollout, gae, means = self.credit == "rollout", self.credit == "gae", self.mean in ("group", "batch")
        weighted = len(self.component_weights) in (0, len(self.components))
        rules = (
            ("credit", self.credit in ("rollout", "return", "gae"), "one of rollout, return, gae"),
            ("mean", self.mean in ("group", "batch", "none", "greedy"), "one of group, batch, none, greedy"),
            ("std", self.std in ("group", "batch", "none", "mean"), "one of group, batch, none, mean"),
            ("std", self.std != "mean" or self.mean == "group", 'group, batch or none unless mean is "group"'),
            ("leave_one_out", self.std != "mean" or not self.leave_one_out, 'False with std "mean"'),
            ("length_weighted", self.std != "mean" or not self.length_weighted, 'False with std "mean"'),
            ("std", self.mean != "greedy" or self.std != "batch", 'group or none with mean "greedy"'),
            ("std", not (self.mean == "batch" and self.std == "group"), 'batch or none with mean "batch"'),
            ("mean", not gae or self.mean == "none", 'none with credit "gae", whose baseline is the critic'),
            ("std", rollout or self.std == "none", 'none unless credit is "rollout"; whiten does it over tokens'),
            ("leave_one_out", means or not self.leave_one_out, "False without a mean"),
            ("length_weighted", means or not self.length_weighted, "False without a mean"),
            ("length_weighted", not (self.length_weighted and self.leave_one_out), "False with leave_one_out"),
            ("eps", self.eps >= 0, "at least 0"),
            ("components", rollout or not self.components, 'empty unless credit is "rollout"'),
            ("components", self.mean != "greedy" or not self.components, 'empty with mean "greedy"'),
            ("component_weights", weighted, f"one for each of {len(self.components)} components, or none"),
            ("whiten", self.whiten in ("none", "token", "rollout"), "one of none, token, rollout"),
            ("whiten", rollout or self.whiten != "rollout", 'token or none unless credit is "rollout"'),
            ("gamma", 0 <= self.gamma <= 1, "between 0 and 1"),
            ("gamma", self.gamma == 1 or not rollout, '1 with credit "rollout"'),
            ("lam", 0 <= self.lam <= 1, "between 0 and 1"),
            ("lam", self.lam == 1 or gae, '1 unless credit is "gae"'),
            ("lam_alpha", self.lam_alpha >= 0, "at least 0"),
            ("lam_alpha", self.lam_alpha == 0 or gae, '0 unless credit is "gae"'),
        )
        validate(self, rules)

    @property
    def by_reward(self) -> bool:
        """Whether groups of equal rewards have zero advantage and so teach nothing."""
        return self.credit == "rollout" and self.mean == "group" and not self.components and not self.teacher

    @property
    def needs(self) -> tuple[str, ...]:
        """Reward components that the batch must have."""
        return self.components + ("greedy",) * (self.mean == "greedy")


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


def of(spec: Advantage, batch: Batch, reward_BT, reward_BJ, sampled_BT, mask_BT, *, shaping: Shaping):
    """Computes (adv_BT, return_BT) of a whole batch; return_BT is the critic's target, advantage + value, or None.

    Args:
      reward_BT, reward_BJ: shaped rewards, reward_BJ as returned by `scorable`; NaN = unscorable.
      sampled_BT: the sampled tokens, which are the steps of each episode.
      mask_BT: the learnt tokens among them, over which "token" whitens.
      shaping: the shaping of the rewards, applied to the greedy completion's as well.

    Raises:
      ValueError: credit is "gae" and the batch has no values of a critic.
    """
    if spec.credit == "gae" and batch.value_BT is None:
        raise ValueError('advantages: credit "gae" needs value_BT of a critic, got None')
    segment_BT, J = batch.segment_BT, reward_BJ.shape[-1]
    length_BJ = total(jnp.where(mask_BT, 1.0, 0.0), segment_BT, J) if spec.length_weighted else None
    compare = lambda reward_BJ, **how: group(reward_BJ, batch.group_BJ, batch.rollout_BJ, **how)
    how = dict(
        mean="none" if spec.mean == "greedy" else spec.mean, leave_one_out=spec.leave_one_out, length_BJ=length_BJ,
        eps=spec.eps, ddof=spec.ddof,
    )  # fmt: skip
    base_BJ = 0.0
    if spec.mean == "greedy":
        base_BJ = shapings.bounded(shaping, batch.component["greedy"])
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
    if spec.credit == "gae":
        lam = spec.lam
        if spec.lam_alpha:
            length_BJ = total(jnp.where(sampled_BT, 1.0, 0.0), segment_BT, J)
            lam = to_tokens(jnp.maximum(1 - 1 / (spec.lam_alpha * jnp.maximum(length_BJ, 1)), 0), segment_BT)
        adv_BT = gae(reward_BT, batch.value_BT, sampled_BT, segment_BT, gamma=spec.gamma, lam=lam)
        return_BT = adv_BT + jnp.where(sampled_BT, batch.value_BT, 0)
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
