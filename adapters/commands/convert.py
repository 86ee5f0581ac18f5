"""`areax convert`: rewrites a checkpoint with current keys and config.json, another dtype and a manifest, or as a GGUF
file; or makes one of a GGUF file, of adapters, of the difference to another, or of torch's distributed checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Literal

from ...models import config_json
from .. import gguf, hf, peft, safetensors
from ..runtime import hub
from ..tracking import progress
from . import dcp
from . import extract as extracting
from . import merge as merging
from .files import AS_SOURCE, Files, check_new, report


def convert(
    source: str | os.PathLike, destination: str | os.PathLike, dtype: str | None = None, *, shard_size: str = "5GB",
    experts: Literal["apart", "fused"] = "apart", embeddings: Literal["tied", "untied"] | None = None,
    merge: bool = False, extract: int = 0, base: str | None = None, gguf_kind: str | None = None,
) -> dict:  # fmt: skip
    """Reads a checkpoint as strictly as `hf.load` and writes it, with its tokenizer, to another directory.

    Args:
      source: a checkpoint, a folder of adapters, or a GGUF file.
      destination: a directory that does not exist or is empty; with `gguf_kind` a file that does not exist.
      dtype: dtype of the written tensors; None = the source's. Quantised ones are written as floats, of bfloat16 unless
        config.json names another dtype; a line on stderr says so.
      shard_size, experts, embeddings: as `files.Files`.
      merge: the source is a PEFT folder, and what is written its base with the adapters merged.
      extract: rank of adapters that are written instead: those closest to the difference to `base`
        (`extract.extract`).
      gguf_kind: writes a GGUF file whose weights are in this way, one of `gguf.KINDS`.
      base: the base of adapters, None = where adapter_config.json says; the model that a checkpoint of
        torch.distributed.checkpoint is of, for its config.json and tokenizer.

    Returns:
      {"source", "path", "family", "dtypes", "tensors", "bytes"}, with `extract` also what `extract.extract` returns.
    """
    check_new(destination, directory=gguf_kind is None)
    files = Files(dtype, shard_size, experts, embeddings, gguf_kind)
    if (Path(source) / peft.CONFIG).is_file() != merge:
        raise ValueError(
            f"convert: --merge needs a folder with {peft.CONFIG}, got {source}; leave it out"
            if merge else f"convert: {source} holds adapters; merge them into their base with --merge"
        )  # fmt: skip
    if merge:
        return report(source, merging.merge(source, destination, base, files))
    if extract:
        if not base or files != AS_SOURCE:
            raise ValueError(
                f"convert: --extract needs --base, and writes one float32 file, got --base {base} and {files}"
            )
        path, figures = extracting.extract(source, destination, base, extract)
        return report(source, path) | figures
    if dcp.is_dcp(source):
        if not base:
            raise ValueError(f"convert: {source} has no config.json; name that model's folder with --base")
        base = hub.folder(base)
        config, params = dcp.opened(source, base)
        return report(source, files.save(destination, config, params, base=base))
    if base:
        raise ValueError(f"convert: --base is for adapters and runs, got {base} for {source}; leave it out")
    if hub.is_gguf(source):
        return report(source, _from_gguf(source, destination, files))
    source = hub.folder(source, weights=True)
    config, params, _ = hf.mapped(source, dtype=None)
    hf.check(source, safetensors.read(source))
    if stored := config_json.quantisation(json.loads(config.source)):
        progress.say(f"{source}: in {stored.method}, written as floats without quantization_config")
    return report(source, files.save(destination, config, params, base=source))


def _from_gguf(source: str | os.PathLike, destination: str | os.PathLike, files: Files) -> Path:
    file, source_config, tensors = gguf.opened(source)
    with tempfile.TemporaryDirectory() as base:
        gguf.small_files(file, source_config, Path(base))
        config, params = hf.mapped_tensors(hf.read_config(base), tensors, os.fspath(source), dtype=None)
        if kinds := gguf.quantised(tensors):
            written = files.gguf or files.dtype or source_config["dtype"]
            progress.say(f"{source}: in {', '.join(kinds)}, written as {written}")
        return files.save(destination, config, params, base=base)
