"""Mixtral (arXiv:2401.04088): Llama with a mixture of experts in every layer."""

import dataclasses

from ..core.param import Table
from . import dense, qwen3_moe
from .dense import embed as embed
from .layers import moe
from .qwen3_moe import Config as Config
from .qwen3_moe import block as block

NAMES = {
    "router": "block_sparse_moe.gate",
    "gate": "block_sparse_moe.experts.{expert}.w1",
    "up": "block_sparse_moe.experts.{expert}.w3",
    "down": "block_sparse_moe.experts.{expert}.w2",
}
DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SIZES = {"experts": "num_local_experts", "expert_ffn": "intermediate_size"}


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    dense.refuse(hf, "router_jitter_noise", 0.0, default=0.0)
    window = hf.get("sliding_window")
    if window is not None and window < 1:
        raise ValueError(f"config.json: sliding_window must be at least 1, or null, got {window}")
    base = dense.config(DEFAULTS | hf, "mixtral", window=window)
    everywhere = tuple(range(base.layers)) if window else ()
    base = dataclasses.replace(base, window_layers=everywhere)
    return qwen3_moe.sparse(Config, base, hf, moe.Router(normalise=True), **SIZES)


def to_hf(config: Config) -> dict:
    """The config.json."""
    plain = dense.to_hf(dataclasses.replace(config, window_layers=()))
    return plain | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "sliding_window": config.window,
    }


def table(config: Config) -> Table:
    """The weights."""
    return qwen3_moe.with_experts(config, dense.table(config, qk_norm=False), names=NAMES)
