"""Phi 3 and 4 (arXiv:2404.14219, arXiv:2412.08905): queries, keys and values in one tensor, gate and up in another."""

import dataclasses

from ..core.param import Stack, Table
from ..core.parts import split
from . import dense
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    for name in ("resid_pdrop", "embd_pdrop"):
        dense.refuse(hf, name, 0.0, default=0.0)
    window = hf.get("sliding_window")
    if window is not None and window < 1:
        raise ValueError(f"config.json: sliding_window must be at least 1, or null, got {window}")
    made = dense.config(
        hf, "phi3", window=window,
        norm_eps=hf.get("rms_norm_eps", 1e-5), context=hf.get("max_position_embeddings", 4096),
    )  # fmt: skip
    return dataclasses.replace(made, window_layers=tuple(range(made.layers)) if window else ())


def to_hf(config: Config) -> dict:
    """The config.json, which has the window of all layers in one option."""
    absent = ("use_sliding_window", "max_window_layers", "layer_types")
    plain = {name: value for name, value in dense.to_hf(config).items() if name not in absent}
    return plain | {"architectures": ["Phi3ForCausalLM"], "sliding_window": config.window}


def table(config: Config) -> Table:
    """The weights."""
    plain = dense.table(config, qk_norm=False)
    width = config.kv_heads * config.head_dim
    fused = {
        "self_attn.qkv_proj": zip("qkv", split(config.heads * config.head_dim, width, width), strict=True),
        "mlp.gate_up_proj": zip(("gate", "up"), split(config.ffn, config.ffn), strict=True),
    }
    place = {name: ((f"{dense.AT}{key}.weight",), part) for key, parts in fused.items() for name, part in parts}

    def placed(stack: Stack) -> Stack:
        moved = {
            name: dataclasses.replace(stack.params[name], keys=keys, part=part) for name, (keys, part) in place.items()
        }
        return Stack(stack.layers, {**stack.params, **moved})

    return dataclasses.replace(plain, stacks=tuple(map(placed, plain.stacks)))
