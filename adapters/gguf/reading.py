"""A GGUF file as a Hugging Face folder: config.json, tokenizer, and tensors that are dequantised as they are read."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from ... import models
from ...core import param
from .. import safetensors
from . import container, families, options, tokenizer_files
from .container import File, Weight
from .families import FREQUENCIES, SHARED_GATE, Family

FLOATS = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISED = "bfloat16"  # dtype in which quantised weights are written, as those of other formats


def opened(path: str | os.PathLike) -> tuple[File, dict[str, Any], dict[str, Any]]:
    """(the file, its config.json, tensors by Hugging Face's names: each a `Weight`).

    Raises:
      ValueError: as `container.read`; or the architecture, an option or a tensor is not implemented, or a tensor is
        missing or misshapen; names it.
    """
    file = container.read(path)
    data = file.metadata
    architecture = file.get("general.architecture", str)
    family = families.of_file(architecture, data.get(f"{architecture}.expert_count"), str(file.path))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{file.path}: needs the matrix token_embd.weight; copy it again")
    hf = options.config(file, family)
    vocab = embedding.shape[0]
    hf |= {"vocab_size": vocab, "eos_token_id": tokenizer_files.ends(file, vocab) or None}
    for option, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        hf[option] = tokenizer_files.token_id(file, key, vocab)
    try:
        hf = options.normalised(hf)
    except ValueError as error:
        raise ValueError(f"{file.path}: as {error}") from error
    hf["dtype"] = hf["torch_dtype"] = _dtype(file)
    tensors = _tensors(file, family, hf)
    _check(file, tensors, models.table(models.config_from_hf(hf)))
    return file, hf, tensors


def small_files(file: File, hf: Mapping[str, Any], directory: Path) -> None:
    """Writes everything but the weights: config.json, generation_config.json and the tokenizer."""
    ends = {"eos_token_id": hf["eos_token_id"]} if hf["eos_token_id"] else {}
    made = {"config.json": dict(hf), "generation_config.json": ends}
    for name, value in (made | tokenizer_files.files(file, hf["vocab_size"])).items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        safetensors.write_bytes(directory / name, text.encode())


def unpack(path: str | os.PathLike, directory: Path) -> None:
    """Writes a file as a Hugging Face folder, one tensor at a time, to an empty directory.

    Matrices of 16 bits keep their dtype, which the other tensors get too; quantised ones become bfloat16.
    """
    file, hf, tensors = opened(path)
    dtype = np.dtype(ml_dtypes.bfloat16) if hf["dtype"] == "bfloat16" else np.dtype(hf["dtype"])
    small_files(file, hf, directory)
    specs = {name: SimpleNamespace(shape=x.shape, dtype=dtype) for name, x in tensors.items()}
    safetensors.write(directory, specs, (x.read(dtype) for x in tensors.values()))


def summary(path: str | os.PathLike) -> tuple[str, Counter[str], int]:
    """(architecture, how many tensors there are of each type, their bytes) of a file."""
    file = container.read(path)
    kinds = Counter(x.kind.lower() for x in file.tensors.values())
    return file.metadata["general.architecture"], kinds, sum(x.raw.size for x in file.tensors.values())


def quantised(tensors: Mapping[str, Weight]) -> list[str]:
    """The quantised types that there are."""
    return sorted({x.kind for x in tensors.values() if x.quantised})


def _dtype(file: File) -> str:
    """The dtype of most matrices."""
    kinds = Counter(FLOATS.get(x.kind, QUANTISED) for x in file.tensors.values() if len(x.shape) > 1)
    return kinds.most_common(1)[0][0]


def _tensors(file: File, family: Family, hf: Mapping[str, Any]) -> dict[str, Weight]:
    out: dict[str, Weight] = {}
    unknown = []
    for name, weight in file.tensors.items():
        wanted = families.from_gguf(family, name)
        if wanted is None:
            unknown += [name] if name != f"{FREQUENCIES}.weight" else []
        elif "{}" in wanted:
            count = hf.get("num_local_experts") or hf.get("num_experts") or 0
            if len(weight.shape) != 3 or len(weight) != count:
                raise ValueError(f"{weight.name} must be of {count} experts, got {list(weight.shape)}; copy it again")
            out |= {wanted.format(e): weight.entry(e) for e in range(count)}
        else:
            out[wanted] = _restored(name, weight, family, hf)
    if unknown:
        more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
        raise ValueError(f"{file.path}: {unknown[0]}{more} is no tensor of {family.gguf} that areax knows")
    return out


def _check(file: File, tensors: Mapping[str, Weight], table: param.Table) -> None:
    """Raises ValueError unless the tensors are those of the table."""
    wanted = {}
    for leaf in param.leaf_list(table):
        for spelt in leaf.keys("model.").values():
            wanted[next((key for key in spelt if key in tensors), spelt[0])] = leaf.stored_shape
    for words, names in (("missing", wanted.keys() - tensors.keys()), ("unexpected", tensors.keys() - wanted.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{file.path}: {words} {min(names)}{more}; copy it again")
    for key, shape in wanted.items():
        if tensors[key].shape != shape:
            raise ValueError(
                f"{file.path}: {key} must be {list(shape)} by the metadata, got {list(tensors[key].shape)}"
            )


def _restored(name: str, weight: Weight, family: Family, hf: Mapping[str, Any]) -> Weight:
    """A weight with what makes Hugging Face's of it."""
    place = name.split(".")[-2]
    if family.turned and place in ("attn_q", "attn_k"):
        heads = hf["num_attention_heads" if place == "attn_q" else "num_key_value_heads"]
        if weight.shape[0] % (2 * heads):
            raise ValueError(f"{weight.name} must be of {heads} heads, got {list(weight.shape)}; copy it again")
        return replace(weight, restore=functools.partial(halves, heads=heads))
    if family.norm_offset and name.endswith("norm.weight"):
        return replace(weight, restore=functools.partial(np.add, -np.float32(family.norm_offset)))
    if place == SHARED_GATE:
        return replace(weight, shape=(1, *weight.shape))
    return weight


def halves(x: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys with the two entries that turn together half a head apart, as Hugging Face has them,
    from neighbours."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def pairs(x: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `halves`."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
