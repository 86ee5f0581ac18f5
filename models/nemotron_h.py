"""Nemotron-H and Nemotron 3 (arXiv:2504.03624): each layer is one mixer behind one norm, which may be Mamba 2
(arXiv:2405.21060), attention without positions, an MLP, or a mixture of experts."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal, ones, zeros

from ..core import param
from ..core.param import Param, Stack, Table
from ..core.parts import Part, split
from . import dense, mixture
from .dense import embed as embed
from .layer import STATELESS, AnyMixer, Mixer, Recurrence, Recurrent
from .layers import mamba, moe
from .layers.linear import linear
from .layers.mlp import Activation, mlp
from .layers.norm import rms_norm
from .layers.recurrence import time_steps

DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "intermediate_size": 21504, "layer_norm_epsilon": 1e-5, "ssm_state_size": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
    "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
}  # fmt: skip
# Other names that transformers reads, and that win over the usual ones.
ALIASES = {
    "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias", "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max", "mamba_dt_init_floor": "time_step_floor", "mamba_dt_limit": "time_step_limit",
}  # fmt: skip
# Options with a single value: others transformers does not honour, or servers read them differently.
ONLY = {
    "tie_word_embeddings": False, "attention_bias": False, "mamba_proj_bias": False, "sliding_window": None,
    "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "hidden_dropout": 0.0, "residual_in_fp32": False,
    "n_shared_experts": 1,
}  # fmt: skip
MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", dense.FULL, "mlp", "moe"  # values in layers_block_type
FORMER = {"mamba": MAMBA, "attention": ATTENTION}  # and what these were called
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}  # in hybrid_override_pattern


@dataclass(frozen=True)
class Mamba:
    """Sizes and constants of a Mamba 2 layer.

    Attributes:
      heads, head_dim: number and size of the heads.
      groups: of heads, each with its own B and C.
      state: size of B and C.
      taps: tokens that the convolution reads.
      bias, conv_bias: the projections in and out, and the convolution, have biases.
      least: the smallest time step.
      start: bounds of the time steps of a new model.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    bias: bool
    conv_bias: bool
    least: float
    start: tuple[float, float]

    @property
    def channels(self) -> dict[str, int]:
        """Channels of x, B and C."""
        return {"x": self.heads * self.head_dim, "b": self.groups * self.state, "c": self.groups * self.state}

    @property
    def layer(self) -> Recurrent:
        """The record of a layer."""
        past = tuple((name, (size, self.taps - 1)) for name, size in self.channels.items())
        return Recurrent((*past, ("mamba", (self.heads, self.head_dim, self.state))))


@dataclass(frozen=True)
class Config(mixture.Config):
    """`mixture.Config` plus the kind of each layer and the sizes of Mamba's; `experts` is 0 without layers of experts.

    Attributes:
      kinds: the kind of each layer, as in layers_block_type.
      latent: width at which experts work; None = that of the residual stream.
    """

    kinds: tuple[str, ...] = ()
    mamba: Mamba = Mamba(1, 1, 1, 1, 1, False, False, 0.0, (1.0, 1.0))
    latent: int | None = None


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf | {name: hf[alias] for alias, name in ALIASES.items() if alias in hf}
    for name, only in ONLY.items():
        dense.refuse(hf, name, only, default=only)
    dense.refuse(hf, "attention_head_dim", hf["head_dim"], default=hf["head_dim"])
    if hf.get("time_step_limit") not in (None, *([0.0, top] for top in (math.inf, {"__float__": "Infinity"}))):
        raise ValueError(
            "config.json: time_step_limit must be [0, Infinity], got "
            f"{hf['time_step_limit']!r:.200}; time steps have a lower limit only, time_step_min"
        )
    kinds = layer_kinds(hf)
    base = dense.config(
        hf | {"num_hidden_layers": len(kinds)}, "nemotron_h", activation=Activation("relu2"),
        norm_eps=hf["layer_norm_epsilon"], mlp_bias=hf["mlp_bias"] or False, ropes=[None] * len(kinds),
        patterns=dense.Pattern(),
    )  # fmt: skip
    low = max(hf["time_step_min"], hf["time_step_floor"])
    net = Mamba(
        hf["mamba_num_heads"], hf["mamba_head_dim"], hf["n_groups"], hf["ssm_state_size"], hf["conv_kernel"],
        bias=hf["use_bias"] or False, conv_bias=hf["use_conv_bias"] or False, least=hf["time_step_min"],
        start=(low, max(hf["time_step_max"], low)),
    )  # fmt: skip
    if net.heads % net.groups:
        raise ValueError(
            f"config.json: mamba_num_heads must be a multiple of n_groups, got {net.heads} and {net.groups}"
        )
    of_kind = {MAMBA: net.layer, ATTENTION: base.records[0], MLP: STATELESS, EXPERTS: STATELESS}
    base = dataclasses.replace(base, records=tuple(of_kind[kind] for kind in kinds))
    if EXPERTS not in kinds:
        return Config(**vars(base), kinds=kinds, mamba=net)
    shared = hf["moe_shared_expert_intermediate_size"]
    sparse = mixture.sparse(
        base, hf, mixture.sigmoid_router(hf), experts="n_routed_experts", shared_ffn=shared,
        dense_layers=[i for i, kind in enumerate(kinds) if kind != EXPERTS],
    )  # fmt: skip
    return Config(**vars(sparse), kinds=kinds, mamba=net, latent=hf["moe_latent_size"])


def layer_kinds(hf: dict) -> tuple[str, ...]:
    """The kind of each layer: layers_block_type, else hybrid_override_pattern, else one layer of each.

    Raises:
      ValueError: a kind is unknown, or num_hidden_layers is another number.
    """
    if hf.get("layers_block_type") is not None:
        kinds = tuple(FORMER.get(kind, kind) for kind in hf["layers_block_type"])
    else:
        kinds = tuple(LETTERS.get(letter, letter) for letter in hf.get("hybrid_override_pattern") or "ME*-")
    if not kinds or (unknown := set(kinds) - set(LETTERS.values())):
        raise ValueError(
            f"config.json: layers_block_type must have {', '.join(LETTERS.values())}, or hybrid_override_pattern "
            f"{' '.join(LETTERS)}, for each layer, got {', '.join(sorted(unknown)) if kinds else 'none':.200}"
        )
    if (count := hf.get("num_hidden_layers", len(kinds))) != len(kinds):
        raise ValueError(
            "config.json: num_hidden_layers must be the number of layers in layers_block_type or "
            f"hybrid_override_pattern, {len(kinds)}, got {count}"
        )
    return kinds


def to_hf(config: Config) -> dict:
    """The config.json, with the kinds of layers in both spellings, by the names that SGLang reads, too; the sizes of
    Mamba are those of the source."""
    letters, names = ({kind: name for name, kind in known.items()} for known in (LETTERS, FORMER))
    out = dense.to_hf(config) | {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [names.get(kind, kind) for kind in config.kinds],
        "hybrid_override_pattern": "".join(letters[kind] for kind in config.kinds),
        "layer_norm_epsilon": config.norm_eps,
        "mlp_bias": config.mlp_bias,
    }
    if config.experts:
        sizes = {"n_routed_experts": config.experts, "moe_intermediate_size": config.expert_ffn}
        sizes |= {"moe_shared_expert_intermediate_size": config.shared_ffn, "moe_latent_size": config.latent}
        out |= sizes | mixture.sigmoid_to_hf(config.router)
    return out


def table(config: Config) -> Table:
    """The weights."""
    plain, net = dense.table(config), config.mamba
    of_kind = {MAMBA: mamba_layer, ATTENTION: attention_layer, MLP: mlp_layer, EXPERTS: experts_layer}
    norm = {"norm": weight(config, "embed", "layers.{layer}.norm.weight", ones)}
    stacks = [Stack(layers, norm | of_kind[config.kinds[layers[0]]](config)) for layers in param.stacks(config.kinds)]
    top = {
        **plain.top,
        "embed": weight(config, "vocab embed", "embeddings.weight", inits(config)[0]),
        "norm": weight(config, "embed", "norm_f.weight", ones),
    }
    dims = {
        **plain.dims,
        "value_channels": net.channels["x"], "key_channels": net.channels["b"], "value_heads": net.heads,
        "taps": net.taps,
    }  # fmt: skip
    if config.experts:
        dims |= {
            "router": config.experts, "experts": config.experts, "expert_ffn": config.expert_ffn,
            "expert_embed": config.latent or config.embed, "expert_latent": config.latent or config.embed,
            "shared_ffn": config.shared_ffn,
        }  # fmt: skip
    return Table(top, tuple(stacks), dims)


def weight(
    config: Config, axes: str, name: str, init, dtype: str | None = None, trainable: bool = True,
    part: Part | None = None,
) -> Param:  # fmt: skip
    """A weight under the name in files, `backbone.`, and that in transformers' module; without either in a bare
    backbone."""
    roots = ("backbone.", "{prefix}") if config.prefix else ("",)
    return Param(axes, tuple(f"{root}{name}" for root in roots), init, dtype, trainable, part)


AT = "layers.{layer}.mixer."  # prefix of the keys of a layer's mixer


def inits(config: Config):
    """Initialisers of (matrices, output projections); each layer adds to the residual stream once."""
    return normal(config.init_std), normal(config.init_std * config.layers**-0.5)


def projections(config: Config, bias: bool, **named: tuple[str, str]) -> dict[str, Param]:
    """The matrices {name: (axes, module in checkpoints)} of a layer's mixer, with their biases if it has any."""
    std, out = inits(config)
    params = {}
    for name, (axes, module) in named.items():
        first, _ = axes.split()
        params[name] = weight(config, axes, f"{AT}{module}.weight", out if first == "embed" else std)
        if bias:
            params[f"{name}_bias"] = weight(config, first, f"{AT}{module}.bias", zeros)
    return params


def attention_layer(config: Config) -> dict[str, Param]:
    """The weights of attention."""
    return projections(
        config, False, q=("heads embed", "q_proj"), k=("kv_heads embed", "k_proj"), v=("kv_heads embed", "v_proj"),
        o=("embed heads", "o_proj"),
    )  # fmt: skip


def mlp_layer(config: Config) -> dict[str, Param]:
    """The weights of an MLP."""
    return projections(config, config.mlp_bias, up=("ffn embed", "up_proj"), down=("embed ffn", "down_proj"))


def experts_layer(config: Config) -> dict[str, Param]:
    """The weights of a mixture of experts with a shared expert."""
    std, out = inits(config)
    expert = f"{AT}experts.{{expert}}."
    named = {
        "shared_up": ("shared_ffn embed", "shared_experts.up_proj"),
        "shared_down": ("embed shared_ffn", "shared_experts.down_proj"),
    }
    if config.latent is not None:
        named["latent_down"] = "expert_latent embed", "fc1_latent_proj"
        named["latent_up"] = "embed expert_latent", "fc2_latent_proj"
    return projections(config, config.mlp_bias, **named) | {
        "router": weight(config, "router embed", f"{AT}gate.weight", std),
        "router_bias": weight(config, "router", f"{AT}gate.e_score_correction_bias", zeros, "float32", False),
        "expert_up": weight(config, "experts expert_ffn expert_embed", f"{expert}up_proj.weight", std),
        "expert_down": weight(config, "experts expert_embed expert_ffn", f"{expert}down_proj.weight", out),
    }


def mamba_layer(config: Config) -> dict[str, Param]:
    """The weights of Mamba 2; x are its values, B its keys and C its queries (arXiv:2405.21060, section 7)."""
    net, (std, _) = config.mamba, inits(config)
    axes = {"x": "value_channels", "b": "key_channels", "c": "key_channels"}
    inputs = {"gate": "value_channels", **axes, "dt": "value_heads"}
    sizes = net.channels.values()
    params = projections(config, net.bias, out=("embed value_channels", "out_proj"))
    for (name, axis), part in zip(inputs.items(), split(net.channels["x"], *sizes, net.heads), strict=True):
        params[f"in_{name}"] = weight(config, f"{axis} embed", f"{AT}in_proj.weight", std, part=part)
        if net.bias:
            params[f"in_{name}_bias"] = weight(config, axis, f"{AT}in_proj.bias", zeros, part=part)
    for (name, axis), part, of_taps in zip(axes.items(), split(*sizes), split(*sizes, dropped=1), strict=True):
        params[f"{name}_taps"] = weight(config, f"{axis} taps", f"{AT}conv1d.weight", normal(0.5), part=of_taps)
        if net.conv_bias:
            params[f"{name}_taps_bias"] = weight(config, axis, f"{AT}conv1d.bias", zeros, part=part)
    return params | {
        "decay_log": weight(config, "value_heads", f"{AT}A_log", _decays, "float32"),
        "dt_offset": weight(config, "value_heads", f"{AT}dt_bias", partial(time_steps, net.start), "float32"),
        "skip": weight(config, "value_heads", f"{AT}D", ones, "float32"),
        "out_norm": weight(config, "value_channels", f"{AT}norm.weight", ones),
    }


def _decays(key, shape, dtype):
    """log A of 1 to the number of heads."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1)), shape).astype(dtype)


def block(x_BTD, w, mixer: AnyMixer, config: Config, routing=None):
    """One layer: (x_BTD, the statistics of `moe.mlp` if it is of experts)."""
    h_BTD, report = rms_norm(x_BTD, w["norm"], config.norm_eps), {}
    if isinstance(mixer, Mixer):
        a_BTNV = dense.attention_of_heads(h_BTD, w, mixer, config)
        out_BTD = checkpoint_name(linear(dense.flat(a_BTNV), w["o"]), "attention_out")
    elif mixer.layer.state:
        out_BTD = checkpoint_name(recur(h_BTD, w, mixer, config), "attention_out")
    elif "router" in w:
        out_BTD, report = moe.mlp(h_BTD, w, config.router, config.activation, routing=routing)
    else:
        out_BTD = mlp(h_BTD, w, config.activation)
    return x_BTD + out_BTD, report


def recur(h_BTD, w, mixer: Recurrence, config: Config):
    """Mamba 2 with a gate before the norm, which is over the channels of each group. Time steps, decays, gate and norm
    are computed in fp32 or wider."""
    net, (B, T, _) = config.mamba, h_BTD.shape
    wide = jnp.promote_types(h_BTD.dtype, jnp.float32)
    project = lambda name: checkpoint_name(linear(h_BTD, w[f"in_{name}"], w.get(f"in_{name}_bias")), "qkv")

    def mixed(name, heads):
        x_BTC = mixer.convolve(name, project(name), w[f"{name}_taps"], w.get(f"{name}_taps_bias"))
        return jax.nn.silu(x_BTC).reshape(B, T, heads, -1)

    x_BTHP, B_BTGN, C_BTGN = mixed("x", net.heads), mixed("b", net.groups), mixed("c", net.groups)
    dt_BTH = jax.nn.softplus(project("dt").astype(wide) + w["dt_offset"].astype(wide)[None, None])
    dt_BTH, A_H = mixer.gate(jnp.maximum(dt_BTH, net.least)), -jnp.exp(w["decay_log"].astype(wide))
    out_BTHP = mixer.recur("mamba", mamba, x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, w["skip"])
    gate_BTC = jax.nn.silu(project("gate").astype(wide))
    out_BTGX = (dense.flat(out_BTHP).astype(wide) * gate_BTC).reshape(B, T, net.groups, -1)
    out_BTC = dense.flat(rms_norm(out_BTGX, None, config.norm_eps)) * w["out_norm"].astype(wide)[None, None]
    return linear(out_BTC.astype(h_BTD.dtype), w["out"], w.get("out_bias"))
