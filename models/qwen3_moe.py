"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with mixtures of experts instead of MLPs in all or some layers."""

from ..core.param import Table
from . import dense, mixture, qwen3
from .dense import embed as embed
from .mixture import Config as Config
from .mixture import block as block


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    bias = hf.get("attention_bias", False)
    patterns = dense.windows({"max_window_layers": 0} | hf)
    sliding = [i for i, pattern in enumerate(patterns) if pattern.window]
    wanted = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
    if wanted and len(sliding) < len(patterns):
        raise ValueError(
            f"config.json: the sliding window of qwen3_moe must apply to all layers, got layers {sliding}; "
            "remove layer_types and max_window_layers"
        )
    base = dense.config(hf, "qwen3_moe", qkv_bias=bias, out_bias=bias, patterns=patterns)
    return mixture.sparse(base, hf, mixture.softmax_router(hf), dense_layers=mixture.every_nth(hf))


def to_hf(config: Config) -> dict:
    """The config.json."""
    return qwen3.to_hf(config) | mixture.qwen_to_hf(config) | {"architectures": ["Qwen3MoeForCausalLM"]}


def table(config: Config) -> Table:
    """The weights, one stack per run of layers with or without experts."""
    return mixture.with_experts(config, dense.table(config, dense.BEFORE | dense.QK_HEAD), mixture.routed(config))
