"""Gemma 3 (Google, arXiv:2503.19786): Gemma 2 with norms of queries and keys in place of soft caps, and full attention
in one layer of six, with rotary embeddings of its own."""

import json

from ..core.param import Table
from . import dense, gemma2
from .dense import FULL, SLIDING
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed
from .layers import rope

DEFAULTS = gemma2.DEFAULTS | {
    "max_position_embeddings": 131072, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
}  # fmt: skip
ROPES = {SLIDING: rope.Rope(1e4), FULL: rope.Rope(1e6)}
LOCAL = "rope_local_base_freq"


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    dense.refuse(hf, "attn_logit_softcapping", None, default=None)
    every = hf["sliding_window_pattern"]
    kinds = dense.layer_types(hf, lambda i: SLIDING if (i + 1) % every else FULL)
    layers = dense.by_type(kinds, gemma2.attention_patterns(hf), rope.by_layer_type(hf, ROPES, LOCAL))
    return dense.config(hf, "gemma3_text", **layers, **gemma2.constants(hf))


def to_hf(config: Config) -> dict:
    """The config.json; scales and the cap are those of the source."""
    hf = json.loads(config.source)
    ropes = rope.to_hf_by_layer_type(rope.by_layer_type(hf, ROPES, LOCAL), LOCAL, hf)
    return gemma2.to_hf(config) | ropes | {"architectures": ["Gemma3ForCausalLM"]}


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config, gemma2.NORMS | dense.QK_HEAD)
