"""SmolLM3 (Hugging Face): Llama without positions in some layers (NoPE), which may have a sliding window instead."""

from ..core.param import Table
from . import dense
from .attention.pattern import Pattern
from .dense import FULL, SLIDING
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed
from .layers import rope

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True}
ROPE = rope.Rope(2e6)


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    count, every = hf.get("num_hidden_layers") or 0, hf.get("no_rope_layer_interval", 4)
    rotary = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]  # 1 = with rope
    if len(rotary) < count or set(rotary) - {0, 1}:
        raise ValueError(f"config.json: no_rope_layers must be 0 or 1 for each of {count} layers, got {rotary!r:.200}")
    window = dense.window(hf) if hf.get("use_sliding_window") else None
    kinds = dense.layer_types(hf, lambda i: FULL if rotary[i] or window is None else SLIDING)
    if SLIDING in kinds and window is None:
        raise ValueError(
            f"config.json: {SLIDING} in layer_types needs use_sliding_window and a sliding_window, got "
            f"{hf.get('use_sliding_window')} and {hf.get('sliding_window')}"
        )
    shared, bias = rope.from_hf(hf, ROPE), hf.get("attention_bias", False)
    return dense.config(
        hf, "smollm3", qkv_bias=bias, out_bias=bias, mlp_bias=hf.get("mlp_bias", False),
        patterns=[Pattern(window=window) if kind == SLIDING else Pattern() for kind in kinds],
        ropes=[shared if turns else None for turns in rotary[:count]],
    )  # fmt: skip


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config)
