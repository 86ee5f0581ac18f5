"""Llama 2, 3 and relatives (arXiv:2302.13971, arXiv:2407.21783): optional biases, llama3 rope scaling."""

from ..core.param import Table
from . import dense
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = {"max_position_embeddings": 2048} | hf
    bias = hf.get("attention_bias", False)
    return dense.config(hf, "llama", qkv_bias=bias, out_bias=bias, mlp_bias=hf.get("mlp_bias", False))


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config)
