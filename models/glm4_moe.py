"""GLM-4.5 to 4.7 (arXiv:2508.06471): dense layers, then mixtures with DeepSeek-V3's router and a shared expert; rotary
embedding of half a head."""

from dataclasses import dataclass

from ..core.param import Table
from . import dense, mixture
from .dense import embed as embed
from .layers import rope
from .mixture import block as block

DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
ROPE = rope.Rope(partial=0.5)


@dataclass(frozen=True)
class Config(mixture.Config):
    """`mixture.Config`; `qk_norm`: queries and keys are normalised, a head at a time."""

    qk_norm: bool = False


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    base = dense.config(hf, "glm4_moe", qkv_bias=hf.get("attention_bias", False), rope=ROPE)
    if not hf["n_shared_experts"]:
        raise ValueError(f"config.json: n_shared_experts must be at least 1, got {hf['n_shared_experts']}")
    plain = mixture.sparse(
        base, hf, mixture.sigmoid_router(hf), dense_layers=range(min(hf["first_k_dense_replace"], base.layers)),
        shared_ffn=hf["n_shared_experts"] * (hf.get("moe_intermediate_size") or 0), experts="n_routed_experts",
    )  # fmt: skip
    return Config(**vars(plain), qk_norm=hf.get("use_qk_norm") or False)


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | mixture.sigmoid_to_hf(config.router) | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "n_routed_experts": config.experts,
        "n_shared_experts": config.shared_ffn // config.expert_ffn,
        "moe_intermediate_size": config.expert_ffn,
        "first_k_dense_replace": len(config.dense_layers),
    }  # fmt: skip


def table(config: Config) -> Table:
    """The weights, one stack for the layers with experts and one for those without."""
    plain = dense.table(config, dense.BEFORE | (dense.QK_HEAD if config.qk_norm else {}))
    weights = mixture.routed(config) | mixture.choice_bias("mlp.gate") | mixture.shared(config, "shared_experts")
    return mixture.with_experts(config, plain, weights)
