"""config.json of a file's metadata, and the metadata of a config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import models
from ...models.layers import rope as rotary
from .container import File
from .families import FREQUENCIES, SIZES, Family

HEAD_DIM = ("attention.key_length", "attention.value_length")
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
SCALING = "rope.scaling."
ORIGINAL = "original_max_position_embeddings"
YARN = {  # option of yarn -> key
    "factor": "factor", ORIGINAL: "original_context_length", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}  # fmt: skip
# Of Llama 3.1 and later; files hold the frequencies that follow from these.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
IGNORED = {"vocab_size", "rope.scaling.finetuned"}  # the embeddings say it; it says nothing
SLIDING, FULL = "sliding_attention", "full_attention"
# Numbers of layers with which llama.cpp scales scores by the width over the heads, not by their size.
LARGEST = {"gemma2": 46, "gemma3": 62}


def config(file: File, family: Family) -> dict[str, Any]:
    """config.json of a file, without tokens.

    Raises:
      ValueError: something is missing, or has a value that areax does not implement.
    """
    stated = {
        key.removeprefix(f"{family.gguf}."): value
        for key, value in file.metadata.items() if key.startswith(f"{family.gguf}.")
    }  # fmt: skip

    def take(key: str, default: Any = None, needed: bool = False) -> Any:
        value = stated.pop(key, default)
        if value is None and needed:
            raise ValueError(f"{file.path}: needs {family.gguf}.{key}, which is missing; copy it again")
        return _shortest(value)

    hf: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
    optional = {"num_key_value_heads"} | ({"intermediate_size"} if family.sparse else set())
    for option, key in SIZES.items():
        hf[option] = take(key, needed=option not in optional)
    if hf["num_key_value_heads"] is None:
        hf["num_key_value_heads"] = hf["num_attention_heads"]
    if hf["intermediate_size"] is None:
        hf["intermediate_size"] = stated.get("expert_feed_forward_length")
    for option, name in SIZES.items():
        if option != "rms_norm_eps" and (type(hf[option]) is not int or hf[option] < 1):
            raise ValueError(
                f"{file.path}: {family.gguf}.{name} must be one number above 0, got {hf[option]!r:.80}; a model whose "
                "layers differ in it is not implemented"
            )
    size = hf["hidden_size"] // hf["num_attention_heads"]
    key_size, value_size = (take(key, size) for key in HEAD_DIM)
    if value_size != key_size or take("rope.dimension_count", key_size) != key_size:
        raise ValueError(
            f"{file.path}: keys and values must be as long as what rotates of them, got {key_size} and {value_size}"
        )
    hf["head_dim"] = key_size
    for option, key in family.options.items():
        hf[option] = take(key)
    if family.model_type == "granite":
        neutral = {"attention_multiplier": key_size**-0.5}
        hf |= {option: neutral.get(option, 1.0) for option in family.options if not hf[option]}
    hf |= family.fixed
    hf["tie_word_embeddings"] = "output.weight" not in file.tensors
    if family.model_type == "llama":
        hf["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        hf["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    theta = take("rope.freq_base", 10000.0)
    scaling = _scaling(file, family, take, theta, key_size)
    if family.period:
        hf |= _windows(file, family, take, hf)
    if family.model_type == "gemma3_text":
        full = {"rope_theta": theta} | (scaling or {"rope_type": "default"})
        local = {"rope_theta": take("rope.freq_base_swa", 10000.0), "rope_type": "default"}
        hf["rope_parameters"] = {FULL: full, SLIDING: local}
    else:
        hf |= {"rope_theta": theta, "rope_scaling": scaling}
    if left := sorted(stated.keys() - IGNORED):
        raise ValueError(
            f"{file.path}: {family.gguf}.{left[0]} is not implemented, got {stated[left[0]]!r:.80}; use the original "
            "checkpoint"
        )
    kept = {"sliding_window", *family.options}  # null means something there
    return {name: value for name, value in hf.items() if value is not None or name in kept}


def metadata(hf: Mapping[str, Any], settings: Any, family: Family) -> dict[str, Any]:
    """Values by key, without the architecture's name before them.

    Args:
      hf: config.json as `models.config_to_hf` writes it.
      settings: its Config.

    Raises:
      ValueError: llama.cpp would compute something else; names the option.
    """
    for option, only in family.fixed.items():
        if hf.get(option, only) != only:
            raise ValueError(
                f"convert: llama.cpp computes {family.model_type} with {option} {only!r} alone, got "
                f"{hf[option]!r:.80}; leave --gguf out"
            )
    if family.full_width and settings.head_dim * settings.heads != settings.embed:
        raise ValueError(
            f"convert: llama.cpp computes {family.model_type} with head_dim {settings.embed / settings.heads:g} here, "
            f"hidden_size by num_attention_heads, got {settings.head_dim}; leave --gguf out"
        )
    out = {key: hf[option] for option, key in SIZES.items()}
    out |= dict.fromkeys((*HEAD_DIM, "rope.dimension_count"), settings.head_dim)
    out |= {key: hf[option] for option, key in family.options.items() if hf.get(option) is not None}
    out["vocab_size"] = settings.vocab
    windows = [layer.pattern.window for layer in settings.records]
    if family.period:
        [window] = {window for window in windows if window} or {None}
        full = [window is None for window in windows]
        if window is None:
            raise ValueError(f"convert: llama.cpp needs layers with a window in {family.model_type}, got none")
        out[WINDOW] = window
        if full != [(i + 1) % family.period == 0 for i in range(len(full))]:
            out[PATTERN] = [not one for one in full]
        scale = _score_scale(family, hf) ** -0.5
        if any(not math.isclose(layer.pattern.scale, scale) for layer in settings.records):
            raise ValueError(
                f"convert: llama.cpp takes query_pre_attn_scalar {_score_scale(family, hf)} for granted here, got "
                f"{hf.get('query_pre_attn_scalar')}; leave --gguf out"
            )
    elif short := [window for window in windows if window and window < settings.context]:
        raise ValueError(
            f"convert: llama.cpp computes {family.model_type} without a sliding window, got one of {short[0]} for "
            f"contexts of up to {settings.context}; leave --gguf out, or lower max_position_embeddings"
        )
    if family.model_type == "smollm3":
        turning = [layer.rope is not None for layer in settings.records]
        if turning != [(i + 1) % 4 != 0 for i in range(len(turning))]:
            raise ValueError("convert: llama.cpp leaves rope out in every fourth layer of smollm3, got other layers")
    return out | _rope(settings, family)


def frequencies(settings: Any) -> np.ndarray | None:
    """The divisors of the frequencies of llama3's rope, f32[head / 2], else None."""
    [rope] = settings.ropes if len(settings.ropes) == 1 else [None]
    if rope is None or rope.kind != "llama3":
        return None
    plain = rotary.Rope(rope.theta)
    size = settings.head_dim
    return (rotary.frequencies(plain, size) / rotary.frequencies(rope, size)).astype(np.float32)


def _windows(file: File, family: Family, take, hf: Mapping[str, Any]) -> dict[str, Any]:
    every: Any = family.period
    window, pattern = take(WINDOW, 4096 if family.gguf == "gemma2" else None), take(PATTERN, every)
    if not window:
        raise ValueError(f"{file.path}: needs {family.gguf}.{WINDOW}, which is missing; copy it again")
    layers = range(hf["num_hidden_layers"])
    full = [not one for one in pattern] if isinstance(pattern, list) else [(i + 1) % pattern == 0 for i in layers]
    return {
        "sliding_window": window,
        "layer_types": [FULL if one else SLIDING for one in full],
        "query_pre_attn_scalar": _score_scale(family, hf),
    }


def _score_scale(family: Family, hf: Mapping[str, Any]) -> int:
    """The number by whose root llama.cpp divides scores."""
    if hf["num_hidden_layers"] == LARGEST[family.gguf]:
        return hf["hidden_size"] // hf["num_attention_heads"]
    return hf["head_dim"]


def _scaling(file: File, family: Family, take, theta: float, head_dim: int) -> dict[str, Any] | None:
    """config.json's rope_scaling."""
    kind, linear = take(f"{SCALING}type", "none"), take("rope.scale_linear")
    divisors = file.tensors.get(f"{FREQUENCIES}.weight")
    if divisors is not None:
        return _llama3(file, divisors[...], theta, head_dim)
    if kind == "none" and linear in (None, 1.0):
        if take(f"{SCALING}factor", 1.0) not in (0.0, 1.0):
            raise ValueError(f"{file.path}: a factor of rope needs {family.gguf}.{SCALING}type, which is missing")
        return None
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": take(f"{SCALING}factor") or linear}
    if kind == "yarn":
        found = {option: take(f"{SCALING}{key}") for option, key in YARN.items()}
        return {"rope_type": "yarn"} | {option: value for option, value in found.items() if value is not None}
    raise ValueError(f"{file.path}: {family.gguf}.{SCALING}type must be none, linear or yarn, got {kind!r:.80}")


def _llama3(file: File, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """rope_scaling of the divisors of frequencies: those of Llama 3.1 and later, by whatever factor."""
    scaling = {"rope_type": "llama3", "factor": max(1.0, _shortest(divisors.max()))} | LLAMA3
    rope = rotary.Rope(
        theta, "llama3", scaling["factor"], LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"],
        original_context=int(LLAMA3[ORIGINAL]),
    )  # fmt: skip
    with np.errstate(all="ignore"):  # of a damaged base, which is refused below
        wanted = rotary.frequencies(rotary.Rope(theta), head_dim) / rotary.frequencies(rope, head_dim)
    if divisors.shape != wanted.shape or not np.allclose(divisors, wanted, rtol=1e-4):
        raise ValueError(
            f"{file.path}: {FREQUENCIES}.weight must be that of Llama 3.1 and later, with {LLAMA3}, got "
            f"{np.round(divisors, 3).tolist()!r:.80}; use the original checkpoint"
        )
    return scaling


def _rope(settings: Any, family: Family) -> dict[str, Any]:
    """The metadata of rotary embeddings, but for the frequencies of Llama 3."""
    ropes: dict[bool, rotary.Rope] = {}  # by whether the layer has full attention
    for layer in settings.records:
        if layer.rope is not None:
            ropes[layer.pattern.window is None or not family.period] = layer.rope
    rope = ropes.get(True) or next(iter(ropes.values()))
    out: dict[str, Any] = {"rope.freq_base": rope.theta}
    if local := ropes.get(False):
        if local.kind != "default":
            raise ValueError(f"convert: llama.cpp does not scale rope in layers with a window, got {local.kind}")
        if family.gguf == "gemma3":
            out["rope.freq_base_swa"] = local.theta
    if rope.kind == "linear":
        return out | {f"{SCALING}type": "linear", f"{SCALING}factor": rope.factor}
    plain_yarn = rope.attention_factor is None and not rope.mscale and not rope.mscale_all_dim and rope.truncate
    if rope.kind == "yarn" and plain_yarn and not family.period:
        values = (rope.factor, rope.original_context, rope.beta_fast, rope.beta_slow)
        return out | {f"{SCALING}type": "yarn"} | {
            f"{SCALING}{key}": value for key, value in zip(YARN.values(), values, strict=True)
        }  # fmt: skip
    if rope.kind == "default" or (rope.kind == "llama3" and family.gguf == "llama"):
        return out
    raise ValueError(f"convert: rope of the kind {rope.kind} is not written for {family.model_type}; leave --gguf out")


def _shortest(value: Any) -> Any:
    """A number that was rounded to float32 as people write it."""
    if isinstance(value, float | np.floating) and math.isfinite(value):
        return float(str(np.float32(value)))
    return value


def normalised(hf: dict[str, Any]) -> dict[str, Any]:
    """config.json with all that it leaves out, in the spellings of transformers 4 and 5."""
    return models.config_to_hf(models.config_from_hf(json.loads(json.dumps(hf))))
