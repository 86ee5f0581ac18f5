"""Layers that families share. Weights are [out, in]; every matmul goes through `linear`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..core.param import Adapted
from ..core.shapes import shaped
from ..parallel import mesh


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A weight staged as [in, out], which decoding reads faster; made once when weights are loaded for generation."""

    weight: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """A weight beside which every row of a batch has one of K changes of low rank, or none; for generation.

    Attributes:
      weight: as `linear` takes it.
      a: [K, rank, in]; b: [K, out, rank], the scale in it.
      index: i32[B], which of them each row has; 0 = none.
    """

    weight: Any
    a: Any
    b: Any
    index: Any


def linear(x, w, bias=None):
    """x @ w^T + bias over the last axis, in x's dtype.

    Tokens are flattened first, which makes the backward pass faster, unless positions are split over devices: to
    flatten those would gather whole rows.
    """
    if isinstance(w, Adapted):
        return linear(x, w.weight, bias) + linear(linear(x, w.a) * w.scale, w.b)
    if isinstance(w, Choice):
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


def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight over the last axis (arXiv:1910.07467), in fp32 or wider, returned in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (wide * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def gated_mlp(x_BTD, w):
    """down(silu(gate x) * up x) (SwiGLU, arXiv:2002.05202); biases where the weights have them."""
    gate = checkpoint_name(linear(x_BTD, w["gate"], w.get("gate_bias")), "mlp_gate_up")
    up = checkpoint_name(linear(x_BTD, w["up"], w.get("up_bias")), "mlp_gate_up")
    return linear(jax.nn.silu(gate) * up, w["down"], w.get("down_bias"))


@shaped
def segment_index(segment_BT):
    """Order of each token inside its segment: 0, 1, ... from where the segment number changes."""
    T = segment_BT.shape[-1]
    t_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), segment_BT.shape)
    first = jnp.ones((*segment_BT.shape[:-1], 1), bool)
    new_BT = jnp.concatenate([first, segment_BT[..., 1:] != segment_BT[..., :-1]], -1)
    return t_BT - jax.lax.cummax(jnp.where(new_BT, t_BT, 0), axis=segment_BT.ndim - 1)
