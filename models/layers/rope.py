"""Rotary position embedding (arXiv:2104.09864), half-split as in Hugging Face checkpoints."""

import math
import sys
from dataclasses import dataclass
from typing import Any

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


def from_hf(hf: dict) -> Rope:
    """Reads a config.json, in the new spelling (`rope_parameters`) or the old (`rope_theta`, `rope_scaling`).

    Raises:
      ValueError: a kind of scaling that is not implemented, parameters by layer type, an option that is missing or no
        number above 0, or spellings that disagree; names it.
    """
    given = {name: _read(hf, name, hf[name]) for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError(
            f"config.json: rope_scaling and rope_parameters must agree, got {hf['rope_scaling']} (with rope_theta "
            f"{hf.get('rope_theta')}) and {hf['rope_parameters']}; remove the wrong one"
        )
    return next(iter(given.values())) if given else _read(hf, "rope_theta", {})


def _read(hf: dict, name: str, scaling: Any) -> Rope:
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(
            f"config.json: {name} must be one set of options for all layers, got {scaling!r:.200}, which is not "
            "implemented"
        )
    partial = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be 1, got {partial}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"config.json: rope_type must be default, linear or llama3, got {kind!r}, which is not implemented"
        )

    def number(option: str, default: Any = None) -> float:
        value = scaling.get(option, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"config.json: {option} of rope_type {kind} must be a number above 0, got {value!r}")
        return float(value)

    theta = number("rope_theta", hf.get("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, number("factor"))
    original = "original_max_position_embeddings"
    if original in hf:  # as in transformers, that of the model comes first
        scaling = {**scaling, original: hf[original]}
    rope = Rope(
        theta, kind, number("factor"), number("low_freq_factor"), number("high_freq_factor"),
        int(number(original, hf.get("max_position_embeddings"))),
    )  # fmt: skip
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ValueError(
            f"config.json: high_freq_factor must be above low_freq_factor {rope.low_freq_factor:g}, got "
            f"{rope.high_freq_factor:g}"
        )
    return rope


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
