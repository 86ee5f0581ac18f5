"""Leaves that are read when they are used."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ... import models
from ...core import param
from ...core.parts import Part
from .. import safetensors
from .config_files import save_dtype
from .placing import common_dtype, on_host


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped:
    """A leaf as lazily read tensors of its layers.

    Attributes:
      tensors: tensors by their index along the leading axes.
      dtype: dtype of the layers that `leaf[i]` returns.
      part: the part of each tensor that the leaf has; None = all of it.
    """

    tensors: Mapping[tuple[int, ...], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype
    part: Part | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: int) -> np.ndarray:
        """Layer i, a view of the file if possible."""
        return self.at((i,)).astype(self.dtype, copy=False)

    def at(self, index: tuple[int, ...]) -> np.ndarray:
        """The leaf's entries of one tensor, or of all below an index, as stored, or dequantised."""
        if index not in self.tensors:
            return np.stack([self.at(at) for at in self.below(index)])
        return self.part.take(self.tensors[index]) if self.part else self.tensors[index][...]

    def below(self, index: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The indices of the tensors that begin with an index."""
        return [at for at in self.tensors if at[: len(index)] == index]

    def read(self) -> np.ndarray:
        """All layers, a copy; pages of the files are not kept."""
        host = np.empty(self.shape, self.dtype)
        for index, tensor in self.tensors.items():
            host[index] = self.at(index)
            safetensors.forget(tensor)
        return host


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """A leaf that `save` reads, by `read() -> array`, when it writes it, and does not keep."""

    read: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: np.dtype


def views(tree, tensors: Mapping[str, np.ndarray], keys: Mapping[str, Sequence[str]], dtype):
    """The leaves as `Mapped`, or numpy arrays."""

    def view(leaf):
        held = [tensors[key] for key in keys[leaf.path]]
        wanted = np.dtype(leaf.param.dtype or dtype or common_dtype(held))
        lazy = Mapped(
            dict(zip(np.ndindex(*leaf.unstacked_shape), held, strict=True)), leaf.shape, wanted, leaf.param.part
        )
        return lazy if leaf.unstacked_shape else lazy.at(()).astype(wanted, copy=False)

    return jax.tree.map(view, tree, is_leaf=lambda x: isinstance(x, param.Leaf))


@dataclasses.dataclass(frozen=True, eq=False)
class Cast:
    """A leaf on devices, sharded or not, that is read layer by layer as `save` would write it.

    Attributes:
      array: an array, or what `param.plain` makes one.
      saved: dtype that `save` rounds to.
      dtype: dtype that it is read in after that.
    """

    array: Any
    shape: tuple[int, ...]
    saved: np.dtype
    dtype: np.dtype

    def merged(self) -> Cast:
        """The leaf as an array, adapters merged."""
        if not param.composite(self.array):
            return self
        with _own_mesh(self.array):
            return dataclasses.replace(self, array=param.plain(self.array))

    def __getitem__(self, index):
        """Layer i, or the array itself at (): a view if it is in host memory and needs no cast."""
        x = self.array
        if on_host(x):
            return np.asarray(x)[index].astype(self.saved, copy=False).astype(self.dtype, copy=False)
        with _own_mesh(x):
            return cut(None)(x, index, self.saved).astype(self.dtype)


def cast(config, params, dtype, saved=None):
    """The parameters as `mapped` in this dtype would give those that `save` has written, without copies: as `Cast`.

    Args:
      saved: the dtype in which `save` would write them; None = its default.
    """
    saved = save_dtype(config, params, saved)
    one = lambda leaf, x: Cast(x, tuple(x.shape), *(np.dtype(leaf.param.dtype or to) for to in (saved, dtype)))
    return param.tree_map(one, models.table(config), params)


def _own_mesh(x):
    """A context with the mesh of an array's own devices."""
    sharding = jax.tree.leaves(x)[0].sharding
    own = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return jax.set_mesh(own if isinstance(own, Mesh) else Mesh(np.array([*sharding.device_set]), ("one",)))


@functools.cache
def cut(mesh):
    """Jitted slice of one tensor; on a mesh over several processes the result is replicated."""

    def row(x, index, dtype):
        return x[index].astype(dtype)

    out = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(row, static_argnums=2, out_shardings=out)
