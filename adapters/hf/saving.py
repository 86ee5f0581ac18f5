"""Parameters to checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from ...models import mtp, wrappers
from ...rollout.servers.labels import MANIFEST
from .. import safetensors
from .. import tokenizer as tokenizers
from ..runtime import passed
from ..runtime.atomic_dir import replacing
from .config_files import json_bytes, read_json, save_dtype, tokenizer_in, with_ends, with_named_ends, written_config
from .manifests import is_checkpoint, manifest_of
from .tensors import Part, to_tensors, with_copies

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
FURTHER_TEMPLATES = "additional_chat_templates"  # a folder with those of a tokenizer that has several


def save(
    path: str | os.PathLike, config, params, dtype=None, base=None, tokenizer=None, version: int | None = None,
    like: str | os.PathLike | None = None, shard_bytes: int = safetensors.SHARD,
    fused_experts: bool = False, others: Callable[[], Mapping[str, dict]] = dict,
) -> Path:  # fmt: skip
    """Writes a Hugging Face directory: weights, config.json, generation_config.json, tokenizer, manifest.json.

    Tensors that the model does not use (`config.rest`) and a processor's files are copied from the checkpoint that the
    config was loaded from, bit for bit, to files of their own; the manifest has the tensors' hashes, too. Copies of the
    model's embeddings and head among them (`models.mtp.copies`) are written as these are now.

    The directory is written atomically, by rename; an existing checkpoint is replaced, and kept if anything fails.
    config.json has rope and dtype in the spellings of transformers 4 and 5. manifest.json is `{version, base, bytes,
    tensors: {name: {dtype, shape, xxh3_128}}}`, with base null since all tensors are there. Both configs name the stop
    tokens of the config, of `base`'s generation_config.json, and of the tokenizer (`with_ends`).

    Args:
      params: jax or numpy arrays (`host_copy`); each `param.LoRAWeight` is merged as it is written. Or the `host_part`
        of process 0, whose tensors alone are written, beside the index and the manifest of all.
      dtype: dtype of the tensors; None = that of the checkpoint the model came from, else of the parameters.
      base: a checkpoint directory from which tokenizer and generation settings are copied, and the tensors of
        `config.rest` if the one that they were in is gone.
      tokenizer: a transformers tokenizer to save instead.
      version: policy version, for published weights.
      like: a directory on the same disk that was saved with the same `config.rest`: those files become hard links to
        its files.
      shard_bytes: as `safetensors.write`.
      fused_experts: writes the experts of a layer as `experts.gate_up_proj` [E, 2 F, D] and `experts.down_proj`
        [E, D, F], where the family has a tensor for each expert; transformers 5 and `load` read both.
      others: of a part: returns what `write_part` returned in the other processes, as soon as it has.

    If parameters are sharded over several processes, all must call it: they gather one tensor at a time, and process 0
    writes; the others return before the directory exists.

    Raises:
      ValueError: the path is a file or another kind of directory, the parameters do not match the config, or the
        checkpoint with the tensors of `config.rest` is gone.
    """
    if base is not None and not Path(base).is_dir():
        raise ValueError(f"save: base must be a checkpoint directory, got {base}")
    dtype, rest = save_dtype(config, params, dtype), _rest(config, base)
    part = params if isinstance(params, Part) else Part(*with_copies(config, params, dtype, fused_experts), dtype)
    if jax.process_index() > 0:
        for _ in part.arrays:
            pass
        return Path(path)
    with replacing(path, is_checkpoint) as directory:
        described = safetensors.write(
            directory, part.specs, part.arrays, apart=rest, like=_written(like) if rest else None,
            shard_bytes=shard_bytes, parts=part.count, others=others,
        )  # fmt: skip
        passed.copy_files(config, base, directory)
        generation: dict = {}
        if base is not None:
            if (Path(base) / "generation_config.json").is_file():
                generation = read_json(Path(base) / "generation_config.json")
            for name in TOKENIZER_FILES if tokenizer is None else ():
                if (Path(base) / name).is_file():
                    shutil.copyfile(Path(base) / name, directory / name)
            if tokenizer is None and (Path(base) / FURTHER_TEMPLATES).is_dir():
                shutil.copytree(Path(base) / FURTHER_TEMPLATES, directory / FURTHER_TEMPLATES)
        if tokenizer is not None:
            tokenizers.save(tokenizer, directory)
        config = with_ends(with_named_ends(config, generation), tokenizer or tokenizer_in(directory))
        hf = written_config(config, dtype)
        if config.eos:
            generation["eos_token_id"] = wrappers.text(hf)["eos_token_id"]
        manifest = manifest_of(version, described)
        for name, value in (("generation_config.json", generation), ("config.json", hf), (MANIFEST, manifest)):
            safetensors.write_bytes(directory / name, json_bytes(value))
    return Path(path)


def manifest(config, params, dtype=None, version: int | None = None) -> dict:
    """The manifest.json that `save` would write for these parameters alone, without writing anything."""
    specs, arrays = to_tensors(config, params, save_dtype(config, params, dtype))
    pairs = zip(specs.items(), arrays, strict=True)
    hashed = lambda name, spec, x: {**safetensors.describe(name, spec), "xxh3_128": safetensors.digest(x)}
    return manifest_of(version, {name: hashed(name, spec, x) for (name, spec), x in pairs})


def write_published(
    root: str | os.PathLike, version: int, config, params, dtype=None, base=None, tokenizer=None, like=None,
    others: Callable[[], Mapping[str, dict]] = dict,
) -> Path:  # fmt: skip
    """`save` to `root/{version}`, as a version of a policy."""
    if version < 0:
        raise ValueError(f"write_published: version must be at least 0, got {version}")
    return save(Path(root) / str(version), config, params, dtype, base, tokenizer, version, like, others=others)


def write_part(path: str | os.PathLike, config, part: Part) -> dict[str, dict]:
    """Writes this process's `host_part` to the directory `path`, atomically; returns its entries of the manifest, which
    `save` in process 0 needs."""
    files, arrays = safetensors.layout(part.specs, _rest(config), parts=part.count), iter(part.arrays)
    described: dict[str, dict] = {}
    with replacing(path, is_checkpoint) as directory:
        for file, entries in files[jax.process_index()].items():
            described |= safetensors.write_file(directory / file, entries, arrays)
    return described


def _rest(config, base: str | os.PathLike | None = None) -> dict:
    """The tensors that are copied from the checkpoint that the model came from."""
    made = mtp.copies(config)
    return {name: x for name, x in passed.tensors(config, base).items() if name not in made}


def _written(like: str | os.PathLike | None) -> tuple[Path, dict] | None:
    """(directory, tensors of its manifest) of `save`'s `like`."""
    return None if like is None else (Path(like), read_json(Path(like) / MANIFEST)["tensors"])
