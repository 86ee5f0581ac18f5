"""Rows of large data sets: the same rows as in memory, checked in part, replaced where they are left out, resumed."""

import asyncio
import contextlib
import fcntl
import gzip
import itertools
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import datasets as hf_datasets
import numpy as np
import pyarrow
import pytest
import tiny
import zstandard
from pyarrow import parquet

from areax.adapters import orbax
from areax.adapters.data import datasets, indexed
from areax.core.optim import Optimizer
from areax.recipes import sft
from areax.recipes.shared import many_rows, rows, sources
from areax.rollout.scheduling import curriculum, executor
from areax.rollout.scheduling.curriculum import Prompts
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Completion, sampled

ROWS = [{"prompt": f"{i}\u2028é", "answer": i, "tags": [{"n": i}]} for i in range(100)]


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    """Data sets of more than 40 rows count as large, and the cache of `datasets` is the test's own."""
    monkeypatch.setattr(datasets, "MANY", 40)
    monkeypatch.setattr(hf_datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def lines(own):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own).encode()


def write(file, own):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(own), file)
    else:
        file.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(file.suffix, bytes)(lines(own)))
    return file


SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])


@SUFFIXES
def test_every_row_is_that_of_the_file(tmp_path, suffix):
    file = write(tmp_path / f"rows{suffix}", ROWS)
    assert list(datasets.many(file)) == datasets.placed(file)
    assert len(datasets.many(str(file), limit=50)) == 50 and datasets.many(file, limit=40) is None
    assert datasets.many(write(tmp_path / f"few{suffix}", ROWS[:40])) is None


@SUFFIXES
def test_a_folder_and_a_pattern_join_their_files(tmp_path, suffix):
    for i in range(4):
        write(tmp_path / "data" / f"train-0000{i}-of-00004{suffix}", ROWS[25 * i : 25 * (i + 1)])
    pattern = f"{tmp_path}/data/train*{suffix}"
    for source in (tmp_path, pattern):
        own = datasets.many(source)
        assert [row for row, _ in own] == [own[i][0] for i in range(100)] == datasets.rows(source) == ROWS
    assert datasets.rows(pattern, limit=30) == ROWS[:30]
    with pytest.raises(ValueError, match=r"must match files of one type, got .*/none\*.jsonl, which matches 0 files"):
        datasets.rows(f"{tmp_path}/none*.jsonl")


def test_tables_of_the_datasets_library(tmp_path):
    hf_datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert list(datasets.many(tmp_path / "saved")) == datasets.placed(tmp_path / "saved")
    write(tmp_path / "hub" / "train.jsonl", ROWS)
    assert [row for row, _ in datasets._rows_of(datasets._loaded(str(tmp_path / "hub"), "train"), "hub")] == ROWS


def test_lines_that_are_blank_bad_or_unfinished_keep_their_places(tmp_path):
    content = b"\n" + lines(ROWS[:45]) + b" \n[1]\n" + lines(ROWS[45:]) + b'{"half'
    (tmp_path / "rows.jsonl").write_bytes(content)
    own, bad = datasets.many(tmp_path / "rows.jsonl"), []
    placed = datasets.placed(tmp_path / "rows.jsonl", bad=lambda error: bad.append(str(error)))
    assert [x for x in own if isinstance(x[0], dict)] == placed and len(own) == 102
    assert [str(x) for x, _ in own if not isinstance(x, dict)] == bad
    assert own[45][1].endswith("rows.jsonl:48") and own[101][1].endswith("rows.jsonl:104")


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines(ROWS * 99))[:-9])
    for read in (datasets.many, datasets.rows):
        with pytest.raises(ValueError, match=r"rows.jsonl.gz: damaged or half-written: Truncated"):
            read(tmp_path / "rows.jsonl.gz")
    assert not list((tmp_path / "cache/areax").iterdir())


def replaced(file, content):
    (file.parent / "other").write_bytes(content)
    os.replace(file.parent / "other", file)


def grown(file, content):
    with file.open("ab") as end:
        end.write(content)


CHANGES = {"replaced": replaced, "grown": grown, "cut": lambda file, content: os.truncate(file, 40)}


@pytest.mark.parametrize("keep", [True, False], ids=["open", "opened again"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_during_the_run_gives_no_other_rows(tmp_path, monkeypatch, change, keep):
    """One that is kept open and replaced stays what it was; anything else is one line, in each way of reading."""
    monkeypatch.setattr(indexed, "OPEN", 1 if keep else 0)
    file = write(tmp_path / "rows.jsonl", ROWS)
    own = many_rows.opened(str(file))
    CHANGES[change](file, lines(ROWS[::-1]))
    if keep and change == "replaced":
        assert own[51] == ROWS[51] and list(own) == ROWS
        return
    for read in (lambda: own[51], lambda: own[0], lambda: list(own), own.check, own.usable):
        with pytest.raises(ValueError, match=r"rows.jsonl: must stay as it was when the run began, [\d,]+ bytes, got"):
            read()


def test_an_index_is_read_by_threads_at_once_and_pickled_without_its_file(tmp_path):
    """By threads, which share an open file's position as forked processes do."""
    file = write(tmp_path / "rows.jsonl", ROWS)
    own = indexed.Lines(file)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(own.__getitem__, [*range(100)] * 4)) == list(own) * 4
    again = pickle.loads(pickle.dumps(own))
    assert list(again) == list(own)
    replaced(file, lines(ROWS[::-1]))
    assert json.loads(own[3][1]) == ROWS[3]
    with pytest.raises(ValueError, match="rows.jsonl: must stay as it was"):
        again[3]


def test_an_index_does_not_grow_with_the_lines(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"{}\n" * 100_000)
    own = indexed.Lines(tmp_path / "rows.jsonl")
    assert len(own) == 100_000 and len(own._offsets) + len(own._numbers) < 100_000 / 15


@pytest.mark.parametrize("size", [2, 3, 100, 1023, 1024, 1025])
def test_a_permutation_without_a_table_shows_every_row_once_an_epoch(monkeypatch, size):
    monkeypatch.setattr(curriculum, "TABLE", 1)
    orders = [[Prompts(range(size), seed=s)[e * size + i] for i in range(size)] for s, e in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size > 3:
        assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_permutation_without_a_table_looks_random():
    """Neighbours are as far apart, and places as evenly filled, as in a random order."""
    size, count = 10_000_000, 20_000
    at = np.array([Prompts(range(size), seed=7)[i] for i in range(count)])
    assert len(set(at.tolist())) == count
    hist = np.histogram(at, 20, (0, size))[0]
    assert ((hist - count / 20) ** 2 / (count / 20)).sum() < 50  # chi-squared of 19 degrees of freedom, p = 1e-4
    assert abs(np.abs(np.diff(at)).mean() / size - 1 / 3) < 0.01


def test_rows_are_those_in_memory_and_left_out_ones_are_replaced(tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert list(many_rows.opened(str(file))) == rows.read(str(file))
    check = lambda row: "odd" if row["answer"] % 2 else None
    own, again = (many_rows.opened(str(file), check=check) for _ in range(2))
    got = [own[i] for i in range(100)]
    assert got == [again[i] for i in reversed(range(100))][::-1] and len(own) == 100
    assert got[::2] == ROWS[::2] and all(row["answer"] % 2 == 0 for row in got)
    assert len({row["answer"] for row in got[1::2]}) > 25  # not always the neighbour
    said = capsys.readouterr().err
    assert "100 rows stay on the disk; 100 spread over them are checked" in said
    assert "50 of 100 rows that were checked are left out, odd" in said and ": 10 rows were left out since" in said


def test_a_bad_row_ends_the_run_or_is_skipped(tmp_path, capsys):
    def check(row):
        if row["answer"] == 51:
            raise ValueError("no 51")

    file = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"rows.jsonl:52: no 51"):
        many_rows.opened(str(file), check=check)
    own = many_rows.opened(str(file), check=check, bad="skip")
    assert own[51] != ROWS[51] and own[51] in ROWS
    assert "1 of 100 rows that were checked are left out, bad (--bad-rows skip), the first: " in capsys.readouterr().err


def test_only_some_rows_are_checked_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(many_rows, "CHECKED", 10)
    seen = []
    own = many_rows.opened(str(write(tmp_path / "rows.jsonl", ROWS)), check=lambda row: seen.append(row["answer"]))
    assert seen == list(range(0, 100, 10))
    assert own[51] == ROWS[51] and seen[10:] == [51]


def test_too_few_good_rows_are_refused(tmp_path, monkeypatch):
    file = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="all 100 rows that were checked are left out, no; at least one is needed"):
        many_rows.opened(str(file), check=lambda row: "no")
    monkeypatch.setattr(many_rows, "TRIES", 3)
    own = many_rows.opened(str(file), check=lambda row: None if row["answer"] == 0 else "no")
    with pytest.raises(ValueError, match="3 rows one after the other are left out, the last no; at least one"):
        own[1]


@SUFFIXES
def test_iteration_gives_what_random_access_gives(tmp_path, suffix):
    for i in range(4):
        write(tmp_path / "data" / f"train-0000{i}-of-00004{suffix}", ROWS[25 * i : 25 * (i + 1)])
    for own in (datasets.many(tmp_path), datasets.many(tmp_path, limit=60), datasets.given(ROWS, 70)):
        assert list(own) == [own[i] for i in range(len(own))] and len(list(own)) == len(own)


def test_what_a_killed_decompression_left_is_removed(tmp_path):
    """But nothing that a running one writes."""
    cache = tmp_path / "cache/areax"
    cache.mkdir(parents=True)
    for name in ("0.ab.partial", "1.cd.partial"):
        (cache / name).write_bytes(b"{}")
    with (cache / "1.cd.partial").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert len(datasets.many(write(tmp_path / "rows.jsonl.gz", ROWS))) == 100
        assert [file.name for file in cache.glob("*.partial")] == ["1.cd.partial"]
    datasets.many(write(tmp_path / "more.jsonl.zst", ROWS))
    assert sorted(file.suffix for file in cache.iterdir()) == [".jsonl", ".jsonl"]


@pytest.mark.parametrize("damage", [lambda copy: os.truncate(copy, 100), lambda copy: os.truncate(copy, 0)])
def test_a_decompressed_copy_that_is_not_whole_is_made_again(tmp_path, damage):
    file = write(tmp_path / "rows.jsonl.gz", ROWS)
    assert list(datasets.many(file)) == datasets.placed(file)
    [copy] = (tmp_path / "cache/areax").iterdir()
    made = copy.stat().st_mtime_ns, copy.stat().st_ino
    datasets.many(file)
    assert (copy.stat().st_mtime_ns, copy.stat().st_ino) == made
    damage(copy)
    assert list(datasets.many(file)) == datasets.placed(file) and list(copy.parent.iterdir()) == [copy]


def test_a_copy_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append("fsync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *names: order.append("rename") or rename(*names))
    datasets.many(write(tmp_path / "rows.jsonl.gz", ROWS))
    assert order == ["fsync", "rename"]


def test_a_file_that_changes_while_it_is_decompressed_is_refused(tmp_path):
    file = write(tmp_path / "rows.jsonl.gz", ROWS)

    def chunks():
        yield lines(ROWS)
        os.utime(file, ns=(1, 1))

    with pytest.raises(ValueError, match="rows.jsonl.gz: must not change while it is decompressed"):
        indexed.decompressed(file, chunks())
    assert not list((tmp_path / "cache/areax").iterdir())


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".parquet"])
def test_a_cache_without_room_is_named(tmp_path, monkeypatch, suffix):
    def full(*arguments, **options):
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")
            yield

    def read(*arguments, **options):
        try:
            next(full())
        except OSError as error:
            raise hf_datasets.exceptions.DatasetGenerationError("An error occurred") from error

    monkeypatch.setattr(indexed, "_partial", contextlib.contextmanager(full))
    monkeypatch.setattr(hf_datasets, "load_dataset", read)
    words = (
        rf"rows{suffix}: needs a copy in the cache folder of `datasets`, .*/cache, .*: No space left on device; make"
    )
    file = write(tmp_path / f"rows{suffix}", ROWS)
    for read in (lambda: datasets.many(file), lambda: datasets._loaded(f"owner/rows{suffix}", "train")):
        with pytest.raises(ValueError, match=words) as error:
            read()
        assert "HF_DATASETS_CACHE" in str(error.value) and "\n" not in str(error.value)


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(
        ValueError, match="rows.jsonl.gz: needs a copy in the cache folder .*: Not a directory; make room"
    ):
        datasets.many(write(tmp_path / "rows.jsonl.gz", ROWS))


def test_held_out_rows_stay_on_the_disk_and_none_is_replaced(tmp_path, capsys):
    file = str(write(tmp_path / "rows.jsonl", ROWS))
    seen: list[int] = []

    def check(row):
        seen.append(row["answer"])
        return "odd" if row["answer"] % 2 else None

    own = many_rows.every(file, check=check)
    assert seen == list(range(100)) and isinstance(own, many_rows.Usable)
    said = capsys.readouterr().err
    assert "50 rows stay on the disk" in said and "50 of 100 rows that were checked are left out, odd" in said
    assert list(own) == [own[i] for i in range(50)] == own[:] == rows.read(file, check=check) == ROWS[::2]
    assert own[7:9] == ROWS[14:18:2] and own[-1] == ROWS[98]
    assert isinstance(many_rows.every(file, limit=40), list)
    with pytest.raises(ValueError, match="all 100 rows that were checked are left out, no; at least one is needed"):
        many_rows.every(file, check=lambda row: "no")


@pytest.mark.parametrize(
    "data", ["{0}/rows.jsonl", "a={0}/rows.jsonl:0.7,b={0}/more.jsonl:0.3"], ids=["one", "mixture"]
)
def test_reinforcement_learning_that_is_killed_takes_every_prompt_once(tmp_path, data):
    """Groups in flight at the last saved batch run again; those of batches that were not saved, too."""
    write(tmp_path / "rows.jsonl", ROWS)
    write(tmp_path / "more.jsonl", [row | {"answer": row["answer"] + 100} for row in ROWS[:60]])
    G, last, saved, killed = 4, 30, 11, 17

    def prompts():
        return sources.opened(
            data.format(tmp_path), check=lambda row: None, bad="stop", recognise=True, seed=3
        )  # fmt: skip

    async def play(first, end, cursor):
        """(the rows of batches `first` .. `end` - 1 by prompt, the prompts played, the cursor after each batch)."""
        trained, played, cursors = {}, [], {}

        async def workflow(generate, row):
            played.append(row["answer"])
            await asyncio.sleep(0.001 * (row["answer"] * 7 % 5))
            done = Completion([2], [-1.0], [-1], "stop")
            return sampled([1], done, temperature=1.0, reward=1.0, info={"row": row})

        async with executor.Executor(
            workflow, None, prompts(), group_size=1, groups_per_batch=G, eta=2, max_concurrent=7, batches=last,
            cursor=cursor,
        ) as rollout:  # fmt: skip
            for v in range(first, end):
                rollout.admit(v)
                for [sample] in await rollout.batch(v):
                    assert sample.prompt not in trained
                    trained[sample.prompt] = sample.info["row"]
                cursors[v + 1] = json.loads(json.dumps(rollout.cursor()))
            return trained, played, cursors

    whole, *_ = asyncio.run(play(0, last, None))
    before, _, cursors = asyncio.run(play(0, killed, None))
    before = {prompt: row for prompt, row in list(before.items())[: G * saved]}
    opened = cursors[saved]["open"]
    after, played, _ = asyncio.run(play(saved, last, cursors[saved]))
    assert opened and {order[prompt]["answer"] for order in [prompts()] for prompt in opened} <= set(played)
    assert not before.keys() & after.keys() and before | after == whole
    order = prompts()
    assert whole == {i: order[i] for i in range(G * last)}


@pytest.mark.slow
def test_a_run_on_rows_on_the_disk_is_that_on_rows_in_memory_and_resumes_exactly(tmp_path, monkeypatch):
    """Of sft: by metrics, which differ if one row does. A bad row in the middle ends it in a saved state."""
    monkeypatch.setattr(many_rows, "CHECKED", 2)
    tiny.model(tmp_path / "model")
    train = arithmetic.splits()["train"]
    tiny.rows(tmp_path / "rows.jsonl", list(itertools.islice(arithmetic.demonstrations(train), 200)))
    config = sft.Config(
        model=str(tmp_path / "model"), data=str(tmp_path / "rows.jsonl"), out=str(tmp_path / "disk"), steps=4, batch=8,
        length=64, rows=4, optim=Optimizer(lr=1e-2), save_every=2,
    )  # fmt: skip
    on_disk = sft.main(config)
    order, content = Prompts(range(200), config.seed), (tmp_path / "rows.jsonl").read_bytes()
    bad = next(order[i] for i in range(16, 24) if order[i] % 2)  # of the third batch, not among those compared
    tiny.rows(tmp_path / "rows.jsonl", [row if i != bad else {} for i, row in enumerate(datasets.rows(config.data))])
    parts = replace(config, out=str(tmp_path / "parts"), save_every=0)
    with pytest.raises(ValueError, match=f"rows.jsonl:{bad + 1}: a row needs"):
        sft.main(parts)
    assert orbax.versions(tmp_path / "parts/state") == [2]
    (tmp_path / "rows.jsonl").write_bytes(content)
    resumed = sft.main(parts)
    monkeypatch.setattr(datasets, "MANY", 1000)
    in_memory = sft.main(replace(config, out=str(tmp_path / "memory")))
    assert on_disk["loss"] == in_memory["loss"] == resumed["loss"]
