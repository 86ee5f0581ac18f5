"""Gemma 2 (Google, arXiv:2408.00118): norms before and after attention and MLP, soft caps on scores and logits, a
sliding window in every other layer."""

import math

from ..core.param import Table
from . import dense
from .attention.pattern import Pattern
from .dense import FULL, SLIDING
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed
from .layers.mlp import Activation

DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "eos_token_id": 1, "sliding_window": 4096, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
NORMS = dense.BEFORE | dense.AFTER | {"norm2": ("embed", "pre_feedforward_layernorm")}


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    hf = DEFAULTS | hf
    kinds = dense.layer_types(hf, lambda i: FULL if i % 2 else SLIDING)
    patterns = attention_patterns(hf, hf["attn_logit_softcapping"])
    return dense.config(hf, "gemma2", patterns=[patterns[kind] for kind in kinds], **constants(hf))


def constants(hf: dict) -> dict:
    """What Gemma 2 and 3 have in common, as arguments of `dense.config`.

    Raises:
      ValueError: an option is not implemented; names it.
    """
    dense.refuse(hf, "hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    if hf.get("use_bidirectional_attention"):
        raise ValueError(
            "config.json: use_bidirectional_attention must be false, got "
            f"{hf['use_bidirectional_attention']!r:.80}, which is not implemented"
        )
    bias = hf.get("attention_bias", False)
    return dict(
        qkv_bias=bias, out_bias=bias, activation=Activation("gelu_tanh"), norm_offset=1.0,
        embed_scale=math.sqrt(hf.get("hidden_size") or 1), logit_softcap=hf["final_logit_softcapping"],
    )  # fmt: skip


def attention_patterns(hf: dict, softcap: float | None = None) -> dict[str, Pattern]:
    """The attention pattern of each type of layer."""
    scale = hf["query_pre_attn_scalar"] ** -0.5
    return {
        FULL: Pattern(scale=scale, softcap=softcap),
        SLIDING: Pattern(window=dense.window(hf), scale=scale, softcap=softcap),
    }


def to_hf(config: Config) -> dict:
    """The config.json, with the activation by SGLang's name for it, too; scales and caps are those of the source."""
    return dense.to_hf(config) | {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": config.qkv_bias,
        "hidden_act": "gelu_pytorch_tanh",
    }


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config, NORMS)
