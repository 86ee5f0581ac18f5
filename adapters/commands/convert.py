"""`areax convert`: rewrites a checkpoint with current keys and config.json, another dtype and a manifest, or makes one
of adapters, of the difference to another, or of torch's distributed checkpoint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from ...models import config_json
from .. import hf, peft, safetensors
from ..runtime import hub
from ..tracking import progress
from . import extract as extracting
from . import merge as merging

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B", re.IGNORECASE)


def convert(
    source: str | os.PathLike, destination: str | os.PathLike, dtype: str | None = None, *, shard_size: str = "5GB",
    merge: bool = False, extract: int = 0, base: str | None = None,
) -> dict:  # fmt: skip
    """Reads a checkpoint as strictly as `hf.load` and writes it, with its tokenizer, to another directory.

    Args:
      destination: a directory that does not exist or is empty.
      dtype: dtype of the written tensors; None = the source's. Quantised ones are written as floats, of bfloat16 unless
        config.json names another dtype; a line on stderr says so.
      shard_size: most bytes of a file, such as 5GB or 500MB; a larger tensor has its own.
      merge: the source is a PEFT folder, and what is written its base with the adapters merged.
      extract: rank of adapters that are written instead: those closest to the difference to `base`
        (`extract.extract`).
      base: the base of adapters; None = where adapter_config.json says.

    Returns:
      {"source", "path", "family", "dtypes", "tensors", "bytes"}, with `extract` also what `extract.extract` returns.
    """
    check_new(destination)
    shard_bytes = parse_size(shard_size)
    if (Path(source) / peft.CONFIG).is_file() != merge:
        raise ValueError(
            f"convert: --merge needs a folder with {peft.CONFIG}, got {source}; leave it out"
            if merge else f"convert: {source} holds adapters; merge them into their base with --merge"
        )  # fmt: skip
    if base and not (merge or extract):
        raise ValueError(f"convert: --base is for adapters and runs, got {base} for {source}; leave it out")
    if merge:
        return report(source, merging.merge(source, destination, base, dtype=dtype, shard_bytes=shard_bytes))
    if extract:
        if not base or dtype:
            raise ValueError(
                f"convert: --extract needs --base, and writes float32, got --base {base} and --dtype {dtype}"
            )
        path, figures = extracting.extract(source, destination, base, extract)
        return report(source, path) | figures
    source = hub.folder(source, weights=True)
    config, params, _ = hf.mapped(source, dtype=None)
    hf.check(source, safetensors.read(source))
    if stored := config_json.quantisation(json.loads(config.source)):
        progress.say(f"{source}: in {stored.method}, written as floats without quantization_config")
    return report(source, hf.save(destination, config, params, dtype, base=source, shard_bytes=shard_bytes))


def check_new(destination: str | os.PathLike) -> None:
    """Raises ValueError if something is at the destination."""
    target = Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"convert: {destination} already exists; choose another destination, or remove it first")


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB (10^9) or 5GiB (2^30)."""
    found = SIZE.fullmatch(text.strip())
    number, unit, binary = found.groups() if found else ("0", "", "")
    size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if size < 1:
        raise ValueError(f"convert: --shard-size must be a size such as 5GB or 500MB, got {text!r:.80}")
    return size


def report(source: str | os.PathLike, path: Path) -> dict:
    """What `convert` returns, of a checkpoint or of adapters."""
    adapters = (path / peft.CONFIG).is_file()
    tensors = safetensors.read(path / peft.WEIGHTS if adapters else path)
    family = "adapters" if adapters else hf.read_config(path).family
    return {
        "source": os.fspath(source),
        "path": os.fspath(path),
        "family": family,
        "dtypes": sorted({x.dtype.name for x in tensors.values()}),
        "tensors": len(tensors),
        "bytes": sum(x.nbytes for x in tensors.values()),
    }
