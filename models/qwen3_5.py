"""Qwen3.5, 3.6 and 3.8: gated delta nets (arXiv:2412.06464) in most layers, attention with an output gate in others."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal, ones

from ..core.param import Param, Stack, Table
from ..core.parts import split
from . import dense
from .dense import embed as embed
from .layer import AnyMixer, Attention, Mixer, Recurrence, Recurrent
from .layers import delta, rope
from .layers.linear import linear
from .layers.norm import rms_norm
from .layers.recurrence import time_steps

DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768}
ROPE = rope.Rope(partial=0.25, sections=(11, 11, 10), interleaved=True)
LINEAR = "linear_attention"  # a value in layer_types
TAPS = {"q": "key_channels", "k": "key_channels", "v": "value_channels"}  # what the convolution reads


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net.

    Attributes:
      key_heads, value_heads: heads of queries and keys, each for value_heads / key_heads heads of values.
      key_dim, value_dim: size of a head.
      taps: tokens that the convolution reads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> dict[str, int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.value_heads * self.value_dim}

    @property
    def layer(self) -> Recurrent:
        """The record of a layer."""
        past = tuple((name, (size, self.taps - 1)) for name, size in self.channels.items())
        return Recurrent((*past, ("delta", (self.value_heads, self.key_dim, self.value_dim))))


@dataclass(frozen=True)
class Config(dense.Config):
    """`dense.Config` plus the sizes of delta nets; heads and head_dim are those of layers with attention."""

    delta: DeltaNet = DeltaNet(1, 1, 1, 1, 1)


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    return hybrid(DEFAULTS | hf, "qwen3_5_text", ROPE)


def hybrid(hf: dict, family: str, default: rope.Rope) -> Config:
    """The Config of a family with delta nets, and with this rotary embedding where config.json states none."""
    every = hf.get("full_attention_interval") or 4
    kinds = dense.layer_types(hf, lambda i: LINEAR if (i + 1) % every else dense.FULL, (dense.FULL, LINEAR))
    bias = hf.get("attention_bias", False)
    base = dense.config(
        hf, family, rope=default, qkv_bias=bias, out_bias=bias, norm_offset=1.0, patterns=dense.Pattern()
    )  # fmt: skip
    sizes = (("num_key_heads", 16), ("num_value_heads", 32), ("key_head_dim", 128), ("value_head_dim", 128),
             ("conv_kernel_dim", 4))  # fmt: skip
    net = DeltaNet(*(hf.get(f"linear_{name}", default) for name, default in sizes))
    if net.value_heads % net.key_heads:
        raise ValueError(
            "config.json: linear_num_value_heads must be a multiple of linear_num_key_heads, got "
            f"{net.value_heads} and {net.key_heads}"
        )
    layers = zip(kinds, base.records, strict=True)
    records = tuple(net.layer if kind == LINEAR else attention for kind, attention in layers)
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return Config(**{**fields, "records": records}, delta=net)


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": config.qkv_bias,
        "layer_types": [dense.FULL if isinstance(record, Attention) else LINEAR for record in config.records],
        **interval(config),
    }


def interval(config: Config) -> dict[str, int]:
    """The option by which SGLang places Qwen3-Next's layers with attention, if they are every n-th layer."""
    full = [i for i, record in enumerate(config.records) if isinstance(record, Attention)]
    every = full[0] + 1 if full else 0
    return {"full_attention_interval": every} if full and full == [*range(full[0], len(config.records), every)] else {}


def table(config: Config) -> Table:
    """The weights."""
    plain = dense.table(config, dense.BEFORE | dense.QK_HEAD)

    def stack(plain: Stack) -> Stack:
        params = plain.params
        if isinstance(config.records[plain.layers[0]], Attention):
            return Stack(plain.layers, {**params, **gated_queries(config, params)})
        kept = {name: p for name, p in params.items() if ".self_attn." not in p.keys[0]}
        return Stack(plain.layers, kept | delta_net(config))

    return Table(plain.top, tuple(map(stack, plain.stacks)), {**plain.dims, **dims(config.delta)})


def dims(net: DeltaNet) -> dict[str, int]:
    """Sizes of the axes of delta nets."""
    return {
        "key_channels": net.channels["k"], "value_channels": net.channels["v"], "value_heads": net.value_heads,
        "taps": net.taps, "value_dim": net.value_dim,
    }  # fmt: skip


def gated_queries(config: Config, params: Mapping[str, Param]) -> dict[str, Param]:
    """Queries and the gate of attention's output, which share a tensor: of each head queries, then gates."""
    parts = dict(zip(("q", "q_gate"), split(config.head_dim, config.head_dim), strict=True))
    found = {name: dataclasses.replace(params["q"], part=part) for name, part in parts.items()}
    if config.qkv_bias:
        biases = {f"{name}_bias": part for name, part in parts.items()}
        found |= {name: dataclasses.replace(params["q_bias"], part=part) for name, part in biases.items()}
    return found


def delta_net(config: Config) -> dict[str, Param]:
    """The weights of a delta net.

    New heads remember for a token up to a thousand, as in flash-linear-attention (`fla/layers/gated_deltanet.py`, by
    the authors of the paper). As transformers starts them, nearly none remembers beyond one.
    """
    std, out = dense.inits(config)
    at = f"{dense.AT}linear_attn."
    sizes = config.delta.channels.values()
    inputs = zip(TAPS.items(), split(*sizes), split(*sizes, dropped=1), strict=True)
    params = {}
    for (name, axis), part, of_taps in inputs:
        params[f"delta_{name}"] = Param(f"{axis} embed", (f"{at}in_proj_qkv.weight",), std, part=part)
        params[f"delta_{name}_taps"] = Param(f"{axis} taps", (f"{at}conv1d.weight",), normal(0.5), part=of_taps)
    return params | {
        "delta_gate": Param("value_channels embed", (f"{at}in_proj_z.weight",), std),
        "decay": Param("value_heads embed", (f"{at}in_proj_a.weight",), std),
        "write": Param("value_heads embed", (f"{at}in_proj_b.weight",), std),
        "decay_log": Param("value_heads", (f"{at}A_log",), _rates, "float32"),
        "decay_bias": Param("value_heads", (f"{at}dt_bias",), partial(time_steps, (0.001, 0.1)), "float32"),
        "out_norm": Param("value_dim", (f"{at}norm.weight",), ones),
        "delta_o": Param("embed value_channels", (f"{at}out_proj.weight",), out),
    }


def _rates(key, shape, dtype):
    """log A, A uniform up to 16."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16))


def block(x_BTD, w, mixer: AnyMixer, config: Config, routing=None, mlp=dense.mlp):
    """One layer, as `dense.block`."""
    norm = lambda x, name: rms_norm(x, w[name], config.norm_eps, config.norm_offset)
    h_BTD = norm(x_BTD, "norm1")
    if isinstance(mixer, Mixer):
        out_BTD = gated_attention(h_BTD, w, mixer, config)
    else:
        out_BTD = recur(h_BTD, w, mixer, config)
    x_BTD = x_BTD + checkpoint_name(out_BTD, "attention_out")
    out_BTD, report = mlp(norm(x_BTD, "norm2"), w, config, routing=routing)
    return x_BTD + out_BTD, report


def gated_attention(h_BTD, w, mixer: Mixer, config: Config):
    """Attention whose output is multiplied by the sigmoid of a gate."""
    a_BTNH = mixer.attend(*dense.queries_keys_values(h_BTD, w, mixer, config))
    gate = checkpoint_name(linear(h_BTD, w["q_gate"], w.get("q_gate_bias")), "qkv")
    return linear(dense.flat(a_BTNH) * jax.nn.sigmoid(gate), w["o"], w.get("o_bias"))


def recur(h_BTD, w, mixer: Recurrence, config: Config):
    """A gated delta net. Decays, norms and gates are computed in fp32 or wider."""
    net = config.delta
    wide = jnp.promote_types(h_BTD.dtype, jnp.float32)
    project = lambda name: checkpoint_name(linear(h_BTD, w[name]), "qkv")

    def mixed(name, heads, size):
        x_BTC = jax.nn.silu(mixer.convolve(name, project(f"delta_{name}"), w[f"delta_{name}_taps"]))
        return x_BTC.reshape(*x_BTC.shape[:2], heads, size)

    q_BTGK, k_BTGK = (delta.l2_norm(mixed(name, net.key_heads, net.key_dim)) for name in ("q", "k"))
    write_BTN = jax.nn.sigmoid(linear(h_BTD, w["write"]))
    speed_BTN = jax.nn.softplus(linear(h_BTD, w["decay"]).astype(wide) + w["decay_bias"].astype(wide)[None, None])
    decay_BTN = -jnp.exp(w["decay_log"].astype(wide))[None, None] * speed_BTN
    out_BTNV = mixer.recur(
        "delta", delta, q_BTGK * net.key_dim**-0.5, k_BTGK, mixed("v", net.value_heads, net.value_dim),
        mixer.gate(write_BTN), mixer.gate(decay_BTN),
    )  # fmt: skip
    gate_BTNV = project("delta_gate").reshape(out_BTNV.shape).astype(wide)
    out_BTNV = rms_norm(out_BTNV, w["out_norm"], config.norm_eps).astype(wide) * jax.nn.silu(gate_BTNV)
    return linear(dense.flat(out_BTNV).astype(h_BTD.dtype), w["delta_o"])
