"""`areax convert ADAPTER --merge`: a base model with LoRA adapters merged into its weights."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ... import models
from ...core import param, quantised
from ...models import lora
from .. import hf, peft, safetensors
from ..runtime import hub
from .files import AS_SOURCE, Files


def merge(
    adapter: str | os.PathLike, destination: str | os.PathLike, base: str | None = None, files: Files = AS_SOURCE
) -> Path:
    """Writes the base of a PEFT folder with its adapters merged, one weight of all layers at a time, as training and
    serving with these adapters compute it: summed in fp32 and rounded once. Its tokenizer is the folder's, with which
    the adapters were trained, if that has one, else the base's.

    Args:
      base: a checkpoint, or a model on the hub; None = the one that adapter_config.json names.
      files: how it is written.

    Raises:
      ValueError: the base is not there or is another model; a merged number is not finite; or as `peft.load`.
    """
    base = base_of(adapter, base)
    config, params, _ = hf.mapped(base, dtype=None)
    spec, adapters = peft.load(adapter, config)
    hf.check(base, safetensors.read(base))
    own = hf.tokenizer_in(Path(adapter))
    return files.save(destination, config, joined(config, params, adapters, spec), base=base, tokenizer=own)


def base_of(adapter: str | os.PathLike, base: str | None = None) -> str:
    """The folder of a PEFT folder's base: `base`, or the model that adapter_config.json names."""
    named = base or peft.read_options(adapter).get("base_model_name_or_path")
    if not named or not isinstance(named, str):
        raise ValueError(f"{adapter}: {peft.CONFIG} names no base model; name it with --base")
    try:
        found = hub.folder(named, weights=True)
        hf.read_config(found)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{adapter}: needs its base model, {named:.200} ({error!s:.500}); name a copy with --base"
        ) from error
    return found


def joined(config, params, adapters, spec: lora.Lora):
    """The parameters of a model with its adapters for `hf.save`, which then reads, quantises as `spec.base` says and
    merges one weight of all layers at a time.

    Args:
      params: as `hf.mapped` in the dtype of the files, or arrays.
    """

    def one(leaf: param.Leaf, w):
        if not isinstance(w, param.LoRAWeight):
            return w
        return hf.Deferred(functools.partial(_merged, leaf.path, w, spec.base), leaf.shape, np.dtype(w.weight.dtype))

    return param.tree_map(one, models.table(config), lora.join(params, adapters, spec))


def _merged(name: str, w: param.LoRAWeight, kind: str):
    """The weight `name` with its adapter; raises ValueError if a sum is too large for its dtype."""
    weight = jnp.asarray(w.weight.read() if isinstance(w.weight, hf.Mapped) else w.weight)
    narrow = weight if kind == "stored" else jax.jit(quantised.quantise, static_argnums=1)(weight, kind)
    whole = param.merged(dataclasses.replace(w, weight=narrow))
    if bad := safetensors.count_nonfinite(np.asarray(whole)):
        raise ValueError(
            f"merge: {name} with its adapters has {bad} of {whole.size} numbers that {whole.dtype} does not hold; use "
            "other adapters, or a base in a wider dtype"
        )
    return whole
