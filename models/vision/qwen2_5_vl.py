"""Qwen2.5-VL's tower (arXiv:2502.13923): RMS norms, gated MLPs, windows in most layers."""

from jax.nn.initializers import normal

from ...core.param import Table
from ..layers import rope
from . import options, weights
from .tower import Tower

ROPE = rope.Rope(sections=(16, 24, 24))  # axes of the text model's positions, where config.json is silent
DEFAULTS = {
    "hidden_size": 3584, "depth": 32, "intermediate_size": 3420, "hidden_act": "silu", "image_token_id": 151655,
    "video_token_id": 151656,
}  # fmt: skip


def tower(hf: dict, out: int, trained: bool) -> Tower:
    """Reads a wrapper's config.json; raises ValueError naming an option that is not implemented."""
    found = options.read(hf, DEFAULTS, out)
    vision = hf["vision_config"]
    window, unit = options.size(vision, "window_size", 112), found["patch"] * found["merge"]
    if window % unit:
        raise ValueError(
            f"config.json: window_size must be a multiple of patch_size x spatial_merge_size, {unit}, got {window}"
        )
    return Tower(
        **found, wrapper=hf["model_type"], trained=trained, window=window // found["patch"],
        full=options.layers(vision, "fullatt_block_indexes", (7, 15, 23, 31), found["layers"]),
        per_second=options.number(vision, "tokens_per_second", 4),
    )  # fmt: skip


def table(tower: Tower, module: bool) -> Table:
    """The weights, by their names in checkpoints or in transformers' module."""
    made = weights.Lines(tower, ("model.visual.", "visual.") if module else ("visual.", "model.visual."))
    patch = made.one(weights.KERNEL, "patch_embed.proj.weight", normal(tower.init_std))
    layer = {
        **made.norm("norm1", "blocks.{layer}.norm1", "vision_embed", bias=False),
        **made.attention(),
        **made.norm("norm2", "blocks.{layer}.norm2", "vision_embed", bias=False),
        **made.linear("gate", "blocks.{layer}.mlp.gate_proj", "vision_ffn vision_embed"),
        **made.linear("up", "blocks.{layer}.mlp.up_proj", "vision_ffn vision_embed"),
        **made.linear("down", "blocks.{layer}.mlp.down_proj", "vision_embed vision_ffn"),
    }
    merger = made.merger("merge", "merger.ln_q", "merger.mlp.0", "merger.mlp.2", bias=False)
    return weights.table(tower, {"patch": patch, **merger}, layer)
