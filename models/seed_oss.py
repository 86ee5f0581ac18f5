"""Seed-OSS: Llama with biases on queries, keys and values. Dropout, which its config.json may state, is not applied."""

import json

from ..core.param import Table
from . import dense
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    return dense.config(
        hf | {"attention_dropout": 0.0}, "seed_oss", qkv_bias=hf.get("attention_bias", True),
        out_bias=hf.get("attention_out_bias", False), mlp_bias=hf.get("mlp_bias", False), source=json.dumps(hf),
    )  # fmt: skip


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": config.qkv_bias,
        "attention_out_bias": config.out_bias,
        "mlp_bias": config.mlp_bias,
    }


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config)
