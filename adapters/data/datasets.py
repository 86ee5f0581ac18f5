"""Reads rows from JSONL, JSON and Parquet files, folders of them, and data sets on the Hugging Face hub."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ..runtime import hub

Placed = tuple[dict | ValueError, str]  # a row, or why a line is none, and its place

SAVED = ("state.json", "dataset_dict.json")  # files that mark a folder written by `save_to_disk`
COMPRESSED = {".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
SUFFIXES = (".jsonl", *COMPRESSED, ".json", ".parquet")


def rows(source: str | Path, *, split: str = "train", limit: int | None = None) -> list[dict]:
    """The rows of a data set as plain dicts, in order; at most the first `limit`.

    Args:
      source: a .jsonl (also .jsonl.gz, .jsonl.zst), .json (a list of objects) or .parquet file; a folder of them, or
        one written by `save_to_disk` of `datasets`; or on the hub `owner/name`, `owner/name:configuration` or
        `owner/name:configuration:split`.
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
    if limit is not None and limit < 1:
        raise ValueError(f"data: limit must be at least 1, got {limit}")
    if not str(source):
        raise ValueError("data: needs a file, a folder or a data set on the hub, got ''")
    path = Path(source).expanduser()
    if path.is_file():
        found = _read(path)
    elif any((path / name).is_file() for name in SAVED):
        found = _saved(path, split)
    elif path.is_dir():
        found = itertools.chain.from_iterable(map(_read, _files(path, split)))
    elif isinstance(source, Path) or _means_a_file(str(source)):
        raise ValueError(f"data: no such file or folder, got {source}")
    else:
        found = _hub(str(source), split, limit)
    read = list(itertools.islice(found, limit))
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


def _suffix(file):
    return next((suffix for suffix in SUFFIXES if file.name.endswith(suffix)), "")


def _means_a_file(source):
    name = source.partition(":")[0]
    return source.endswith(SUFFIXES) or name.count("/") > 1 or name.startswith(("/", ".", "~"))


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
        return _compressed(file, COMPRESSED[suffix])
    if suffix == ".jsonl":
        return _jsonl(file, file.open("rb"))
    raise ValueError(f"data: a file must end in {', '.join(SUFFIXES)}, got {file}")


def _jsonl(file, opened):
    with opened as lines:  # bytes: lines end only at \n, not at U+2028 in a text
        for count, line in enumerate(lines, 1):
            if line.strip():
                place = f"{file}:{count}"
                try:
                    yield _object(_parse(line.strip(), place), place), place
                except ValueError as error:
                    yield error, place


def _compressed(file, how):
    import pyarrow  # detects truncated streams, which zstandard takes for the end

    try:
        yield from _jsonl(file, io.BufferedReader(pyarrow.input_stream(str(file), compression=how)))
    except OSError as error:
        raise ValueError(f"{file}: damaged or half-written: {_line(error)}") from None


def _json(file):
    content = _parse(file.read_bytes(), str(file))
    if not isinstance(content, list):
        raise ValueError(f"{file}: must hold a list of objects, got {type(content).__name__}")
    for count, row in enumerate(content, 1):
        place = f"{file}: entry {count}"
        try:
            yield _object(row, place), place
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
            yield from _numbered(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file: {_line(error)}") from None


def _numbered(rows, source) -> Iterator[Placed]:
    for count, row in enumerate(rows, 1):
        yield row, f"{source}: row {count}"


def _saved(folder, split) -> Iterator[Placed]:
    import datasets

    try:
        found = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:  # missing and damaged files, of which it checks nothing
        raise ValueError(f"{folder}: not a folder that `save_to_disk` wrote completely: {_line(error)}") from None
    if isinstance(found, dict) and split not in found:
        raise ValueError(f"data: {folder} must hold a split {split}, got {', '.join(found)}; name a folder in it")
    return _numbered(found[split] if isinstance(found, dict) else found, folder)


def _hub(source, split, limit) -> Iterator[Placed]:
    import datasets

    hub.check(source)
    parts = source.split(":")
    if len(parts) > 3:
        raise ValueError(f"data: a hub source must be owner/name:configuration:split, got {source}")
    name, configuration, named = (parts + ["", ""])[:3]
    split = named or split
    try:
        found = datasets.load_dataset(name, configuration or None, split=split, streaming=limit is not None)
        return _numbered(found if limit is None else list(itertools.islice(found, limit)), source)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"data: neither a local file nor a data set on the hub, got {source} (split {split}): {_line(error)}"
        ) from None


def _line(error):
    return " ".join(str(error).split())
