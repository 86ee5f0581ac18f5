"""The listing of a published version: its files with sizes and hashes, and what a holder of another version needs.

    {"files": {name: {"bytes", "xxh3_128"}}, "same": [name, ...], "delta": null or {"name", "bytes", "xxh3_128"}}

"same" are the files that do not differ from those of the other version; the delta makes the other tensors' files of
that version's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from ..servers.labels import MANIFEST
from . import delta

log = logging.getLogger(__name__)

PAYS = 0.5  # largest size of a useful delta, as a share of its files' bytes
CHUNK = 8 << 20


def described(path: Path) -> dict[str, Any]:
    """The size and the hash of a file: {"bytes", "xxh3_128"}."""
    state, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3_128": state.hexdigest()}


def files_of(directory: Path) -> dict[str, dict]:
    """Lists the files of a directory: {name: {"bytes", "xxh3_128"}}."""
    return {path.name: described(path) for path in sorted(directory.iterdir()) if path.is_file()}


def same(files: dict[str, dict], others: dict[str, dict]) -> list[str]:
    """The files of a version that do not differ from those of another one."""
    return [name for name, entry in files.items() if others.get(name) == entry]


def make_delta(folder: Path, new: tuple[str, Path], old: tuple[str, Path], same: list[str]) -> dict | None:
    """Writes a delta to `folder` and returns its entry in the listing; None if there is none of a useful size.

    Args:
      new, old: label and directory of the versions.
      same: files that it leaves out.
    """
    (label, here), (base, there) = new, old
    names = sorted(path.name for path in here.glob("*.safetensors") if path.name not in same)
    path = folder / f"{label}-from-{base}.delta"
    try:
        size = delta.write(path, there, here, names, (base, label))
    except (ValueError, OSError) as error:  # another size, a base just removed, a full disk: sends all of it
        log.warning("no delta from %s to %s: %s", base, label, error)
        size = None
    if size is None or size > PAYS * sum((here / name).stat().st_size for name in names):
        path.unlink(missing_ok=True)
        return None
    return {"name": path.name, **described(path)}


def checked(listings: Sequence[Any], label: str) -> list[dict[str, dict[str, Any]]]:
    """The files of each part's listing, after checking its format, that no two have a file, and that the manifest has
    the label's hash.

    Raises RuntimeError.
    """
    try:
        parts: list[dict[str, dict[str, Any]]] = [
            {
                str(name): {"bytes": int(entry["bytes"]), "xxh3_128": str(entry["xxh3_128"])}
                for name, entry in listing["files"].items()
            }
            for listing in listings
        ]
        [manifest] = (files[MANIFEST]["xxh3_128"] for files in parts if MANIFEST in files)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise RuntimeError(f"stager: the listing of {label} is malformed ({error!r})") from error
    names = [name for files in parts for name in files]
    if len(set(names)) < len(names) or not all(Path(name).name == name and not name.startswith(".") for name in names):
        raise RuntimeError(f"stager: the listing of {label} must name files once, without folders, got {sorted(names)}")
    if manifest[:8] != label.partition("-")[2]:
        raise RuntimeError(f"stager: {label} is the name of another manifest than the one listed, {manifest[:8]}")
    return parts
