"""config.json and the other JSON files of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from ... import models
from ...models import config_json, wrappers
from ...models.layers import score_head as heads
from ...models.layers.score_head import ScoreHead
from .. import safetensors
from .. import tokenizer as tokenizers
from ..runtime import passed
from .matching import FLOATS, SCALAR, matched

SETTINGS = "config.json", "generation_config.json", *passed.PROCESSOR_FILES  # how a checkpoint's weights are used
LARGEST = 2**28  # bytes of a JSON file


def read_json(path: Path) -> dict:
    return json_object(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """The content of a JSON file, for `json_object`."""
    damaged = f"{path}: damaged or half-written JSON"
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{damaged} (more than {LARGEST >> 20} MiB); copy it again")
    if not path.is_file():
        raise ValueError(f"{damaged} (no file); copy it again")
    return path.read_bytes()


def json_object(content: bytes, path: Path) -> dict:
    """The JSON object that is the content of the file `path`."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or half-written JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}; copy it again")
    return value


def settings(path: str | os.PathLike) -> dict[str, dict]:
    """{file: its content} of the JSON files that say how a checkpoint's weights are used; raises as `read_json`."""
    files = (Path(path) / name for name in SETTINGS)
    return {file.name: read_json(file) for file in files if file.is_file()}


def json_bytes(value: dict) -> bytes:
    """Serialises an object as `save` does."""
    return (json.dumps(value, indent=2) + "\n").encode()


def read_config(path: str | os.PathLike):
    """The Config of a checkpoint directory; its stop tokens are those of config.json and generation_config.json, or if
    neither has any, the tokenizer's.

    Raises:
      ValueError: the path is missing or not a directory, config.json is missing or malformed, or the architecture or
        an option is not supported.
    """
    path, generation = Path(path), {}
    if not path.exists():
        raise ValueError(f"{path}: a checkpoint must be a directory that exists (`hf download` fetches one)")
    if not path.is_dir():
        raise ValueError(f"{path}: a checkpoint must be a directory, got a file; name the one that holds config.json")
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ValueError(
                f"{path}: a checkpoint is needed, got adapters; merge them: areax convert {path} MERGED --merge"
            )
        raise ValueError(f"{path}: a checkpoint needs config.json, got none; is this the right directory?")
    hf = read_json(path / "config.json")
    try:
        config = models.config_from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{path}/{error}") from error
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
        config_json.check(generation, f"{path}/generation_config.json")
    config = with_named_ends(config, generation)
    return config if config.eos else with_ends(config, tokenizer_in(path))


def with_named_ends(config, generation: Mapping):
    """The Config with the stop tokens of generation_config.json, too."""
    eos = generation.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return dataclasses.replace(config, eos=tuple(dict.fromkeys((*config.eos, *eos))))


def with_ends(config, tokenizer):
    """The Config with the stop tokens of a tokenizer, too, if there is one (`tokenizer.stop_ids`).

    A base model's files name its end of text alone, while training on a chat template teaches the end of a turn. SGLang
    and vLLM take the tokenizer's end of text as well.
    """
    ends = () if tokenizer is None else tokenizers.stop_ids(tokenizer)
    known = (id for id in ends if id < config.vocab)
    return dataclasses.replace(config, eos=tuple(dict.fromkeys((*config.eos, *known))))


def tokenizer_in(path: Path):
    """The tokenizer of a checkpoint folder; None if it has none."""
    return tokenizers.load(path) if any((path / name).is_file() for name in tokenizers.FILES) else None


def with_parts(config, vision: bool, mtp: bool):
    """The Config with its vision tower, and with its layer for multi-token prediction, if they are wanted."""
    config = models.with_vision(config) if vision else config
    return models.with_mtp(config) if mtp else config


def loaded_config(
    path: str | os.PathLike, init_missing: Sequence[str] = (), score_head: ScoreHead = SCALAR, vision: bool = False,
    mtp: bool = False,
):  # fmt: skip
    """The Config that `load` gives, which depends on the tensors that are there; weights are not read."""
    config = with_parts(read_config(path), vision, mtp)
    config, *_ = matched(config, safetensors.read(path), str(path), init_missing, score_head)
    return passed.loaded(config, path)


def written_config(config, dtype: np.dtype) -> dict:
    hf = models.config_to_hf(config)
    dtypes = {"dtype": dtype.name, "torch_dtype": dtype.name}
    hf.pop("quantization_config", None)  # tensors are written as floats
    if "text_config" in hf:
        hf["text_config"] = hf["text_config"] | dtypes
        hf["text_config"].pop("quantization_config", None)
    if wrappers.wraps(config):
        return hf | dtypes
    causal = hf["architectures"][0]
    if config.score_head:
        hf |= heads.to_hf(config.score_head, json.loads(config.source), causal)
    elif not config.prefix:
        hf["architectures"] = [causal.replace("ForCausalLM", "Model")]
    return hf | dtypes


def save_dtype(config, params, dtype=None) -> np.dtype:
    """The requested dtype, else that of the checkpoint the model came from, else of the parameters."""
    source = wrappers.text(json.loads(config.source))
    name = dtype or source.get("dtype") or source.get("torch_dtype") or jax.tree.leaves(params)[0].dtype
    return float_dtype("save", name)


def float_dtype(function: str, name) -> np.dtype:
    """Returns the dtype of a name; `function` is named in the error.

    Raises:
      ValueError: it is not a dtype in which checkpoints store weights.
    """
    try:
        known = jax.numpy.dtype(name)
    except TypeError:
        known = None
    if known not in FLOATS:
        raise ValueError(f"{function}: dtype must be one of {', '.join(sorted(str(d) for d in FLOATS))}, got {name}")
    return known
