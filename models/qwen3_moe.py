"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with mixtures of experts instead of MLPs in all or some layers."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ..core import param
from ..core.param import Param, Stack, Table
from . import dense, qwen3
from .dense import embed as embed
from .layer import Mixer
from .layers import moe


@dataclass(frozen=True)
class Config(dense.Config):
    """`dense.Config` plus experts; `ffn` is the width of layers without them.

    Attributes:
      experts: experts per layer.
      router: how a token's experts are chosen and weighed.
      expert_ffn: hidden width of an expert.
      dense_layers: indices of layers with an ordinary MLP.
    """

    experts: int = 0
    router: moe.Router = moe.Router()
    expert_ffn: int = 0
    dense_layers: tuple[int, ...] = ()

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.router.top_k


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    bias = hf.get("attention_bias", False)
    patterns = dense.windows({"max_window_layers": 0} | hf)
    sliding = [i for i, pattern in enumerate(patterns) if pattern.window]
    wanted = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
    if wanted and len(sliding) < len(patterns):
        raise ValueError(
            f"config.json: the sliding window of qwen3_moe must apply to all layers, got layers {sliding}; "
            "remove layer_types and max_window_layers"
        )
    base = dense.config(hf, "qwen3_moe", qkv_bias=bias, out_bias=bias, patterns=patterns)
    return sparse(Config, base, hf, router(hf))


def router(hf: dict) -> moe.Router:
    """The router of Qwen2-MoE and Qwen3-MoE: softmax over all experts, weights normalised or not."""
    return moe.Router(normalise=hf.get("norm_topk_prob") or False)


def sparse(kind: type[Config], base: dense.Config, hf: dict, router: moe.Router, **sizes: str):
    """Builds a Config of class `kind` from the dense model's and the MoE options; `sizes` maps fields to options. The
    number of experts per token is added to the router."""
    sizes = dict(experts="num_experts", expert_ffn="moe_intermediate_size") | sizes
    hf = {"num_experts": hf.get("num_local_experts")} | hf
    for name in ("num_experts_per_tok", *sizes.values()):
        if not hf.get(name):
            raise ValueError(f"config.json: {base.family} needs {name}, got {hf.get(name)}")
    top_k, name, experts = hf["num_experts_per_tok"], sizes["experts"], hf[sizes["experts"]]
    if top_k > experts:
        raise ValueError(f"config.json: num_experts_per_tok must be at most {name} {experts}, got {top_k}")
    each, rest = divmod(experts, router.groups)
    if rest or top_k > router.kept_groups * each or (router.groups > 1 and each < 2):
        raise ValueError(
            f"config.json: n_group must divide {name} {experts} into groups of at least 2, of which topk_group hold "
            f"num_experts_per_tok {top_k} experts, got n_group {router.groups} and topk_group {router.kept_groups}"
        )
    step, only = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not step >= 1:
        raise ValueError(f"config.json: decoder_sparse_step must be at least 1, got {step}")
    return kind(
        **{f.name: getattr(base, f.name) for f in dataclasses.fields(base)},
        **{field: hf[name] for field, name in sizes.items()},
        router=dataclasses.replace(router, top_k=top_k),
        dense_layers=tuple(i for i in range(base.layers) if i in only or (i + 1) % step),
    )


def to_hf(config: Config) -> dict:
    """The config.json."""
    return qwen3.to_hf(config) | experts_to_hf(config) | {"architectures": ["Qwen3MoeForCausalLM"]}


def experts_to_hf(config: Config) -> dict:
    """The MoE options of a config.json."""
    return {
        "num_experts": config.experts,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_ffn,
        "norm_topk_prob": config.router.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


def table(config: Config) -> Table:
    """The weights, one stack per run of layers with or without experts."""
    return with_experts(config, dense.table(config, dense.BEFORE | dense.QK_HEAD))


# Names in checkpoints of the router and of an expert's matrices; those in transformers' modules, of all families.
NAMES = {"router": "mlp.gate"} | {name: f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")}


def with_experts(
    config: Config, plain: Table, extra: Mapping[str, Param] = {}, names: Mapping[str, str] = NAMES, **dims: int
) -> Table:
    """Replaces MLPs by experts in a dense model's table, except in `config.dense_layers`.

    Args:
      extra: further weights of the MoE layers; `dims` has the sizes of their axes.
      names: as `NAMES`, which are read as well.
    """
    std, out = dense.inits(config)
    spelt = {name: dict.fromkeys((names[name], NAMES[name])) for name in NAMES}
    keys = {name: tuple(f"{dense.AT}{one}.weight" for one in either) for name, either in spelt.items()}
    bare = plain.stacks[0].params
    without = {name: p for name, p in bare.items() if name not in ("gate", "up", "down")}
    sparse = without | {
        "router": Param("router embed", keys["router"], std),
        "expert_gate": Param("experts expert_ffn expert_embed", keys["gate"], std),
        "expert_up": Param("experts expert_ffn expert_embed", keys["up"], std),
        "expert_down": Param("experts expert_embed expert_ffn", keys["down"], out),
        **extra,
    }
    kinds = [(i in config.dense_layers, record) for i, record in enumerate(config.records)]
    stacks = tuple(Stack(layers, bare if kinds[layers[0]][0] else sparse) for layers in param.stacks(kinds))
    dims = {
        **plain.dims, **dims,
        "router": config.experts, "experts": config.experts, "expert_embed": config.embed,
        "expert_ffn": config.expert_ffn,
    }  # fmt: skip
    return Table(plain.top, stacks, dims)


def mlp(h_BTD, w, config: Config, routing=None):
    """The mixture, or the MLP of a layer without experts, as the second half of a layer."""
    if "router" not in w:
        return dense.mlp(h_BTD, w, config)
    return moe.mlp(h_BTD, w, config.router, config.activation, routing=routing)


def block(x_BTD, w, mixer: Mixer, config: Config, routing=None):
    """One layer, as `dense.block`; MoE layers report the statistics of `moe.mlp`."""
    return dense.block(x_BTD, w, mixer, config, routing, mlp)
