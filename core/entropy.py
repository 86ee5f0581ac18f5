"""Entropy bonus: constant, only below a floor, or by token class."""

from dataclasses import dataclass

import jax.numpy as jnp

from .batch import Batch
from .checks import validate


@dataclass(frozen=True)
class Entropy:
    """Options of the entropy bonus.

    Attributes:
      coef: coefficient of the entropy in nats; 0 = no bonus.
      floor: the bonus applies only while the mean entropy of the batch's learnt tokens before the update is below this,
        in nats; 0 = always. Skywork-OR1 (arXiv:2505.22312) adapts its coefficient in steps instead.
      classes: factors of `coef` for tokens of class 0, 1, ... in `target["token_class"]`, other classes get no bonus;
        empty = all alike.
    """

    coef: float = 0.0
    floor: float = 0.0
    classes: tuple[float, ...] = ()

    def __post_init__(self):
        rules = (
            ("floor", self.floor == 0 or (self.floor > 0 and self.coef != 0), "0, or above 0 with a coef"),
            ("classes", not self.classes or self.coef != 0, "empty without a coef"),
        )
        validate(self, rules)


def weights(spec: Entropy, batch: Batch, entropy_BT, mask_BT, share_BT):
    """Coefficient of each token's entropy in the objective, [B, T].

    Args:
      entropy_BT: entropy before the update; read only with a floor.

    Raises:
      ValueError: `spec.classes` is set and the batch has no token classes.
    """
    weight_BT = spec.coef * share_BT
    if spec.classes:
        if "token_class" not in batch.target:
            raise ValueError(f'Entropy: classes need target["token_class"], got the arrays {sorted(batch.target)}')
        class_BT = batch.target["token_class"]
        known_BT = (class_BT >= 0) & (class_BT < len(spec.classes))
        factor_BT = jnp.asarray(spec.classes, share_BT.dtype)[jnp.clip(class_BT, 0, len(spec.classes) - 1)]
        weight_BT *= jnp.where(known_BT, factor_BT, 0)
    if spec.floor:
        mean = jnp.sum(jnp.where(mask_BT, entropy_BT, 0)) / jnp.maximum(jnp.sum(jnp.where(mask_BT, 1.0, 0.0)), 1)
        weight_BT *= jnp.where(mean < spec.floor, 1.0, 0.0)
    return weight_BT
