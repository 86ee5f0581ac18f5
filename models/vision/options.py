"""The options of a wrapper's config.json that describe its tower."""

from collections.abc import Mapping
from typing import Any

LARGEST = 10_000


def read(hf: Mapping[str, Any], defaults: Mapping[str, Any], out: int) -> dict[str, Any]:
    """The fields that all towers have.

    Args:
      defaults: of vision_config's options in this family, and of the ids of tokens that stand for features.
      out: size of the text model's embeddings.

    Raises:
      ValueError: an option is no number of its kind, or is not implemented; names it.
    """
    vision = hf.get("vision_config")
    if not isinstance(vision, dict):
        kind = hf["model_type"]
        raise ValueError(f"config.json: {kind} needs vision_config, the tower's options, got {vision!r:.80}")
    for name, only in (("hidden_act", defaults["hidden_act"]), ("out_hidden_size", out)):
        if vision.get(name, only) != only:
            raise ValueError(f"config.json: {name} of vision_config must be {only!r}, got {vision[name]!r:.80}")
    names = {
        "embed": ("hidden_size", None), "layers": ("depth", None), "ffn": ("intermediate_size", None),
        "heads": ("num_heads", 16), "channels": ("in_channels", vision.get("in_chans", 3)), "patch": ("patch_size", 14),
        "frames": ("temporal_patch_size", 2), "merge": ("spatial_merge_size", 2),
    }  # fmt: skip
    found: dict[str, Any] = {
        field: size(vision, name, defaults.get(name, default)) for field, (name, default) in names.items()
    }
    if found["embed"] % (4 * found["heads"]):
        raise ValueError(
            f"config.json: hidden_size of vision_config must be a multiple of 4 num_heads, {4 * found['heads']}, "
            f"got {found['embed']}"
        )
    tokens = {name: hf.get(f"{name}_token_id", defaults[f"{name}_token_id"]) for name in ("image", "video")}
    for name, token in tokens.items():
        if type(token) is not int or token < 0:
            raise ValueError(f"config.json: {name}_token_id must be a token's id, got {token!r:.80}")
    rope = vision.get("rope_parameters") or {}
    std = number(vision, "initializer_range", 0.02)
    return {**found, **tokens, "out": out, "init_std": std, "theta": number(rope, "rope_theta", 10000.0)}


def size(vision: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of 1 to 10,000."""
    value = vision.get(name, default)
    if type(value) is not int or not 0 < value <= LARGEST:
        raise ValueError(
            f"config.json: {name} of vision_config must be a whole number of 1 to {LARGEST:,}, got {value!r:.80}"
        )
    return value


def number(given: Mapping[str, Any], name: str, default: float) -> float:
    """A number above 0."""
    value = given.get(name, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"config.json: {name} of vision_config must be a number above 0, got {value!r:.80}")
    return float(value)


def layers(vision: Mapping[str, Any], name: str, default: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Some of the tower's layers."""
    value = vision.get(name, default)
    known = isinstance(value, list | tuple) and all(type(i) is int and 0 <= i < count for i in value)
    if not known or len(set(value)) < len(value):
        raise ValueError(
            f"config.json: {name} of vision_config must be different layers among 0 to {count - 1}, got {value!r:.80}"
        )
    return tuple(value)
