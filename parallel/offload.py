"""Training with master weights and moments in the host's memory, streamed through the device layer by layer.

The device holds what the forward and backward passes need: matrices of layers in the dtype of the computation, all else
in fp32, and the gradient. An update then takes one part of the model at a time, a layer or a weight outside layers:
copies its master weights and moments to the device, updates them there, and copies them back. The numbers are those of
`core.step`.
"""

import collections
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core import hardware, metrics, optim, param, rounding, step
from . import rules

HOST = "pinned_host"  # memory that devices copy from and to by themselves
LAYERS = 1024  # more than a model has parts: keeps seeds of rounding apart
AHEAD = 2  # parts on the device at a time: one is copied while another is updated; 1 on the CPU, where queues can hang


class Held(NamedTuple):
    """What the host holds of a part: fp32 master weights of those that are narrower on the device, by name, and the
    optimiser's state."""

    masters: dict[str, Any]
    opt_state: Any


@dataclass(frozen=True)
class Step:
    """A training step of several programs; `lower` is that of the largest."""

    take: Callable
    lower: Callable

    def __call__(self, *arguments):
        return self.take(*arguments)


@dataclass(frozen=True)
class Part:
    """Weights that are updated together: one outside layers, or those of a layer; layers of a stack are alike.

    Attributes:
      table: the weights, as those of a model of their own.
      inner: the model inside that has them, by its name in `param.Table.inner`; "" = the model itself.
      stack: index of the stack; None = `table` has one weight, outside layers.
      layers: how many layers the stack has; 1 without a stack.
      mastered: names of weights with fp32 masters on the host.
      optimizer: the update, without clipping, which needs the gradient of all parts.
    """

    table: param.Table
    inner: str
    stack: int | None
    layers: int
    mastered: tuple[str, ...]
    optimizer: optax.GradientTransformation

    def of(self, tree) -> dict[str, Any]:
        """This part of a tree of weights: stacked, if it has layers."""
        tree = tree[self.inner] if self.inner else tree
        if self.stack is None:
            return {name: tree[name] for name in self.table.top}
        return tree["stacks"][self.stack]

    def take(self, tree: dict[str, Any], at) -> dict[str, Any]:
        """A layer of this part's arrays."""
        if self.stack is None:
            return tree
        return {name: jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for name, x in tree.items()}

    def put(self, tree: dict[str, Any], new: dict[str, Any], at) -> dict[str, Any]:
        """The arrays of a part with layers, with layer `at` replaced by `new`, in their own dtypes."""
        cast = {name: new[name].astype(x.dtype) for name, x in tree.items()}
        return {name: jax.lax.dynamic_update_index_in_dim(x, cast[name], at, 0) for name, x in tree.items()}

    def replaced(self, tree, new: dict[str, Any]):
        """The tree of weights with `new` in place of this part."""
        own = tree[self.inner] if self.inner else tree
        if self.stack is not None:
            new = {"stacks": [new if i == self.stack else x for i, x in enumerate(own["stacks"])]}
        return tree | {self.inner: own | new} if self.inner else own | new


def parts(table: param.Table, spec: optim.Optimizer, dtype: str) -> list[Part]:
    """The parts of a model that have weights to train.

    Args:
      dtype: of the computation.
    """
    inside = replace(spec, lr=spec.vision_lr or spec.lr, vision_lr=0.0)
    return [*_parts(table, spec, dtype), *(
        part for name, tower in table.inner.items() for part in _parts(tower, inside, dtype, name)
    )]  # fmt: skip


def _parts(table: param.Table, spec: optim.Optimizer, dtype: str, inner: str = "") -> list[Part]:
    """The parts of a model without those inside."""
    narrow = jnp.dtype(dtype) != jnp.float32 and spec.weights == "float32"
    leaves = param.leaves(table)["stacks"]
    found = []
    for stack, layers, params in (
        *((None, 1, {name: p}) for name, p in table.top.items()),
        *((i, len(stack.layers), stack.params) for i, stack in enumerate(table.stacks)),
    ):
        own = param.Table(params, (), table.dims)
        if any(p.trainable for p in params.values()):
            mastered = (
                () if stack is None else tuple(name for name in params if narrow and optim.cast(leaves[stack][name]))
            )
            optimizer = optim.make_optimizer(replace(spec, clip=0.0), own)
            found.append(Part(own, inner, stack, layers, mastered, optimizer))
    return found


def init(params, table: param.Table, spec: optim.Optimizer, dtype: str, mesh) -> step.State:
    """The state at step 0.

    Args:
      params: fp32 weights on the devices.
      dtype: of the computation.

    Returns:
      Its `params` are on the devices, its `opt_state` on the host: for each of `parts` a `Held` for each layer.
    """
    held = []
    for part in parts(table, spec, dtype):
        (_, device, host), layers = _update(part, spec.clip, mesh), []
        start = jax.jit(functools.partial(_start, part), out_shardings=device)
        for at in range(part.layers):
            layers.append(jax.block_until_ready(jax.device_put(start(part.of(params), np.int32(at)), host)))
        held.append(layers)
    narrow = dtype if spec.weights == "float32" else spec.weights
    cast = jax.jit(lambda params: optim.narrowed(params, table, narrow), out_shardings=rules.of_params(table, mesh))
    everywhere = rules.of_state(optax.identity(), table, mesh).step
    return step.State(cast(params), held, jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=everywhere)())


def make_gradient(score: Callable, objective, table: param.Table, spec: optim.Optimizer, mesh) -> Callable:
    """Returns jitted `gradient(params, batch, *frozen) -> (gradient, metrics, aux, norm, whether all is finite)`: the
    part of a step before the update."""
    gradient_of = step.whole_gradient(score, objective, optim.sums(table, spec))
    on, everywhere = rules.of_params(table, mesh), rules.of_state(optax.identity(), table, mesh).step

    def first(params, batch, *frozen):
        gradient, report, aux = gradient_of(params, batch, *frozen)
        norm = optax.tree.norm(jax.tree.map(_wide, gradient.params))
        finite = jnp.isfinite(norm) & jnp.isfinite(gradient.loss)
        report |= {"grad_norm": metrics.of(norm), "skipped": metrics.of(~finite)}
        return gradient.params, report, aux, norm, finite

    return jax.jit(first, out_shardings=(on, *[everywhere] * 4))


def make_step(
    score: Callable, objective, table: param.Table, spec: optim.Optimizer, dtype: str, mesh,
    adjust: Callable = lambda params, aux: params,
) -> Step:  # fmt: skip
    """Returns `step(state, batch, *frozen) -> (state, metrics)` for a state of `init`, as `core.step.make_step`; its
    `lower` is that of the largest of its programs, the gradient's."""
    on, everywhere = rules.of_params(table, mesh), rules.of_state(optax.identity(), table, mesh).step
    differentiate: Any = make_gradient(score, objective, table, spec, mesh)
    updates = [(part, *_update(part, spec.clip, mesh)) for part in parts(table, spec, dtype)]

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(on, everywhere))
    def last(params, aux, finite, moved):
        adjusted = jax.tree.map(lambda new, old: jnp.where(finite, new, old), adjust(params, aux), params)
        change, size = (jnp.sqrt(sum(x)) for x in zip(*moved, strict=True))
        return adjusted, {"update_ratio": metrics.of(jnp.where(finite, change, 0) / jnp.maximum(size, 1e-30))}

    def one(state: step.State, batch, *frozen):
        gradient, report, aux, norm, finite = differentiate(state.params, batch, *frozen)
        params, held, moved = state.params, list[list[Held]](), list[tuple]()
        copying: collections.deque = collections.deque()
        ahead = 1 if hardware.platform() == "cpu" else AHEAD
        for (part, update, device, host), layers in zip(updates, state.opt_state, strict=True):
            weights, change, new = part.of(params), part.of(gradient), []
            for at, old in enumerate(layers):
                while len(copying) >= ahead:
                    jax.block_until_ready(copying.popleft())
                there = jax.device_put(old, device)
                seeds = state.step, np.int32(len(moved))
                weights, there, sums = update(weights, there, change, np.int32(at), norm, finite, *seeds)
                new.append(jax.device_put(there, host))
                copying.append(new[-1])
                moved.append(sums)
            params, held = part.replaced(params, weights), [*held, new]
        params, ratio = last(params, aux, finite, moved)
        return step.State(params, held, state.step + 1), report | ratio

    return Step(one, lambda state, batch, *frozen: differentiate.lower(state.params, batch, *frozen))


def lower_update(table: param.Table, spec: optim.Optimizer, dtype: str, mesh) -> jax.stages.Lowered:
    """Lowers the update of the largest layer, or weight outside layers, from shapes; arguments as `make_step`."""
    size = lambda part: sum(math.prod(x.shape) for x in jax.tree.leaves(param.abstract(part.table)))
    part = max(parts(table, spec, dtype), key=size)
    changed, held, narrow, whole = _change(part, spec.clip, mesh)
    everywhere = rules.of_state(optax.identity(), part.table, mesh).step
    on = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    wide = {name: on(x, whole[name]) for name, x in param.abstract(part.table).items() if name in whole}
    scalar = lambda kind: jax.ShapeDtypeStruct((), kind, sharding=everywhere)
    scalars = scalar(jnp.float32), scalar(bool), scalar(jnp.int32), scalar(jnp.int32)
    kept = jax.tree.map(on, abstract(part, mesh)[0], held)
    return changed.lower({name: wide[name] for name in narrow}, kept, wide, *scalars)


def abstract(part: Part, mesh) -> tuple[Held, Held]:
    """What the host holds of a layer, as shapes, and its shardings."""
    weights = param.abstract(part.table)
    state = rules.of_state(part.optimizer, part.table, mesh)
    masters = lambda tree: {name: tree[name] for name in part.mastered}
    return (
        Held(masters(weights), jax.eval_shape(part.optimizer.init, weights)),
        Held(masters(state.params), state.opt_state),
    )


def _start(part: Part, params, at) -> Held:
    """What the host holds of a layer at first."""
    own = part.take(params, at)
    return Held({name: own[name] for name in part.mastered}, part.optimizer.init(_whole(own)))


def _update(part: Part, clip: float, mesh) -> tuple[Callable, Held, Held]:
    """(the update of a layer, the shardings of what is held of it on the device, and on the host).

    `update(weights, held, gradient, at, norm, finite, *seeds) -> (weights, held, squared norms of change and weights)`:
    weights and gradient are those of all layers, of which layer `at` is updated. Weights and `held` are donated.

    A layer is taken out, updated and put back by separate programs: in a single one XLA copies the weights of all
    layers on a GPU.

    Args:
      clip: as in `Optimizer`; `norm` is that of the whole gradient.
    """
    changed, held, narrow, whole = _change(part, clip, mesh)
    if part.stack is None:
        alone = lambda weights, held, gradient, at, *others: changed(weights, held, gradient, *others)
        return alone, held, _in(HOST, held)
    stacked = replace(part.table, top={}, stacks=(param.Stack(tuple(range(part.layers)), part.table.top),))
    [where] = rules.of_params(stacked, mesh)["stacks"]
    take_own, take_all = (jax.jit(part.take, out_shardings=these) for these in (narrow, whole))
    put = jax.jit(part.put, donate_argnums=0, out_shardings=where)

    def update(weights, held: Held, gradient, at, *others):
        own = take_own({name: weights[name] for name in narrow}, at)
        new, held, sums = changed(own, held, take_all(gradient, at), *others)
        return put(weights, new | held.masters, at), held, sums

    return update, held, _in(HOST, held)


def _change(part: Part, clip: float, mesh) -> tuple[Any, Held, dict, dict]:
    """(jitted update of a layer that was taken out, shardings of what is held of it, of the weights that are not held,
    and of all)."""
    state = rules.of_state(part.optimizer, part.table, mesh)
    whole = {name: state.params[name] for name in part.table.top}
    held = Held({name: whole[name] for name in part.mastered}, state.opt_state)
    narrow = {name: sharding for name, sharding in whole.items() if name not in part.mastered}

    def change_layer(own, held: Held, gradient, norm, finite, step, place):
        own |= held.masters
        clipped = lambda g: jnp.where(norm < clip, g, g / norm * clip) if clip else g
        change = {name: clipped(_wide(x)) for name, x in gradient.items()}
        changes, opt_state = part.optimizer.update(_whole(change), held.opt_state, _whole(own))
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        new = keep(rounding.apply_updates(own, {name: changes[name] for name in own}, step * LAYERS + place), own)
        sums = tuple(optax.tree.norm(x, squared=True) for x in (changes, own))
        masters = {name: new.pop(name) for name in part.mastered}
        return new, Held(masters, keep(opt_state, held.opt_state)), sums

    changed = jax.jit(change_layer, donate_argnums=(0, 1), out_shardings=(narrow, held, state.step))
    return changed, held, narrow, whole


def on_host(x) -> bool:
    """Whether an array is in the memory of the host because `to_host`, or a state of `init`, put it there."""
    return isinstance(x, jax.Array) and x.sharding.memory_kind == HOST


def to_host(tree):
    """Arrays in the memory of the host, sharded as they are."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(HOST), tree))


def to_device(tree):
    """Arrays in the memory of their devices; those that are there already are not copied."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), tree))


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _whole(own: dict[str, Any]) -> dict:
    """Weights of a part, as the parameters of a model."""
    return own | {"stacks": []}


def _in(memory: str, shardings):
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(memory), shardings)
