"""Llama 4 (Meta), text: attention within chunks, layers without positions, experts whose inputs are scaled."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp

from ..core.param import Param, Stack, Table
from ..core.parts import split
from . import dense, mixture
from .attention.pattern import Pattern
from .dense import embed as embed
from .layer import Attention, Growth, Mixer
from .layers import moe, rope
from .layers.norm import rms_norm

DEFAULTS = {
    "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1, "num_local_experts": 16,
    "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
    "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
ROPE = rope.Rope(5e5, pairs=True)
CHUNKED, FULL = "chunked_attention", dense.FULL  # values in layer_types


@dataclass(frozen=True)
class Config(mixture.Config):
    """`mixture.Config`; `qk_norm`: queries and keys of layers with positions are normalised, a head at a time."""

    qk_norm: bool = False


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    dense.refuse(hf, "router_jitter_noise", 0.0, default=0.0)
    count, every, step = (
        hf.get(name) or 0 for name in ("num_hidden_layers", "no_rope_layer_interval", "interleave_moe_layer_step")
    )
    turned = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]  # 1 = with rope
    if len(turned) < count or set(turned) - {0, 1}:
        raise ValueError(f"config.json: no_rope_layers must be 0 or 1 for each of {count} layers, got {turned!r:.200}")
    turned = turned[:count]
    sparse = hf.get("moe_layers")
    sparse = range(step - 1, count, step) if sparse is None else sparse
    if not set(sparse) <= set(range(count)):
        raise ValueError(f"config.json: moe_layers must be among the {count} layers, got {list(sparse)!r:.200}")
    shared, bias = rope.from_hf(hf, ROPE), hf.get("attention_bias", False)
    base = dense.config(
        hf, "llama4_text", qkv_bias=bias, out_bias=bias, ffn=hf["intermediate_size_mlp"], patterns=patterns(hf, turned),
        ropes=[shared if turns else None for turns in turned],
    )  # fmt: skip
    growth = Growth(hf["attn_scale"], hf["floor_scale"], shift=1) if hf["attn_temperature_tuning"] else None
    records = (dataclasses.replace(r, growth=None if r.rope else growth) for r in attentions(base))
    plain = mixture.sparse(
        dataclasses.replace(base, records=tuple(records)), hf, moe.Router(score="sigmoid", scaled_input=True),
        experts="num_local_experts", expert_ffn="intermediate_size", shared_ffn=hf["intermediate_size"],
        dense_layers=[i for i in range(count) if i not in sparse],
    )  # fmt: skip
    return Config(**vars(plain), qk_norm=hf["use_qk_norm"] or False)


def attentions(config: dense.Config) -> list[Attention]:
    """The records of the layers."""
    return [record for record in config.records if isinstance(record, Attention)]


def patterns(hf: dict, turned: list[int]) -> list[Pattern]:
    """Each layer's attention: by layer_types, else within chunks in layers with positions.

    Raises:
      ValueError: layer_types are not one of the two for each layer, or layers with chunks have no size of chunks.
    """
    kinds = hf.get("layer_types") or [CHUNKED if turns else FULL for turns in turned]
    if len(kinds) != len(turned) or set(kinds) - {CHUNKED, FULL}:
        raise ValueError(
            f"config.json: layer_types must be {CHUNKED} or {FULL} for each of {len(turned)} layers, got {len(kinds)} "
            f"of {sorted(set(kinds))}"
        )
    size = hf["attention_chunk_size"]
    if CHUNKED in kinds and size is None:
        raise ValueError(f"config.json: {CHUNKED} needs an attention_chunk_size of at least 1, got {size}")
    return [Pattern(chunk=size) if kind == CHUNKED else Pattern() for kind in kinds]


def to_hf(config: Config) -> dict:
    """The config.json; options of attention are those of the source."""
    return dense.to_hf(config) | {
        "architectures": ["Llama4ForCausalLM"],
        "attention_bias": config.qkv_bias,
        "intermediate_size": config.expert_ffn,
        "intermediate_size_mlp": config.ffn,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_layers": [i for i in range(config.layers) if i not in config.dense_layers],
        "no_rope_layers": [int(record.rope is not None) for record in attentions(config)],
        "layer_types": [FULL if record.pattern.chunk is None else CHUNKED for record in attentions(config)],
    }


def table(config: Config) -> Table:
    """The weights; those of all experts of a layer are two tensors, transposed."""
    std, out = dense.inits(config)
    at, plain = f"{dense.AT}feed_forward", dense.table(config)

    def moved(weights):
        keys = lambda p: tuple(key.replace(".mlp.", ".feed_forward.") for key in p.keys)
        return {name: dataclasses.replace(p, keys=keys(p)) for name, p in weights.items()}

    gate, up = split(config.expert_ffn, config.expert_ffn, axis=1, transposed=True)
    [down] = split(config.embed, axis=1, transposed=True)
    halves, outputs = (f"{at}.experts.gate_up_proj",), (f"{at}.experts.down_proj",)
    experts = {
        "router": Param("router embed", (f"{at}.router.weight",), std),
        "expert_gate": Param("experts expert_ffn expert_embed", halves, std, part=gate),
        "expert_up": Param("experts expert_ffn expert_embed", halves, std, part=up),
        "expert_down": Param("experts expert_embed expert_ffn", outputs, out, part=down),
    }
    stacks = tuple(Stack(stack.layers, moved(stack.params)) for stack in plain.stacks)
    weights = experts | moved(mixture.shared(config, "shared_expert"))
    return mixture.with_experts(config, dataclasses.replace(plain, stacks=stacks), weights)


def attention(h_BTD, w, mixer: Mixer, config: Config):
    """`dense.attention_of_heads`, with queries and keys normalised after their rotation."""
    q_BTNH, k_BTKH, v_BTKV = dense.queries_keys_values(h_BTD, w, mixer, config)
    if config.qk_norm and mixer.layer.rope:
        one_H = jnp.ones(mixer.layer.key_dim)
        q_BTNH, k_BTKH = (rms_norm(x, one_H, config.norm_eps) for x in (q_BTNH, k_BTKH))
    return mixer.attend(q_BTNH, k_BTKH, v_BTKV)


def block(x_BTD, w, mixer: Mixer, config: Config, routing=None):
    """One layer, as `dense.block`; MoE layers report the statistics of `moe.mlp`."""
    return dense.block(x_BTD, w, mixer, config, routing, mixture.mlp, attention)
