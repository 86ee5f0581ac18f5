"""From one checkpoint directory to another: keys and config.json in today's spelling, another dtype, a manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .. import hf


def convert(source: str | os.PathLike, destination: str | os.PathLike, dtype: str | None = None) -> dict:
    """Reads a checkpoint as strictly as `hf.load` and writes it anew, with its tokenizer.

    Args:
      destination: a directory that does not exist yet, or is empty.
      dtype: of the written tensors; None = that of the source.

    Returns:
      {"source", "path", "family", "dtypes", "tensors", "bytes"}.
    """
    target = Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"convert: {destination} exists already; choose another destination, or remove it first")
    config, params, _ = hf.mapped(source, dtype=None)
    path = hf.save(destination, config, params, dtype, base=source)
    manifest = json.loads((path / hf.MANIFEST).read_bytes())
    return {
        "source": os.fspath(source),
        "path": os.fspath(path),
        "family": config.family,
        "dtypes": sorted({entry["dtype"] for entry in manifest["tensors"].values()}),
        "tensors": len(manifest["tensors"]),
        "bytes": manifest["bytes"],
    }
