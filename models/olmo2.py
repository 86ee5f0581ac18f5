"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, queries and keys normalised over all heads at once."""

from ..core.param import Table
from . import dense
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    bias = hf.get("attention_bias", False)
    return dense.config(DEFAULTS | hf, "olmo2", qkv_bias=bias, out_bias=bias)


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {"architectures": ["Olmo2ForCausalLM"], "attention_bias": config.qkv_bias}


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config, dense.AFTER | dense.QK_ALL)
