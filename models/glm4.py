"""GLM-4-0414 (arXiv:2406.12793): norms before and after attention and MLP; half of a head turns with its position, in
pairs; gate and up are one tensor."""

from ..core.param import Table
from . import dense
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed
from .layers import rope

DEFAULTS = {
    "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
ROPE = rope.Rope(partial=0.5, pairs=True)
# As in Llama post_attention_layernorm stands before the MLP; the norms after both halves have names of their own.
AFTER = {"norm1_after": ("embed", "post_self_attn_layernorm"), "norm2_after": ("embed", "post_mlp_layernorm")}


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    return dense.config(hf, "glm4", qkv_bias=hf.get("attention_bias", True), rope=ROPE)


def to_hf(config: Config) -> dict:
    """The config.json."""
    return dense.to_hf(config) | {"architectures": ["Glm4ForCausalLM"], "attention_bias": config.qkv_bias}


def table(config: Config) -> Table:
    """The weights."""
    return dense.fuse(dense.table(config, dense.BEFORE | AFTER), {"mlp.gate_up_proj": ("gate", "up")})
