"""Model families, one module each (`config`, `to_hf`, `table`, `embed`, `block`), and functions for all of them."""

import dataclasses

from ..core import param
from ..parallel import rules
from . import config_json, mtp, vision, wrappers
from .families import FAMILIES
from .layer import trie_alignment, trie_lengths
from .layers.score_head import ScoreHead
from .mtp import with_mtp
from .transformer import Run, Scores, backbone, classify, default_dtype, forward, head, score, score_centred, value
from .vision import with_vision
from .wrappers import text_only


def config_from_hf(hf: dict):
    """Builds the Config of any supported family, or of a wrapper's text model, from a parsed config.json.

    Raises:
      ValueError: unsupported model_type, or an option of the wrong kind or that is not implemented.
    """
    text = wrappers.text(hf)
    name = text.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(sorted({**FAMILIES, **wrappers.WRAPPERS}))
        raise ValueError(f"config.json: model_type must be one of {known}, got {name!r}")
    config_json.check(text, "config.json")
    return wrappers.wrapped(FAMILIES[name].config(text), hf)


def config_to_hf(config) -> dict:
    """The config.json of a Config."""
    made = FAMILIES[config.family].to_hf(text_only(config))
    return wrappers.to_hf(config, made) if wrappers.wraps(config) else made


def table(config):
    """The Param table of a Config."""
    made = wrappers.with_rest(FAMILIES[config.family].table(config), config)
    if config.vision:
        made = dataclasses.replace(made, inner={"vision": vision.table(config.vision, wrappers.of_module(config))})
    if config.mtp:
        made = dataclasses.replace(made, inner={**made.inner, "mtp": mtp.table(config)})
    param.check_parts(made)
    return made


def explain(config, mesh, dtype="float32") -> str:
    """Describes a model's sharding: path, shape, split and bytes per device of each weight. Raises as `of_params`."""
    return rules.explain(table(config), mesh, dtype=dtype)


__all__ = [
    "FAMILIES", "Run", "ScoreHead", "Scores", "backbone", "classify", "config_from_hf", "config_to_hf",
    "default_dtype", "explain", "forward", "head", "score", "score_centred", "table", "text_only", "trie_alignment",
    "trie_lengths", "value", "vision", "with_mtp", "with_vision",
]  # fmt: skip
