"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): routed experts plus a gated shared expert."""

from ..core.param import Param, Table
from . import dense, mixture
from .dense import embed as embed
from .mixture import Config as Config
from .mixture import block as block

SHARED = "shared_expert_intermediate_size"


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    base = dense.config(hf, "qwen2_moe", qkv_bias=hf.get("qkv_bias", True))
    if SHARED not in hf:
        raise ValueError(f"config.json: qwen2_moe needs {SHARED}, got none")
    router, without = mixture.softmax_router(hf), mixture.every_nth(hf)
    return mixture.sparse(base, hf, router, dense_layers=without, shared_ffn=hf[SHARED])


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | mixture.qwen_to_hf(config) | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "qkv_bias": config.qkv_bias,
        SHARED: config.shared_ffn,
    }  # fmt: skip


def table(config: Config) -> Table:
    """The weights, one stack per run of layers with or without experts."""
    gate = Param("one embed", (f"{dense.AT}mlp.shared_expert_gate.weight",), dense.inits(config)[0])
    shared = mixture.shared(config, "shared_expert") | {"shared_router": gate}
    return mixture.with_experts(config, dense.table(config), mixture.routed(config) | shared)
