"""DeepSeek-V3 (arXiv:2412.19437) and Kimi K2 (arXiv:2507.20534): multi-head latent attention, and experts chosen in
groups by a bias that balances them."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import ones, zeros

from ..core.param import Param, Stack, Table
from . import dense, mixture
from .attention.pattern import Pattern
from .dense import embed as embed
from .layer import Attention, Mixer
from .layers import moe, rope
from .layers.latent import Latent
from .layers.linear import linear
from .layers.norm import rms_norm

DEFAULTS = {
    "num_experts_per_tok": 8, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 4096, "rope_interleave": True,
}  # fmt: skip
NORM_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps


@dataclass(frozen=True)
class Config(mixture.Config):
    """`mixture.Config` plus latent attention.

    Attributes:
      q_rank, kv_rank: sizes of the vectors that a token's queries are made from, and its keys and values; q_rank None =
        queries are made from the residual stream.
      attention_bias: the products with the residual stream, but not q, have biases.
    """

    q_rank: int | None = None
    kv_rank: int = 0
    attention_bias: bool = False

    @property
    def attention(self) -> Attention:
        """The record of all layers."""
        [record] = {record for record in self.records if isinstance(record, Attention)}
        return record


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    dense.refuse(hf, "scoring_func", "sigmoid", default="sigmoid")
    dense.refuse(hf, "topk_method", "noaux_tc", default="noaux_tc")
    return latent(hf, hf.get("model_type", "deepseek_v3"), mixture.sigmoid_router(hf), hf["rope_interleave"] or False)


def latent(hf: dict, family: str, router: moe.Router, pairs: bool) -> Config:
    """The Config of a model with latent attention, and shared experts behind its first layers.

    Args:
      pairs: of `rope.Rope`.
    """
    dense.need(hf, family)
    heads, still, turned = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    dense.refuse(hf, "num_key_value_heads", heads, default=heads)
    dense.refuse(hf, "moe_layer_freq", 1, default=1)
    if turned % 2:
        raise ValueError(f"config.json: qk_rope_head_dim must be even, got {turned}")
    if hf.get("head_dim") is not None:  # transformers turns as many entries
        dense.refuse(hf, "head_dim", turned, default=turned)
    turns = rope.from_hf(hf, rope.Rope(pairs=pairs))
    factor = rope.yarn_scale(turns.factor, turns.mscale_all_dim) ** 2 if turns.mscale_all_dim else 1.0
    base = dense.config(
        hf, family, head_dim=turned, ropes=[turns] * hf["num_hidden_layers"],
        patterns=Pattern(scale=factor / math.sqrt(still + turned)),
    )  # fmt: skip
    sizes = dict(kv_heads=heads, key_dim=still + turned, value_dim=hf["v_head_dim"], latent=hf["kv_lora_rank"])
    records = tuple(dataclasses.replace(record, **sizes) for record in base.records if isinstance(record, Attention))
    plain = mixture.sparse(
        dataclasses.replace(base, records=records), hf, router, experts="n_routed_experts",
        dense_layers=range(min(hf["first_k_dense_replace"], base.layers)),
        shared_ffn=(hf["n_shared_experts"] or 0) * (hf["moe_intermediate_size"] or 0),
    )  # fmt: skip
    ranks = dict(q_rank=hf["q_lora_rank"], kv_rank=hf["kv_lora_rank"])
    return Config(**vars(plain), **ranks, attention_bias=hf.get("attention_bias") or False)


def to_hf(config: Config) -> dict:
    """The config.json, with the constants that SGLang needs; the options of experts and of latent attention are those
    of the source."""
    fixed = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    return dense.to_hf(config) | fixed | {"architectures": ["DeepseekV3ForCausalLM"]}


def table(config: Config) -> Table:
    """The weights, one stack for the layers with experts and one for those without."""
    return latent_table(config, mixture.choice_bias("mlp.gate"))


def latent_table(config: Config, extra: Mapping[str, Param]) -> Table:
    """The weights of a model with latent attention and shared experts.

    Args:
      extra: further weights of the layers with experts.
    """
    std, out = dense.inits(config)

    def weight(axes, name, init=std):
        return Param(axes, (f"{dense.AT}self_attn.{name}.weight",), init)

    def bias(axes, name):
        return Param(axes, (f"{dense.AT}self_attn.{name}.bias",), zeros)

    attention = {
        "kv_down": weight("kv_latent embed", "kv_a_proj_with_mqa"),
        "kv_latent_norm": weight("kv_rank", "kv_a_layernorm", ones),
        "kv_up": weight("keys_values kv_rank", "kv_b_proj"),
        "o": weight("embed values", "o_proj", out),
    }
    if config.q_rank is None:
        attention |= {"q": weight("heads embed", "q_proj")}
    else:
        attention |= {
            "q_down": weight("q_latent embed", "q_a_proj"),
            "q_latent_norm": weight("q_rank", "q_a_layernorm", ones),
            "q_up": weight("heads q_rank", "q_b_proj"),
        }
    if config.attention_bias:
        attention |= {"kv_down_bias": bias("kv_latent", "kv_a_proj_with_mqa"), "o_bias": bias("embed", "o_proj")}
        attention |= {"q_down_bias": bias("q_latent", "q_a_proj")} if config.q_rank else {}
    layer, plain = config.attention, dense.table(config)
    dims = {
        **plain.dims,
        "head": layer.key_dim,
        "heads": layer.heads * layer.key_dim,
        "kv_heads": layer.heads * layer.key_dim,
        "keys_values": layer.heads * (layer.key_dim - layer.rope_dim + layer.value_dim),
        "values": layer.heads * layer.value_dim,
        "q_latent": config.q_rank or 0,
        "q_rank": config.q_rank or 0,
        "kv_latent": config.kv_rank + layer.rope_dim,
        "kv_rank": config.kv_rank,
    }
    kept = {name: p for name, p in plain.stacks[0].params.items() if name not in ("q", "k", "v")}
    stacks = tuple(Stack(stack.layers, kept | attention) for stack in plain.stacks)
    weights = mixture.routed(config) | (mixture.shared(config, "shared_experts") if config.shared_ffn else {})
    return mixture.with_experts(config, Table(plain.top, stacks, dims), {**weights, **extra})


def attention(h_BTD, w, mixer: Mixer, config: Config):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), [B, T, N, V].

    A token's keys and values are made from a vector of kv_rank numbers; their part that turns is one for all heads.
    """
    layer, (B, T, _) = mixer.layer, h_BTD.shape
    still = layer.key_dim - layer.rope_dim

    def product(x, name):
        return checkpoint_name(linear(x, w[name], w.get(f"{name}_bias")), "qkv")

    def heads(x):
        return x.reshape(B, T, layer.heads, -1)

    if "q_down" in w:
        q_BTNH = heads(product(rms_norm(product(h_BTD, "q_down"), w["q_latent_norm"], NORM_EPS), "q_up"))
    else:
        q_BTNH = heads(product(h_BTD, "q"))
    latent_BTR, turned_BTP = jnp.split(product(h_BTD, "kv_down"), [config.kv_rank], -1)
    latent_BTR = rms_norm(latent_BTR, w["kv_latent_norm"], NORM_EPS)
    turned_BT1P = mixer.rotate(turned_BTP[:, :, None])
    q_still, q_turned = jnp.split(q_BTNH, [still], -1)
    k_still, v_BTNV = jnp.split(heads(product(latent_BTR, "kv_up")), [still], -1)
    k_turned = jnp.broadcast_to(turned_BT1P, (B, T, layer.heads, layer.rope_dim))
    q_BTNH = jnp.concatenate([q_still, mixer.rotate(q_turned)], -1)
    k_BTNH = jnp.concatenate([k_still, k_turned], -1)
    kept_BT1L = jnp.concatenate([latent_BTR[:, :, None], turned_BT1P], -1)
    latent = Latent(kept_BT1L, w["kv_up"], layer.heads, still, config.kv_rank)
    return mixer.attend(q_BTNH, k_BTNH, v_BTNV, latent=latent)


def block(x_BTD, w, mixer: Mixer, config: Config, routing=None):
    """One layer, as `dense.block`; MoE layers report the statistics of `moe.mlp`."""
    return dense.block(x_BTD, w, mixer, config, routing, mixture.mlp, attention)
