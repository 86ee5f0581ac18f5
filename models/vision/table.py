"""The vision towers by the model_type of their wrappers: their options and weights."""

import dataclasses
import json
from functools import cache

from ...core.param import Table
from .. import wrappers
from ..layer import Attention
from ..layers import rope
from . import qwen2_5_vl, qwen3_vl
from .tower import Tower

TOWERS = {
    "qwen2_5_vl": qwen2_5_vl, "qwen3_5": qwen3_vl, "qwen3_5_moe": qwen3_vl, "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
}  # fmt: skip


@cache
def table(tower: Tower, module: bool = False) -> Table:
    """The Param table of a tower.

    Args:
      module: names are those of transformers' module where they differ from checkpoints'.
    """
    return TOWERS[tower.wrapper].table(tower, module)


def available(config) -> bool:
    """Whether a model is a wrapper's whose tower `with_vision` adds."""
    return json.loads(config.source).get("model_type") in TOWERS


def without_vision(config):
    """The Config of a text model without its tower, whose weights are stacked as if it had been loaded without."""
    text = lambda layer: dataclasses.replace(layer, deepstack=False) if isinstance(layer, Attention) else layer
    return dataclasses.replace(config, vision=None, records=tuple(map(text, config.records)))


def with_vision(config, trained: bool = True):
    """The Config of a wrapper's text model with the wrapper's tower, whose weights are `params["vision"]`.

    Args:
      trained: False = the tower is frozen.

    Raises:
      ValueError: the model has no tower, none that is implemented, or a score head; or an option is not implemented.
    """
    hf = json.loads(config.source)
    kind = hf.get("model_type")
    if kind not in TOWERS:
        known = ", ".join(TOWERS)
        raise ValueError(f"config.json: model_type must be one with a vision tower, {known}, got {kind!r:.80}")
    if config.score_head:
        raise ValueError("config.json: a model with a score head reads no images; load it without its vision tower")
    tower = TOWERS[kind].tower(hf, config.embed, trained)
    if len(tower.taps) > config.layers:
        raise ValueError(
            f"config.json: deepstack_visual_indexes must be at most one for each of {config.layers} layers, "
            f"got {list(tower.taps)}"
        )

    def with_axes(one: rope.Rope) -> rope.Rope:
        if one.sections:
            return one
        axes = rope.from_hf(wrappers.text_options(hf), TOWERS[kind].ROPE)
        return dataclasses.replace(one, sections=axes.sections, interleaved=axes.interleaved)

    def record(i, layer):
        if not isinstance(layer, Attention):
            return layer
        return dataclasses.replace(layer, rope=with_axes(layer.rope), deepstack=i < len(tower.taps))

    records = tuple(record(i, layer) for i, layer in enumerate(config.records))
    for layer in records:
        if isinstance(layer, Attention):
            rope.axes(layer.rope, layer.rope_dim)  # raises if its sections do not fit
    return dataclasses.replace(config, vision=tower, records=records)
