"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): routed experts plus a gated shared expert."""

from dataclasses import dataclass

from ..core.param import Param, Table
from . import dense, qwen3_moe
from .dense import embed as embed
from .qwen3_moe import block as block


@dataclass(frozen=True)
class Config(qwen3_moe.Config):
    """`qwen3_moe.Config` plus the width of the shared expert."""

    shared_ffn: int = 0


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    base = dense.config(hf, "qwen2_moe", qkv_bias=hf.get("qkv_bias", True))
    return qwen3_moe.sparse(Config, base, hf, qwen3_moe.router(hf), shared_ffn="shared_expert_intermediate_size")


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | qwen3_moe.experts_to_hf(config) | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": config.shared_ffn,
    }  # fmt: skip


def table(config: Config) -> Table:
    """The weights, one stack per run of layers with or without experts."""
    std, out = dense.inits(config)
    at = f"{dense.AT}mlp.shared_expert"
    shared = {
        "shared_gate": Param("shared_ffn embed", (f"{at}.gate_proj.weight",), std),
        "shared_up": Param("shared_ffn embed", (f"{at}.up_proj.weight",), std),
        "shared_down": Param("embed shared_ffn", (f"{at}.down_proj.weight",), out),
        "shared_router": Param("one embed", (f"{at}_gate.weight",), std),
    }
    return qwen3_moe.with_experts(config, dense.table(config), shared, shared_ffn=config.shared_ffn)
