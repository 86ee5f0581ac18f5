"""Mixtures of experts instead of MLPs in layers of a dense decoder, shared by the families that have them."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jax.nn.initializers import zeros

from ..core import param
from ..core.param import Param, Stack, Table
from . import dense
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
      shared_ffn: hidden width of the shared expert; 0 = none.
    """

    experts: int = 0
    router: moe.Router = moe.Router()
    expert_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    shared_ffn: int = 0

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.router.top_k


def sparse(
    base: dense.Config, hf: dict, router: moe.Router, *, dense_layers: Collection[int] = (), shared_ffn: int = 0,
    experts: str = "num_experts", expert_ffn: str = "moe_intermediate_size",
) -> Config:  # fmt: skip
    """Builds a Config from the dense model's and the MoE options; the number of experts per token is added to the
    router.

    Args:
      experts, expert_ffn: names of the options of these fields; num_local_experts stands for num_experts as well.

    Raises:
      ValueError: an option is missing, or there are fewer experts than a token needs; names it.
    """
    hf = {"num_experts": hf.get("num_local_experts")} | hf
    for name in ("num_experts_per_tok", experts, expert_ffn):
        if not hf.get(name):
            raise ValueError(f"config.json: {base.family} needs {name}, got {hf.get(name)}")
    top_k, count = hf["num_experts_per_tok"], hf[experts]
    if top_k > count:
        raise ValueError(f"config.json: num_experts_per_tok must be at most {experts} {count}, got {top_k}")
    groups, kept = router.groups, router.kept_groups
    if count % groups or (groups > 1 and not 2 * groups <= count) or top_k > kept * (count // groups):
        raise ValueError(
            f"config.json: n_group must divide {experts} {count} into groups of 2 or more, and topk_group of them have "
            f"num_experts_per_tok {top_k} experts, got {groups} and {kept}"
        )
    return Config(
        **{f.name: getattr(base, f.name) for f in dataclasses.fields(dense.Config)},
        experts=count,
        router=dataclasses.replace(router, top_k=top_k),
        expert_ffn=hf[expert_ffn],
        dense_layers=tuple(sorted(dense_layers)),
        shared_ffn=shared_ffn,
    )


def every_nth(hf: dict) -> list[int]:
    """The layers without experts in Qwen: mlp_only_layers, and all but each decoder_sparse_step-th."""
    step, only = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not step >= 1:
        raise ValueError(f"config.json: decoder_sparse_step must be at least 1, got {step}")
    return [i for i in range(hf.get("num_hidden_layers") or 0) if i in only or (i + 1) % step]


def softmax_router(hf: dict) -> moe.Router:
    """The router of Qwen: softmax over all experts, weights normalised or not."""
    return moe.Router(normalise=hf.get("norm_topk_prob") or False)


def sigmoid_router(hf: dict) -> moe.Router:
    """The router of DeepSeek-V3 (arXiv:2412.19437), in fp32: sigmoid scores, chosen with a bias and by groups.

    Raises:
      ValueError: more groups are kept than there are.
    """
    hf = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0} | hf
    groups, kept = (hf[name] or 1 for name in ("n_group", "topk_group"))
    if kept > groups:
        raise ValueError(f"config.json: topk_group must be at most n_group {groups}, got {kept}")
    return moe.Router(
        score="sigmoid", groups=groups, kept_groups=kept, normalise=hf["norm_topk_prob"] or False, eps=1e-20,
        scale=hf["routed_scaling_factor"], fp32=True,
    )  # fmt: skip


def sigmoid_to_hf(router: moe.Router) -> dict:
    """The options that `sigmoid_router` reads, and the number of experts per token."""
    return {
        "n_group": router.groups,
        "topk_group": router.kept_groups,
        "norm_topk_prob": router.normalise,
        "routed_scaling_factor": router.scale,
        "num_experts_per_tok": router.top_k,
    }


def qwen_to_hf(config: Config) -> dict:
    """The MoE options of a config.json of Qwen."""
    return {
        "num_experts": config.experts,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_ffn,
        "norm_topk_prob": config.router.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


# Names in checkpoints of the router and of an expert's matrices; those in transformers' modules, of all families.
NAMES = {"router": "mlp.gate"} | {name: f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")}


def routed(config: Config, names: Mapping[str, str] = NAMES) -> dict[str, Param]:
    """The router and the experts of a layer, with each matrix of an expert in a tensor of its own.

    Args:
      names: as `NAMES`, which are read as well.
    """
    std, out = dense.inits(config)
    spelt = {name: dict.fromkeys((names[name], NAMES[name])) for name in NAMES}
    keys = {name: tuple(f"{dense.AT}{one}.weight" for one in either) for name, either in spelt.items()}
    return {
        "router": Param("router embed", keys["router"], std),
        "expert_gate": Param("experts expert_ffn expert_embed", keys["gate"], std),
        "expert_up": Param("experts expert_ffn expert_embed", keys["up"], std),
        "expert_down": Param("experts expert_embed expert_ffn", keys["down"], out),
    }


def choice_bias(*names: str) -> dict[str, Param]:
    """What is added to the scores by which experts are chosen, under these names in checkpoints.

    It has no gradient and stays as loaded, in fp32: rounded, it would change choices.
    """
    keys = tuple(f"{dense.AT}{name}.e_score_correction_bias" for name in names)
    return {"router_bias": Param("router", keys, zeros, dtype="float32", trainable=False)}


def shared(config: Config, name: str) -> dict[str, Param]:
    """The shared expert of a layer, under this name in checkpoints."""
    std, out = dense.inits(config)
    key = lambda half: (f"{dense.AT}mlp.{name}.{half}_proj.weight",)
    return {
        "shared_gate": Param("shared_ffn embed", key("gate"), std),
        "shared_up": Param("shared_ffn embed", key("up"), std),
        "shared_down": Param("embed shared_ffn", key("down"), out),
    }


def with_experts(config: Config, plain: Table, weights: Mapping[str, Param]) -> Table:
    """Replaces MLPs by these weights in a dense model's table, except in `config.dense_layers`."""
    bare = {layer: stack.params for stack in plain.stacks for layer in stack.layers}

    def stack(layers: tuple[int, ...]) -> Stack:
        params = bare[layers[0]]
        if layers[0] not in config.dense_layers:
            params = {name: p for name, p in params.items() if name not in ("gate", "up", "down")} | dict(weights)
        return Stack(layers, params)

    kinds = [(i in config.dense_layers, record) for i, record in enumerate(config.records)]
    stacks = tuple(map(stack, param.stacks(kinds)))
    dims = {
        **plain.dims,
        "router": config.experts, "experts": config.experts, "expert_embed": config.embed,
        "expert_ffn": config.expert_ffn, "shared_ffn": config.shared_ffn,
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
