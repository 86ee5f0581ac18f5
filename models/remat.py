"""What the backward pass of a layer finds again, and where: on the device, in the host's memory, or computed anew.

Layers name the values that are worth keeping (`jax.ad_checkpoint.checkpoint_name`); what is not kept is computed again
(arXiv:1604.06174).

- layer_input: what the layer before gave
- qkv: queries, keys and values before norms and rope
- attention: what attention gave, and the log-sum-exp of its scores
- attention_out: the output projection of attention
- mlp_gate_up: both halves of the gated MLP's hidden layer before the activation, experts' too
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax

from .attention import chunked

Name = Literal["layer_input", "qkv", "attention", "attention_out", "mlp_gate_up"]
Preset = Literal["full", "dots", "none", "offload"]
Place = Literal["save", "offload"]
Named = tuple[tuple[Name, Place], ...]
Keep = Preset | Named

OFFLOAD: Named = tuple((name, "offload") for name in get_args(Name))
DOTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(chunked.OUTPUT, "mlp_gate_up"),
)


def checkpoint(keep: Keep) -> Callable:
    """A function from a layer to the same layer that keeps only this for its backward pass.

    Args:
      keep: "full": the layer's input; all else is computed again. "dots": that, and what attention and the matmuls with
        weights gave. "none": everything. "offload": all named values, in the host's pinned
        memory; of a dense layer they are those that "dots" keeps. Or pairs of a name and "save" (on the device) or
        "offload"; the layer's input is kept on the device unless it is named.

    Raises:
      ValueError: a preset or place that there is not, a name that no layer gives, or one that comes twice.
    """
    if keep == "none":
        return lambda layer: layer
    if keep == "full":
        return jax.checkpoint
    if keep == "dots":
        return partial(jax.checkpoint, policy=DOTS)
    pairs = OFFLOAD if keep == "offload" else keep
    if isinstance(pairs, str):
        presets = ", ".join(get_args(Preset))
        raise ValueError(f"remat: must be one of {presets}, or pairs of a name and a place, got {pairs!r}")
    names, places, known = [name for name, _ in pairs], [place for _, place in pairs], get_args(Name)
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"remat: names must be different ones of {', '.join(known)}, got {', '.join(names)}")
    if not set(places) <= set(get_args(Place)):
        raise ValueError(f"remat: places must be {' or '.join(get_args(Place))}, got {', '.join(places)}")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, place in pairs if place == "save"],
        names_which_can_be_offloaded=[name for name, place in pairs if place == "offload"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    return partial(jax.checkpoint, policy=policy)
