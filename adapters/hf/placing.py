"""A leaf's array on devices, read from its tensors piece by piece."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np

from ...core import param
from .. import safetensors

PIECE, LARGE = 1 << 22, 1 << 25  # numbers that a thread reads at once, and that are on the host at once


def place(leaf: param.Leaf, tensors: Sequence[np.ndarray], dtype, sharding=None) -> jax.Array:
    """Assembles a leaf's array from its tensors, in the order of its keys; each device reads only its shard, and
    dequantises it piece by piece."""
    stored = dict(zip(np.ndindex(*leaf.unstacked_shape), tensors, strict=True))
    wanted = leaf.param.dtype or dtype or common_dtype(tensors)
    unstacked, part = len(leaf.unstacked_shape), leaf.param.part

    def read(*cut: slice, alias: bool = False) -> np.ndarray:
        shape = [one.stop - one.start for one in cut]
        host = _empty(shape, np.dtype(wanted), alias)

        def fill(at: tuple[int, ...], piece: tuple[slice, ...]) -> None:
            tensor = stored[tuple(one.start + i for one, i in zip(cut, at, strict=False))]
            there = tuple(
                slice(all_.start + one.start, all_.start + one.stop) for all_, one in zip(rest, piece, strict=True)
            )
            index: tuple[int | slice, ...] = (*at, *piece)
            with np.errstate(over="ignore"):  # such numbers of float64 are refused with those that are not finite
                host[index] = part.take(tensor, there) if part else tensor[there]
            safetensors.forget(tensor)

        rest, pieces = cut[unstacked:], _pieces(shape[unstacked:], PIECE)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda job: fill(*job), itertools.product(np.ndindex(*shape[:unstacked]), pieces)))
        return host

    if sharding is not None:
        shard = functools.cache(lambda *bounds: read(*(slice(*one) for one in bounds)))  # devices may hold the same
        bounds = lambda index: [one.indices(size)[:2] for one, size in zip(index, leaf.shape, strict=True)]
        made = jax.make_array_from_callback(leaf.shape, sharding, lambda index: shard(*bounds(index)))
        return made.block_until_ready()
    first, *others = _pieces(leaf.shape, LARGE)
    if not others:
        return jax.device_put(read(*first)).block_until_ready()
    # One piece at a time: on a CPU the parameters are in the memory that is read into, too.
    array = jax.numpy.zeros(leaf.shape, wanted)
    for piece in (first, *others):
        array = _insert(array.block_until_ready(), read(*piece, alias=True), [one.start for one in piece])
    return array.block_until_ready()


def _empty(shape: Sequence[int], dtype: np.dtype, alias: bool) -> np.ndarray:
    """Memory of numpy, aligned such that JAX may alias it, or such that it has to copy it: aliased memory cannot be
    donated to a step."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 2 * 64, np.uint8)
    start = -memory.ctypes.data % 64 + (0 if alias else dtype.itemsize)
    return memory[start : start + size].view(dtype).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(array: jax.Array, piece: jax.Array, start: list[int]) -> jax.Array:
    """Overwrites a piece of the array in place; as integers, because XLA copies 16-bit floats one by one on a CPU."""
    bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.dynamic_update_slice(bits(array), bits(piece), start), array.dtype)


def _pieces(shape: Sequence[int], most: int) -> list[tuple[slice, ...]]:
    """Slices that divide an array along its first axes into pieces of up to `most` numbers, or of single rows."""
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    if row > most and len(shape) > 1:
        return [(slice(i, i + 1), *rest) for i in range(shape[0]) for rest in _pieces(shape[1:], most)]
    step, others = max(1, most // max(1, row)), [slice(0, size) for size in shape[1:]]
    return [(slice(at, min(at + step, shape[0])), *others) for at in range(0, shape[0], step)]


def common_dtype(tensors: Sequence[np.ndarray]) -> np.dtype:
    """The narrowest dtype that holds all; numpy has no rule for bfloat16 beside float16, which only float32 holds."""
    dtypes, halves = {x.dtype for x in tensors}, {np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)}
    return np.result_type(*(dtypes - halves | {np.dtype(np.float32)} if halves <= dtypes else dtypes))


def on_host(x) -> bool:
    """Whether the array is unsharded in host memory, so that numpy can view it without a copy."""
    return isinstance(x, np.ndarray) or (len(x.devices()) == 1 and next(iter(x.devices())).platform == "cpu")
