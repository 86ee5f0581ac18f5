"""One line a weight: a family's table, from which initialisation, sharding, loading and export follow.

A parameter tree is `{name: array, ..., "stacks": [{name: array[L, ...]}, ...]}`: the top-level weights, then runs of
equal layers stacked along a leading axis. Weights keep Hugging Face's orientation ([out, in], heads flattened).
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
      axes: logical axes, e.g. "heads embed"; sizes come from the table's dims.
      keys: its spellings in a checkpoint ({prefix}, {layer} and {expert} are filled in); any is read, the first is
        written. With {expert} the first axis runs over tensors of their own.
      init: `init(key, shape, dtype) -> array`, as in `jax.nn.initializers`.
      dtype: of the stored weight; None = what the caller asks for.
      trainable: False keeps the weight out of the optimiser.
    """

    axes: str
    keys: tuple[str, ...]
    init: Callable
    dtype: str | None = None
    trainable: bool = True


@dataclass(frozen=True)
class Stack:
    """A run of equal layers: `layers` are their numbers in the checkpoint, `params` the weights of each."""

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
    """A leaf of the parameter tree: its Param, its path, and the layers stacked in it (None at top level)."""

    param: Param
    path: str
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None

    @property
    def axes(self) -> tuple[str, ...]:
        return ("layers",) * (self.layers is not None) + tuple(self.param.axes.split())

    @property
    def apart(self) -> tuple[int, ...]:
        """Sizes of the leading axes that a checkpoint holds apart: layers, and experts where its keys name them."""
        return self.shape[: (self.layers is not None) + ("{expert}" in self.param.keys[0])]

    def keys(self, prefix: str) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Index along the axes held apart -> spellings of the checkpoint key, for each tensor of this leaf."""

        def spelt(index):
            layer = None if self.layers is None else self.layers[index[0]]
            expert = index[-1] if index else None
            return tuple(key.format(prefix=prefix, layer=layer, expert=expert) for key in self.param.keys)

        return {index: spelt(index) for index in itertools.product(*map(range, self.apart))}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoRAWeight:
    """A weight [..., out, in] with a change of low rank beside it, in its place in a parameter tree.

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
    """What names the axes of `LoRAWeight.a` and `LoRAWeight.b`, from what names those of the weight and of the rank."""
    *lead, out, into = axes
    return (*lead, rank, into), (*lead, out, rank)


@jax.jit
def merged(w: LoRAWeight):
    """The sum as a plain weight, added in fp32 or wider and rounded once, to the weight's dtype."""
    wide = jnp.promote_types(w.weight.dtype, jnp.float32)
    change = jnp.matmul(w.b.astype(wide), w.a.astype(wide), precision="highest")
    return (w.weight + w.scale * change).astype(w.weight.dtype)


def leaves(table: Table) -> dict:
    """The parameter tree with a Leaf in the place of each array."""

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
    """`fn(leaf, *arrays)` over a table and trees of its structure."""
    return jax.tree.map(fn, leaves(table), *trees, is_leaf=lambda x: isinstance(x, Leaf))


def init(key, table: Table, dtype="float32"):
    """Random parameters; each leaf draws from `key` folded with its own path, so that order does not matter."""

    def draw(leaf):
        own = jax.random.fold_in(key, zlib.crc32(leaf.path.encode()))
        return leaf.param.init(own, leaf.shape, jnp.dtype(leaf.param.dtype or dtype))

    return tree_map(draw, table)


def abstract(table: Table, dtype="float32"):
    """The parameter tree as shapes and dtypes."""
    return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.param.dtype or dtype)), table)


def count(table: Table) -> int:
    """Number of weights."""
    return sum(math.prod(leaf.shape) for leaf in leaf_list(table))
