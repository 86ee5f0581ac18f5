"""Mistral (arXiv:2310.06825), Mistral NeMo and Small 3: Llama with an optional sliding window in all layers."""

from ..core.param import Table
from . import dense
from .attention.pattern import Pattern
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed

DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    window = dense.window(hf)
    kind = dense.FULL if window is None else dense.SLIDING
    if set(dense.layer_types(hf, lambda i: kind)) - {kind}:
        raise ValueError(
            f"config.json: layer_types of mistral must all be {kind} with sliding_window {window}, got "
            f"{hf['layer_types']!r:.200}"
        )
    return dense.config(hf, "mistral", patterns=Pattern(window=window))


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {"architectures": ["MistralForCausalLM"]}


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config)
