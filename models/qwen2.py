"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): dense decoder with biases on queries, keys and values."""

from ..core.param import Table
from . import dense
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    return dense.config(hf, "qwen2", qkv_bias=True, patterns=dense.windows(hf))


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | dense.windows_to_hf(config) | {"architectures": ["Qwen2ForCausalLM"]}


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config)
