"""Rematerialisation (gradient checkpointing) policies: save, offload or recompute a layer's activations.

Layers name the values worth saving (`jax.ad_checkpoint.checkpoint_name`); all others are recomputed in the backward
pass (arXiv:1604.06174).

- layer_input: input of the layer
- qkv: queries, keys and values before norms and rope
- attention: output of attention, and the log-sum-exp of its scores
- attention_out: output of attention's output projection
- mlp_gate_up: both halves of the gated MLP's hidden layer before the activation, also in experts; over ep those of the
  first round (`parallel.experts`), later ones are always recomputed
- states: a recurrent layer's states at the starts of chunks
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax

from .attention import chunked
from .layers import recurrence

Name = Literal["layer_input", "qkv", "attention", "attention_out", "mlp_gate_up", "states"]
Preset = Literal["auto", "full", "dots", "none", "offload"]
Place = Literal["save", "offload"]
Named = tuple[tuple[Name, Place], ...]
Keep = Preset | Named

OFFLOAD: Named = tuple((name, "offload") for name in get_args(Name))
DOTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(chunked.OUTPUT, "mlp_gate_up", recurrence.STATES),
)


def chosen(keep: Keep, platform: str) -> Keep:
    """The policy of training scripts on a platform: "auto" is "dots" on "cpu", the fastest there, elsewhere "full"."""
    return keep if keep != "auto" else "dots" if platform == "cpu" else "full"


def checkpoint(keep: Keep) -> Callable:
    """Returns a transformation that makes a layer keep only these activations for its backward pass.

    Args:
      keep: "full" or "auto" rematerialisation saves only the layer's input; "dots" also the outputs of attention and
        of matmuls with weights; "none" saves everything; "offload" moves all named values to pinned host memory (in a
        dense layer what "dots" saves). Or pairs of a name and "save" (on the device) or "offload"; the layer's input
        is saved on the device unless it is named.

    Raises:
      ValueError: an unknown preset, place or name, or a name given twice.
    """
    if keep == "none":
        return lambda layer: layer
    if keep in ("auto", "full"):
        return jax.checkpoint
    if keep == "dots":
        return partial(jax.checkpoint, policy=DOTS)
    pairs = OFFLOAD if keep == "offload" else keep
    if isinstance(pairs, str):
        presets = ", ".join(get_args(Preset))
        raise ValueError(f"remat: must be one of {presets}, or pairs of a name and a place, got {pairs!r}")
    names, places, known = [name for name, _ in pairs], [place for _, place in pairs], get_args(Name)
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"remat: names must be distinct and among {', '.join(known)}, got {', '.join(names)}")
    if not set(places) <= set(get_args(Place)):
        raise ValueError(f"remat: places must be {' or '.join(get_args(Place))}, got {', '.join(places)}")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, place in pairs if place == "save"],
        names_which_can_be_offloaded=[name for name, place in pairs if place == "offload"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    return partial(jax.checkpoint, policy=policy)
