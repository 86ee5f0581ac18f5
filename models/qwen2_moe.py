"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): routed experts plus a gated shared expert."""

from collections.abc import Collection

from ..core.param import Param, Table
from . import dense, mixture
from .dense import embed as embed
from .layers import moe
from .mixture import Config as Config
from .mixture import block as block

SHARED = "shared_expert_intermediate_size"


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    base = dense.config(hf, "qwen2_moe", qkv_bias=hf.get("qkv_bias", True))
    return sparse(base, hf, mixture.softmax_router(hf), dense_layers=mixture.every_nth(hf))


def sparse(base: dense.Config, hf: dict, router: moe.Router, *, dense_layers: Collection[int] = ()) -> Config:
    """`mixture.sparse` with a shared expert; raises ValueError without its width."""
    if not hf.get(SHARED):
        raise ValueError(f"config.json: {base.family} needs {SHARED}, got {hf.get(SHARED)}")
    return mixture.sparse(base, hf, router, dense_layers=dense_layers, shared_ffn=hf[SHARED])


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | mixture.qwen_to_hf(config) | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "qkv_bias": config.qkv_bias,
        SHARED: config.shared_ffn,
    }  # fmt: skip


def table(config: Config) -> Table:
    """The weights, one stack per run of layers with or without experts."""
    return mixture.with_experts(config, dense.table(config), experts(config))


def experts(config: Config) -> dict[str, Param]:
    """The experts of a layer, and the gate of the shared one."""
    gate = Param("one embed", (f"{dense.AT}mlp.shared_expert_gate.weight",), dense.inits(config)[0])
    return mixture.routed(config) | mixture.shared(config, "shared_expert") | {"shared_router": gate}
