"""Ministral 3 (Mistral): Mistral with yarn and queries that grow with their position."""

import sys

from ..core.param import Table
from . import dense
from .attention.pattern import Pattern
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed
from .layer import Growth
from .layers import rope

DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = ROPE
    dense.need(hf, "ministral3")
    scaling = rope.from_hf(hf, others=("llama_4_scaling_beta",))
    options = hf.get("rope_parameters") or hf["rope_scaling"]
    rate, length = options.get("llama_4_scaling_beta"), options.get(rope.ORIGINAL)
    if scaling.kind in rope.SCALED:  # as in transformers, the model's own comes first
        length = hf.get(rope.ORIGINAL, options.get(rope.ORIGINAL, hf[rope.LONGEST]))
    if type(rate) not in (int, float) or not abs(rate) <= sys.float_info.max or type(length) is not int or length < 1:
        raise ValueError(
            "config.json: rope_parameters of ministral3 need numbers llama_4_scaling_beta and "
            f"original_max_position_embeddings, got {rate!r:.80} and {length!r:.80}"
        )
    ropes, pattern = [scaling] * hf["num_hidden_layers"], Pattern(window=dense.window(hf))
    return dense.config(hf, "ministral3", patterns=pattern, ropes=ropes, growth=Growth(rate, length))


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {"architectures": ["Ministral3ForCausalLM"]}


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config)
