"""The linear layer, used for all matmuls with a weight. Weights are [out, in]."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...core import hardware
from ...core.param import LoRAWeight, row_scales
from ...parallel import mesh
from . import blocked
from .blocked import Blocked

WIDE = 512  # least size of both axes of a weight for `_wide_product`; narrower ones lose more by transposing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A weight stored as [in, out], which decodes faster; created once when weights are loaded for generation."""

    weight: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MultiLoRAWeight:
    """A weight with K LoRA adapters; each row of a batch uses one or none. For generation.

    Attributes:
      weight: any weight that `linear` accepts.
      a: [K, rank, in]; b: [K, out, rank], scale included.
      index: i32[B], the adapter of each row; 0 = none.
    """

    weight: Any
    a: Any
    b: Any
    index: Any


def linear(x, w, bias=None):
    """x @ w^T + bias over the last axis, in x's dtype.

    Flattens tokens first, which makes the backward pass faster, unless positions are sharded: flattening would then
    gather whole rows.
    """
    if isinstance(w, LoRAWeight):
        if w.magnitude is None:
            return linear(x, w.weight, bias) + linear(linear(x, w.a) * w.scale, w.b)
        y = linear(x, w.weight) + linear(linear(x, w.a) * w.scale, w.b)
        scales = row_scales(w)[(None,) * (y.ndim - 1)]  # not in bf16, which does not hold those close to 1
        return _with_bias((y * scales).astype(x.dtype), bias, x)
    if isinstance(w, MultiLoRAWeight):
        plain, x = linear(x, w.weight, bias), x.astype(w.a.dtype)
        within = jnp.einsum("BTI,BRI->BTR", x, w.a[w.index])
        change = jnp.einsum("BTR,BOR->BTO", within, w.b[w.index])
        return jnp.where((w.index > 0)[:, None, None], plain + change.astype(plain.dtype), plain)
    flat = x if mesh.size("cp") > 1 else x.reshape(-1, x.shape[-1])
    if isinstance(w, Blocked):
        y = blocked.product(flat, w).astype(x.dtype)
    elif isinstance(w, Transposed):
        y = flat @ w.weight.astype(x.dtype)
    else:
        wide = flat.ndim == 2 and min(w.shape) >= WIDE and hardware.platform() == "cpu"
        y = (_wide_product if wide else _product)(flat, w.astype(x.dtype))
    return _with_bias(y, bias, x)


def linears(x, w, names: Sequence[str]) -> list:
    """`linear` of the named weights, each with its bias if there is one; those in blocks are multiplied in one call."""
    biases = [w.get(f"{name}_bias") for name in names]
    if not all(isinstance(w[name], Blocked) for name in names):
        return [linear(x, w[name], bias) for name, bias in zip(names, biases, strict=True)]
    flat = x.reshape(-1, x.shape[-1])
    each = zip(blocked.products(flat, [w[name] for name in names]), biases, strict=True)
    return [_with_bias(y.astype(x.dtype), bias, x) for y, bias in each]


def _with_bias(y, bias, x):
    """y + bias, in the shape of x but for the last axis."""
    if bias is not None:
        y = y + bias.astype(x.dtype)[(None,) * (y.ndim - 1)]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _product(x, w_FD):
    """x @ w^T over the last axis."""
    return jax.lax.dot_general(x, w_FD, (((x.ndim - 1,), (1,)), ((), ())))


@jax.custom_vjp
def _wide_product(x_AD, w_FD):
    """`_product`, whose weight's gradient is a product of two matrices as they lie in memory: on a CPU, XLA leaves
    products over the rows of both to a slower library. The narrower one is transposed first."""
    return _product(x_AD, w_FD)


def _wide_product_backward(kept, dy_AF):
    fixed = jax.lax.optimization_barrier  # what computes them would otherwise run again, in the transposed order
    w_FD, (x_AD, dy_AF) = kept[1], fixed((kept[0], dy_AF))
    F, D = w_FD.shape
    dw_FD = fixed(dy_AF.T) @ x_AD if F <= D else fixed(fixed(x_AD.T) @ dy_AF).T
    return dy_AF @ w_FD, dw_FD


_wide_product.defvjp(lambda x_AD, w_FD: (_product(x_AD, w_FD), (x_AD, w_FD)), _wide_product_backward)
