"""Random access to the rows of large data sets at flat memory: lines of JSONL files by their offsets, other formats as
Arrow tables that `datasets` maps into memory."""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

STRIDE = 32  # lines per entry of an index: ten million lines need 5 MB
OPEN = 256  # files that are kept open; the limit of a process is often 1024

Numbered = tuple[int, bytes]  # a line's number from 1, and its bytes


class Lines:
    """The lines of a file that are not blank, as (number from 1, bytes); keeps the offset of every 32nd.

    The file must not change meanwhile, which every access checks. One that is replaced by another stays what it was as
    long as it is kept open; a pickled copy, or one of more than OPEN files, opens it for each access.

    Args:
      keep: keeps the file open.

    Raises:
      ValueError: the file is not what it was when it was indexed.
    """

    def __init__(self, file: str | os.PathLike, keep: bool = True):
        self._file, self._count = file, 0
        self._offsets, self._numbers = array("q"), array("q")
        offset = 0
        lines = open(file, "rb")
        close = weakref.finalize(self, lines.close)
        self._kept = lines if keep else None
        self._stamp = _stamp(lines)
        try:
            for number, line in enumerate(lines, 1):  # bytes: lines end only at \n, not at U+2028 in a text
                if not line.isspace():
                    if self._count % STRIDE == 0:
                        self._offsets.append(offset)
                        self._numbers.append(number)
                    self._count += 1
                offset += len(line)
            self._offsets.append(offset)
            self._check(lines, offset == self._stamp[0])
        finally:
            if not keep:
                close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": None}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Numbered]:
        return itertools.chain.from_iterable(map(self._block, range(len(self._numbers))))

    def __getitem__(self, index: int) -> Numbered:
        block, inside = divmod(range(self._count)[index], STRIDE)
        return self._block(block)[inside]

    def _block(self, block: int) -> list[Numbered]:
        """The lines from an offset that is kept to the next one."""
        start, end = self._offsets[block : block + 2]
        wanted = min(STRIDE, self._count - block * STRIDE)
        with contextlib.nullcontext(self._kept) if self._kept else open(self._file, "rb") as file:
            numbered = enumerate(_read(file, start, end).split(b"\n"), self._numbers[block])
            lines = [(number, line) for number, line in numbered if line.strip()]
            self._check(file, len(lines) == wanted)  # after it was read: a change meanwhile counts
        return lines

    def _check(self, file: BinaryIO, holds: bool) -> None:
        now = _stamp(file)
        if now != self._stamp or not holds:
            raise ValueError(
                f"{self._file}: must stay as it was when the run began, {self._stamp[0]:,} bytes, got a file of "
                f"{now[0]:,} bytes that was changed meanwhile; write other data to another file, and start again"
            )


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    """The bytes of a file from `start` to `end`, or to its end; the file's position, which threads and forked processes
    share, is neither used nor moved."""
    parts = []
    try:
        while start < end and (part := os.pread(file.fileno(), end - start, start)):
            parts.append(part)
            start += len(part)
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None
    return b"".join(parts)


class Mapped(Sequence):
    """`f(i, parts[i])` of every i, made when it is read."""

    def __init__(self, parts: Any, f: Callable[[int, Any], Any]):
        self._parts, self._f = parts, f

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index):
        return self._f(index, self._parts[index])

    def __iter__(self):
        return (self._f(index, part) for index, part in enumerate(self._parts))


class Joined(Sequence):
    """Sequences one after the other, up to the first `limit` entries."""

    def __init__(self, parts: Sequence[Sequence], limit: int | None = None):
        self._parts, self._ends = parts, list(itertools.accumulate(map(len, parts)))
        self._count = min(limit or self._ends[-1], self._ends[-1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        index = range(self._count)[index]
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]

    def __iter__(self):
        return itertools.islice(itertools.chain.from_iterable(self._parts), self._count)


def decompressed(file: Path, chunks: Iterator[bytes]) -> Path:
    """The decompressed content of a file, in the cache folder of `datasets`, where it is kept for the next run.

    Its name ends in the hash of its content; a copy with another content is made again. Removes what processes that
    were killed meanwhile left half-written.

    Args:
      chunks: the content; read only if it is not in the cache.

    Raises:
      ValueError: the cache folder cannot be written, or the file changes meanwhile.
    """
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "areax"
    key = _key(file)
    for kept in folder.glob(f"{key}-*.jsonl"):
        if kept.stem == f"{key}-{_hash(kept)}":
            return kept
    digest = xxhash.xxh3_128()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with _partial(folder, key) as partial:
            for chunk in chunks:
                digest.update(chunk)
                partial.write(chunk)
            partial.flush()
            os.fsync(partial.fileno())
            if not file.exists() or _key(file) != key:
                raise ValueError(f"{file}: must not change while it is decompressed; start again once it is complete")
            kept = folder / f"{key}-{digest.hexdigest()}.jsonl"
            os.replace(partial.name, kept)
    except OSError as error:
        raise _not_cached(file, error) from error
    return kept


def _key(file: Path) -> str:
    status = file.stat()
    return xxhash.xxh3_64_hexdigest(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode())


def _hash(file: Path) -> str:
    """The xxh3_128 of a file, which is read whole, as it is when its lines are indexed next; "" if it cannot be."""
    digest = xxhash.xxh3_128()
    try:
        with file.open("rb") as content:
            while chunk := content.read(1 << 22):
                digest.update(chunk)
    except OSError:
        return ""
    return digest.hexdigest()


def _not_cached(file: Path | str, error: OSError) -> ValueError:
    import datasets

    return ValueError(
        f"{file}: needs a copy in the cache folder of `datasets`, {datasets.config.HF_DATASETS_CACHE}, which cannot be "
        f"written: {error.strerror or error}; make room there, or set HF_DATASETS_CACHE to another folder"
    )


def disk_full(source: str, error: BaseException | None) -> ValueError | None:
    """What to say if an error of `datasets`, or one that it comes from, is that of a full disk."""
    while error is not None:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if isinstance(error, OSError) and (full or str(error).startswith("Not enough disk space")):  # as it foresees it
            return _not_cached(source, error)
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _partial(folder: Path, key: str) -> Iterator[BinaryIO]:
    """A new file, locked so that no `_sweep` removes it; removed at the end unless it was renamed."""
    while True:
        name = folder / f"{key}.{secrets.token_hex(6)}.partial"
        with name.open("wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks, where nothing is swept
                fcntl.flock(file, fcntl.LOCK_EX)
            if not name.exists():  # another process swept it before it was locked
                continue
            try:
                yield file
            finally:
                name.unlink(missing_ok=True)
            return


def _sweep(folder: Path) -> None:
    """Removes the partial files of processes that are gone."""
    for left in folder.glob("*.partial"):
        with contextlib.suppress(OSError), left.open("rb") as file:  # locked, removed meanwhile, or not ours
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def parquet(files: Sequence[Path]) -> Any:
    """The rows of Parquet files as a `datasets.Dataset`, whose Arrow copy in its cache is mapped into memory."""
    import datasets

    paths = [str(file.resolve()) for file in files]
    try:
        return datasets.load_dataset("parquet", data_files=paths, split="train", batch_size=1024)
    except (datasets.exceptions.DatasetsError, OSError) as error:
        if full := disk_full(paths[0], error):
            raise full from error
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{paths[0]}: `datasets` must read it and the {len(paths) - 1} after it: {reason}") from None
