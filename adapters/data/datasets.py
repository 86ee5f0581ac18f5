"""Reads rows from JSONL, JSON and Parquet files, folders of them, and data sets on the Hugging Face hub."""

from __future__ import annotations

import copy
import functools
import glob
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...rollout.chat import images
from ..runtime import hub
from . import indexed

MANY = 100_000  # more rows than these are not read into memory
MUCH = 1 << 30  # bytes of files or of a table, as with images in it: nor is more

Placed = tuple[dict | ValueError, str]  # a row, or why a line is none, and its place

SAVED = ("state.json", "dataset_dict.json")  # files that mark a folder written by `save_to_disk`
COMPRESSED = {".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
SUFFIXES = (".jsonl", *COMPRESSED, ".json", ".parquet")


def rows(source: str | Path, *, split: str = "train", limit: int | None = None) -> list[dict]:
    """The rows of a data set as plain dicts, in order; at most the first `limit`.

    Args:
      source: a .jsonl (also .jsonl.gz, .jsonl.zst), .json (a list of objects) or .parquet file; a pattern of them such
        as `data/*.jsonl`; a folder of them, or one written by `save_to_disk` of `datasets`; or on the hub `owner/name`,
        `owner/name:configuration` or `owner/name:configuration:split`.
      split: in a folder, at any depth, the file `train.jsonl` (.json, .parquet) or the shards
        `train-00000-of-00002.parquet`; on the hub the split, unless the source names one; ignored for a file.
      limit: maximum number of rows to read; a hub data set is then streamed instead of downloaded.

    Raises:
      ValueError: the source does not exist, is empty, or a line cannot be read.
    """
    return [row for row, _ in placed(source, split=split, limit=limit)]


def placed(
    source: str | Path,
    *,
    split: str = "train",
    limit: int | None = None,
    bad: Callable[[ValueError], None] | None = None,
) -> list[tuple[dict, str]]:
    """(row, its place) of each row of a data set, such as "rows.jsonl:3"; arguments as `rows`.

    Args:
      bad: called with the error of a line that is not a JSON object, which is then left out; None = raises it. Files
        that cannot be read at all are refused in any case.
    """
    files = _located(source, split, limit)
    found: Iterator[Placed]
    if files is not None:
        found = itertools.chain.from_iterable(map(_read, files))
    elif (folder := _path(source)).is_dir():
        found = _numbered(_saved(folder, split), source)
    else:
        found = _hub(str(source), split, limit)
    return good(list(itertools.islice(found, limit)), source, bad)


def good(
    read: Sequence[Placed], source: str | Path, bad: Callable[[ValueError], None] | None = None
) -> list[tuple[dict, str]]:
    """The rows among `read`, with their places; what is no row is raised, or given to `bad`."""
    if not read:
        raise ValueError(f"data: the data set is empty, got {source}")
    result = []
    for row, place in read:
        if not isinstance(row, ValueError):
            result.append((row, place))
        elif bad is None:
            raise row
        else:
            bad(row)
    return result


def many(source: str | Path, *, split: str = "train", limit: int | None = None) -> Sequence[Placed] | None:
    """Random access to (row or error, its place) of a data set with more than MANY rows, or MUCH bytes, without reading
    it into memory; None if it has less. Arguments as `rows`.

    Compressed files are decompressed, and Parquet files copied as Arrow tables, into the cache folder of `datasets`. A
    .json file is one value and cannot be read in parts; it counts as small.
    """
    files = _located(source, split, limit)
    if limit is not None and limit <= MANY:
        return None
    if files is None:
        folder = _path(source)
        table = _saved(folder, split) if folder.is_dir() else _loaded(str(source), split)
        return indexed.Joined([_rows_of(table, source)], limit) if large(table) else None
    suffix = _suffix(files[0])
    if suffix == ".json" or not _exceeds(files, suffix):
        return None
    if suffix == ".parquet":
        return indexed.Joined([_rows_of(indexed.parquet(files), source, files[0].parent)], limit)
    return indexed.Joined([_lines_of(file, keep=len(files) <= indexed.OPEN) for file in files], limit)


def given(rows: Sequence, limit: int | None = None) -> Sequence[Placed]:
    """(row or error, its place) of the rows of a list, a `datasets.Dataset` or the like, as `many`; as many as its
    length says."""
    return indexed.Joined([_Given(_as_stored(rows))], limit)


def large(rows: Sequence) -> bool:
    """Whether there are more than MANY rows, or those of a `datasets.Dataset` have more than MUCH bytes."""
    return len(rows) > MANY or getattr(getattr(rows, "data", None), "nbytes", 0) > MUCH


class _Given(Sequence[Placed]):
    """All rows of an object: an IndexError of its code, which ends an iteration silently, is refused."""

    def __init__(self, rows: Any):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        place = f"rows: row {index + 1}"
        try:
            return _entry(self._rows[index], place)
        except (IndexError, StopIteration) as error:
            raise ValueError(
                f"{place}: must exist, as there are {len(self)} by len(), got {type(error).__name__}: {_line(error)}"
            ) from error

    def __iter__(self) -> Iterator[Placed]:
        count = 0
        if hasattr(self._rows, "__iter__"):  # of `datasets` twice as fast as by index
            for count, row in enumerate(self._rows, 1):
                yield _entry(row, f"rows: row {count}")
        yield from (self[index] for index in range(count, len(self)))


def _entry(row: Any, place: str) -> Placed:
    if not isinstance(row, dict):
        return ValueError(f"{place}: a row must be a dict, got {type(row).__name__}"), place
    return listed(row), place


def listed(value: Any) -> Any:
    """A value with lists instead of the arrays that pandas makes of them."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, list):
        return [listed(each) for each in value]
    return {name: listed(each) for name, each in value.items()} if type(value) is dict else value


def _exceeds(files, suffix):
    """Whether there are more than MANY rows in these files, or more than MUCH bytes; reads no more than it needs."""
    if suffix == ".parquet":
        from pyarrow import parquet

    try:
        if sum(file.stat().st_size for file in files) > MUCH:
            return True
        if suffix == ".parquet":
            tables = [parquet.read_metadata(file) for file in files]
            size = sum(table.row_group(i).total_byte_size for table in tables for i in range(table.num_row_groups))
            return size > MUCH or sum(table.num_rows for table in tables) > MANY
        count = 0
        for file in files:
            with io.BufferedReader(_stream(file, suffix)) if suffix in COMPRESSED else file.open("rb") as lines:
                count += sum(1 for _ in itertools.islice(filter(bytes.strip, lines), MANY + 1 - count))
        return count > MANY
    except (OSError, ValueError):  # whoever reads the rows says what is wrong with the file
        return False


def _lines_of(file, keep) -> Sequence[Placed]:
    """The rows of a JSONL file, which is decompressed into the cache if it is compressed."""
    suffix, plain = _suffix(file), file
    if suffix in COMPRESSED:
        plain = indexed.decompressed(file, _chunks(file, suffix))
    return indexed.Mapped(indexed.Lines(plain, keep), lambda _, line: _row(line[1], file, line[0]))


def _rows_of(table, source, folder: Path | None = None) -> Sequence[Placed]:
    located = functools.partial(images.located, folder=folder) if folder else lambda row: row
    return indexed.Mapped(_as_stored(table), lambda i, row: (located(row), f"{source}: row {i + 1}"))


class _Stored(Sequence):
    """The rows of a `datasets.Dataset`, with images as they are stored: {"bytes", "path"}."""

    def __init__(self, table: Any, features: Any):
        self._table, self._features = table.with_format("arrow"), features

    @property
    def data(self) -> Any:
        return self._table.data

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index):
        at = range(len(self))[index]
        [row] = self._table[at : at + 1].to_pylist()
        return self._features.decode_example(row)

    def __iter__(self):
        for batch in self._table.iter(32):
            yield from map(self._features.decode_example, batch.to_pylist())


def _as_stored(table: Any) -> Any:
    """A table of `datasets` without decoding of images, which would take the memory of their pixels, and forget their
    files; anything else as it is."""
    features = copy.deepcopy(getattr(table, "features", None))
    if not (features and hasattr(table, "with_format") and _undecoded(features)):
        return table
    if hasattr(table, "decode"):  # an iterable one
        return table.decode(False)
    return table if table.format["type"] else _Stored(table, features)


def _undecoded(feature: Any) -> bool:
    """Switches the decoding of images off; returns whether there are any."""
    import datasets

    if isinstance(feature, datasets.Image):
        feature.decode = False
        return True
    if isinstance(feature, dict):
        return any([_undecoded(each) for each in feature.values()])
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return inner is not None and _undecoded(inner)


def _path(source) -> Path:
    return Path(os.path.expanduser(source))  # of `Path` it raises RuntimeError without such a user


def _located(source, split, limit) -> list[Path] | None:
    """The files of a source; None for a folder of `save_to_disk` and for the hub."""
    if limit is not None and limit < 1:
        raise ValueError(f"data: limit must be at least 1, got {limit}")
    if not str(source):
        raise ValueError("data: needs a file, a folder or a data set on the hub, got ''")
    path = _path(source)
    if path.is_file():
        return [path]
    if any((path / name).is_file() for name in SAVED):
        return None
    if path.is_dir():
        return _files(path, split)
    if isinstance(source, str) and glob.has_magic(source):
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if len({_suffix(file) for file in files}) == 1:
            return files
        raise ValueError(
            f"data: a pattern must match files of one type, got {source}, which matches {len(files)} files"
        )
    if isinstance(source, Path) or _means_a_file(str(source)):
        raise ValueError(f"data: no such file or folder, got {source}")
    return None


def _suffix(file):
    return next((suffix for suffix in SUFFIXES if file.name.endswith(suffix)), "")


def means_the_hub(source: str) -> bool:
    """Whether a source that is a text names a data set on the hub, not files here."""
    return not (_means_a_file(source) or glob.has_magic(source) or os.path.exists(source))


def _means_a_file(source):
    name = source.partition(":")[0]
    if source.endswith(SUFFIXES) or name.endswith(SUFFIXES):
        return True
    return name.count("/") > 1 or name.startswith(("/", ".", "~"))


def _files(folder, split):
    """The files of one split in a folder, at any depth, except hidden ones."""
    every = [
        file
        for file in sorted(folder.rglob("*"))
        if _suffix(file) and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    ]
    named = re.compile(rf"{re.escape(split)}(-\d[^.]*)?")
    files = [file for file in every if named.fullmatch(file.name.removesuffix(_suffix(file)))]
    if not files:
        shown = ", ".join(str(file.relative_to(folder)) for file in every[:8]) or "none"
        raise ValueError(
            f"data: no {split}.jsonl, .json or .parquet in the folder {folder}; "
            f"name one of its files or another split (files there: {shown})"
        )
    if len({(file.parent, _suffix(file)) for file in files}) > 1:
        shown = ", ".join(str(file) for file in files[:8])
        raise ValueError(
            f"data: split {split} must be in one folder, in files of one type, got {shown}; name one file or folder"
        )
    return files


def _read(file) -> Iterator[Placed]:
    """Iterates over the rows of a file."""
    suffix = _suffix(file)
    if suffix == ".parquet":
        return _parquet(file)
    if suffix == ".json":
        return _json(file)
    if suffix in COMPRESSED:
        return _compressed(file, suffix)
    if suffix == ".jsonl":
        return _jsonl(file, file.open("rb"))
    with file.open("rb") as opened:
        hint = _known_form(opened.read(1 << 16))
    raise ValueError(f"data: a file must end in {', '.join(SUFFIXES)}, got {file}{hint}")


def _jsonl(file, opened):
    with opened as lines:  # bytes: lines end only at \n, not at U+2028 in a text
        for count, line in enumerate(lines, 1):
            if line.strip():
                yield _row(line, file, count)


def _row(line: bytes, file: Path, count: int) -> Placed:
    place = f"{file}:{count}"
    try:
        return images.located(_object(_parse(line.strip(), place), place), file.parent), place
    except ValueError as error:
        if count == 1 and line.strip()[:1] == b"[":
            error = ValueError(f"{error}{_known_form(line)}")
        return error, place


def _compressed(file, suffix):
    try:
        yield from _jsonl(file, io.BufferedReader(_stream(file, suffix)))
    except OSError as error:
        raise ValueError(f"{file}: damaged or half-written: {_line(error)}") from None


def _stream(file, suffix):
    import pyarrow  # detects truncated streams, which zstandard takes for the end

    return pyarrow.input_stream(str(file), compression=COMPRESSED[suffix])


def _chunks(file, suffix) -> Iterator[bytes]:
    """The decompressed bytes of a file."""
    try:
        with _stream(file, suffix) as stream:
            yield from iter(functools.partial(stream.read, 1 << 20), b"")
    except OSError as error:
        raise ValueError(f"{file}: damaged or half-written: {_line(error)}") from None


def _known_form(content: bytes) -> str:
    """What to name a file that begins with this, if it is JSON; "" = it is not."""
    first = content.lstrip().split(b"\n", 1)[0].strip()
    if first.startswith(b"["):
        return "; it looks like a list in JSON: name it .json"
    try:
        lines = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return ""
    return "; it looks like JSON lines: name it .jsonl" if lines else ""


def _json(file):
    read = file.read_bytes()
    try:
        content = _parse(read, str(file))
    except ValueError as error:
        raise ValueError(f"{error}{'' if read.lstrip()[:1] == b'[' else _known_form(read)}") from None
    if not isinstance(content, list):
        raise ValueError(f"{file}: must hold a list of objects, got {type(content).__name__}")
    for count, row in enumerate(content, 1):
        place = f"{file}: entry {count}"
        try:
            yield images.located(_object(row, place), file.parent), place
        except ValueError as error:
            yield error, place


def _parse(content, place):
    try:
        parsed = json.loads(content.decode("utf-8-sig"))  # of bytes it would guess the encoding
        if b"\\ud" in content.lower():  # JSON can spell half a character, which no tokenizer takes
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: texts must be Unicode, got the lone surrogate {error.object[error.start]!r}"
        ) from None
    except RecursionError:
        raise ValueError(f"{place}: not JSON that can be read: nested too deep") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise ValueError(f"{place}: not JSON: {error.msg}, at {line}column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise ValueError(f"{place}: not JSON that can be read: {_line(error)}") from None


def _object(row, place):
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be a JSON object, got {type(row).__name__}")
    return row


def _parquet(file):
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            batches = table.iter_batches(batch_size=1024)
            read = (images.located(row, file.parent) for batch in batches for row in batch.to_pylist())
            yield from _numbered(read, file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file: {_line(error)}") from None


def _numbered(rows, source) -> Iterator[Placed]:
    for count, row in enumerate(rows, 1):
        yield row, f"{source}: row {count}"


def _saved(folder, split) -> Any:
    """The table of one split in a folder that `save_to_disk` of `datasets` wrote."""
    import datasets

    try:
        found = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:  # missing and damaged files, of which it checks nothing
        raise ValueError(f"{folder}: not a folder that `save_to_disk` wrote completely: {_line(error)}") from None
    if isinstance(found, dict) and split not in found:
        raise ValueError(f"data: {folder} must hold a split {split}, got {', '.join(found)}; name a folder in it")
    return _as_stored(found[split] if isinstance(found, dict) else found)


def _hub(source, split, limit) -> Iterator[Placed]:
    return _numbered(_loaded(source, split, limit), source)


def _loaded(source, split, limit=None) -> Any:
    """The table of a data set on the hub, or a list of its first `limit` rows."""
    import datasets

    hub.check(source)
    parts = source.split(":")
    if len(parts) > 3:
        raise ValueError(f"data: a hub source must be owner/name:configuration:split, got {source}")
    name, configuration, named = (parts + ["", ""])[:3]
    split = named or split
    try:
        found = datasets.load_dataset(name, configuration or None, split=split, streaming=limit is not None)
        found = _as_stored(found)
        return found if limit is None else list(itertools.islice(found, limit))
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        if full := indexed.disk_full(source, error):
            raise full from error
        raise ValueError(
            f"data: neither a local file nor a data set on the hub, got {source} (split {split}): {_line(error)}"
        ) from None


def _line(error):
    return " ".join(str(error).split())
