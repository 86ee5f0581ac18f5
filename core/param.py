"""Parameter tables: one line per weight, from which initialisation, sharding, loading and export are derived.

A parameter tree is `{name: array, ..., "stacks": [{name: array[L, ...]}, ...]}`: the top-level weights, then runs of
identical layers stacked along a leading axis. Weights keep Hugging Face's orientation ([out, in], heads flattened).
"""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Param:
    """One weight of one layer.

    Attributes:
      axes: logical axes, e.g. "heads embed"; their sizes are in the table's dims.
      keys: checkpoint keys ({prefix}, {layer} and {expert} are filled in); any is read, the first is written, the last
        is the name in transformers' module. With {expert}, each index of the first axis is a separate tensor in the
        checkpoint.
      init: `init(key, shape, dtype) -> array`, as in `jax.nn.initializers`.
      dtype: dtype of the stored weight; None = what the caller requests.
      trainable: False excludes the weight from the optimiser.
    """

    axes: str
    keys: tuple[str, ...]
    init: Callable
    dtype: str | None = None
    trainable: bool = True

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix, or one for each expert, rather than a vector."""
        return len([axis for axis in self.axes.split() if axis != "experts"]) > 1


@dataclass(frozen=True)
class Stack:
    """A run of identical layers: `layers` are their indices in the checkpoint, `params` the weights of each."""

    layers: tuple[int, ...]
    params: Mapping[str, Param]


@dataclass(frozen=True)
class Table:
    """All weights of a model: `top` by name, `stacks` in order, `dims` the size of each logical axis."""

    top: Mapping[str, Param]
    stacks: tuple[Stack, ...]
    dims: Mapping[str, int]


@dataclass(frozen=True)
class Leaf:
    """A leaf of the parameter tree: its Param, path and shape, and the layers stacked in it (None at top level)."""

    param: Param
    path: str
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None

    @property
    def axes(self) -> tuple[str, ...]:
        return ("layers",) * (self.layers is not None) + tuple(self.param.axes.split())

    @property
    def unstacked_shape(self) -> tuple[int, ...]:
        """Sizes of the leading axes that checkpoints store as separate tensors: layers, and experts if in the keys."""
        return self.shape[: (self.layers is not None) + ("{expert}" in self.param.keys[0])]

    def keys(self, prefix: str) -> dict[tuple[int, ...], tuple[str, ...]]:
        """For each checkpoint tensor of this leaf: its index along the unstacked axes -> its possible keys."""

        def spelt(index):
            layer = None if self.layers is None else self.layers[index[0]]
            expert = index[-1] if index else None
            return tuple(key.format(prefix=prefix, layer=layer, expert=expert) for key in self.param.keys)

        return {index: spelt(index) for index in itertools.product(*map(range, self.unstacked_shape))}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoRAWeight:
    """A weight [..., out, in] with a low-rank adapter, a leaf of the parameter tree in the weight's place.

    Acts as weight + scale * b @ a (LoRA, arXiv:2106.09685).

    Attributes:
      a: [..., rank, in].
      b: [..., out, rank].
    """

    weight: Any
    a: Any
    b: Any
    scale: float = field(metadata={"static": True})

    @property
    def shape(self):
        return self.weight.shape


def factors(axes: tuple, rank=None) -> tuple[tuple, tuple]:
    """Axis names (or specs) of `LoRAWeight.a` and `LoRAWeight.b`, given those of the weight and of the rank."""
    *lead, out, into = axes
    return (*lead, rank, into), (*lead, out, rank)


@jax.jit
def merged(w: LoRAWeight):
    """Merges the adapter into a plain weight, summed in fp32 or wider and rounded once to the weight's dtype."""
    wide = jnp.promote_types(w.weight.dtype, jnp.float32)
    change = jnp.matmul(w.b.astype(wide), w.a.astype(wide), precision="highest")
    return (w.weight + w.scale * change).astype(w.weight.dtype)


def leaves(table: Table) -> dict:
    """The parameter tree with a Leaf in place of each array."""

    def leaf(name, path, p, layers):
        sizes = tuple(table.dims[axis] for axis in p.axes.split())
        shape = sizes if layers is None else (len(layers), *sizes)
        return Leaf(p, f"{path}{name}", shape, layers)

    tree: dict = {name: leaf(name, "", p, None) for name, p in table.top.items()}
    tree["stacks"] = [
        {name: leaf(name, f"stacks.{i}.", p, stack.layers) for name, p in stack.params.items()}
        for i, stack in enumerate(table.stacks)
    ]
    return tree


def leaf_list(table: Table) -> list[Leaf]:
    """The leaves in the order of `jax.tree.leaves` of the parameters."""
    return jax.tree.leaves(leaves(table))


def tree_map(fn: Callable, table: Table, *trees):
    """Maps `fn(leaf, *arrays)` over a table and trees of its structure."""
    return jax.tree.map(fn, leaves(table), *trees, is_leaf=lambda x: isinstance(x, Leaf))


def init(key, table: Table, dtype="float32"):
    """Random parameters; each leaf uses `key` folded with its path, independent of the others."""

    def draw(leaf):
        leaf_key = jax.random.fold_in(key, zlib.crc32(leaf.path.encode()))
        return leaf.param.init(leaf_key, leaf.shape, jnp.dtype(leaf.param.dtype or dtype))

    return tree_map(draw, table)


def abstract(table: Table, dtype="float32"):
    """The parameter tree as shapes and dtypes."""
    return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.param.dtype or dtype)), table)


def count(table: Table) -> int:
    """Number of weights."""
    return sum(math.prod(leaf.shape) for leaf in leaf_list(table))
