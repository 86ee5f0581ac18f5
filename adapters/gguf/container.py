"""The GGUF format (version 2 and 3): metadata, and tensors that are dequantised as they are read.

A file has a magic number, counts, metadata by key, a record of each tensor, and the tensors' bytes at aligned offsets.
Sizes are listed with the fastest axis first, the other way round than in numpy.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import safetensors

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = {  # number of a metadata type -> its struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9
MOST = 1 << 24  # entries of a list of texts
MOST_AXES = 4
TYPES = {int: "a whole number", bool: "true or false", str: "a text"}
PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": ml_dtypes.bfloat16}
HALVES = "F16", "BF16"


def library() -> Any:
    """The package `gguf`; raises ValueError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"GGUF needs the package gguf ({error}); install areax[gguf]") from error
    return gguf


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of a file; indexing it dequantises and restores it.

    Attributes:
      name: its name in the file, for errors.
      kind: name of its type, such as Q4_0.
      raw: u8[..., bytes of a row].
      restore: what makes Hugging Face's tensor of it, if that has other rows or numbers.
    """

    name: str
    kind: str
    raw: np.ndarray
    shape: tuple[int, ...]
    restore: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def quantised(self) -> bool:
        return self.kind not in PLAIN

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(PLAIN[self.kind] if self.kind in HALVES else np.float32)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, cut: Any) -> np.ndarray:
        return self.read()[cut]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def read(self, dtype: np.dtype | None = None) -> np.ndarray:
        """The whole tensor, in a dtype, None = `dtype`; ValueError if a number is not finite in it."""
        with np.errstate(all="ignore"):  # what is not finite is found below
            if self.quantised:
                gguf = library()
                x = gguf.quants.dequantize(self.raw, gguf.GGMLQuantizationType[self.kind])
            else:
                x = np.ascontiguousarray(self.raw).view(PLAIN[self.kind])
            safetensors.forget(self.raw)
            x = x.reshape(self.raw.shape[:-1] + (-1,))
            x = (self.restore(x) if self.restore else x).reshape(self.shape).astype(dtype or self.dtype, copy=False)
        if count := safetensors.count_nonfinite(x):
            raise ValueError(
                f"{self.name} must be finite, got {count:,} numbers that are not in {x.dtype}; copy it again"
            )
        return x

    def entry(self, i: int) -> Weight:
        """Entry i along the first axis, still to be read."""
        return replace(self, raw=self.raw[i], shape=self.shape[1:])


@dataclass(frozen=True)
class File:
    """What a file holds.

    Attributes:
      metadata: values by key: numbers, truths, texts, lists of these.
      tensors: by name, sizes in numpy's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Weight]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of `metadata`; ValueError if it is of another type."""
        value = self.metadata.get(key, default)
        if value is not default and type(value) is not kind:
            raise ValueError(f"{self.path}: {key} must be {TYPES[kind]}, got {value!r:.80}; copy it again")
        return value


class _Reader:
    """Values of a mapped file, one after another; ValueError at its end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 4

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.data) - self.at:
            raise ValueError(
                f"{self.path}: half-written or damaged, {size:,} bytes at {self.at:,} are beyond its end at "
                f"{len(self.data):,}; copy it again"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: texts must be UTF-8, got {raw!r:.80}; copy it again") from error

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"{self.path}: half-written or damaged, metadata has the type {kind}; copy it again")
        kind, count = self.number("<I"), self.number("<Q")
        if kind == STRING and count <= MOST:
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"{self.path}: lists must be of numbers or texts, got {count} of type {kind}")
        form = SCALARS[kind]
        raw = self.take(struct.calcsize(form) * count)
        return list(struct.unpack(f"<{count}{form[1]}", raw))


def read(path: str | os.PathLike) -> File:
    """The metadata and tensors of a file, whose bytes are memory-mapped.

    Raises:
      ValueError: it is no GGUF file, of another version or byte order, damaged, or has a type that is not implemented.
    """
    path, gguf = Path(path), library()
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path}: a GGUF file must begin with GGUF; is this another kind of file?")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(path, data)
    version = reader.number("<I")
    if version & 0xFFFF == 0 and version:
        raise ValueError(f"{path}: its numbers are big-endian; convert it with gguf-convert-endian of the package gguf")
    if version not in VERSIONS:
        raise ValueError(f"{path}: GGUF version must be one of {VERSIONS}, got {version}; write it anew")
    tensors, keys = reader.number("<Q"), reader.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        name = reader.text()
        if name in metadata:
            raise ValueError(f"{path}: half-written or damaged, {name} is there twice; copy it again")
        metadata[name] = reader.value(reader.number("<I"))
    found = File(path, metadata, {})
    if (parts := found.get("split.count", int, 0)) > 1:
        raise ValueError(
            f"{path}: must be one file, got the part {found.get('split.no', int, 0) + 1} of {parts}; join them with "
            "llama-gguf-split --merge"
        )
    records = [_record(reader) for _ in range(tensors)]
    alignment = found.get("general.alignment", int, ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment must be a power of 2, got {alignment!r:.80}; copy it again")
    start = -(-reader.at // alignment) * alignment
    spans = []
    for name, shape, kind, offset in records:
        if name in found.tensors:
            raise ValueError(f"{path}: half-written or damaged, {name} is there twice; copy it again")
        weight, size = _weight(gguf, path, data, name, shape, kind, start + offset)
        if offset % alignment:
            raise ValueError(f"{path}: half-written or damaged, {name} is at the offset {offset}; copy it again")
        found.tensors[name] = weight
        spans.append((offset, offset + size))
    spans.sort()
    if any(stop > start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False)):
        raise ValueError(f"{path}: half-written or damaged, its tensors overlap; copy it again")
    return found


def _record(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, axes = reader.text(), reader.number("<I")
    if not 1 <= axes <= MOST_AXES:
        raise ValueError(f"{reader.path}: half-written or damaged, {name!r:.80} has {axes} axes; copy it again")
    shape = tuple(reader.number("<Q") for _ in range(axes))[::-1]
    return name, shape, reader.number("<I"), reader.number("<Q")


def _weight(gguf: Any, path: Path, data: mmap.mmap, name: str, shape: tuple[int, ...], number: int, at: int):
    """(the Weight, its bytes)."""
    try:
        kind = gguf.GGMLQuantizationType(number).name
    except ValueError:
        kind = f"type {number}"
    if kind not in PLAIN and kind not in {one.name for one in gguf.quants._type_traits}:
        raise ValueError(f"{path}: {name} must have a type that the package gguf dequantises, got {kind}")
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if shape[-1] % block or not all(shape):
        raise ValueError(f"{path}: half-written or damaged, {name} of {kind} is {list(shape)}; copy it again")
    row = shape[-1] // block * size
    total = math.prod(shape[:-1]) * row
    if at + total > len(data):
        raise ValueError(
            f"{path}: half-written or damaged, {name} ends at {at + total:,}, the file at {len(data):,}; copy it again"
        )
    raw = np.frombuffer(data, np.uint8, total, at).reshape(*shape[:-1], row)
    return Weight(f"{path}: {name}", kind, raw, shape), total
