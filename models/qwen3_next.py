"""Qwen3-Next: the layers of Qwen3.5-MoE, delta nets in other tensors, and MLPs in place of experts in some layers."""

import dataclasses
from typing import Any

from ..core.param import Stack, Table
from ..core.parts import split
from . import dense, mixture, qwen2_moe, qwen3_5, qwen3_5_moe
from .dense import embed as embed
from .layers import rope
from .qwen3_5_moe import Config as Config
from .qwen3_5_moe import block as block

DEFAULTS = qwen3_5_moe.DEFAULTS | {"intermediate_size": 5632, "norm_topk_prob": True}


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    router, without = mixture.softmax_router(hf), mixture.every_nth(hf)
    return qwen3_5_moe.hybrid(hf, "qwen3_next", rope.Rope(partial=0.25), router, without)


def to_hf(config: Config) -> dict:
    """The config.json."""
    return qwen3_5_moe.to_hf(config) | mixture.qwen_to_hf(config) | {"architectures": ["Qwen3NextForCausalLM"]}


def table(config: Config) -> Table:
    """The weights. What a delta net reads its tokens with is in two tensors, whose rows are grouped by key head."""
    net = config.delta
    heads = net.value_heads // net.key_heads
    keys, values = net.key_dim, heads * net.value_dim
    fused = {
        "in_proj_qkvz": (("delta_q", "delta_k", "delta_v", "delta_gate"), split(keys, keys, values, values)),
        "in_proj_ba": (("write", "decay"), split(heads, heads)),
    }
    places: dict[str, Any] = {
        name: {"keys": (f"{dense.AT}linear_attn.{key}.weight",), "part": part}
        for key, (names, parts) in fused.items()
        for name, part in zip(names, parts, strict=True)
    }

    def stack(plain: Stack) -> Stack:
        placed = {name: dataclasses.replace(p, **places.get(name, {})) for name, p in plain.params.items()}
        return Stack(plain.layers, placed)

    plain = qwen3_5.table(config)
    grouped = dataclasses.replace(plain, stacks=tuple(map(stack, plain.stacks)))
    return mixture.with_experts(config, grouped, qwen2_moe.experts(config))
