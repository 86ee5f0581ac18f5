"""Rows from files, folders and the hub, and one-line errors for bad data."""

import functools
import gzip
import json

import datasets as hf_datasets
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from areax.adapters.data import datasets
from areax.recipes.shared import sources

ROWS = [
    {"prompt": "a\u2028b", "answer": 1, "messages": [{"role": "user", "content": "x"}]},
    {"prompt": "é", "answer": None, "messages": []},
    {"prompt": "c", "answer": -3, "messages": []},
]

# A test's name must not depend on the second in which it was collected.
zipped = functools.partial(gzip.compress, mtime=0)


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    else:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        squeeze = {".gz": zipped, ".zst": zstandard.compress}.get(file.suffix, bytes)
        file.write_bytes(squeeze(lines))
    return file


SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet"])


@SUFFIXES
def test_a_file(tmp_path, suffix):
    file = write(tmp_path / f"sums{suffix}", ROWS)
    assert datasets.rows(file) == datasets.rows(str(file)) == ROWS
    assert datasets.rows(file, limit=2) == ROWS[:2] and datasets.rows(file, limit=9) == ROWS


@SUFFIXES
def test_a_folder_of_splits(tmp_path, suffix):
    write(tmp_path / "data" / f"train-00001-of-00002{suffix}", ROWS[2:])
    write(tmp_path / "data" / f"train-00000-of-00002{suffix}", ROWS[:2])
    write(tmp_path / "data" / f"test{suffix}", ROWS[:1])
    write(tmp_path / "data" / f"training{suffix}", ROWS[:1])
    write(tmp_path / ".cache" / f"train{suffix}", ROWS[:1])
    assert datasets.rows(tmp_path) == ROWS and datasets.rows(tmp_path / "data", limit=2) == ROWS[:2]
    assert datasets.rows(tmp_path, split="test") == ROWS[:1]


def test_only_the_requested_rows_are_read(tmp_path):
    file = write(tmp_path / "rows.jsonl", ROWS)
    file.write_text(file.read_text(encoding="utf-8") + '{"half', encoding="utf-8")
    assert datasets.rows(file, limit=3) == ROWS


def hub(*arguments):
    return [row for row, _ in datasets._hub(*arguments)]


def test_a_name_is_loaded_by_the_datasets_library(tmp_path):
    """`datasets` accepts a folder as a data set name: the code path of the hub, without the hub."""
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS[2:])
    assert hub(str(tmp_path), "train", None) == ROWS
    assert hub(str(tmp_path), "train", 2) == ROWS[:2]
    assert hub(f"{tmp_path}:default:test", "train", None) == ROWS[2:]
    assert hub(f"{tmp_path}::test", "train", 2) == ROWS[2:]
    with pytest.raises(ValueError, match='split dev.*Unknown split "dev"'):
        datasets._hub(f"{tmp_path}::dev", "train", None)
    with pytest.raises(ValueError, match="Bad split: dev"):
        datasets._hub(str(tmp_path), "dev", 1)
    with pytest.raises(ValueError, match="must be owner/name:configuration:split, got a:b:c:d"):
        datasets._hub("a:b:c:d", "train", None)


def test_a_hub_data_set_is_streamed_if_a_limit_is_given(tmp_path):
    """Shards beyond the limit are not even opened: the second one is not JSON, which goes unnoticed."""
    write(tmp_path / "train-00000-of-00002.jsonl", ROWS)
    (tmp_path / "train-00001-of-00002.jsonl").write_text("neither JSON nor wanted")
    assert hub(str(tmp_path), "train", 3) == ROWS
    for limit in (4, None):
        with pytest.raises(ValueError, match="neither a local file nor a data set on the hub"):
            datasets._hub(str(tmp_path), "train", limit)


def test_a_folder_written_by_save_to_disk(tmp_path):
    saved = hf_datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    hf_datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "splits")
    assert datasets.rows(tmp_path / "one") == datasets.rows(tmp_path / "splits") == ROWS
    assert datasets.rows(tmp_path / "splits", split="test") == datasets.rows(tmp_path / "splits/test") == ROWS[1:2]
    with pytest.raises(ValueError, match="must hold a split dev, got train, test"):
        datasets.rows(tmp_path / "splits", split="dev")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rows.jsonl", b'{"a": 1}\n\n{"a":', "rows.jsonl:3: not JSON: Expecting value, at column 6"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "rows.jsonl:2: not UTF-8: invalid start byte"),
        ("rows.jsonl", b"[1]\n", "rows.jsonl:1: a row must be a JSON object, got list"),
        ("rows.jsonl", b"[1]\n", "it looks like a list in JSON: name it .json"),
        ("rows.jsonl", b'[\n{"a": 1}]\n', "rows.jsonl:1: not JSON: .*; it looks like a list in JSON: name it .json"),
        ("rows.json", b'{"a": 1}\n{"a": 2}\n', "rows.json: not JSON: Extra data.*; it looks like JSON lines: name it"),
        (
            "rows.txt",
            b'{"a": 1}\n{"a": 2}\n',
            "must end in .*, got .*rows.txt; it looks like JSON lines: name it .jsonl",
        ),
        ("rows.jsonl", b"\n", "the data set is empty, got .*rows.jsonl"),
        ("rows.json", b'[{"a": 1},\n{"a":', "rows.json: not JSON: .* line 2 column 6"),
        ("rows.json", b'{"a": 1}', "rows.json: must hold a list of objects, got dict"),
        ("rows.json", b"[1]", "rows.json: entry 1: a row must be a JSON object, got int"),
        ("rows.json", b"[]", "the data set is empty"),
        ("rows.parquet", b"PAR1 and no more", "rows.parquet: not a readable Parquet file"),
        ("rows.jsonl.gz", zipped(b'{"a": 1}\n' * 9)[:-9], "jsonl.gz: damaged or half-written: Truncated"),
        ("rows.jsonl.zst", zstandard.compress(b'{"a": 1}\n' * 9)[:-9], "jsonl.zst: damaged or half-written: Truncated"),
        ("rows.jsonl.zst", b"no such thing", "jsonl.zst: damaged or half-written: .*Unknown frame"),
        ("rows.jsonl.gz", zipped(b"[1]"), "rows.jsonl.gz:1: a row must be a JSON object, got list"),
        ("rows.csv", b"a,b", "must end in .jsonl, .jsonl.gz, .jsonl.zst, .json, .parquet, got .*rows.csv"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        datasets.rows(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_bad_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no train.jsonl, .json or .parquet in .*files there: none"):
        datasets.rows(tmp_path)
    write(tmp_path / "main" / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match="no dev.jsonl.*files there: main/train.jsonl"):
        datasets.rows(tmp_path, split="dev")
    write(tmp_path / "other" / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match="must be in one folder, in files of one type"):
        datasets.rows(tmp_path)
    write(tmp_path / "main" / "train.json", ROWS)
    with pytest.raises(ValueError, match="must be in one folder, in files of one type"):
        datasets.rows(tmp_path / "main")


@pytest.mark.parametrize(
    "source, message",
    [
        ("rows.jsonl", "no such file or folder, got rows.jsonl"),
        ("/no/such", "no such file or folder, got /no/such"),
        ("~nosuchuser/a.jsonl", "no such file or folder, got ~nosuchuser/a.jsonl"),
        ("~nosuchuser/*.jsonl", "a pattern must match files of one type, got ~nosuchuser/"),
        ("rows.jsonl:half", "no such file or folder, got rows.jsonl:half"),
        ("./rows", "no such file or folder, got ./rows"),
        ("a/b/c", "no such file or folder, got a/b/c"),
        ("no-such/data:main", "neither a local file nor a data set on the hub, got no-such/data:main"),
    ],
)
def test_a_missing_data_set_is_refused(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        datasets.rows(source)
    assert "\n" not in str(error.value)


def test_a_limit_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        datasets.rows(write(tmp_path / "rows.jsonl", ROWS), limit=0)


def test_rows_of_pandas_have_lists_for_its_arrays(tmp_path):
    import pandas  # which datasets needs

    rows = [{"messages": [{"role": "user", "content": "a", "parts": ["b"]}], "labels": [1, 0], "answer": "7"}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    read = pandas.read_parquet(tmp_path / "rows.parquet").to_dict("records")
    assert not isinstance(read[0]["messages"], list)
    assert [row for row, _ in datasets.given(read)] == rows
    assert isinstance(datasets.given(read)[0][0]["labels"], list)
    stream = sources.Converted(iter(read), "", 0, lambda row: None, "stop", False, True)
    assert list(stream) == rows
