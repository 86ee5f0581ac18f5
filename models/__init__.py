"""Model families, one module each (`config`, `to_hf`, `table`, `embed`, `block`), and functions for all of them."""

from ..parallel import rules
from .families import FAMILIES
from .transformer import Run, Scores, backbone, forward, head, score, value

SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "moe_intermediate_size", "num_experts", "num_experts_per_tok",
}  # fmt: skip


def config_from_hf(hf: dict):
    """Builds the Config of any supported family from a parsed config.json.

    Raises:
      ValueError: unsupported model_type, a size that is no whole number above 0, or an option that is not implemented.
    """
    name = hf.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"config.json: model_type must be one of {', '.join(sorted(FAMILIES))}, got {name!r}")
    for key in sorted(SIZES & hf.keys()):
        if hf[key] is not None and not (type(hf[key]) is int and 0 < hf[key] < 1 << 40):
            raise ValueError(f"config.json: {key} must be a whole number above 0, got {hf[key]!r:.80}")
    return FAMILIES[name].config(hf)


def config_to_hf(config) -> dict:
    """The config.json of a Config."""
    return FAMILIES[config.family].to_hf(config)


def table(config):
    """The Param table of a Config."""
    return FAMILIES[config.family].table(config)


def explain(config, mesh, dtype="float32") -> str:
    """Describes a model's sharding: path, shape, split and bytes per device of each weight. Raises as `of_params`."""
    return rules.explain(table(config), mesh, dtype=dtype)


__all__ = [
    "FAMILIES", "Run", "Scores", "backbone", "config_from_hf", "config_to_hf", "explain", "forward", "head", "score",
    "table", "value",
]  # fmt: skip
