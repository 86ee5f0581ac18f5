"""GPT-OSS (arXiv:2508.10925): attention sinks, windows in every second layer, biases everywhere, and experts with a
clamped activation, whose gate and up alternate in one tensor."""

from jax.nn.initializers import zeros

from ..core.param import Param, Table
from ..core.parts import split
from . import dense, mixture
from .attention.pattern import Pattern
from .dense import FULL, SLIDING
from .dense import embed as embed
from .layers import moe, rope
from .layers.mlp import Activation
from .mixture import Config as Config
from .mixture import block as block

DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
}  # fmt: skip
ROPE = rope.Rope(1.5e5, "yarn", factor=32.0, original_context=4096, truncate=False)


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    dense.refuse(hf, "hidden_act", "silu", default="silu")
    patterns = {FULL: Pattern(), SLIDING: Pattern(window=dense.window(hf))}
    kinds = dense.layer_types(hf, lambda i: FULL if i % 2 else SLIDING)
    bias, activation = hf["attention_bias"], Activation("clamped", hf["swiglu_limit"], hf["swiglu_alpha"])
    base = dense.config(
        hf, "gpt_oss", qkv_bias=bias, out_bias=bias, activation=activation, rope=ROPE,
        patterns=[patterns[kind] for kind in kinds],
    )  # fmt: skip
    return mixture.sparse(
        base, hf, moe.Router(normalise=True), experts="num_local_experts", expert_ffn="intermediate_size"
    )


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": config.qkv_bias,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "swiglu_limit": config.activation.limit,
        "swiglu_alpha": config.activation.alpha,
    }


def table(config: Config) -> Table:
    """The weights; experts are tensors of all of a layer's, [experts, in, out]."""
    std, out = dense.inits(config)
    gate, up = split(1, 1, axis=1, transposed=True)
    [down] = split(config.embed, axis=1, transposed=True)
    gate_bias, up_bias = split(1, 1, axis=1)
    key = lambda name: (f"{dense.AT}{name}",)
    gate_up, down_proj = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    weights = {
        "sinks": Param("query_heads", key("self_attn.sinks"), std),
        "router": Param("router embed", key("mlp.router.weight"), std),
        "router_logit_bias": Param("router", key("mlp.router.bias"), zeros),
        "expert_gate": Param("experts expert_ffn expert_embed", key(gate_up), std, part=gate),
        "expert_up": Param("experts expert_ffn expert_embed", key(gate_up), std, part=up),
        "expert_down": Param("experts expert_embed expert_ffn", key(down_proj), out, part=down),
        "expert_gate_bias": Param("experts expert_ffn", key(f"{gate_up}_bias"), zeros, part=gate_bias),
        "expert_up_bias": Param("experts expert_ffn", key(f"{gate_up}_bias"), zeros, part=up_bias),
        "expert_down_bias": Param("experts expert_embed", key(f"{down_proj}_bias"), zeros),
    }
    return mixture.with_experts(config, dense.table(config), weights)
