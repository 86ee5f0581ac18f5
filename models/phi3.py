"""Phi 3 and 4 (arXiv:2404.14219, arXiv:2412.08905): queries, keys and values in one tensor, gate and up in another."""

from ..core.param import Table
from . import dense
from .attention.pattern import Pattern
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed
from .layers import rope

DEFAULTS = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
}  # fmt: skip
ROPE = rope.Rope(partial=1.0)


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    for name in ("resid_pdrop", "embd_pdrop"):
        dense.refuse(hf, name, 0.0, default=0.0)
    made = rope.from_hf(hf, ROPE)
    if made.kind not in ("default", "longrope"):
        raise ValueError(f"config.json: rope_type of phi3 must be default or longrope, got {made.kind}")
    return dense.config(hf, "phi3", patterns=Pattern(window=dense.window(hf)), rope=ROPE)


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {"architectures": ["Phi3ForCausalLM"]}


def table(config: Config) -> Table:
    """The weights."""
    fused = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
    return dense.fuse(dense.table(config), fused)
