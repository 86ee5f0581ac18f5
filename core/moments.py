"""Moments of optimisers in fewer bytes: bf16, or 8 bits with a scale for each block.

Between steps a moment is kept narrow; a step widens it to fp32, updates it, and rounds it stochastically. 8-bit states
with a scale per block are those of arXiv:2110.02861; here their numbers are float8_e4m3fn, whose conversion needs no
table. Of second moments the roots are kept, which halves their range in octaves and never rounds one to zero, by which
a step would be divided.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import param, rounding

Dtype = Literal["float32", "bfloat16", "float8"]  # of moments between steps
BLOCK = 128  # entries along the last axis that share a scale, or the largest part of it that divides the axis
SMALLEST = 16  # of a block: shorter ones would need a scale for too few entries, and stay in fp32
LARGEST = 448.0  # of float8_e4m3fn
LEAST = 2.0**-9  # of its numbers above zero
SECOND = ("nu",)  # fields of optimiser states that are means of squares


class Blocks(NamedTuple):
    """A moment in 8 bits: `code` in the shape of the weight, times `scale` [..., blocks], block by block."""

    code: Any
    scale: Any


def widened(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation with everything in fp32, whatever the dtype of weights and gradients."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)

    def update(updates, state, params=None):
        return inner.update(wide(updates), state, None if params is None else wide(params))

    return optax.GradientTransformation(lambda params: inner.init(wide(params)), update)


def block(width: int) -> int:
    """Entries per scale along an axis of this size."""
    return math.gcd(width, BLOCK)


def kept(inner: optax.GradientTransformation, dtype: Dtype, table: param.Table) -> optax.GradientTransformation:
    """The transformation with the moments of matrices in `dtype` between steps, the others in fp32.

    A moment is an array of its state in the place of a weight.
    """
    weights = jax.tree_util.tree_leaves_with_path(param.leaves(table), is_leaf=lambda x: isinstance(x, param.Leaf))
    matrices = {path for path, leaf in weights if leaf.param.matrix}

    def each(fn: Callable, state, step):
        """Applies fn(x, whether it is a second moment, seed) to the moments of matrices."""
        is_leaf = lambda x: isinstance(x, Blocks)
        found, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_leaf)
        out = []
        for i, (path, x) in enumerate(found):
            owner = max((at for at, key in enumerate(path) if hasattr(key, "name")), default=-1)
            if tuple(path[owner + 1 :]) in matrices:
                x = fn(x, getattr(path[owner], "name", "") in SECOND, step * len(found) + i)
            out.append(x)
        return jax.tree.unflatten(tree, out)

    narrow = lambda x, second, seed: encode(x, dtype, second, seed)

    def init(params):
        zero = jax.lax.optimization_barrier(inner.init(params))  # XLA would fold the largest ones for many seconds
        return Kept(jnp.zeros((), jnp.int32), each(narrow, zero, 0))

    def update(updates, state, params=None):
        moments = each(lambda x, second, _: decode(x, second), state.moments, 0)
        updates, moments = inner.update(updates, moments, params)
        step = optax.safe_increment(state.step)
        return updates, Kept(step, each(narrow, moments, step))

    return optax.GradientTransformation(init, update)


class Kept(NamedTuple):
    """The state of an optimiser, with narrow moments; `step` counts updates, as a seed of rounding."""

    step: jax.Array
    moments: Any


def encode(x, dtype: Dtype, second: bool, seed):
    """Rounds a moment [..., width] stochastically; in float8 it becomes `Blocks`, unless its blocks would be too short.

    Args:
      second: whether it is a mean of squares, of which the root is kept.
    """
    if dtype == "bfloat16":
        return rounding.to_bfloat16(x, seed)
    size = block(x.shape[-1])
    if size < SMALLEST:
        return x
    x = jnp.sqrt(x) if second else x
    blocks = x.reshape(*x.shape[:-1], -1, size)
    scale = jnp.max(jnp.abs(blocks), -1) / LARGEST
    part = blocks / jnp.where(scale > 0, scale, 1)[..., None]
    code = rounding.to_float8(part, seed)
    if second:
        code = jnp.where(part > 0, jnp.maximum(code.astype(jnp.float32), LEAST), 0).astype(code.dtype)
    return Blocks(code.reshape(x.shape), scale)


def decode(x, second: bool):
    """The moment in fp32."""
    if not isinstance(x, Blocks):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))
    size = x.code.shape[-1] // x.scale.shape[-1]
    wide = x.code.astype(jnp.float32).reshape(*x.scale.shape, size) * x.scale[..., None]
    wide = wide.reshape(x.code.shape)
    return jnp.square(wide) if second else wide
