"""Optimisers: optax chains over fp32 master weights, configured by a frozen dataclass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from . import matrixwise, moments, param

Kind = Literal["matrix", "embedding", "norm", "bias"]
Schedule = Literal["constant", "cosine", "linear"]
VISION, MTP = "vision.", "mtp."  # what paths begin with, of a tower's weights and of the layer that drafts
USES = {  # optimiser-specific fields
    "adamw": ("b1", "b2", "eps", "state"),
    "muon": ("momentum", "b1", "b2", "eps", "state"),
    "lion": ("b1", "b2", "state"),
    "sgd": ("momentum", "state"),
    "adafactor": (),
}


@dataclass(frozen=True)
class Optimizer:
    """An optimiser: clips the global gradient norm, then subtracts lr * (direction + weight_decay * weight).

    Weight decay is decoupled for all of them (arXiv:1711.05101). Directions, each layer's and expert's matrix being
    treated separately:
      adamw: Adam (arXiv:1412.6980).
      muon: orthogonalised Nesterov momentum (arXiv:2502.16982) for matrices; Adam at the same learning rate for
        embeddings, the output head, rows with a single output, norms and biases.
      lion: the sign of an interpolated momentum (arXiv:2302.06675); needs a learning rate 3 to 10 times below Adam's.
      sgd: the gradient, or its momentum.
      adafactor: the gradient over the root of a factored second moment, scaled by the matrix's root mean square
        (arXiv:1804.04235): the learning rate is relative, and 1e-2 is large.

    Attributes:
      name: update rule.
      lr: peak learning rate.
      vision_lr: peak learning rate of a vision tower in training, with the same schedule; 0 = `lr`.
      mtp_lr: likewise of the layer for multi-token prediction in training; 0 = `lr`.
      schedule: learning rate after the warm-up; cosine and linear end at `floor` * lr after `steps` optimiser steps.
      warmup: steps over which the learning rate rises linearly from lr / warmup to lr.
      steps: length of the schedule in optimiser steps, including the warm-up; 0 = in a recipe the whole run.
      floor: final learning rate as a fraction of lr.
      b1: decay of Adam's first moment, also in muon; of lion's interpolation.
      b2: decay of Adam's second moment, also in muon; of lion's momentum (its authors use 0.99).
      eps: added to the root of Adam's second moment, also in muon.
      momentum: momentum of muon and sgd; 0 = sgd without momentum.
      weight_decay: each step subtracts lr * weight_decay * weight.
      decay: kinds of weights that are decayed; "embedding" includes the output head, "norm" is any vector but a bias.
      clip: maximum global gradient norm (max_grad_norm in TRL); 0 = no clipping. A layer for multi-token prediction in
        training is clipped by a norm of its own, so that its gradient does not shrink the model's.
      ema: decay per step of an exponential moving average of the weights, initialised with the first ones; 0 = none.
        `averaged` reads it.
      state: dtype of the moments of matrices: float8 is 8 bits with a scale per 128 entries (`core.moments`), a quarter
        of the memory of float32.
      weights: bfloat16 = the matrices of layers have no fp32 master weights: an update is rounded to bf16
        stochastically. Their gradients are still added up in fp32.
      gradients: dtype in which the gradients of several microbatches are added up, for matrices of layers; bfloat16 is
        rounded stochastically, and needs half the memory.
      offload: keeps master weights and moments in the memory of the host; an update streams them through the device,
        layer by layer (`parallel.offload`). The device holds matrices of layers in the dtype of the computation.

    Raises:
      ValueError: an unknown name or kind; a number outside its range; a field is set that the optimiser does not use.
    """

    name: Literal["adamw", "muon", "lion", "sgd", "adafactor"] = "adamw"
    lr: float = 1e-6
    vision_lr: float = 0.0
    mtp_lr: float = 0.0
    schedule: Schedule = "constant"
    warmup: int = 0
    steps: int = 0
    floor: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.0
    decay: tuple[Kind, ...] = ("matrix", "embedding")
    clip: float = 1.0
    ema: float = 0.0
    state: moments.Dtype = "float32"
    weights: Literal["float32", "bfloat16"] = "float32"
    gradients: Literal["float32", "bfloat16"] = "float32"
    offload: bool = False

    def __post_init__(self):
        if self.name not in USES:
            raise ValueError(f"Optimizer: name must be one of {', '.join(USES)}, got {self.name!r}; choose one of them")
        for name in ("b1", "b2", "eps", "momentum", "state"):
            if name not in USES[self.name] and getattr(self, name) != getattr(Optimizer, name):
                raise ValueError(
                    f"Optimizer: {self.name} does not use {name}, got {getattr(self, name)}; "
                    "leave it out, or choose another optimiser"
                )
        if unknown := set(self.decay) - set(get_args(Kind)):
            raise ValueError(
                f"Optimizer: decay must be among {', '.join(get_args(Kind))}, got {min(unknown)!r}; choose from these"
            )
        for name in ("lr", "vision_lr", "mtp_lr", "weight_decay", "clip", "floor", "eps", "warmup", "steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Optimizer: {name} must be at least 0 and finite, got {getattr(self, name)}")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Optimizer: {name} must be at least 0 and below 1, got {getattr(self, name)}")
        for name in ("vision_lr", "mtp_lr"):
            if getattr(self, name) and not self.lr:
                raise ValueError(
                    f"Optimizer: lr must be above 0 beside a {name}, whose schedule is the same, got {self.lr}"
                )
        if self.floor and self.schedule == "constant":
            raise ValueError(f"Optimizer: a constant schedule has no floor, got {self.floor}; choose cosine or linear")
        if not 0 <= self.ema < 1:
            raise ValueError(f"Optimizer: ema must be at least 0 and below 1, got {self.ema}; 0 is none")
        narrow = "float32", "bfloat16"
        choices = {"schedule": get_args(Schedule), "state": get_args(moments.Dtype)}
        choices |= {"weights": narrow, "gradients": narrow}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Optimizer: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}; choose one of "
                    "them"
                )
        if self.offload and self.ema:
            raise ValueError(
                f"Optimizer: offload keeps no average of the weights, got ema {self.ema}; leave out one of them"
            )


def schedule(spec: Optimizer) -> optax.Schedule:
    """The learning rate as a function of the optimiser step, counted from 0.

    Raises:
      ValueError: a cosine or linear schedule does not reach beyond its warm-up.
    """
    if spec.schedule != "constant" and spec.steps <= spec.warmup:
        raise ValueError(
            f"Optimizer: a {spec.schedule} schedule needs steps > warmup, got {spec.steps} and {spec.warmup}"
        )
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


def cast(leaf: param.Leaf) -> bool:
    """Whether every family casts a weight to the compute dtype before it uses it."""
    return leaf.layers is not None and leaf.param.cast


def copied(leaf: param.Leaf) -> bool:
    """Whether a copy that is not trained may have a weight in the compute dtype: also embeddings and the head, whose
    gradients are sums that need fp32."""
    return cast(leaf) or leaf.path in ("embed", "head")


def sums(table: param.Table, spec: Optimizer):
    """The dtype in which each weight's gradients are added up, for `step.make_step`."""
    return param.tree_map(lambda leaf: jnp.dtype(spec.gradients if cast(leaf) else "float32"), table)


def narrowed(params, table: param.Table, dtype: str):
    """The weights with those that families `cast` in the given dtype."""
    return param.tree_map(lambda leaf, x: x.astype(dtype) if cast(leaf) else x, table, params)


def kind(p: param.Param) -> Kind:
    """The kind of a weight for `Optimizer.decay`, from its axes; a vector is a bias if its checkpoint key says so."""
    if p.matrix:
        return "embedding" if p.axes.split()[0].endswith("vocab") else "matrix"
    return "bias" if p.keys[0].endswith("bias") else "norm"


def make_optimizer(spec: Optimizer, table: param.Table) -> optax.GradientTransformation:
    """The optax chain for a model's table: clip, direction, decay, learning rate, average; frozen weights get zero
    updates.

    On a mesh `parallel.rules.of_state` gives the shardings of its state.
    """
    decayed = param.tree_map(lambda leaf: kind(leaf.param) in spec.decay, table)
    direction = _direction(spec, table)
    if spec.weights != "float32":
        direction = moments.widened(direction)
    if spec.state != "float32":
        direction = moments.kept(direction, spec.state, table)
    chain = optax.chain(
        _clip(spec.clip, table),
        direction,
        optax.add_decayed_weights(spec.weight_decay, mask=decayed),
        _learning_rate(spec, table),
        _average(spec.ema) if spec.ema else optax.identity(),
    )
    return _trained(chain, table)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdamW:
    """AdamW's hyperparameters for one update: numbers, which `adamw` may get traced. Meanings as in `Optimizer`."""

    lr: float = 1e-6
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0


def adamw(
    table: param.Table, hyper: AdamW = AdamW(), decay: Sequence[Kind] = ("matrix", "embedding")
) -> optax.GradientTransformation:
    """AdamW whose hyperparameters may change with every update, for `step.make_apply`; its state has none of them.

    Equal to `make_optimizer` up to rounding: traced, 1 - b1 and 1 - b2 are taken in float32.

    Args:
      decay: kinds of weights that are decayed, as in `Optimizer`.
    """
    decayed = param.tree_map(lambda leaf: kind(leaf.param) in decay, table)
    chain = optax.chain(
        optax.clip_by_global_norm(jnp.where(hyper.clip > 0, hyper.clip, jnp.inf)),
        optax.scale_by_adam(b1=hyper.b1, b2=hyper.b2, eps=hyper.eps),
        optax.add_decayed_weights(jnp.asarray(hyper.weight_decay), mask=decayed),
        optax.scale_by_learning_rate(hyper.lr),
    )
    return _trained(chain, table)


def _trained(chain: optax.GradientTransformation, table: param.Table) -> optax.GradientTransformation:
    """The transformation, with zero updates for frozen weights."""
    labels = param.tree_map(lambda leaf: "train" if leaf.param.trainable else "freeze", table)
    if "freeze" not in jax.tree.leaves(labels):
        return chain
    return optax.partition({"train": chain, "freeze": optax.set_to_zero()}, labels)


def _clip(most: float, table: param.Table) -> optax.GradientTransformation:
    """Clips by the global norm, weights of the layer for multi-token prediction by their own; 0 = no clipping."""
    clip = optax.clip_by_global_norm(most) if most else optax.identity()
    if not most or "mtp" not in table.inner:
        return clip
    label = lambda leaf: "mtp" if leaf.path.startswith(MTP) else "model"
    return optax.partition({"model": clip, "mtp": clip}, param.tree_map(label, table))


def _learning_rate(spec: Optimizer, table: param.Table) -> optax.GradientTransformation:
    """Multiplies by minus the learning rate, parts of the model by their own; the state is the same."""
    rate = optax.scale_by_learning_rate(schedule(spec))
    own = {start: lr / spec.lr for start, lr in ((VISION, spec.vision_lr), (MTP, spec.mtp_lr)) if lr}
    if not own:
        return rate
    factor = lambda leaf: next((by for start, by in own.items() if leaf.path.startswith(start)), None)
    factors = [factor(leaf) for leaf in param.leaf_list(table)]
    left_out = lambda x: isinstance(x, optax.MaskedNode)

    def scaled(update, by: float | None):
        return update if by is None or left_out(update) else update * by

    def update(updates, state, params=None):
        updates, state = rate.update(updates, state, params)
        flat, tree = jax.tree.flatten(updates, is_leaf=left_out)
        return jax.tree.unflatten(tree, [scaled(x, by) for x, by in zip(flat, factors, strict=True)]), state

    return optax.GradientTransformation(rate.init, update)


def averaged(params, opt_state):
    """Replaces `params` by their moving averages if the optimiser keeps any; frozen weights are returned as given."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, AverageState))
    found = [state.average for state in states if isinstance(state, AverageState)]
    frozen = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(lambda a, p: p if frozen(a) else a, found[0], params, is_leaf=frozen) if found else params


class AverageState(NamedTuple):
    """Exponential moving average of the weights, in fp32 or wider."""

    average: optax.Params


def _average(decay: float) -> optax.GradientTransformation:
    """Passes updates through and keeps an exponential moving average of the updated weights."""

    wide = lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32))  # a copy, because the state is donated

    def init(params):
        return AverageState(jax.tree.map(wide, params))

    def update(updates, state, params=None):
        now = jax.tree.map(jnp.add, params, updates)
        return updates, AverageState(optax.incremental_update(now, state.average, 1 - decay))

    return optax.GradientTransformation(init, update)


def _direction(spec: Optimizer, table: param.Table) -> optax.GradientTransformation:
    """Transforms gradients into the update direction, before weight decay and learning rate."""
    adam = lambda: optax.scale_by_adam(b1=spec.b1, b2=spec.b2, eps=spec.eps)
    label = lambda of: param.tree_map(lambda leaf: of(leaf.param), table)
    match spec.name:
        case "adamw":
            return adam()
        case "muon":
            rest = {"one", "labels", "vision_column"}  # heads of scores, gates, and kernels of convolutions
            inner = lambda p: kind(p) == "matrix" and not rest & {*p.axes.split()}
            labels = label(lambda p: "muon" if inner(p) else "adam")
            return optax.partition({"muon": matrixwise.muon(spec.momentum), "adam": adam()}, labels)
        case "lion":
            return optax.scale_by_lion(b1=spec.b1, b2=spec.b2)
        case "sgd":
            return optax.trace(spec.momentum) if spec.momentum else optax.identity()
        case "adafactor":
            labels = label(lambda p: "matrix" if kind(p) in ("matrix", "embedding") else "vector")
            return optax.partition({"matrix": matrixwise.adafactor(2), "vector": matrixwise.adafactor(1)}, labels)
