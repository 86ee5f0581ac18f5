"""Advantages: how good a rollout, or what followed a token, was beside what it is compared with.

Groups come with explicit ids: any sizes, in any order.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from . import shaping as shapings
from .batch import Batch
from .checks import must
from .returns import gae, returns
from .segments import by_id, to_tokens, total
from .shapes import shaped
from .shaping import Shaping


@dataclass(frozen=True)
class Advantage:
    """How rollouts and tokens are compared.

    Attributes:
      credit: "rollout" gives each token the rollout's advantage; "return" the discounted rewards from the token on,
        less the rollout's undiscounted baseline (REINFORCE++, arXiv:2501.03262); "gae" what a critic makes of them
        (arXiv:1506.02438).
      mean, std, leave_one_out, length_weighted, ddof, eps: how `group` compares rollouts. "greedy" takes the reward
        of the prompt's greedy completion for the baseline (ReMax, arXiv:2310.10505): the component "greedy".
      components: parts of the reward that are compared each by itself, in place of their sum (GDPO, arXiv:2601.05242);
        NaN = unscorable in any of them.
      component_weights: of their advantages in the sum; none = all 1.
      whiten: subtracts the mean and divides by the standard deviation of all learnt tokens, or of all rollouts, of the
        batch.
      gamma, lam: discount a sampled token, and the decay of "gae".
      teacher: coefficient of log (teacher / proximal) at each token, added at the end: distillation by the reverse KL
        of sampled tokens. Needs `target["teacher"]`.
    """

    credit: Literal["rollout", "return", "gae"] = "rollout"
    mean: Literal["group", "batch", "none", "greedy"] = "group"
    std: Literal["group", "batch", "none"] = "group"
    leave_one_out: bool = False
    length_weighted: bool = False
    ddof: int = 1
    eps: float = 1e-6
    components: tuple[str, ...] = ()
    component_weights: tuple[float, ...] = ()
    whiten: Literal["none", "token", "rollout"] = "none"
    gamma: float = 1.0
    lam: float = 1.0
    teacher: float = 0.0

    def __post_init__(self):
        rollout, gae, means = self.credit == "rollout", self.credit == "gae", self.mean in ("group", "batch")
        weighted = len(self.component_weights) in (0, len(self.components))
        rules = (
            ("credit", self.credit in ("rollout", "return", "gae"), "one of rollout, return, gae"),
            ("mean", self.mean in ("group", "batch", "none", "greedy"), "one of group, batch, none, greedy"),
            ("std", self.std in ("group", "batch", "none"), "one of group, batch, none"),
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
        )
        must(self, rules)

    @property
    def by_reward(self) -> bool:
        """In a group of equal rewards there is nothing to learn."""
        return self.credit == "rollout" and self.mean == "group" and not self.components and not self.teacher

    @property
    def needs(self) -> tuple[str, ...]:
        """Components of the reward that the batch has to bring."""
        return self.components + ("greedy",) * (self.mean == "greedy")


def scorable(spec: Advantage, batch: Batch, reward_BJ):
    """The rewards, NaN also where something they are compared by is.

    Raises:
      ValueError: the batch lacks components.
    """
    for name in spec.needs:
        if name not in batch.component:
            raise ValueError(f"advantages: the batch needs the component {name}, got {sorted(batch.component)}")
        reward_BJ = jnp.where(jnp.isnan(batch.component[name]), jnp.nan, reward_BJ)
    return reward_BJ


def of(spec: Advantage, batch: Batch, reward_BT, reward_BJ, sampled_BT, mask_BT, *, shaping: Shaping):
    """(adv_BT, return_BT) of a whole batch; return_BT is what a critic is to learn, advantage + value, or None.

    Args:
      reward_BT, reward_BJ: shaped, and as `scorable` leaves them; NaN = unscorable.
      sampled_BT: the steps of each episode.
      mask_BT: the learnt ones among them, over which "token" whitens.
      shaping: how the rewards were shaped, for a greedy completion's.

    Raises:
      ValueError: the batch lacks the values that a critic should have given.
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
        adv_BT = gae(reward_BT, batch.value_BT, sampled_BT, segment_BT, gamma=spec.gamma, lam=spec.lam)
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
        differs_BT = mask_BT & (high > low)  # else rounding would be scaled up
        adv_BT = jnp.where(differs_BT, (adv_BT - mean) / (jnp.sqrt(variance) + spec.eps), 0)
    return adv_BT, return_BT


@shaped
def group(
    reward_BJ,
    group_BJ,
    rollout_BJ,
    *,
    mean: Literal["group", "batch", "none"] = "group",
    std: Literal["group", "batch", "none"] = "group",
    leave_one_out: bool = False,
    length_BJ=None,
    eps: float = 1e-6,
    ddof: int = 1,
):
    """(reward - baseline) / (std + eps) a segment (GRPO, arXiv:2402.03300; without std Dr. GRPO, arXiv:2503.20783).

    A rollout counts once however many rows it spans: its rows must agree in reward. Rewards that are
    NaN are unscorable: outside every mean and standard deviation, advantage 0. A group with a single scorable rollout
    has advantage 0 (there is nothing to compare with), as has a group whose rewards are all equal.

    Args:
      reward_BJ: reward of each segment's rollout; NaN = unscorable.
      group_BJ, rollout_BJ: ids >= 0, -1 in empty slots; less than B * J.
      mean: over what the baseline is taken; "none" = 0.
      std: over what the deviation is taken; "none" = do not divide.
      leave_one_out: the baseline leaves the rollout itself out (RLOO, arXiv:2402.14740).
      length_BJ: learnt tokens of each segment, which the baseline then weighs rewards by (OPO, arXiv:2505.23585).
      eps: added to the deviation, in units of reward.
      ddof: delta degrees of freedom of the deviation.

    Returns:
      adv_BJ, f32 or wider, 0 in empty and unscorable slots. No gradient is meant to flow.
    """
    shape, size = reward_BJ.shape, reward_BJ.size
    reward_A, group_A, rollout_A = (jnp.asarray(x).reshape(-1) for x in (reward_BJ, group_BJ, rollout_BJ))
    scorable_A = (rollout_A >= 0) & ~jnp.isnan(reward_A)
    value_A = jnp.where(scorable_A, reward_A, 0)
    # A rollout of k rows counts 1/k a row.
    rows_A = by_id(scorable_A.astype(value_A.dtype), rollout_A, size)
    share_A = jnp.where(scorable_A, 1 / jnp.maximum(rows_A, 1), 0)

    def over(kind, x_A):
        """Sum over the rollout's group, or over the batch, of a quantity counted once a rollout."""
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
    if std != "none":
        n_A = over(std, ones_A)
        centred_A = value_A - over(std, value_A) / jnp.maximum(n_A, 1)
        variance_A = over(std, jnp.square(centred_A)) / jnp.maximum(n_A - ddof, 1)
        adv_A = adv_A / (jnp.sqrt(variance_A) + eps)
    if mean != "none" or std != "none":
        # Exact zeros where nothing distinguishes the rollouts: rounding must not be scaled up by a tiny deviation.
        among = mean if mean != "none" else std
        id_A = jnp.where(scorable_A, group_A if among == "group" else 0, size)
        high_A = jax.ops.segment_max(value_A, id_A, size + 1)[id_A]
        low_A = jax.ops.segment_min(value_A, id_A, size + 1)[id_A]
        scorable_A &= high_A > low_A
    return jnp.where(scorable_A, adv_A, 0).reshape(shape)
