"""The tower of Qwen3-VL (arXiv:2511.21631), which gives features to several text layers, and Qwen3.5: layer norms and
learnt places."""

import math

from jax.nn.initializers import normal

from ...core.param import Table
from ..layers import rope
from . import options, weights
from .tower import Tower

# Axes of the text model's positions, where config.json is silent.
ROPE = rope.Rope(sections=(24, 20, 20), interleaved=True)
TAPPED = ("qwen3_vl", "qwen3_vl_moe")  # wrappers whose tower gives features to several text layers
DEFAULTS = {
    "hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh", "patch_size": 16,
}  # fmt: skip
TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
NEWER_TOKENS = {"image_token_id": 248056, "video_token_id": 248057}


def tower(hf: dict, out: int, trained: bool) -> Tower:
    """Reads a wrapper's config.json; raises ValueError naming an option that is not implemented."""
    tapped = hf["model_type"] in TAPPED
    found = options.read(hf, DEFAULTS | (TOKENS if tapped else NEWER_TOKENS), out)
    vision = hf["vision_config"]
    places = options.size(vision, "num_position_embeddings", 2304)
    if math.isqrt(places) ** 2 != places:
        raise ValueError(f"config.json: num_position_embeddings must be a square number, got {places}")
    taps = options.layers(vision, "deepstack_visual_indexes", (8, 16, 24), found["layers"]) if tapped else ()
    return Tower(**found, wrapper=hf["model_type"], trained=trained, places=places, taps=taps, frames_apart=True)


def table(tower: Tower, module: bool) -> Table:
    """The weights, whose names are the same in checkpoints and in transformers' module."""
    made = weights.Lines(tower, ("model.visual.",))
    top = {
        **made.linear("patch", "patch_embed.proj", weights.KERNEL),
        "places": made.one("place_vocab vision_embed", "pos_embed.weight", normal(tower.init_std)),
        **merger(made, "merge", "merger"),
    }
    for i in range(len(tower.taps)):
        top |= merger(made, f"tap{i}", f"deepstack_merger_list.{i}", wide=True)
    layer = {
        **made.norm("norm1", "blocks.{layer}.norm1", "vision_embed", bias=True),
        **made.attention(),
        **made.norm("norm2", "blocks.{layer}.norm2", "vision_embed", bias=True),
        **made.linear("up", "blocks.{layer}.mlp.linear_fc1", "vision_ffn vision_embed"),
        **made.linear("down", "blocks.{layer}.mlp.linear_fc2", "vision_embed vision_ffn"),
    }
    return weights.table(tower, top, layer)


def merger(made: weights.Lines, name: str, key: str, wide: bool = False):
    """The weights of a merger; the norm of those behind taps is over all patches of a feature."""
    return made.merger(name, f"{key}.norm", f"{key}.linear_fc1", f"{key}.linear_fc2", bias=True, wide=wide)
