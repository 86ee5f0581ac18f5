"""LoRA adapters of an engine, by name; requests in the same batch may use different adapters or none.

All loaded adapters are stacked in one array per weight, from which a decode step gathers each slot's by index
(`MultiLoRAWeight`); index 0 means no adapter. While none is loaded, the compiled programs contain no LoRA.
"""

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...core.param import Table
from ...models.lora import Lora

Factors = list[dict[str, tuple[Any, Any]]]  # per layer {weight: (a, b with the scale folded in)}

PLACES = 4  # initial capacity, including index 0; doubles when full
EXPERTS = "expert_"  # prefix of weights that are computed per expert, not per row of the batch


@dataclass(eq=False)
class Loaded:
    """One adapter.

    Attributes:
      path: the directory it was loaded from.
      index: its index in the stacked arrays.
      users: number of requests in the engine that use it.
      number: of its own among all that were ever loaded; those before it may have had its index.
    """

    name: str
    path: str
    index: int
    users: int = 0
    number: int = field(default_factory=itertools.count(1).__next__)


def factors(spec: Lora, tree, base: Table, dtype) -> Factors:
    """Converts a tree of `lora.table` to the engine's layout, in host memory: a [rank, in] and b [out, rank] of each
    layer's weights.

    Args:
      base: the model's table, without adapters.

    Raises:
      ValueError: it adapts expert weights, or is a DoRA adapter.
    """
    if spec.dora:
        raise ValueError(
            "adapters: this engine supports no DoRA adapters by name, got use_dora; load the merged weights, of "
            "areax convert ADAPTER MERGED --merge"
        )
    names = {name.removesuffix("_a") for stack in tree["stacks"] for name in stack if name.endswith("_a")}
    if experts := sorted(name for name in names if name.startswith(EXPERTS)):
        raise ValueError(
            f"adapters: this engine supports none for expert weights, got {', '.join(experts)}; train other "
            "targets, or load the merged weights"
        )

    stacks = jax.tree.map(np.asarray, tree["stacks"])  # a few large copies instead of many small computations

    def layer(stack: dict[str, np.ndarray], i: int):
        pair = lambda name: (stack[f"{name}_a"][i].astype(dtype), (stack[f"{name}_b"][i] * spec.scale).astype(dtype))
        return {name: pair(name) for name in sorted(names) if f"{name}_a" in stack}

    return [layer(stacks[i], place) for i, place in base.layers]


class Adapters:
    """The stacked arrays of all adapters that are loaded or still in use, whole on each device of a mesh; owned by one
    thread.

    Attributes:
      factors: a [K, rank, in] and b [K, out, rank] for K indices; None while none is taken.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        self.factors: Factors | None = None
        self._everywhere = NamedSharding(mesh, P())
        self._free: list[int] = []
        self._taken: set[int] = set()

    def check(self, new: Factors) -> None:
        """Raises ValueError if other adapters are loaded, with another rank or other target weights."""
        if self.factors is not None and _shapes(new) != [
            {name: tuple(x.shape[1:] for x in pair) for name, pair in layer.items()} for layer in self.factors
        ]:
            raise ValueError(
                "adapters: all loaded adapters must have the same rank and targets; unload the others first"
            )

    def add(self, new: Factors) -> int:
        """Adds an adapter that was `check`ed, and returns its index."""
        if self.factors is None:
            self.factors, self._free = self._places(new, PLACES), [*range(1, PLACES)]
        if not self._free:
            capacity = len(self._taken) + 1
            self.factors = _joined(self.factors, self._places(new, capacity))
            self._free = [*range(capacity, 2 * capacity)]
        index = self._free.pop(0)
        self.factors = _put(self.factors, new, index)
        self._taken.add(index)
        return index

    def remove(self, index: int) -> None:
        self._taken.discard(index)
        self._free.append(index)
        if not self._taken:
            self.factors = None

    def _places(self, like: Factors, count: int) -> Factors:
        """Zeros for so many adapters."""

        def zeros(x: np.ndarray) -> jax.Array:
            places = np.zeros((count, *x.shape), x.dtype)
            return jax.make_array_from_callback(places.shape, self._everywhere, lambda index: places[index])

        return jax.tree.map(zeros, like)


def _shapes(factors: Factors) -> list:
    return jax.tree.map(jnp.shape, factors)


@jax.jit
def _joined(factors: Factors, more: Factors) -> Factors:
    return jax.tree.map(lambda *x: jnp.concatenate(x), factors, more)


@functools.partial(jax.jit, donate_argnums=0)
def _put(factors: Factors, new: Factors, index) -> Factors:
    return jax.tree.map(lambda places, x: places.at[index].set(x), factors, new)
