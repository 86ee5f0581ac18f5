"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from ..core.param import Table
from . import dense, mixture
from .attention.pattern import Pattern
from .dense import embed as embed
from .layers import moe, rope
from .mixture import Config as Config
from .mixture import block as block

NAMES = {
    "router": "block_sparse_moe.gate",
    "gate": "block_sparse_moe.experts.{expert}.w1",
    "up": "block_sparse_moe.experts.{expert}.w3",
    "down": "block_sparse_moe.experts.{expert}.w2",
}
DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072}
ROPE = rope.Rope(1e6)


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    dense.refuse(hf, "router_jitter_noise", 0.0, default=0.0)
    base = dense.config(hf, "mixtral", patterns=Pattern(window=dense.window(hf)), rope=ROPE)
    return mixture.sparse(
        base, hf, moe.Router(normalise=True), experts="num_local_experts", expert_ffn="intermediate_size"
    )


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
    }


def table(config: Config) -> Table:
    """The weights."""
    return mixture.with_experts(config, dense.table(config), mixture.routed(config, NAMES))
