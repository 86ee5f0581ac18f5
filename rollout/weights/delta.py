"""Encodes the difference of two published versions as one file: their tensor files XORed and compressed.

An RL step with a small learning rate leaves most bf16 weights bit-identical: their XOR with the previous version is
zero, which zstd compresses well. Even and odd bytes are separated first, because a changed weight mostly changes in its
low byte.

    8 bytes "areaxd1\n", 4 bytes the header's length, header, then for each block 4 bytes its length and a zstd frame

The header is JSON {"base": label, "label": label, "files": [[name, bytes], ...]}; blocks are BLOCK bytes of each file
in turn, the last one of a file shorter.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard

MAGIC = b"areaxd1\n"
BLOCK = 1 << 20  # small enough that its memory is reused
LEVEL = 1  # of zstd: on XORed weights higher levels take longer and gain little
WORKERS = min(8, os.cpu_count() or 1)  # threads: numpy and zstd release the GIL


def write(path: Path, base: Path, new: Path, names: Iterable[str], labels: tuple[str, str]) -> int:
    """Writes the delta of files that have the same size in both directories; returns its size in bytes.

    Args:
      labels: of the base and of the new version.

    Raises:
      ValueError: a file is missing in one of them, or differs in size.
    """
    sizes: list[tuple[str, int]] = []
    for name in names:
        now, then = ((folder / name).stat().st_size if (folder / name).is_file() else None for folder in (new, base))
        if now is None or now != then:
            raise ValueError(f"delta: {name} must have the same size in both versions, got {then} and {now} bytes")
        sizes.append((name, now))
    header = json.dumps({"base": labels[0], "label": labels[1], "files": sizes}).encode()
    with open(path, "wb") as file, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        file.write(MAGIC + len(header).to_bytes(4, "little") + header)
        for name, size in sizes:
            for frame in _mapped(pool, _pack, ((base / name, new / name, *cut) for cut in _cuts(size))):
                file.write(len(frame).to_bytes(4, "little") + frame)
        return file.tell()


def apply(path: Path, base: Path, out: Path, label: str) -> list[str]:
    """Writes the files of the new version to the directory `out`; returns their names.

    Args:
      label: of the version in `base`.

    Raises:
      ValueError: not a delta, one for another base, or a damaged one. Files may then be incomplete.
    """
    with open(path, "rb") as file, concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        try:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("wrong magic bytes")
            header = json.loads(_exactly(file, int.from_bytes(file.read(4), "little")))
            sizes = [(str(name), int(size)) for name, size in header["files"]]
            wanted = header["base"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a delta ({error})") from error
        if wanted != label:
            raise ValueError(f"{path}: the delta needs the base {wanted}, got {label}")
        for name, size in sizes:
            if Path(name).name != name or not (base / name).is_file() or (base / name).stat().st_size != size:
                raise ValueError(f"{path}: {name!r} must be a file of {size} bytes in {base}")
            (out / name).unlink(missing_ok=True)  # a link to another version's, from a transfer that was interrupted
            with open(out / name, "wb") as new:
                cuts = zip(_cuts(size), _frames(file), strict=False)
                work = ((base / name, new.fileno(), *cut, frame) for cut, frame in cuts)
                if sum(_mapped(pool, _unpack, work)) != size:
                    raise ValueError(f"{path}: ends within {name}")
        return [name for name, _ in sizes]


def _cuts(size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(BLOCK, size - start)) for start in range(0, size, BLOCK))


def _frames(file: BinaryIO) -> Iterator[bytes]:
    while head := file.read(4):
        yield _exactly(file, int.from_bytes(head, "little"))


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("it is truncated")
    return data


def _mapped(pool: concurrent.futures.Executor, function, work: Iterable[tuple]) -> Iterator:
    """Like `pool.map`, in order, but submits only as much work as keeps the workers busy."""
    waiting: list[concurrent.futures.Future] = []
    for arguments in work:
        waiting.append(pool.submit(function, *arguments))
        if len(waiting) > 2 * WORKERS:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


def _read(path: Path, start: int, size: int) -> np.ndarray:
    return np.fromfile(path, np.uint8, size, offset=start)


def _pack(base: Path, new: Path, start: int, size: int) -> bytes:
    bits = _read(new, start, size)
    np.bitwise_xor(bits, _read(base, start, size), out=bits)
    even = size // 2 * 2
    planes = np.concatenate([bits[0:even:2], bits[1:even:2], bits[even:]])
    return zstandard.ZstdCompressor(LEVEL).compress(planes.data)


def _unpack(base: Path, new: int, start: int, size: int, frame: bytes) -> int:
    """Unpacks a block and writes it in place, in the worker: page faults of a file in memory take most of the time."""
    try:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"delta: a block cannot be decompressed ({error})") from error
    if len(planes) != size:
        raise ValueError(f"delta: a block must have {size} bytes, got {len(planes)}")
    half = size // 2
    bits = _read(base, start, size)
    bits[0 : 2 * half : 2] ^= planes[:half]
    bits[1 : 2 * half : 2] ^= planes[half : 2 * half]
    bits[2 * half :] ^= planes[2 * half :]
    return os.pwrite(new, bits.data, start)
