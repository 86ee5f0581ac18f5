"""Reads checkpoint folders that the engine is to serve, which may be malformed, or change meanwhile."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...adapters import hf
from ...adapters.data import images
from ...models import vision

CONFIG_BYTES = 2**20  # largest config.json, of a model or an adapter


def state_of(path: str) -> frozenset:
    """(name, inode, size, modification time) of the files in a folder; empty if there is no folder."""
    if not os.path.isdir(path):
        return frozenset()
    with readable(path):
        found = ((file.name, file.stat()) for file in os.scandir(path))
        return frozenset((name, is_.st_ino, is_.st_size, is_.st_mtime_ns) for name, is_ in found)


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Raises ValueError if the folder cannot be read, or its files have what no such file has."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: malformed ({type(error).__name__}: {error!s:.100})") from error


def check_file_size(path: Path, most: int) -> None:
    """Raises ValueError if a file is larger than `most` bytes."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{path}: must have at most {most} bytes, got {size}")


def blind(path: str) -> str | None:
    """Why the model in a checkpoint folder reads text alone; "" = it is a text model; None = it reads images.

    Raises:
      ValueError: as `hf.read_config`.
    """
    if json.loads(hf.read_config(path).source).get("model_type") not in vision.TOWERS:
        return ""
    if not (Path(path) / images.FILE).is_file():
        return f"text only (the folder has no {images.FILE})"
    if importlib.util.find_spec("PIL") is None:
        return "text only (images need areax[vision])"
    return None


def read_weights(
    path: str, dtype: str, take: Callable[[Any, Any], Any] = lambda config, params: params, sees: bool = False
) -> tuple[Any, Any, dict[str, str]]:
    """Reads a checkpoint folder: (config, parameters, xxh3-128 of each tensor by name), complete and verified against
    its manifest.json, if it has one. The parameters are views of its files, as in `hf.mapped`.

    Args:
      take: `take(config, parameters)` is returned instead of the parameters; it runs while the hashes are verified.
      sees: with the vision tower.

    Raises:
      ValueError: as `hf.load`, `hf.verify` and `take`.
    """
    with ThreadPoolExecutor(1) as pool:
        config, params, verify = hf.mapped(path, dtype, sees)
        if not config.output_head:
            raise ValueError(f"{path}: must have an output head to generate text, got a classifier without")
        verified = pool.submit(verify)
        params = take(config, params)
        manifest = verified.result()
    if manifest is not None:
        return config, params, {name: entry["xxh3_128"] for name, entry in manifest["tensors"].items()}
    stored = hf.mapped(path, None, sees)[1]
    specs, tensors = hf.to_tensors(config, stored, hf.save_dtype(config, stored))
    digest = lambda tensor: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return config, params, {name: digest(tensor) for name, tensor in zip(specs, tensors, strict=True)}


def together(checksums: dict[str, str]) -> str:
    """Combines checksums into one."""
    return xxhash.xxh3_128_hexdigest(json.dumps(checksums, sort_keys=True).encode())
