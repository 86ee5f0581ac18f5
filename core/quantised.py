"""Frozen weights in 8 or 4 bits, with a scale per 64 entries: bases of adapters (QLoRA, arXiv:2305.14314).

Rounded once, to the nearest, when the base is read; widened layer by layer where they are used, so that a layer at a
time is in the dtype of the computation. They get no gradient.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .checks import one_of

Kind = Literal["int8", "nf4"]
BLOCK = 64  # entries along the last axis that share a scale, or the largest part of it that divides the axis
SMALLEST = 16  # of a block
# Quantiles of a normal distribution, with an exact zero, scaled to [-1, 1]: appendix E of the paper.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight:
    """A frozen weight [..., in], a leaf of the parameter tree in the weight's place.

    Attributes:
      code: i8[..., in], or two entries a byte, u8[..., in / 2].
      scale: f32[..., blocks]: the largest magnitude of each block.
      dtype: of the weight that it stands for.
    """

    code: Any
    scale: Any
    kind: Kind = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.code.shape[:-1], self.code.shape[-1] * (2 if self.kind == "nf4" else 1))


def block(width: int) -> int:
    """Entries per scale along an axis of this size; 0 if it is left as it is, because blocks would be too short."""
    size = math.gcd(width, BLOCK)
    return size if size >= SMALLEST else 0


def quantise(w, kind: Kind):
    """The weight in 8 or 4 bits; as it is if its blocks would be too short."""
    one_of("quantise: kind", kind, Kind)
    size = block(w.shape[-1])
    if not size:
        return w
    blocks = w.astype(jnp.float32).reshape(*w.shape[:-1], -1, size)
    scale = jnp.max(jnp.abs(blocks), -1)
    part = blocks / jnp.where(scale > 0, scale, 1)[..., None]
    if kind == "int8":
        return QuantisedWeight(jnp.round(part * 127).astype(jnp.int8).reshape(w.shape), scale, kind, w.dtype)
    nearest = jnp.searchsorted((NF4[1:] + NF4[:-1]) / 2, part).astype(jnp.uint8)
    pairs = nearest.reshape(*w.shape[:-1], -1, 2)
    return QuantisedWeight(pairs[..., 0] | pairs[..., 1] << 4, scale, kind, w.dtype)


def dequantise(w: QuantisedWeight, dtype=None):
    """The numbers that a quantised weight stands for, in the given dtype, or in that of the weight."""
    if w.kind == "int8":
        part = w.code.astype(jnp.float32) / 127
    else:
        pairs = jnp.stack([w.code & 15, w.code >> 4], -1)
        part = jnp.asarray(NF4)[pairs.reshape(w.shape)]
    size = w.shape[-1] // w.scale.shape[-1]
    wide = part.reshape(*w.scale.shape, size) * w.scale[..., None]
    return wide.reshape(w.shape).astype(dtype or w.dtype)


def widened(weights: Mapping[str, Any], dtype) -> dict[str, Any]:
    """One layer's weights with quantised ones, also those under adapters, in the given dtype."""
    is_leaf = lambda x: isinstance(x, QuantisedWeight)
    return jax.tree.map(lambda x: dequantise(x, dtype) if is_leaf(x) else x, dict(weights), is_leaf=is_leaf)
