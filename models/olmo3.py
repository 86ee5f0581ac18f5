"""OLMo 3 (Ai2): OLMo 2 with a sliding window in three of four layers, and scaled rotary embeddings in the others."""

import json

from . import dense, olmo2
from .attention.pattern import Pattern
from .dense import FULL, SLIDING
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed
from .layers import rope
from .olmo2 import table as table

DEFAULTS = olmo2.DEFAULTS | {"sliding_window": 4096}
ROPES = dict.fromkeys((SLIDING, FULL), rope.Rope(5e5))
LOCAL = "rope_theta"  # in the old spelling theta of both types of layers; rope_scaling is that of the full ones


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    patterns = {FULL: Pattern(), SLIDING: Pattern(window=dense.window(hf))}
    kinds = dense.layer_types(hf, lambda i: SLIDING if (i + 1) % 4 else FULL)
    layers = dense.by_type(kinds, patterns, rope.by_layer_type(hf, ROPES, LOCAL))
    bias = hf.get("attention_bias", False)
    return dense.config(hf, "olmo3", qkv_bias=bias, out_bias=bias, **layers)


def to_hf(config: Config) -> dict:
    """The config.json."""
    hf = json.loads(config.source)
    ropes = rope.to_hf_by_layer_type(rope.by_layer_type(hf, ROPES, LOCAL), LOCAL, hf)
    return olmo2.to_hf(config) | ropes | {"architectures": ["Olmo3ForCausalLM"]}
