"""Qwen3.5-MoE: Qwen3.5 with routed experts and a gated shared one in every layer."""

from dataclasses import dataclass
from functools import partial

from ..core.param import Table
from . import mixture, qwen2_moe, qwen3_5
from .dense import embed as embed
from .layers import moe, rope

DEFAULTS = qwen3_5.DEFAULTS | {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Config(mixture.Config, qwen3_5.Config):
    """`mixture.Config` plus the sizes of delta nets."""


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | {"intermediate_size": hf.get("moe_intermediate_size")} | hf
    return hybrid(hf, "qwen3_5_moe_text", qwen3_5.ROPE, moe.Router(normalise=True))


def hybrid(hf: dict, family: str, default: rope.Rope, router: moe.Router, dense_layers=()) -> Config:
    """The Config of a family with delta nets and experts, as `qwen3_5.hybrid` and `qwen2_moe.sparse`."""
    base = qwen3_5.hybrid(hf, family, default)
    return Config(**vars(qwen2_moe.sparse(base, hf, router, dense_layers=dense_layers)), delta=base.delta)


def to_hf(config: Config) -> dict:
    """The config.json."""
    return qwen3_5.to_hf(config) | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_ffn,
        qwen2_moe.SHARED: config.shared_ffn,
    }


def table(config: Config) -> Table:
    """The weights; of the experts of a layer, published checkpoints have tensors of all, and these are read as well."""
    return mixture.with_experts(config, qwen3_5.table(config), qwen2_moe.experts(config))


block = partial(qwen3_5.block, mlp=mixture.mlp)
