"""Rotary position embedding (arXiv:2104.09864), half-split as in Hugging Face checkpoints."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ...core.shapes import shaped


@dataclass(frozen=True)
class Rope:
    """Base frequency and scaling: "default" (none), "linear" (positions / factor) or "llama3" (by wavelength)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


NEEDED: dict[str, tuple[str, ...]] = {  # options of each kind of scaling in a config.json
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def from_hf(hf: dict) -> Rope:
    """Reads a config.json, in the new spelling (`rope_parameters`) or the old (`rope_theta`, `rope_scaling`).

    Raises:
      ValueError: a kind of scaling that is not implemented, or lacks an option that it needs; names it.
    """
    scaling = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(scaling.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be 1, got {partial}")
    if kind not in NEEDED:
        raise ValueError(
            f"config.json: rope_type must be default, linear or llama3, got {kind!r}, which is not implemented"
        )
    if missing := [name for name in NEEDED[kind] if name not in scaling]:
        raise ValueError(f"config.json: rope_type {kind} needs {missing[0]}, got none")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(scaling["factor"]))
    return Rope(
        theta, kind, float(scaling["factor"]), float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]), int(scaling["original_max_position_embeddings"]),
    )  # fmt: skip


def to_hf(rope: Rope) -> dict:
    """The rope options of a config.json, in both spellings."""
    scaling: dict = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
    }


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular frequencies in radians per position, f64[head_dim / 2]."""
    freq = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        # Long wavelengths are divided by the factor, short ones kept, those between interpolated.
        low, high = rope.low_freq_factor, rope.high_freq_factor
        turns = rope.original_context * freq / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return freq * (keep + (1 - keep) / rope.factor)
    return freq


@shaped
def tables(position_BT, rope: Rope, head_dim: int):
    """(cos, sin) of the rotation angles, each f32[B, T, head_dim / 2]."""
    freq = jnp.asarray(frequencies(rope, head_dim), jnp.float32)
    angle_BTP = position_BT[..., None].astype(jnp.float32) * freq[None, None]
    return jnp.cos(angle_BTP), jnp.sin(angle_BTP)


@shaped
def rotate(x_BTNH, cos_BTP, sin_BTP):
    """Rotates x by its position, in fp32 or wider; returns x's dtype."""
    cos_BT1P, sin_BT1P = cos_BTP[..., None, :], sin_BTP[..., None, :]
    first, second = jnp.split(x_BTNH, 2, -1)
    out = jnp.concatenate([first * cos_BT1P - second * sin_BT1P, second * cos_BT1P + first * sin_BT1P], -1)
    return out.astype(x_BTNH.dtype)
