"""Gemma 4 (Google): Gemma 3 with larger heads in layers of full attention, unscaled scores and normalised values.

Small models look up an input of its own for each layer, and have last layers without keys and values. In mixtures an
MLP and experts stand side by side.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import ones

from ..core.param import Param, Stack, Table
from ..core.parts import split
from ..parallel import vocab
from . import dense, gemma2, mixture
from .attention.pattern import Pattern
from .dense import FULL, SLIDING
from .dense import embed as embed
from .layer import Attention, Mixer
from .layers import moe, rope
from .layers.linear import linear
from .layers.mlp import gated_mlp
from .layers.norm import rms_norm

DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "eos_token_id": 1, "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
ROPES = {SLIDING: rope.Rope(1e4), FULL: rope.Rope(1e6, "proportional", partial=0.25)}
WIDE = {"heads": "wide_heads", "kv_heads": "wide_kv_heads", "head": "wide_head"}  # axes where heads are larger


@dataclass(frozen=True)
class Config(mixture.Config):
    """`mixture.Config`; heads and head_dim are those of layers with a sliding window.

    Attributes:
      keys_as_values: in layers of full attention values are the keys before their norm.
      per_layer: size of a layer's own input; 0 = none.
      per_layer_vocab: number of tokens that have such an input.
      wide_ffn: width of MLPs in layers without keys and values of their own.
    """

    records: tuple[Attention, ...] = ()
    keys_as_values: bool = False
    per_layer: int = 0
    per_layer_vocab: int = 0
    wide_ffn: int = 0


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    if hf["sliding_window"] is None:
        raise ValueError("config.json: gemma4_text needs sliding_window, got None")
    for name in ("rope_theta", "rope_scaling") if not hf.get("rope_parameters") else ():
        dense.refuse(hf, name, None, default=None)  # there is no old spelling: transformers ignores them
    kinds = dense.layer_types(hf, lambda i: SLIDING if (i + 1) % 6 else FULL)
    kinds = [*kinds[:-1], FULL]  # as in transformers
    patterns = {FULL: Pattern(scale=1.0), SLIDING: Pattern(window=dense.window(hf), scale=1.0)}
    vision = hf.get("use_bidirectional_attention") == "vision"  # text is causal
    constants = gemma2.constants(hf | {"use_bidirectional_attention": None} if vision else hf) | {"norm_offset": 0.0}
    layers = dense.by_type(kinds, patterns, rope.by_layer_type(hf, ROPES))
    base = dense.config(hf, "gemma4_text", **layers, **constants)
    records = [record for record in base.records if isinstance(record, Attention)]  # all of them
    base = replace(base, records=with_sources(with_sizes(records, hf, kinds), hf, kinds))
    own = dict(
        keys_as_values=hf.get("attention_k_eq_v") or False,
        per_layer=hf["hidden_size_per_layer_input"] or 0,
        per_layer_vocab=hf["vocab_size_per_layer_input"],
        wide_ffn=base.ffn * (2 if hf.get("use_double_wide_mlp") else 1),
    )
    if not hf.get("enable_moe_block"):
        return Config(**vars(base), **own)
    sizes = {name: hf.get(name) for name in ("num_experts", "moe_intermediate_size")}
    sizes["num_experts_per_tok"] = hf.get("top_k_experts")
    return Config(**vars(mixture.sparse(base, sizes, moe.Router(normalise=True))), **own)


def with_sizes(records: list[Attention], hf: Mapping, kinds: list[str]) -> list[Attention]:
    """The records with the sizes of heads that layers of full attention have: `per_layer_config` as transformers 5
    writes it, else global_head_dim and num_global_key_value_heads.

    Raises:
      ValueError: sizes differ between layers of one type, or do not fit.
    """
    sizes = {"head_dim": hf.get("global_head_dim") or 512}
    if hf.get("attention_k_eq_v") and hf.get("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = hf["num_global_key_value_heads"]
    if (given := hf.get("per_layer_config")) is not None:
        own = {layer.lstrip("0") or "0": one for layer, one in given.items() if one}
        sizes = next(iter(own.values()), {})
        wanted = {str(i): sizes for i, kind in enumerate(kinds) if kind == FULL and sizes}
        if own != wanted or set(sizes) - {"head_dim", "num_key_value_heads"}:
            raise ValueError(
                "config.json: per_layer_config must have the same head_dim and num_key_value_heads for each layer of "
                f"{FULL} and nothing for others, got {given!r:.200}"
            )

    def sized(record: Attention) -> Attention:
        size, count = sizes.get("head_dim", record.key_dim), sizes.get("num_key_value_heads", record.kv_heads)
        if type(size) is not int or size < 2 or size % 2:
            raise ValueError(f"config.json: global_head_dim must be even and above 0, got {size!r:.80}")
        if type(count) is not int or count < 1 or record.heads % count:
            raise ValueError(
                f"config.json: num_attention_heads {record.heads} must be a multiple of num_global_key_value_heads, "
                f"got {count!r:.80}"
            )
        return replace(record, kv_heads=count, key_dim=size, value_dim=size, rope_dim=size)

    return [sized(record) if kind == FULL else record for record, kind in zip(records, kinds, strict=True)]


def with_sources(records: list[Attention], hf: Mapping, kinds: list[str]) -> tuple[Attention, ...]:
    """The records, the last num_kv_shared_layers of them with the keys and values of the last layer of their type
    before them.

    Raises:
      ValueError: there is none.
    """
    count = hf.get("num_kv_shared_layers") or 0
    first = len(records) - count
    last = {kind: i for i, kind in enumerate(kinds[: max(first, 0)])}
    if missing := set(kinds[max(first, 0) :]) - last.keys():
        raise ValueError(
            f"config.json: num_kv_shared_layers must leave a layer of each type before them, got {count} of "
            f"{len(records)} layers, with no {', '.join(sorted(missing))}"
        )
    sources = {last[kind] for kind in kinds[first:]}
    return tuple(
        replace(record, source=last[kind]) if i >= first else replace(record, kept=i in sources)
        for i, (record, kind) in enumerate(zip(records, kinds, strict=True))
    )


def to_hf(config: Config) -> dict:
    """The config.json; sizes of layers of full attention are those of the source."""
    hf = json.loads(config.source)
    return gemma2.to_hf(config) | {
        "architectures": ["Gemma4ForCausalLM"],
        **rope.to_hf_by_layer_type(rope.by_layer_type(hf, ROPES), hf=hf),
    }


def table(config: Config) -> Table:
    """The weights; `unused` has the keys and values of layers that use those of others."""
    plain = dense.table(config, gemma2.NORMS | dense.QK_HEAD)
    std, _ = dense.inits(config)
    key = "{prefix}%s.weight"
    top = dict(plain.top)
    if config.per_layer:
        top |= {
            "per_layer_embed": Param("per_layer_vocab per_layer_columns", (key % "embed_tokens_per_layer",), std),
            "per_layer_projection": Param("per_layers embed", (key % "per_layer_model_projection",), std),
            "per_layer_norm": Param("per_layer", (key % "per_layer_projection_norm",), ones),
        }
    stacks = tuple(Stack(stack.layers, layer(config, stack)) for stack in plain.stacks)
    wide = next((record for record in config.records if is_wide(record, config)), config.records[0])
    dims = {
        "wide_heads": wide.heads * wide.key_dim, "wide_kv_heads": wide.kv_heads * wide.key_dim,
        "wide_head": wide.key_dim, "wide_ffn": config.wide_ffn,
        "per_layer": config.per_layer, "per_layer_vocab": config.per_layer_vocab,
        "per_layers": config.layers * config.per_layer, "per_layer_columns": config.layers * config.per_layer,
        "router": config.experts, "experts": config.experts, "expert_embed": config.embed,
        "expert_ffn": config.expert_ffn,
    }  # fmt: skip
    unused = tuple(
        f"{dense.AT}self_attn.{name}".format(prefix=config.prefix, layer=i)
        for i, record in enumerate(config.records)
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias", "v_proj.bias")
        if record.source is not None
    )
    return Table(top, stacks, {**plain.dims, **dims}, unused)


def is_wide(record: Attention, config: Config) -> bool:
    """Whether a layer's heads differ from those of layers with a window."""
    return (record.kv_heads, record.key_dim) != (config.kv_heads, config.head_dim)


def layer(config: Config, stack: Stack) -> dict[str, Param]:
    """The weights of the layers of a stack of `dense.table`."""
    record = config.records[stack.layers[0]]
    std, out = dense.inits(config)
    matrix = lambda axes, name, init=std: Param(axes, (f"{dense.AT}{name}.weight",), init)
    vector = lambda axis, name: Param(axis, (f"{dense.AT}{name}",), ones)
    params = dict(stack.params)
    without = ["k", "v", "k_norm", "k_bias", "v_bias"] if record.source is not None else []
    if config.keys_as_values and record.pattern.window is None:
        without += ["v", "v_bias"]
    params = {name: p for name, p in params.items() if name not in without}
    renamed = (WIDE if is_wide(record, config) else {}) | ({"ffn": "wide_ffn"} if record.source is not None else {})
    params = {
        name: replace(p, axes=" ".join(renamed.get(axis, axis) for axis in p.axes.split()))
        for name, p in params.items()
    }
    params["scalar"] = replace(vector("one", "layer_scalar"), trainable=False)
    if config.per_layer:
        params |= {
            "per_layer_gate": matrix("per_layer embed", "per_layer_input_gate"),
            "per_layer_out": matrix("embed per_layer", "per_layer_projection", out),
            "per_layer_norm": vector("embed", "post_per_layer_input_norm.weight"),
        }
    if config.experts:
        both = split(config.expert_ffn, config.expert_ffn, axis=1)
        halves = {
            name: Param("experts expert_ffn expert_embed", (f"{dense.AT}experts.gate_up_proj",), std, part=part)
            for name, part in zip(("expert_gate", "expert_up"), both, strict=True)
        }
        params |= halves | {
            "expert_down": Param("experts expert_embed expert_ffn", (f"{dense.AT}experts.down_proj",), out),
            "router": matrix("router embed", "router.proj"),
            "router_norm": vector("embed", "router.scale"),
            "router_weight": vector("router", "router.per_expert_scale"),
            "mlp_after": vector("embed", "post_feedforward_layernorm_1.weight"),
            "experts_before": vector("embed", "pre_feedforward_layernorm_2.weight"),
            "experts_after": vector("embed", "post_feedforward_layernorm_2.weight"),
        }
    return params


def per_layer(params, token_BT, x_BTD, config: Config):
    """Each layer's own input, [layers, B, T, per_layer]: by the token, and by its embedding; None without them."""
    if not config.per_layer:
        return None
    found = vocab.take(params["per_layer_embed"], token_BT, x_BTD.dtype)
    found = found * jnp.asarray(math.sqrt(config.per_layer), x_BTD.dtype)
    made = linear(x_BTD, params["per_layer_projection"]) * config.embed**-0.5
    apart = lambda x: x.reshape(*x.shape[:2], config.layers, config.per_layer)
    made = rms_norm(apart(made), params["per_layer_norm"], config.norm_eps)
    return jnp.moveaxis((made + apart(found)) * 2**-0.5, 2, 0)


def block(x_BTD, w, mixer: Mixer, config: Config, routing=None):
    """One layer, as `dense.block`; with `per_layer_input` [B, T, per_layer] among its weights in models that have it.

    Keys and values that other layers use are reported as "keys_values".
    """

    def norm(x, name):
        return rms_norm(x, w[name], config.norm_eps)

    q_BTNH, *keys_values = queries_keys_values(norm(x_BTD, "norm1"), w, mixer, config)
    out_BTD = linear(dense.flat(mixer.attend(q_BTNH, *keys_values)), w["o"], w.get("o_bias"))
    x_BTD = x_BTD + norm(checkpoint_name(out_BTD, "attention_out"), "norm1_after")
    out_BTD, report = gated_mlp(norm(x_BTD, "norm2"), w, config.activation), {}
    if config.experts:
        choice_BTD = norm(x_BTD, "router_norm") * config.embed**-0.5
        mixed_BTD, report = moe.mlp(
            norm(x_BTD, "experts_before"), w, config.router, config.activation, routing=routing, choice_BTD=choice_BTD
        )
        out_BTD = norm(out_BTD, "mlp_after") + norm(mixed_BTD, "experts_after")
    x_BTD = x_BTD + norm(out_BTD, "norm2_after")
    if config.per_layer:
        gate = config.activation(linear(x_BTD, w["per_layer_gate"]), w["per_layer_input"])
        x_BTD = x_BTD + norm(linear(gate, w["per_layer_out"]), "per_layer_norm")
    if mixer.layer.kept:
        report = report | {"keys_values": tuple(keys_values)}
    return x_BTD * w["scalar"].astype(x_BTD.dtype)[0], report


def queries_keys_values(h_BTD, w, mixer: Mixer, config: Config):
    """(q_BTNH, k_BTKH, v_BTKH) of a layer's attention; queries alone in layers that use the others' keys and values."""
    layer = mixer.layer

    def heads(name, count):
        x = checkpoint_name(linear(h_BTD, w[name], w.get(f"{name}_bias")), "qkv")
        return x.reshape(*x.shape[:2], count, layer.key_dim)

    def place(x, name):
        return mixer.rotate(rms_norm(x, w[name], config.norm_eps))

    q_BTNH = place(heads("q", layer.heads), "q_norm")
    if layer.source is not None:
        return (q_BTNH,)
    k_BTKH = heads("k", layer.kv_heads)
    v_BTKH = heads("v", layer.kv_heads) if "v" in w else k_BTKH
    return q_BTNH, place(k_BTKH, "k_norm"), rms_norm(v_BTKH, None, config.norm_eps)
