"""Parameter tables: one line per weight, from which initialisation, sharding, loading and export are derived.

A parameter tree is `{name: array, ..., "stacks": [{name: array[L, ...]}, ...]}`: the top-level weights, then runs of
identical layers stacked along a leading axis. Weights keep Hugging Face's orientation ([out, in], heads flattened).
"""

import itertools
import math
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .parts import Part
from .quantised import QuantisedWeight, dequantise


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
      part: the part of a checkpoint tensor that the weight is; None = all of it. Weights with the same keys share the
        tensor, and together have all of it (`check_parts`).
    """

    axes: str
    keys: tuple[str, ...]
    init: Callable
    dtype: str | None = None
    trainable: bool = True
    part: Part | None = None

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix, or one for each expert, rather than a vector or the taps of each channel."""
        return len([axis for axis in self.axes.split() if axis not in ("experts", "taps")]) > 1

    @property
    def cast(self) -> bool:
        """Whether every family casts it to the compute dtype before it uses it, if it is a layer's: a trainable matrix,
        except routers, which some families apply in fp32."""
        return self.matrix and self.trainable and not self.dtype and "router" not in self.axes.split()


@dataclass(frozen=True)
class Stack:
    """Identical layers: `layers` are their indices in the checkpoint, evenly spaced, `params` the weights of each."""

    layers: tuple[int, ...]
    params: Mapping[str, Param]


def stacks(kinds: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """The layers of each stack of a model whose layer i is of kind kinds[i]; equal kinds may be stacked.

    Layers that alternate periodically give a stack for each place in the period: [a, b, a, b] gives (0, 2) and (1, 3).
    """
    found, at = [], 0
    while at < len(kinds):
        period, count = _period(kinds[at:])
        found += [tuple(range(at + place, at + period * count, period)) for place in range(period)]
        at += period * count
    return found


def _period(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """The shortest period that covers most of the first kinds, and how often it is there: at least twice, unless it is
    1."""
    best = 1, _repeats(kinds, 1)
    for period in range(2, len(kinds) // 2 + 1):
        if math.prod(best) == len(kinds):
            break
        count = _repeats(kinds, period)
        if count > 1 and period * count > math.prod(best):
            best = period, count
    return best


def _repeats(kinds: Sequence[Hashable], period: int) -> int:
    """How often the first `period` kinds are there, one after the other."""
    same = itertools.takewhile(lambda i: kinds[i] == kinds[i - period], range(period, len(kinds)))
    return (min(period, len(kinds)) + sum(1 for _ in same)) // period


@dataclass(frozen=True, eq=False)  # of one model there is one, and what follows from it is cached by it
class Table:
    """All weights of a model.

    Attributes:
      top: weights of no layer, by name.
      stacks: layers, in order of their first ones.
      dims: the size of each logical axis.
      unused: keys of tensors that checkpoints may have and the model does not use, or, with a "." at their end, what
        such keys begin with.
      inner: tables of models inside, whose trees are in this one's by name.
    """

    top: Mapping[str, Param]
    stacks: tuple[Stack, ...]
    dims: Mapping[str, int]
    unused: tuple[str, ...] = ()
    inner: Mapping[str, "Table"] = field(default_factory=dict)

    def leaves_out(self, key: str) -> bool:
        """Whether a checkpoint may have a tensor of this name that the model does not use."""
        return key in self.unused or key.startswith(tuple(start for start in self.unused if start.endswith(".")))

    @property
    def layers(self) -> list[tuple[int, int]]:
        """(stack, place in it) of each layer, in order."""
        places = (
            (layer, (i, place)) for i, stack in enumerate(self.stacks) for place, layer in enumerate(stack.layers)
        )
        return [where for _, where in sorted(places)]

    @property
    def rounds(self) -> list[tuple[int, ...]]:
        """Indices of the stacks whose layers alternate: a scan goes through them together, a layer of each in turn."""
        found: list[tuple[int, ...]] = []
        for i, stack in enumerate(self.stacks):
            if found and stack.layers[0] < self.stacks[found[-1][0]].layers[-1]:
                found[-1] += (i,)
            else:
                found.append((i,))
        return found


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

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each checkpoint tensor that this leaf is read from."""
        one = self.shape[len(self.unstacked_shape) :]
        return self.param.part.whole(one) if self.param.part else one

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

    Acts as weight + scale * b @ a (LoRA, arXiv:2106.09685), with a magnitude as that sum with rows of these lengths
    (DoRA, arXiv:2402.09353).

    Attributes:
      weight: an array, or a frozen `QuantisedWeight`.
      a: [..., rank, in].
      b: [..., out, rank].
      magnitude: [..., out], DoRA's m; None = plain LoRA.
    """

    weight: Any
    a: Any
    b: Any
    scale: float = field(metadata={"static": True})
    magnitude: Any = None

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
    whole = _sum(w)
    return (whole if w.magnitude is None else whole * row_scales(w)[..., None]).astype(w.weight.dtype)


def _sum(w: LoRAWeight):
    """weight + scale * b @ a, [..., out, in], in fp32 or wider."""
    wide = jnp.promote_types(w.weight.dtype, jnp.float32)
    change = jnp.matmul(w.b.astype(wide), w.a.astype(wide), precision="highest")
    base = dequantise(w.weight, wide) if isinstance(w.weight, QuantisedWeight) else w.weight
    return base + w.scale * change


def row_norms(w: LoRAWeight):
    """Lengths of the rows of weight + scale * b @ a, [..., out], in fp32 or wider, without gradient."""
    return jnp.linalg.norm(jax.lax.stop_gradient(_sum(w)), axis=-1)


def row_scales(w: LoRAWeight):
    """What DoRA multiplies the rows of weight + scale * b @ a by, [..., out]: magnitude / length, of which the length
    carries no gradient (arXiv:2402.09353, section 4.3). A row of zeros stays so."""
    norm = row_norms(w)
    return w.magnitude / jnp.where(norm > 0, norm, 1)


def composite(x) -> bool:
    """Whether a leaf of a parameter tree is not an array, but what `plain` makes one: for `is_leaf`."""
    return isinstance(x, LoRAWeight | QuantisedWeight)


def plain(x):
    """A leaf of a parameter tree as an array: adapters merged, quantised weights as the numbers they stand for."""
    if isinstance(x, LoRAWeight):
        return merged(x)
    return jax.jit(dequantise)(x) if isinstance(x, QuantisedWeight) else x


def leaves(table: Table, at: str = "") -> dict:
    """The parameter tree with a Leaf in place of each array.

    Args:
      at: what their paths begin with.
    """

    def leaf(name, path, p, layers):
        sizes = tuple(table.dims[axis] for axis in p.axes.split())
        shape = sizes if layers is None else (len(layers), *sizes)
        return Leaf(p, f"{at}{path}{name}", shape, layers)

    tree: dict = {name: leaf(name, "", p, None) for name, p in table.top.items()}
    tree["stacks"] = [
        {name: leaf(name, f"stacks.{i}.", p, stack.layers) for name, p in stack.params.items()}
        for i, stack in enumerate(table.stacks)
    ]
    return tree | {name: leaves(each, f"{at}{name}.") for name, each in table.inner.items()}


def leaf_list(table: Table) -> list[Leaf]:
    """The leaves in the order of `jax.tree.leaves` of the parameters."""
    return jax.tree.leaves(leaves(table))


def by_tensor(table: Table) -> list[list[Leaf]]:
    """The leaves, those together that are parts of the same checkpoint tensors, in the order of each first one."""
    together: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in leaf_list(table):
        together.setdefault((leaf.path.rpartition(".")[0], leaf.param.keys[0]), []).append(leaf)
    return list(together.values())


def check_parts(table: Table) -> None:
    """Checks that leaves which share a checkpoint tensor have all of it between them, each entry once.

    Raises:
      ValueError: they do not; names the tensor and the leaves.
    """
    for shared in by_tensor(table):
        if len(shared) == 1 and shared[0].param.part is None:
            continue
        parts = [leaf.param.part for leaf in shared if leaf.param.part]
        alike = {(leaf.param.keys, leaf.param.dtype, leaf.stored_shape) for leaf in shared}
        frames = {(part.width, part.axis, part.transposed, part.dropped) for part in parts}
        spans = sorted((part.start, part.stop) for part in parts)
        width = max((part.width for part in parts), default=0)
        tiled = [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), width]
        if len(parts) < len(shared) or len(alike) > 1 or len(frames) > 1 or not tiled:
            raise ValueError(
                f"{shared[0].param.keys[0]}: {', '.join(leaf.path for leaf in shared)} must be parts of one tensor "
                f"and have all of it, each entry once, got {parts}"
            )


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
    """The parameter tree with a `jax.ShapeDtypeStruct` in place of each array."""
    return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.param.dtype or dtype)), table)


def count(table: Table) -> int:
    """Number of weights in a table."""
    return sum(math.prod(leaf.shape) for leaf in leaf_list(table))
