"""The manifest of a checkpoint: hashes of its tensors, and their comparison with what is there."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from ...rollout.servers.labels import MANIFEST, manifest_bytes
from .. import safetensors
from .config_files import json_object, read_json
from .matching import listed

BYTES, ENTRY_BYTES = 2**20, 2**10  # most of a manifest, and more for each tensor: parsed, JSON takes many times that


def verify(path: str | os.PathLike) -> dict | None:
    """Compares a checkpoint's tensors with its manifest.json; returns the manifest, or None without one.

    Raises:
      ValueError: the tensors do not match the manifest; names the first that differs.
    """
    path = Path(path)
    return verified(path, safetensors.read(path)) if os.path.lexists(path / MANIFEST) else None


def verified(path: Path, tensors: Mapping[str, np.ndarray]) -> dict | None:
    if (manifest := read_manifest(path, tensors)) is not None:
        compare(path, manifest, tensors)
    return manifest


def read_manifest(path: Path, tensors: Collection[str]) -> dict | None:
    """The manifest.json of a folder with these tensors; None without one; raises as `manifest_bytes`."""
    content = manifest_bytes(path / MANIFEST, BYTES + ENTRY_BYTES * len(tensors))
    return None if content is None else json_object(content, path / MANIFEST)


def compare(path: Path, manifest: Mapping, tensors: Mapping[str, np.ndarray]) -> None:
    """Compares tensors with a manifest; raises as `verify`."""
    compare_names(path, manifest, tensors)
    for name, tensor in tensors.items():
        compare_tensor(path, manifest, name, tensor)


def compare_names(path: Path, manifest: Mapping, tensors: Mapping[str, np.ndarray]) -> None:
    wanted = manifest.get("tensors")
    if not isinstance(wanted, dict):
        raise ValueError(f"{path}: manifest.json must list the tensors; copy the checkpoint again")
    if wanted.keys() != tensors.keys():
        names = sorted(wanted.keys() ^ tensors.keys())
        raise ValueError(
            f"{path}: {listed(names)} only in the manifest or only in the files; copy the checkpoint again"
        )


def compare_tensor(path: Path, manifest: Mapping, name: str, tensor: np.ndarray) -> None:
    got = {**safetensors.describe(name, tensor), "xxh3_128": safetensors.digest(tensor)}
    if got != manifest["tensors"][name]:
        raise ValueError(f"{path}: {name:.200} does not match manifest.json; copy the checkpoint again")


def manifest_of(version: int | None, described: dict[str, dict]) -> dict:
    total = sum(safetensors.size(entry) for entry in described.values())
    return {"version": version, "base": None, "bytes": total, "tensors": described}


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or what is left of one that `save` wrote."""
    found = (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    return found or "tensors" in left_manifest(path)


def left_manifest(path: Path) -> dict:
    """The manifest.json in a folder; {} if there is none, or a damaged one."""
    try:
        return read_json(path / MANIFEST)
    except (FileNotFoundError, ValueError):
        return {}
