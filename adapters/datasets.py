"""Rows from JSONL, JSON and Parquet files, from folders of them, and from data sets on the hub."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".parquet")


def rows(source: str | Path, *, split: str = "train", limit: int | None = None) -> list[dict]:
    """The rows of a data set as plain dicts, in their order; at most the first `limit`.

    Args:
      source: a .jsonl, .json (a list of objects) or .parquet file; a folder; or the hub's
        `owner/name`, `name` or `owner/name:configuration`.
      split: in a folder, at any depth, the file `train.jsonl` (.json, .parquet) or the shards
        `train-00000-of-00002.parquet`; on the hub the split of that name; without meaning for a file.

    Raises:
      ValueError: nothing is there, nothing is in it, or a line cannot be read; in one line.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"datasets.rows: limit must be at least 1, got {limit}")
    path = Path(source).expanduser()
    if path.is_file():
        found = _read(path)
    elif path.is_dir():
        found = itertools.chain.from_iterable(map(_read, _files(path, split)))
    elif isinstance(source, Path) or _means_a_file(str(source)):
        raise ValueError(f"datasets.rows: no such file or folder, got {source}")
    else:
        found = iter(_hub(str(source), split, limit))
    result = list(itertools.islice(found, limit))
    if not result:
        raise ValueError(f"datasets.rows: the data set is empty, got {source}")
    return result


def _means_a_file(source):
    name = source.partition(":")[0]
    return source.endswith(SUFFIXES) or name.count("/") > 1 or name.startswith(("/", ".", "~"))


def _files(folder, split):
    """The files of one split in a folder, at any depth, hidden ones aside."""
    every = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix in SUFFIXES and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    ]
    named = re.compile(rf"{re.escape(split)}(-\d[^.]*)?\.\w+")
    files = [file for file in every if named.fullmatch(file.name)]
    if not files:
        shown = ", ".join(str(file.relative_to(folder)) for file in every[:8]) or "none"
        raise ValueError(
            f"datasets.rows: no {split}.jsonl, .json or .parquet in the folder {folder}; "
            f"name one of its files or another split (files there: {shown})"
        )
    if len({(file.parent, file.suffix) for file in files}) > 1:
        shown = ", ".join(str(file) for file in files[:8])
        raise ValueError(
            f"datasets.rows: split {split} must lie in one folder, in files of one kind, got {shown}; "
            "name one file or folder"
        )
    return files


def _read(file) -> Iterator[dict]:
    """The rows of one file, one after the other."""
    if file.suffix == ".parquet":
        return _parquet(file)
    if file.suffix == ".json":
        return _json(file)
    if file.suffix == ".jsonl":
        return _jsonl(file)
    raise ValueError(f"datasets.rows: a file must end in .jsonl, .json or .parquet, got {file}")


def _jsonl(file):
    with file.open("rb") as lines:  # bytes: a line ends at \n alone, and U+2028 in a text is none
        for count, line in enumerate(lines, 1):
            if line.strip():
                yield _object(_parse(line.strip(), f"{file}:{count}"), f"{file}:{count}")


def _json(file):
    content = _parse(file.read_bytes(), str(file))
    if not isinstance(content, list):
        raise ValueError(f"{file}: must hold a list of objects, got {type(content).__name__}")
    for count, row in enumerate(content, 1):
        yield _object(row, f"{file}: entry {count}")


def _parse(content, place):
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise ValueError(f"{place}: not JSON: {error.msg}, at {line}column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8: {error.reason} at byte {error.start}") from None


def _object(row, place):
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be a JSON object, got {type(row).__name__}")
    return row


def _parquet(file):
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file: {_line(error)}") from None


def _hub(source, split, limit):
    import datasets

    name, _, configuration = source.partition(":")
    taken = split if limit is None else f"{split}[:{limit}]"
    try:
        return datasets.load_dataset(name, configuration or None, split=taken)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"datasets.rows: neither a file here nor a data set on the hub, got {source} "
            f"(split {split}): {_line(error)}"
        ) from None


def _line(error):
    return " ".join(str(error).split())
