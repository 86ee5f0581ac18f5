"""Granite 3 (IBM): Llama with factors on embeddings, attention scores, residuals and logits (muP, arXiv:2203.03466)."""

from ..core.param import Table
from . import dense
from .attention.pattern import Pattern
from .dense import Config as Config
from .dense import block as block
from .dense import embed as embed

FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def config(hf: dict) -> Config:
    """Reads a config.json; raises ValueError naming an option that is not implemented."""
    bias = hf.get("attention_bias", False)
    embedding, attention, residual, logits = (hf.get(name, 1.0) for name in FACTORS)
    return dense.config(
        {"max_position_embeddings": 2048} | hf, "granite", patterns=Pattern(scale=attention), qkv_bias=bias,
        out_bias=bias, mlp_bias=hf.get("mlp_bias", False), embed_scale=embedding, residual_scale=residual,
        logit_scale=1 / logits,
    )  # fmt: skip


def to_hf(config: Config) -> dict:
    """The config.json; its factors are those of the source."""
    return dense.to_hf(config) | {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def table(config: Config) -> Table:
    """The weights."""
    return dense.table(config)
