"""Optimisers: chains from optax over fp32 master weights, chosen by a frozen dataclass."""

from dataclasses import dataclass
from typing import Literal

import optax

from . import param


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101) on matrices, after clipping the global gradient norm.

    Attributes:
      lr: peak learning rate.
      schedule: after the warm-up; cosine and linear end at `floor` * lr after `steps` optimiser steps.
      warmup: steps over which the rate rises linearly from lr / warmup to lr.
      steps: length of the whole schedule in optimiser steps, the warm-up included.
      floor: final rate as a fraction of lr.
      clip: largest global gradient norm; 0 = do not clip.
    """

    lr: float = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int = 0
    steps: int = 0
    floor: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0


def schedule(spec: AdamW) -> optax.Schedule:
    """Learning rate at a step (from 0)."""
    if spec.schedule != "constant" and spec.steps <= spec.warmup:
        raise ValueError(f"AdamW: a {spec.schedule} schedule needs steps > warmup, got {spec.steps} and {spec.warmup}")
    rest = spec.steps - spec.warmup
    after = {
        "constant": lambda: optax.constant_schedule(spec.lr),
        "cosine": lambda: optax.cosine_decay_schedule(spec.lr, rest, alpha=spec.floor),
        "linear": lambda: optax.linear_schedule(spec.lr, spec.floor * spec.lr, rest),
    }[spec.schedule]()
    if not spec.warmup:
        return after
    rise = optax.linear_schedule(spec.lr / spec.warmup, spec.lr, spec.warmup)
    return optax.join_schedules([rise, after], [spec.warmup])


def adamw(spec: AdamW, table: param.Table) -> optax.GradientTransformation:
    """The chain for a model's table: clip, Adam, decay on matrices only, learning rate; frozen weights stay put."""
    matrices = param.tree_map(lambda leaf: len(leaf.param.axes.split()) > 1, table)
    chain = optax.chain(
        optax.clip_by_global_norm(spec.clip) if spec.clip else optax.identity(),
        optax.adamw(
            schedule(spec), b1=spec.b1, b2=spec.b2, eps=spec.eps,
            weight_decay=spec.weight_decay, mask=matrices,
        ),
    )  # fmt: skip
    labels = param.tree_map(lambda leaf: "train" if leaf.param.trainable else "freeze", table)
    if all(leaf.param.trainable for leaf in _leaves(table)):
        return chain
    return optax.partition({"train": chain, "freeze": optax.set_to_zero()}, labels)


def _leaves(table):
    out: list = []
    param.tree_map(out.append, table)
    return out
