"""Adapters (LoRA) beside the weights of an engine, by name: one request may use one, its neighbour another or none.

All that are loaded lie in one array a weight, of which a decode step takes each slot's own by its index
(`MultiLoRAWeight`); index 0 is that of no adapter. While none is loaded the programs are those of the weights alone.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.param import Table
from ...models.lora import Lora

Factors = list[dict[str, tuple[Any, Any]]]  # of each layer {weight: (a, b with the scale in it)}

PLACES = 4  # to begin with, that of no adapter included; doubles
EXPERTS = "expert_"  # names of weights that are computed by expert, not by row of the batch, begin so


@dataclass(eq=False)
class Loaded:
    """One adapter.

    Attributes:
      path: the directory it came from.
      index: its place.
      users: requests in the engine that use it.
    """

    name: str
    path: str
    index: int
    users: int = 0


def stage(spec: Lora, tree, base: Table, dtype, device) -> Factors:
    """A tree of `lora.table` as the engine reads it: a [rank, in] and b [out, rank] of each layer's weights.

    Args:
      base: the model's own table.

    Raises:
      ValueError: it changes weights of experts.
    """
    names = {name.removesuffix("_a") for stack in tree["stacks"] for name in stack if name.endswith("_a")}
    if experts := sorted(name for name in names if name.startswith(EXPERTS)):
        raise ValueError(
            f"adapters: this engine has none for the weights of experts, got {', '.join(experts)}; train other "
            "targets, or load the merged weights"
        )

    def layers(stack: dict[str, np.ndarray], depth: int) -> Factors:
        a, b = ({name: stack[f"{name}_{part}"] for name in sorted(names) if f"{name}_a" in stack} for part in "ab")
        one = lambda name, i: (a[name][i].astype(dtype), (b[name][i] * spec.scale).astype(dtype))
        return [{name: one(name, i) for name in a} for i in range(depth)]

    stacks = jax.tree.map(np.asarray, tree["stacks"])  # a few large copies in place of many small computations
    each = zip(stacks, base.stacks, strict=True)
    return jax.device_put([layer for stack, its in each for layer in layers(stack, len(its.layers))], device)


class Adapters:
    """The places of those that are loaded, or that requests still use; belongs to one thread.

    Attributes:
      factors: of all places, a [K, rank, in] and b [K, out, rank]; None while all are free.
    """

    def __init__(self):
        self.factors: Factors | None = None
        self._free: list[int] = []
        self._taken: set[int] = set()

    def add(self, staged: Factors) -> int:
        """The place that it got.

        Raises:
          ValueError: there are others, which have another rank or change other weights.
        """
        if self.factors is None:
            self.factors, self._free = _places(staged, PLACES), [*range(1, PLACES)]
        elif _shapes(staged) != _shapes(jax.tree.map(lambda x: x[0], self.factors)):
            raise ValueError(
                "adapters: all that are loaded must have one rank and change the same weights; unload those"
            )
        if not self._free:
            have = len(self._taken) + 1
            self.factors = jax.tree.map(lambda *x: jnp.concatenate(x), self.factors, _places(staged, have))
            self._free = [*range(have, 2 * have)]
        index = self._free.pop(0)
        self.factors = _put(self.factors, staged, index)
        self._taken.add(index)
        return index

    def remove(self, index: int) -> None:
        self._taken.discard(index)
        self._free.append(index)
        if not self._taken:
            self.factors = None


def _shapes(factors: Factors) -> list:
    return jax.tree.map(jnp.shape, factors)


def _places(like: Factors, count: int) -> Factors:
    return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)


@functools.partial(jax.jit, donate_argnums=0)
def _put(factors: Factors, staged: Factors, index) -> Factors:
    return jax.tree.map(lambda places, x: places.at[index].set(x), factors, staged)
