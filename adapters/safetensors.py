"""Safetensors files: a streaming writer that hashes what it writes, and a memory-mapping reader.

The format: 8 bytes with the header's length, a JSON header {name: {dtype, shape, data_offsets}}, the tensors' bytes. A
checkpoint is a directory with `model.safetensors`, or with shards listed in `model.safetensors.index.json`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
EXPONENTS = {  # unsigned integers of the same size, and the bits that are all set in numbers that are not finite
    np.dtype(np.float32): (np.uint32, np.uint32(0x7F800000)),
    np.dtype(np.float16): (np.uint16, np.uint16(0x7C00)),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, np.uint16(0x7F80)),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, np.uint8(0x7F)),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, np.uint8(0x7C)),
}
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")
CHUNK = 1 << 20  # bytes hashed and then written while still in the CPU cache
SHARD = 5 * 10**9  # bytes of a file
HEADER = 100_000_000  # most bytes of a header, as in the format's own library
CHECKED = 1 << 16  # numbers checked at a time: each takes memory besides


def write(
    directory: str | os.PathLike, specs: Mapping[str, Any], arrays: Iterable, *,
    apart: Mapping[str, np.ndarray] = MappingProxyType({}), like: tuple[Path, Mapping[str, dict]] | None = None,
    shard_bytes: int = SHARD, parts: int = 1, others: Callable[[], Mapping[str, dict]] = dict,
) -> dict[str, dict]:  # fmt: skip
    """Writes tensors to an empty directory, one at a time: one file, or shards of up to `shard_bytes` and an index.

    Each file is renamed to its name once complete and synced; the index is written last.

    Args:
      specs: {name: anything with `shape` and `dtype`}, in order, for headers, which are written before the tensors.
      arrays: the tensors in that order, each fetched when it is written; any memory layout.
      apart: views of `read` that go to files of their own, the last; the memory that reading one takes is released.
      like: (directory, its manifest's entries) that was written with the same tensors `apart`: their files become hard
        links to its files, if the disk has those.
      parts: in how many the tensors are split (`layout`); `arrays` are then those of the first alone.
      others: called once these are written; returns the manifest's entries of the tensors of the other parts.

    Returns:
      {name: {"dtype", "shape", "xxh3_128"}}: the manifest's entries.

    Raises:
      ValueError: the format does not support a dtype, or an array does not match its spec; earlier shards are then left
        behind, but not the current file.
    """
    directory = Path(directory)
    files = layout(specs, apart, shard_bytes, parts)
    described: dict[str, dict] = {}
    source = iter(arrays)
    for file, entries in files[0].items():
        described |= write_file(directory / file, entries, source)
    for file, entries in files[-1].items():
        linked = _link(directory / file, entries, *like) if like else None
        described |= linked or write_file(directory / file, entries, _streamed(apart[name] for name in entries))
    if next(source, None) is not None:
        raise ValueError(f"{directory}: must get as many arrays as specs, {len(specs)}, got more")
    described |= others()
    names = [*specs, *apart]
    if FILE not in files[0]:
        places = {name: file for part in files for file, entries in part.items() for name in entries}
        index = {
            "metadata": {"total_size": sum(size(described[name]) for name in names)},
            "weight_map": {name: places[name] for name in names},
        }
        write_bytes(directory / INDEX, json.dumps(index, indent=2).encode())
    return {name: described[name] for name in names}


def layout(
    specs: Mapping[str, Any], apart: Mapping[str, Any] = MappingProxyType({}), shard_bytes: int = SHARD, parts: int = 1
) -> list[dict[str, dict[str, dict]]]:
    """The files of tensors, {file: {name: its `describe` entry}}, of each part (`split`); last, those of `apart`."""
    described = [{name: describe(name, spec) for name, spec in some.items()} for some in (specs, apart)]
    shards = [_shards(part, shard_bytes) for part in split(described[0], parts)]
    shards.append(_shards(described[1], shard_bytes) if apart else [])
    n, number = sum(map(len, shards)), itertools.count(1)
    file = lambda: FILE if n == 1 else f"model-{next(number):05}-of-{n:05}.safetensors"
    return [{file(): entries for entries in part} for part in shards]


def split(entries: Mapping[str, dict], parts: int) -> list[dict[str, dict]]:
    """Splits `describe` entries into parts of about as many bytes: the largest tensor first, each to the part that has
    the fewest so far. The same for the same entries, which keep their order."""
    loads, places = [0] * parts, {}
    for name in sorted(entries, key=lambda name: size(entries[name]), reverse=True):
        places[name] = loads.index(min(loads))
        loads[places[name]] += size(entries[name])
    return [{name: entry for name, entry in entries.items() if places[name] == i} for i in range(parts)]


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The tensors of a file or a checkpoint directory by name, as read-only views of memory-mapped files.

    Nothing is copied: shape and dtype are free, and a slice reads only its pages. Files must not be truncated or
    overwritten while views exist; replacing them by rename is safe.

    Raises:
      ValueError: the path is missing, holds no safetensors, or is incomplete; names the file.
    """
    path = Path(path)
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        raise ValueError(f"{path}: a checkpoint must be a directory or a safetensors file that exists")
    if not (path / INDEX).is_file():  # exists() would also find a pipe, whose reading never ends
        if not (path / FILE).is_file():
            refuse_pickles(path)
            others = sorted(p.name for p in path.glob("*.safetensors"))
            found = f"only {', '.join(others)}, the index is missing; copy it again" if others else "neither"
            raise ValueError(f"{path}: a checkpoint needs {FILE} or {INDEX}, got {found}")
        return _read_file(path / FILE)
    places = _shards_of(path)
    files = sorted(set(places.values()))
    if (path / FILE).exists() and files != [FILE]:  # transformers and servers would take that one
        raise ValueError(
            f"{path}: holds both {FILE} and {INDEX} of other files, so that one is of another checkpoint; remove that "
            "one"
        )
    for file in files:
        if not (path / file).is_file():
            raise ValueError(f"{path / file}: missing, but listed in {INDEX}; copy the checkpoint again")
    held = {file: _read_file(path / file) for file in files}
    for name, file in places.items():
        if name not in held[file]:
            raise ValueError(f"{path / file}: lacks {name:.200}, listed there in {INDEX}; copy the checkpoint again")
    for file in files:
        if twice := [name for name in held[file] if places.get(name, file) != file]:
            raise ValueError(
                f"{path / file}: holds {twice[0]:.200}, which {INDEX} lists in {places[twice[0]]}; copy the checkpoint "
                "again"
            )
    return {name: held[file][name] for name, file in places.items()}


def refuse_pickles(path: Path) -> None:
    """Raises ValueError if a directory without safetensors has weights pickled by PyTorch."""
    found = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if found and not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path / found[0]}: weights must be in safetensors, got a pickle, which may run any program when it is "
            'read; if you trust it, convert it with: python -c "import transformers as t; d = '
            f"{str(path)!r}; getattr(t, t.AutoConfig.from_pretrained(d).architectures[0]).from_pretrained(d, "
            "dtype='auto').save_pretrained('converted')\" and copy the tokenizer's files"
        )


def _shards_of(path: Path) -> dict[str, str]:
    """{tensor: file beside the index} of a checkpoint directory's index."""
    try:
        places = json.loads((path / INDEX).read_bytes())["weight_map"]
        files = set(places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path / INDEX}: not an index of shards ({line(error)}); copy the checkpoint again"
        ) from error
    for file in files:
        # A downloaded index must not make other files of this machine part of what is read, copied and served.
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise ValueError(
                f"{path / INDEX}: a shard must be a file beside the index, got {file!r:.80}; copy the checkpoint again"
            )
    return places


def line(error: Exception) -> str:
    """An exception in a few words: the repr of one about characters has the whole text."""
    return f"{type(error).__name__}: {error!s:.80}"


def forget(tensor: np.ndarray) -> None:
    """Releases the memory that reading a tensor of `read` took; pages are read again when accessed."""
    base: Any = tensor
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a small file atomically: temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with named(path), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order; a view if it is contiguous, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def digest(array: np.ndarray) -> str:
    """xxh3-128 of an array's bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(raw(array))


def count_nonfinite(array: np.ndarray) -> int:
    """How many numbers of an array are infinite or not a number, those of float64 in float32; 0 for integers."""
    narrow = np.dtype(np.float32) if array.dtype == np.float64 else array.dtype
    if narrow not in EXPONENTS:
        return 0
    kind, exponent = EXPONENTS[narrow]
    flat = np.ascontiguousarray(array).reshape(-1)
    with np.errstate(over="ignore"):
        parts = (flat[i : i + CHECKED].astype(narrow, copy=False).view(kind) for i in range(0, flat.size, CHECKED))
        return sum(int(np.count_nonzero((part & exponent) == exponent)) for part in parts)


def describe(name: str, spec: Any) -> dict:
    """{"dtype", "shape"} of an array or spec, in the format's spelling."""
    dtype = np.dtype(spec.dtype)
    if dtype not in NAMES:
        raise ValueError(f"safetensors: {name} must have one of the dtypes {', '.join(DTYPES)}, got {dtype}")
    return {"dtype": NAMES[dtype], "shape": [int(n) for n in spec.shape]}


def size(entry: Mapping) -> int:
    """Bytes of a tensor, given its `describe` entry."""
    return math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize


def _shards(entries: Mapping[str, dict], shard_bytes: int) -> list[dict[str, dict]]:
    """Splits entries into shards of up to `shard_bytes`; a larger tensor gets its own shard."""
    shards: list[dict[str, dict]] = [{}]
    total = 0
    for name, entry in entries.items():
        if shards[-1] and total + size(entry) > shard_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = entry
        total += size(entry)
    return shards


def write_file(path: Path, entries: Mapping[str, dict], arrays: Iterable) -> dict[str, dict]:
    """Writes one file of tensors, renamed to its name once complete and synced; see `write`.

    Args:
      entries: the `describe` entry of each tensor; as many arrays are consumed, in this order.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # required by transformers
    offset = 0
    for name, entry in entries.items():
        header[name] = {**entry, "data_offsets": [offset, offset + size(entry)]}
        offset += size(entry)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # aligns tensors in the mapped file
    temporary = path.with_name(f".{path.name}.tmp")
    described = {}
    source = iter(arrays)
    try:
        with named(path), open(temporary, "wb", buffering=0) as file:
            _put(file, memoryview(len(text).to_bytes(8, "little") + text))
            for name, entry in entries.items():
                array = np.asarray(_next(source, name, path))
                if NAMES.get(array.dtype) != entry["dtype"] or list(array.shape) != entry["shape"]:
                    spec = f"{entry['dtype']}{entry['shape']}"
                    raise ValueError(f"{path}: {name} must be {spec} by its spec, got {array.dtype}{list(array.shape)}")
                described[name] = {**entry, "xxh3_128": _put_hashed(file, raw(array))}
                del array  # before the next is made
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return described


def _link(path: Path, entries: Mapping[str, dict], like: Path, described: Mapping[str, dict]) -> dict | None:
    """Makes a file a hard link to that of its name in the directory `like`, if that holds the same tensors; returns
    their manifest's entries, None if nothing was done."""
    found = {name: described.get(name, {}) for name in entries}
    alike = all(entry.items() <= found[name].items() and "xxh3_128" in found[name] for name, entry in entries.items())
    if not alike or not (like / path.name).is_file() or _read_file(like / path.name).keys() != entries.keys():
        return None
    try:
        os.link(like / path.name, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK):
            raise
        return None
    return found


def _streamed(tensors: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for tensor in tensors:
        yield tensor
        forget(tensor)


def _next(source, name: str, path: Path):
    for array in source:
        return array
    raise ValueError(f"{path}: {name} needs an array, but there are no more")


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Gives an error of writing the file's name, which that of a full disk lacks."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.strerror:
            error.filename = os.fspath(path)
        raise


def _put(file, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _put_hashed(file, data: memoryview) -> str:
    state = xxhash.xxh3_128()
    for start in range(0, len(data), CHUNK):
        part = data[start : start + CHUNK]
        state.update(part)
        _put(file, part)
    return state.hexdigest()


def _read_file(path: Path) -> dict[str, np.ndarray]:
    short = f"{path}: half-written or damaged"
    with open(path, "rb") as file:
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or 8 + length > total:
            raise ValueError(f"{short}, {total} bytes do not hold the header; copy the checkpoint again")
        if length > HEADER:
            raise ValueError(f"{short}, a header has at most {HEADER:,} bytes, got {length:,}; copy it again")
        text = file.read(length)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    places = {}
    try:
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                start, stop = map(int, entry["data_offsets"])
                places[name] = (str(entry["dtype"]), tuple(map(int, entry["shape"])), start, stop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{short}, its header is not a safetensors header ({line(error)}); copy it again") from error
    held = total - 8 - length
    needed = max((stop for _, _, _, stop in places.values()), default=0)
    if needed != held:
        raise ValueError(f"{short}, its header lists {needed!s:.80} bytes of tensors, got {held}; copy it again")
    spans = sorted((start, stop) for _, _, start, stop in places.values())
    if [0, *(stop for _, stop in spans)] != [*(start for start, _ in spans), held]:
        raise ValueError(f"{short}, its tensors overlap or leave gaps; copy it again")
    tensors = {}
    for name, (dtype, shape, start, stop) in places.items():
        if dtype not in DTYPES:
            raise ValueError(f"{path}: dtype of {name:.200} must be one of {', '.join(DTYPES)}, got {dtype:.80}")
        if stop - start != math.prod(shape) * DTYPES[dtype].itemsize or min(start, *shape, 0) < 0:
            raise ValueError(
                f"{short}, {name:.200} of {dtype}{list(shape)!r:.80} is at [{start}, {stop}); copy it again"
            )
        flat = np.frombuffer(data, DTYPES[dtype], math.prod(shape), 8 + length + start)
        try:
            tensors[name] = flat.reshape(shape)
        except (ValueError, OverflowError) as error:  # more axes, or longer ones, than numpy supports
            raise ValueError(f"{path}: {name:.200} of {dtype}{list(shape)!r:.80} cannot be read ({error})") from error
    return tensors
