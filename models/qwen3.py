"""Qwen3 (arXiv:2505.09388): dense decoder with RMS norms on queries and keys, and an optional attention bias."""

from ..core.param import Table
from . import dense
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    bias = hf.get("attention_bias", False)
    head_dim = hf.get("head_dim") or 128
    return dense.config(hf, "qwen3", qkv_bias=bias, out_bias=bias, head_dim=head_dim, patterns=dense.windows(hf))


def to_hf(config: Config) -> dict:
    """The config.json."""
    return (
        dense.to_hf(config)
        | dense.windows_to_hf(config)
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": config.qkv_bias,
        }
    )


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config, dense.BEFORE | dense.QK_HEAD)
