"""`areax convert`: rewrites a checkpoint with current keys and config.json, another dtype and a manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ...models import config_json
from .. import hf, safetensors
from ..runtime import hub
from ..tracking import progress


def convert(source: str | os.PathLike, destination: str | os.PathLike, dtype: str | None = None) -> dict:
    """Reads a checkpoint as strictly as `hf.load` and writes it, with its tokenizer, to another directory.

    Args:
      destination: a directory that does not exist or is empty.
      dtype: dtype of the written tensors; None = the source's. Quantised ones are written as floats, of bfloat16 unless
        config.json names another dtype; a line on stderr says so.

    Returns:
      {"source", "path", "family", "dtypes", "tensors", "bytes"}.
    """
    target = Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"convert: {destination} already exists; choose another destination, or remove it first")
    source = hub.folder(source, weights=True)
    config, params, _ = hf.mapped(source, dtype=None)
    hf.check(source, safetensors.read(source))
    if stored := config_json.quantisation(json.loads(config.source)):
        progress.say(f"{source}: in {stored.method}, written as floats without quantization_config")
    path = hf.save(destination, config, params, dtype, base=source)
    manifest = json.loads((path / hf.MANIFEST).read_bytes())
    return {
        "source": os.fspath(source),
        "path": os.fspath(path),
        "family": config.family,
        "dtypes": sorted({safetensors.DTYPES[entry["dtype"]].name for entry in manifest["tensors"].values()}),
        "tensors": len(manifest["tensors"]),
        "bytes": manifest["bytes"],
    }
