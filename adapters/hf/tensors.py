"""Parameters to tensors by checkpoint key, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from ... import models
from ...core import param
from ...models import mtp, wrappers
from .. import safetensors
from .config_files import save_dtype
from .lazy import Deferred, Mapped, cut
from .matching import complaint
from .placing import on_host


def host_copy(config, params, dtype=None):
    """Copies the parameters to numpy arrays in the dtype that `save` would write, with each `param.LoRAWeight` merged;
    the originals may be donated afterwards.

    With several processes all must call it, as `save`; process 0 gets the arrays, the others a tree of None.
    """
    return copied(models.table(config), params, save_dtype(config, params, dtype))


def copied(table: param.Table, params, dtype):
    """`host_copy` for any table."""

    def copy(leaf, x):
        host = np.empty(leaf.shape, leaf.param.dtype or dtype) if jax.process_index() == 0 else None
        for index, row in zip(np.ndindex(*leaf.unstacked_shape), _rows(leaf, x, dtype), strict=True):
            if host is not None:
                host[index] = row
        return host

    return param.tree_map(copy, table, params)


@dataclass(frozen=True)
class Part:
    """Tensors to write: all of a model's, or the part that a process has of them.

    Attributes:
      specs: shape and dtype of all by checkpoint key, in the order of `to_tensors`.
      arrays: those of this part, in that order.
      dtype: in which they are written.
      count: parts that there are.
    """

    specs: Mapping[str, jax.ShapeDtypeStruct]
    arrays: Iterable[np.ndarray]
    dtype: np.dtype
    count: int = 1


def host_part(config, params, dtype=None) -> Part:
    """Copies this process's part (`safetensors.split`) of what `host_copy` copies to numpy arrays, as tensors.

    All processes must call it: they gather one tensor at a time, because JAX gathers to no single one of them, and each
    keeps its own.
    """
    dtype, count = save_dtype(config, params, dtype), jax.process_count()
    specs, arrays = with_copies(config, params, dtype)
    entries = {name: safetensors.describe(name, spec) for name, spec in specs.items()}
    own = safetensors.split(entries, count)[jax.process_index()]
    return Part(specs, [np.array(x) for name, x in zip(specs, arrays, strict=True) if name in own], dtype, count)


def to_tensors(
    config, params, dtype, fused_experts: bool = False
) -> tuple[dict[str, jax.ShapeDtypeStruct], Iterator[np.ndarray]]:
    """(shape and dtype by checkpoint key, iterator over the arrays in that order, fetched lazily).

    Args:
      fused_experts: as `save`.

    Raises:
      ValueError: the parameters do not match the config; names them.
    """
    table = models.table(config)
    return tensors_of(wrappers.with_fused_experts(table) if fused_experts else table, config.prefix, params, dtype)


def with_copies(
    config, params, dtype, fused_experts: bool = False
) -> tuple[dict[str, jax.ShapeDtypeStruct], Iterator[np.ndarray]]:
    """`to_tensors`, and behind them the copies of some that checkpoints have (`models.mtp.copies`)."""
    specs, arrays = to_tensors(config, params, dtype, fused_experts)
    leaves = {leaf.path: leaf for leaf in param.leaf_list(models.table(config))}
    twice = {key: leaves[name] for key, name in mtp.copies(config).items()}
    more = {key: jax.ShapeDtypeStruct(leaf.shape, leaf.param.dtype or dtype) for key, leaf in twice.items()}
    again = (_rows(leaf, params[leaf.path], dtype) for leaf in twice.values())
    return specs | more, itertools.chain(arrays, itertools.chain.from_iterable(again))


def tensors_of(table: param.Table, prefix: str, params, dtype, where: str = "save"):
    """`to_tensors` for any table; zeros where no leaf has a part of a tensor."""
    leaves = param.leaf_list(table)
    arrays = tree_leaves_with_path(params, is_leaf=param.composite)
    found = {keystr(path, simple=True, separator="."): x for path, x in arrays}
    paths = [leaf.path for leaf in leaves]
    missing, unexpected = [path for path in paths if path not in found], [path for path in found if path not in paths]
    if missing or unexpected:
        raise ValueError(f"{where}: the parameters must match the config, got {complaint(missing, unexpected)}")
    for leaf in leaves:
        if tuple(found[leaf.path].shape) != leaf.shape:
            raise ValueError(f"{where}: {leaf.path} must be {list(leaf.shape)}, got {list(found[leaf.path].shape)}")
    shared = param.by_tensor(table)
    spec = lambda leaf: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.param.dtype or dtype)
    specs = {spelt[0]: spec(leaf) for leaf, *_ in shared for spelt in leaf.keys(prefix).values()}
    wholes = (_wholes(parts, [found[leaf.path] for leaf in parts], dtype) for parts in shared)
    return specs, itertools.chain.from_iterable(wholes)


def _wholes(leaves: Sequence[param.Leaf], arrays: Sequence, dtype) -> Iterator[np.ndarray]:
    """The tensors that these leaves are the parts of, on the host, one at a time in the order of their keys."""
    rows = [_rows(leaf, x, dtype) for leaf, x in zip(leaves, arrays, strict=True)]
    parts = [leaf.param.part for leaf in leaves if leaf.param.part]
    if not parts:  # nothing holds a tensor while the next is made
        yield from rows[0]
        return
    for row in zip(*rows, strict=True):
        whole = np.zeros(leaves[0].stored_shape, row[0].dtype)
        for part, x in zip(parts, row, strict=True):
            part.put(whole, x)
        yield whole


def _rows(leaf: param.Leaf, x, dtype) -> Iterator[np.ndarray]:
    """The leaf's entries of each tensor on the host, in the order of its keys; views if it is already there."""
    wanted = jax.numpy.dtype(leaf.param.dtype or dtype)
    indices = list(np.ndindex(*leaf.unstacked_shape))
    if isinstance(x, Mapped):
        for index in indices:
            yield _narrowed(leaf, x.at(index), wanted)
            for at in [index] if index in x.tensors else x.below(index):
                safetensors.forget(x.tensors[at])
        return
    x = param.plain(x.read() if isinstance(x, Deferred) else x)
    if on_host(x):
        host = np.asarray(x)
        yield from (_narrowed(leaf, host[index], wanted) for index in indices)
        return
    # Cast on the device, one tensor at a time, fetching the next while the last is written.
    ahead = _fetch(x, indices[0], wanted)
    for index in indices[1:]:
        row, ahead = ahead, _fetch(x, index, wanted)
        yield np.asarray(row)
    yield np.asarray(ahead)


def _narrowed(leaf: param.Leaf, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An array in another dtype; ValueError if a number is too large for float16."""
    with np.errstate(over="ignore"):
        narrow = x.astype(dtype, copy=False)
    if dtype == np.float16 != x.dtype and safetensors.count_nonfinite(narrow) > np.count_nonzero(~np.isfinite(x)):
        raise ValueError(f"save: {leaf.path} has numbers that float16 does not hold; write it in bfloat16")
    return narrow


def _fetch(x, index: tuple[int, ...], dtype) -> jax.Array:
    row = cut(None if x.is_fully_addressable else x.sharding.mesh)(x, index, dtype)
    row.copy_to_host_async()
    return row
