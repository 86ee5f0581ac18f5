"""Products of few rows with weights in blocks, on CPUs: weights are read once, in the dtype in which they are kept.

XLA's own products of few rows run at a fraction of what a CPU reads and multiplies, widen weights in memory first, and
sum in an order that depends on the number of rows. `native/blocked.c` does none of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...core.quantised import NF4, QuantisedWeight
from . import native

OUTPUTS = 32  # of a block
ROWS = jnp.float32, jnp.bfloat16  # dtypes of rows that `native` reads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocked:
    """A weight [out, in] as [out / OUTPUTS, in, OUTPUTS]; the last block is filled up with zeros.

    Attributes:
      weight: in fp32; two entries along `in` of bf16 in a u32, of which XLA never makes fp32; or the code of a
        `QuantisedWeight`: two entries a byte along `in` if it has 4 bits.
      scale: f32[out / OUTPUTS, groups of entries, OUTPUTS] of the code; None = no code.
      outputs: its size `out`.
      active: bool[S], which rows of [S, in] are multiplied; None = all.
    """

    weight: Any
    scale: Any
    outputs: int = field(metadata={"static": True})
    active: Any = None


def blocks(w) -> Blocked:
    """The weight [out, in], an array or a `QuantisedWeight`, in blocks."""
    if isinstance(w, QuantisedWeight):
        scale = w.scale / 127 if w.kind == "int8" else w.scale
        return Blocked(_rows_apart(w.code), _rows_apart(scale), w.shape[0])
    if w.dtype == jnp.bfloat16 and w.shape[1] % 2:
        w = w.astype(jnp.float32)
    if w.dtype == jnp.bfloat16:
        w = jax.lax.bitcast_convert_type(w.reshape(len(w), -1, 2), jnp.uint32)
    return Blocked(_rows_apart(w), None, w.shape[0])


def _rows_apart(w_FD):
    F, D = w_FD.shape
    return jnp.pad(w_FD, ((0, -F % OUTPUTS), (0, 0))).reshape(-1, OUTPUTS, D).swapaxes(1, 2)


def rows(w: Blocked, index, dtype):
    """The rows w[index], [..., in]; the weight has no code."""
    return _floats(w.weight[index // OUTPUTS, :, index % OUTPUTS]).reshape(*index.shape, -1).astype(dtype)


def _floats(x):
    """Numbers in fp32, or [..., 2] those in bf16 of each u32."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint32 else x


def of_rows(weights, active_S):
    """The weights, a tree, such that products with rows [S, in] compute the active ones alone; others give 0."""
    is_leaf = lambda x: isinstance(x, Blocked)
    return jax.tree.map(lambda w: replace(w, active=active_S) if is_leaf(w) else w, weights, is_leaf=is_leaf)


def product(x_SD, w: Blocked):
    """x @ w^T, f32[S, out]. If `native.ready`, the bits of a row depend neither on S nor on other rows."""
    return products(x_SD, [w])[0]


def products(x_SD, weights: Sequence[Blocked]) -> Sequence:
    """`product` with each of some weights, in one call."""
    if not native.ready():
        return [_by_xla(x_SD, w) for w in weights]
    x_SD = x_SD if x_SD.dtype == jnp.bfloat16 else x_SD.astype(jnp.float32)
    active_S = jnp.ones(len(x_SD), bool) if weights[0].active is None else weights[0].active
    kept = [x for w in weights for x in (w.weight, w.scale) if x is not None]
    made = [jax.ShapeDtypeStruct((len(x_SD), w.outputs), jnp.float32) for w in weights]
    return jax.ffi.ffi_call("areax_blocked", made)(x_SD, active_S, *kept)


def silu_product(gate, up, active_S=None):
    """silu(gate) * up over the last axis, in f32 or bf16, computed in f32; 0 in rows that are not active."""
    if not native.ready():
        return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
    gate_SF, up_SF = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
    active_S = jnp.ones(len(gate_SF), bool) if active_S is None else active_S
    made = jax.ShapeDtypeStruct(gate_SF.shape, gate_SF.dtype)
    return jax.ffi.ffi_call("areax_silu_product", made)(gate_SF, up_SF, active_S).reshape(gate.shape)


def _by_xla(x_SD, w: Blocked):
    w_FDN = w.weight
    if w_FDN.dtype == jnp.uint8:
        pair_FD2N = jnp.stack([w_FDN & 15, w_FDN >> 4], 2)
        w_FDN = jnp.asarray(NF4)[pair_FD2N.reshape(len(w_FDN), -1, OUTPUTS)]
    if w_FDN.dtype == jnp.uint32:
        w_FDN = _floats(w_FDN).swapaxes(2, 3).reshape(len(w_FDN), -1, OUTPUTS)
    w_FDN = w_FDN.astype(jnp.float32)
    if w.scale is not None:
        by_group = w_FDN.reshape(*w.scale.shape[:2], -1, OUTPUTS) * w.scale[:, :, None]
        w_FDN = by_group.reshape(w_FDN.shape)
    y_SFN = jnp.einsum("SD,FDN->SFN", x_SD, w_FDN, preferred_element_type=jnp.float32)
    return y_SFN.reshape(len(x_SD), -1)[:, : w.outputs]
