"""Observations as targets: what the environment answered is learnt beside what the policy sampled (ECHO)."""

from dataclasses import dataclass

import jax.numpy as jnp

from .batch import Batch
from .checks import validate
from .segments import divisor

KINDS = "tool", "error", "user"  # `target["observation"]` has their number from 1 on; 0 = no observation
WEIGHT = "observation_weight_BT"


@dataclass(frozen=True)
class Observation:
    """Options of the likelihood of observations (ECHO, arXiv:2605.24517).

    Attributes:
      coef: coefficient of the observations' negative log-likelihood in nats, the mean over the tokens of these kinds in
        the batch; the paper has 0.05. 0 = they are not learnt.
      kinds: which observations are learnt: answers of tools ("tool"), those that say "error: ..." ("error"), and
        messages of the user or of an environment ("user").
    """

    coef: float = 0.0
    kinds: tuple[str, ...] = KINDS

    def __post_init__(self):
        known = bool(self.kinds) and set(self.kinds) <= set(KINDS) and len(set(self.kinds)) == len(self.kinds)
        rules = (
            ("coef", 0 <= self.coef < float("inf"), "at least 0 and finite"),
            ("kinds", known, f"one or several of {', '.join(KINDS)}"),
            ("kinds", self.kinds == KINDS or self.coef != 0, "left out without a coef"),
        )
        validate(self, rules)


def weights(spec: Observation, batch: Batch):
    """Weight of each token's negative log-likelihood in the loss, [B, T], of a whole batch; their sum is `spec.coef`.

    The reward of an episode does not matter, nor whether it has one.

    Raises:
      ValueError: the samples have no array "observation".
    """
    if "observation" not in batch.target:
        raise ValueError(
            f'Observation: coef {spec.coef:g} needs target["observation"], got the arrays {sorted(batch.target)}; take '
            "a workflow of several turns"
        )
    kind_BT = batch.target["observation"]
    learnt_BT = jnp.zeros(kind_BT.shape, bool)
    for kind in spec.kinds:
        learnt_BT |= kind_BT == 1 + KINDS.index(kind)
    one_BT = jnp.where(learnt_BT & ~batch.mask_BT, 1.0, 0.0).astype(batch.weight_BT.dtype)
    return spec.coef * one_BT / divisor(jnp.sum(one_BT))
