"""What containers share, those of Docker and those of services: the shape of commands, and files on their way in."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

HALF = 32 * 2**10  # bytes of a command's output that are kept of its beginning, and of its end


def late(command: str, timeout_s: float) -> list[str]:
    """The command in bash, killed after `timeout_s` with all that it has not left in the background."""
    return ["timeout", "--signal=KILL", f"{max(timeout_s, 0.001):.3f}", "bash", "-c", command]


def why(code: int, seconds: float, timeout_s: float) -> str:
    """`Result.why` of a command of `late`."""
    return "wall" if code == 137 and seconds >= timeout_s else ""


def left_out(count: str) -> str:
    """What stands for the middle of a long output."""
    return f"\n... {count} bytes left out ...\n"


def digest(folder: Path) -> str:
    """A hash of what is in a folder: images are built once of each content."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()[:32]


def archive(files: Mapping[str, bytes]) -> bytes:
    """The files, by their absolute paths, as a tar file for "/"."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as packed:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), 0o644
            packed.addfile(entry, io.BytesIO(content))
    return made.getvalue()
