"""The linear layer, used for all matmuls with a weight. Weights are [out, in]."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...core.param import LoRAWeight
from ...parallel import mesh


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
        return linear(x, w.weight, bias) + linear(linear(x, w.a) * w.scale, w.b)
    if isinstance(w, MultiLoRAWeight):
        plain, x = linear(x, w.weight, bias), x.astype(w.a.dtype)
        within = jnp.einsum("BTI,BRI->BTR", x, w.a[w.index])
        change = jnp.einsum("BTR,BOR->BTO", within, w.b[w.index])
        return jnp.where((w.index > 0)[:, None, None], plain + change.astype(plain.dtype), plain)
    flat = x if mesh.size("cp") > 1 else x.reshape(-1, x.shape[-1])
    if isinstance(w, Transposed):
        y = flat @ w.weight.astype(x.dtype)
    else:
        y = jax.lax.dot_general(flat, w.astype(x.dtype), (((flat.ndim - 1,), (1,)), ((), ())))
    if bias is not None:
        y = y + bias.astype(x.dtype)[(None,) * (flat.ndim - 1)]
    return y.reshape(*x.shape[:-1], y.shape[-1])
