"""What the planner asks of a model's weights, and of the records of its layers."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ...core import param
from .. import rules
from ..mesh import AXES, Layout

ONE = Layout()  # device


def abstract(layout: Layout) -> AbstractMesh:
    """The mesh of a layout, without devices."""
    return AbstractMesh(tuple(getattr(layout, axis) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@functools.lru_cache(maxsize=1 << 16)
def held(axes: tuple[str, ...], shape: tuple[int, ...], path: str, by: rules.ShardingRules, mesh: AbstractMesh) -> int:
    """Entries of a weight that a device holds under these sharding rules.

    Raises:
      ValueError: the mesh does not divide it.
    """
    spec = rules.spec(axes, by, where=path, shape=shape, mesh=mesh)
    return math.prod(NamedSharding(mesh, spec).shard_shape(shape))


def in_use(leaf: param.Leaf, layout: Layout) -> int:
    """Entries of a leaf that a device of a generation engine holds: gathered over all but tp, experts over ep too.

    Raises:
      ValueError: the layout does not divide it.
    """
    return held(leaf.axes, leaf.shape, leaf.path, rules.GATHERED, abstract(layout))


def depth(stack: Mapping[str, param.Leaf]) -> int:
    """Number of layers of a run."""
    return next(iter(stack.values())).shape[0]


def stored(leaf: param.Leaf, itemsize: int, layout: Layout = ONE) -> int:
    """Bytes of a leaf in files and on a device of a server, with `itemsize` bytes an entry unless the table says
    otherwise."""
    return in_use(leaf, layout) * (jnp.dtype(leaf.param.dtype).itemsize if leaf.param.dtype else itemsize)


def entries(leaf: param.Leaf) -> int:
    return math.prod(leaf.shape)


def nested(leaf: param.Leaf) -> bool:
    """Whether the leaf belongs to a layer rather than the top level."""
    return leaf.layers is not None


def matrix(leaf: param.Leaf) -> bool:
    """Whether tokens are multiplied with it."""
    return leaf.param.matrix


def expert(leaf: param.Leaf) -> bool:
    return "experts" in leaf.axes


def added(stack: Mapping[str, param.Leaf]) -> set[str]:
    """Names of a layer's matrices whose outputs are only added to the residual stream, and read by nothing else in it:
    the backward pass needs their inputs alone."""
    if not {"down", "router"} & stack.keys():
        # nothing follows the mixer
        return {name for name, leaf in stack.items() if matrix(leaf) and leaf.param.axes.startswith("embed ")}
    readers = {
        "down": {"norm2_after", "mlp_after"},
        "shared_down": {"norm2_after", "shared_router"},
        "latent_up": set(),
    }
    return {name for name, after in readers.items() if name in stack and not after & stack.keys()}


def recurrent(layer: Any) -> bool:
    """Whether a layer's record is that of a recurrence."""
    return hasattr(layer, "state")


def matrix_states(layer: Any) -> list[tuple[int, int, int]]:
    """Shapes of the states of a recurrent layer that are a matrix per head; its others are pasts of convolutions."""
    return [shape for _, shape in layer.state if len(shape) == 3]
