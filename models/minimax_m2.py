"""MiniMax-M2: a mixture in every layer, chosen by sigmoid scores with a bias; queries and keys are normalised over all
heads at once, and a part of a head turns with its position."""

from ..core.param import Table
from . import dense, mixture
from .dense import embed as embed
from .layers import moe, rope
from .mixtral import NAMES
from .mixture import Config as Config
from .mixture import block as block

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608}
ROPE = rope.Rope(5e6, partial=1.0)
# Options that have one implemented value, which is that of transformers.
ONLY = {
    "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "router_jitter_noise": 0.0,
}  # fmt: skip


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    for name, only in ONLY.items():
        dense.refuse(hf, name, only, default=only)
    if any(kind != 1 for kind in hf.get("attn_type_list") or ()):
        raise ValueError(
            f"config.json: attn_type_list must be 1, full attention, in all layers, got {hf['attn_type_list']!r:.200}"
        )
    if hf.get("rotary_dim") and hf["head_dim"]:
        hf = {rope.PARTIAL: hf["rotary_dim"] / hf["head_dim"]} | hf
    base, router = dense.config(hf, "minimax_m2", rope=ROPE), moe.Router(score="sigmoid", normalise=True)
    return mixture.sparse(base, hf, router, experts="num_local_experts", expert_ffn="intermediate_size")


def to_hf(config: Config) -> dict:
    """The config.json; it states the options that SGLang takes to be off where they are missing."""
    return dense.to_hf(config) | ONLY | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
    }  # fmt: skip


def table(config: Config) -> Table:
    """The weights."""
    plain = dense.table(config, dense.BEFORE | dense.QK_ALL)
    weights = mixture.routed(config, NAMES) | mixture.choice_bias("block_sparse_moe", "mlp")
    return mixture.with_experts(config, plain, weights)
