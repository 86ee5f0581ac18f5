"""A checkpoint's tensors and the leaves of a family: which is which, and complaints about what is missing."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence

import ml_dtypes
import numpy as np

from ... import models
from ...core import param
from ...models import wrappers
from ...models.layers import score_head as heads
from ...models.layers.score_head import ScoreHead
from .. import safetensors
from ..runtime import passed

SCALAR = ScoreHead()
HEADS = ("head", "score")  # leaves missing in checkpoints of backbones or of models with another head
# Buffers in old checkpoints that are derived from config.json.
BUFFERS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
FLOATS = {np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)}


def matched(config, tensors: Mapping[str, np.ndarray], where: str, init_missing=(), score_head: ScoreHead = SCALAR):
    """(config, leaves of its table, tensors, keys of each leaf, leaves to initialise); ValueError on mismatch."""
    if not set(init_missing) <= set(HEADS):
        raise ValueError(f"{where}: init_missing may hold {' and '.join(HEADS)}, got {list(init_missing)}")
    tensors = passed.opened(config, tensors, where)
    spelt_as = wrappers.prefixes(config)
    starts = lambda prefix: any(key.startswith((f"{prefix}embed_tokens.", f"{prefix}layers.")) for key in tensors)
    prefix = next(filter(starts, spelt_as), spelt_as[0])
    stated = config.score_head
    scored = stated or heads.found(tensors) or (score_head if "score" in init_missing else None)
    if scored and config.vision:
        raise ValueError(f"{where}: a model with a score head reads no images; load it without its vision tower")
    config = dataclasses.replace(config, prefix=prefix, score_head=scored)
    head, embed = wrappers.head(config), f"{prefix}embed_tokens.weight"
    if not wrappers.states_tying(config) and {head, embed} <= tensors.keys():  # as in transformers, files decide
        config = dataclasses.replace(config, tied=equal(tensors[head], tensors[embed]))
    if head not in tensors and (stated or heads.found(tensors)):
        config = dataclasses.replace(config, output_head=config.tied or "head" in init_missing)
    table = models.table(config)
    rest = tuple(key for key in tensors if table.leaves_out(key))
    tensors = {key: tensor for key, tensor in tensors.items() if not table.leaves_out(key)}
    tree = param.leaves(table)
    tensors, keys = keyed(table, tensors, prefix)
    drawn = {name for name in init_missing if name in table.top and keys[name][0] not in tensors}
    if "score" in drawn:
        drawn |= table.top.keys() & set(heads.NAMES)
    needed = dict.fromkeys(key for path, found in keys.items() if path not in drawn for key in found)
    missing = [key for key in needed if key not in tensors]
    used = {key for found in keys.values() for key in found}
    own = {key for path, found in keys.items() if path.startswith("mtp.") for key in found}
    unexpected = [key for key in tensors if key not in used and not BUFFERS.search(key)]
    if config.tied and head in unexpected and not missing:
        _check_tied(head, tensors[head], tensors[keys["embed"][0]], where)
        unexpected.remove(head)
    if missing or unexpected:
        layer = bool(missing) and all(key in own for key in missing)
        without = "; of the layer for multi-token prediction, without which it is loaded if --mtp.coef is left out"
        raise ValueError(f"{where}: {complaint(missing, unexpected)}{without if layer else ''}")
    for leaf in param.leaf_list(table):
        for key in keys[leaf.path] if leaf.path not in drawn else ():
            check_tensor(key, tensors[key], leaf, where)
    if drawn or scored:  # a backbone with a head is saved with the prefix
        config = dataclasses.replace(config, prefix=config.prefix or "model.")
    if scored:  # nothing reads images or speculates with a value
        config = models.text_only(config)
    elif rest or wrappers.wraps(config):
        config = dataclasses.replace(config, rest=wrappers.Rest("", rest))
    return config, tree, tensors, keys, drawn


def keyed(table: param.Table, tensors: Mapping[str, np.ndarray], prefix: str):
    """(tensors, fused experts split; the keys that each leaf has among them, or the first ones that it may have)."""
    spelt_out = [spelt for leaf in param.leaf_list(table) for spelt in leaf.keys(prefix).values()]
    tensors = _split_experts(tensors, {key for spelt in spelt_out for key in spelt})
    there = lambda spelt: next((key for key in spelt if key in tensors), spelt[0])
    leaves = param.leaf_list(table)
    keys = {leaf.path: [there(spelt) for spelt in leaf.keys(prefix).values()] for leaf in leaves}
    turned = {key: leaf.stored_shape for leaf in leaves if _is_turned(leaf) for key in keys[leaf.path]}
    return _turned_back(tensors, turned), keys


def _split_experts(tensors: Mapping[str, np.ndarray], fused: Collection[str]) -> Mapping[str, np.ndarray]:
    """Splits fused experts into one tensor per expert, as views of `experts.gate_up_proj` [E, 2 F, D] and
    `experts.down_proj` [E, D, F], except keys that the family reads in this form, `fused`."""
    out = {}
    for key, tensor in tensors.items():
        stem, _, name = key.rpartition(".")
        names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        size, rest = divmod(tensor.shape[1], len(names)) if len(tensor.shape) == 3 else (0, 1)
        if not stem.endswith(".experts") or key in fused or rest:
            out[key] = tensor
            continue
        expert = getattr(tensor, "expert", None)  # of tensors that are not in memory: without reading it
        for e, (i, part) in itertools.product(range(len(tensor)), enumerate(names)):
            rows = slice(i * size, (i + 1) * size)
            out[f"{stem}.{e}.{part}.weight"] = expert(e, rows) if expert else tensor[e, rows]
    return out


def _is_turned(leaf: param.Leaf) -> bool:
    return leaf.param.part is not None and leaf.param.part.transposed


def _turned_back(tensors: Mapping[str, np.ndarray], stored: Mapping[str, tuple]) -> Mapping[str, np.ndarray]:
    """The tensors with those of these keys and shapes as checkpoints have them, if they are as in transformers'
    modules, whose last two axes are the other way round: those whose two axes differ tell."""
    there = {key: tuple(tensors[key].shape) for key in stored if key in tensors}
    telling = [key for key in there if stored[key] != _swapped(stored[key])]
    if not telling or any(there[key] != _swapped(stored[key]) for key in telling):
        return tensors
    return {key: x.swapaxes(-1, -2) if key in there else x for key, x in tensors.items()}


def _swapped(shape: tuple) -> tuple:
    return (*shape[:-2], shape[-1], shape[-2])


def _check_tied(name: str, head: np.ndarray, embed: np.ndarray, where: str) -> None:
    if not equal(head, embed):
        raise ValueError(
            f"{where}: tie_word_embeddings is true, but {name} differs from the embeddings; "
            "set it to false in config.json if the model has a separate head"
        )


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors are equal, bit by bit."""

    def digest(x) -> str:
        found = safetensors.digest(x)
        safetensors.forget(x)
        return found

    return one.dtype == other.dtype and digest(one) == digest(other)


def check_tensor(key: str, tensor: np.ndarray, leaf: param.Leaf, where: str) -> None:
    if tensor.shape != leaf.stored_shape:
        raise ValueError(f"{where}: {key} must be {list(leaf.stored_shape)} by config.json, got {list(tensor.shape)}")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{where}: {key} must have a float dtype, got {tensor.dtype}; quantised weights not supported")


def complaint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"missing {listed(missing)}")
        leaves = {"lm_head.weight": "head", "language_model.lm_head.weight": "head", "score.weight": "score"}
        leaves |= {"score.bias": "score"} if "score.weight" in missing else {}
        if set(missing) <= set(leaves):
            names = tuple(dict.fromkeys(leaves[key] for key in missing))
            parts[-1] += f" (init_missing={names} initialises missing heads randomly)"
    if unexpected:
        parts.append(f"unexpected {listed(unexpected)}")
    return "; ".join(parts)


def listed(names: Sequence[str], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(f"{name:.200}" for name in names[:shown]) + (f" and {rest} more" if rest > 0 else "")
