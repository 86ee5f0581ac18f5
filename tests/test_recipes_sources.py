"""What a run trains on: mixtures by name and weight, and objects of `datasets` and torch."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import datasets as hf_datasets
import pandas
import pytest
import tiny
import xxhash
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterable

from areax.adapters import cli
from areax.adapters.data import datasets
from areax.adapters.tracking import run_dir
from areax.core.optim import Optimizer
from areax.parallel.multihost import agreement
from areax.recipes import sft
from areax.recipes.shared import sources
from areax.rollout.tasks import arithmetic

ROWS = list(itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 60))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources")
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", ROWS)
    tiny.rows(path / "few.jsonl", ROWS[:10])
    return path


def config(place, out, **changes):
    base = sft.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), out=str(place / out), steps=4, batch=10, length=64,
        rows=4, optim=Optimizer(lr=1e-2), save_every=2,
    )  # fmt: skip
    return replace(base, **changes)


def opened(data="", given=None, **changes):
    options = dict(check=lambda row: None, bad="stop", recognise=True, seed=3) | changes
    return sources.opened(data, given, **options)


def losses(out):
    return [line["loss"] for line in run_dir.read_lines(out / "metrics.jsonl")]


def test_names_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x=1.jsonl").write_text("{}")
    plain = lambda place: [("", place, Fraction(1))]
    assert sources.named("a.jsonl") == plain("a.jsonl") and sources.named(tmp_path) == plain(tmp_path)
    assert sources.named("a, b.jsonl") == plain("a, b.jsonl") and sources.named("o/n:main:2") == plain("o/n:main:2")
    assert sources.named("x=1.jsonl") == plain("x=1.jsonl")
    assert sources.named("math=a.jsonl:0.7,code=o/n:main:train,c=o/n:main:2") == [
        ("math", "a.jsonl", Fraction(7, 10)), ("code", "o/n:main:train", 1), ("c", "o/n:main", 2),
    ]  # fmt: skip
    more = "a=x.jsonl:.5,b=o/n:1e-3,c=o/n:2.0,d=o/n:2024:1,e=o/n:2024:train,f=~/x.jsonl:2.,g=d/x:1E1"
    assert sources.named(more) == [
        ("a", "x.jsonl", Fraction(1, 2)), ("b", "o/n", Fraction(1, 1000)), ("c", "o/n", 2), ("d", "o/n:2024", 1),
        ("e", "o/n:2024:train", 1), ("f", "~/x.jsonl", 2), ("g", "d/x", 10),
    ]  # fmt: skip
    (tmp_path / "d/x").mkdir(parents=True)
    assert sources.named("a=d/x:2,b=d/y.jsonl:2,c=d/x/y:2") == [
        ("a", "d/x", 2),
        ("b", "d/y.jsonl", 2),
        ("c", "d/x/y", 2),
    ]


def test_a_mixture_may_be_longer_than_a_file_name():
    texts = [f"{'source' * 8}{i}={'folder' * 8}/{i}.jsonl:{i}" for i in range(1, 50)]
    assert [source.weight for source in sources.named(",".join(texts))] == list(range(1, 50))


@pytest.mark.parametrize(
    "data, words",
    [
        ("a=x.jsonl,y.jsonl", "each of several sources needs a name, as in math=y.jsonl, got y.jsonl"),
        ("a=x.jsonl,a=y.jsonl", "sources must have different names, got a twice"),
        *(
            (
                f"a=x.jsonl:{weight},b=y.jsonl",
                f"a weight must be a number above 0, such as .*, got a=x.jsonl:{weight}; leave",
            )
            for weight in ("0", "-1", "nan", "inf", "1e999", "1e-999", "1_0")
        ),
        ("a=squad:2", "may be its weight or its configuration, got a=squad:2; write squad:2.0 for the weight"),
        ("a=o/n:2024,b=y.jsonl", "got a=o/n:2024; write o/n:2024.0 for the weight, o/n:2024:1 for the configuration"),
    ],
)
def test_wrong_names_are_refused(data, words):
    with pytest.raises(ValueError, match=words):
        sources.named(data)


def test_one_source_is_as_before(place):
    assert opened(str(place / "rows.jsonl")) == sources.Prompts(ROWS, seed=3)


@pytest.mark.wide
@pytest.mark.slow
def test_a_mixture_from_the_command_line_reports_its_shares_and_resumes_exactly(place, capsys):
    options = "--steps 4 --batch 10 --length 64 --rows 4 --optim.lr 1e-2 --save-every 2".split()
    words = ["train", "sft", "--model", f"{place}/model", "--out", f"{place}/mixed", *options]
    words += ["--data", f"all={place}/rows.jsonl:0.7,few={place}/few.jsonl:0.3"]
    assert cli.main(words) == 0
    lines = list(run_dir.read_lines(place / "mixed/metrics.jsonl"))
    assert [(line["all/share"], line["few/share"]) for line in lines] == [(0.7, 0.3)] * 4
    tiny.cut_off(place / "mixed", place / "mixed again", 2)
    assert cli.main(["train", "sft", "--config", f"{place}/mixed/config.json", "--out", f"{place}/mixed again"]) == 0
    assert losses(place / "mixed again") == losses(place / "mixed")
    tiny.cut_off(place / "mixed", place / "mixed otherwise", 2)
    changed = [word.replace(":0.7", ":0.6").replace("/mixed", "/mixed otherwise") for word in words]
    assert cli.main(changed) == 2
    assert " must have the run's sources, weights and rows, mixture all:7:60:0" in capsys.readouterr().err
    assert json.loads((place / "mixed/config.json").read_text())["data"] == words[-1]


def test_a_run_that_goes_on_must_find_the_same_rows(place, tmp_path):
    """Their sources, weights, order and, in a hundred places of each source, content."""
    tiny.rows(tmp_path / "other.jsonl", [{**row, "prompt": row["prompt"][::-1]} for row in ROWS])
    tiny.rows(tmp_path / "short.jsonl", ROWS[:50])
    (tmp_path / "same.jsonl").write_bytes((place / "rows.jsonl").read_bytes())
    two = lambda file, weight=0.7, name="all": f"{name}={file}:{weight},few={place}/few.jsonl:0.3"
    mixed = json.loads(json.dumps(sources.identity(opened(two(place / "rows.jsonl")))))
    one = json.loads(json.dumps(sources.identity(opened(str(place / "rows.jsonl")))))
    for data, then, words in (
        (two(tmp_path / "same.jsonl"), mixed, None),
        (two(place / "rows.jsonl", 0.6), mixed, "the run's sources, weights and rows, mixture all:7:60:3 few:3"),
        (two(place / "rows.jsonl", name="every"), mixed, "weights and rows, .* got mixture every:7:60:3 few:3"),
        (two(tmp_path / "short.jsonl"), mixed, "sources, weights and rows, .* got mixture all:7:50:3 few:3:10:4"),
        (two(tmp_path / "other.jsonl"), mixed, "must have the rows that the run was started with, got others"),
        (str(place / "rows.jsonl"), mixed, "sources, weights and rows, mixture .* got shuffled"),
        (str(tmp_path / "same.jsonl"), one, None),
        (str(tmp_path / "short.jsonl"), one, "must have the 60 rows that the run was started with, got 50"),
        (str(tmp_path / "other.jsonl"), one, "must have the rows that the run was started with, got others"),
    ):  # fmt: skip
        if words is None:
            sources.check_same(opened(data), then)
        else:
            with pytest.raises(ValueError, match=words):
                sources.check_same(opened(data), then)
    with pytest.raises(ValueError, match="--seed must be the run's, 3, for the same order of --data, got 4"):
        sources.check_same(opened(two(place / "rows.jsonl"), seed=4), mixed)
    stream = opened(given=ITERABLES["DataLoader"]())
    sources.check_same(stream, sources.identity(stream))


def test_order_success_needs_one_source(place):
    with pytest.raises(ValueError, match="order success needs one source of --data, got a mixture"):
        opened(f"a={place}/rows.jsonl,b={place}/few.jsonl", spec=sources.Curriculum(order="success"))


class Map(TorchDataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


@pytest.mark.parametrize("given", [ROWS, hf_datasets.Dataset.from_list(ROWS), Map()], ids=["list", "Dataset", "torch"])
@pytest.mark.parametrize("many", [False, True])
def test_rows_with_random_access_are_those_of_a_file(place, monkeypatch, given, many):
    monkeypatch.setattr(datasets, "MANY", 10 if many else 100)
    own, file = opened(given=given), opened(str(place / "rows.jsonl"))
    assert [own[i] for i in range(150)] == [file[i] for i in range(150)] and len(own.rows) == 60
    assert isinstance(own.rows, list) != many and opened(given=given, limit=20).size == 20


class Short(Map):
    """A data set whose code fails inside with the error that ends an iteration."""

    def __init__(self, error):
        self._error = error

    def __getitem__(self, index):
        if index == 30:
            raise self._error("list index out of range")
        return ROWS[index]


class ShortSequence(Short, Sequence):
    """Its iteration, of `Sequence`, ends at the error."""


@pytest.mark.parametrize("short, error", [(Short, IndexError), (Short, StopIteration), (ShortSequence, IndexError)])
@pytest.mark.parametrize("many", [False, True])
def test_rows_with_random_access_are_all_there_or_refused(monkeypatch, short, error, many):
    monkeypatch.setattr(datasets, "MANY", 10 if many else 100)
    words = f"rows: row 31: must exist, as there are 60 by len\\(\\), got {error.__name__}: list index out of range"
    for bad in ("stop", "skip"):
        with pytest.raises(ValueError, match=words):
            opened(given=short(error), bad=bad)
    assert opened(given=short(error), limit=30).size == 30


class Plain(Map):
    """Rows without lists, which torch collates."""

    def __getitem__(self, index):
        return {name: ROWS[index][name] for name in ("prompt", "completion")} | {"n": index, "share": index / 2}


class Stream(TorchIterable):
    """Torch's data sets without random access have __getitem__ too, and may have a length."""

    def __len__(self):
        return len(ROWS)

    def __iter__(self):
        return iter(ROWS)


ITERABLES = {
    "torch's IterableDataset": Stream,
    "IterableDataset": lambda: hf_datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "generator data set": lambda: hf_datasets.IterableDataset.from_generator(lambda: iter(ROWS)),
    "DataLoader": lambda: DataLoader(Plain(), batch_size=8),
    "DataLoader of rows": lambda: DataLoader(Map(), batch_size=None),
    "DataLoader of lists": lambda: DataLoader(Map(), batch_size=8, collate_fn=list),
}


@pytest.mark.parametrize("made", ITERABLES.values(), ids=ITERABLES)
def test_iterables_keep_their_order(made):
    own, again = opened(given=made()), opened(given=made())
    rows = [Plain()[i] for i in range(60)] if made is ITERABLES["DataLoader"] else ROWS
    assert [own[i] for i in range(150)] == [rows[i % 60] for i in range(150)]
    assert again[130] == rows[10] and [opened(given=made(), limit=7)[i] for i in (6, 7)] == [rows[6], rows[0]]


def test_a_loader_that_takes_rows_apart_is_refused():
    with pytest.raises(ValueError, match="lists or dicts, such as field '.*', takes rows apart; give it collate_fn"):
        opened(given=DataLoader(Map(), batch_size=8))


def test_a_shuffled_stream_has_another_order_in_each_epoch_and_resumes():
    made = lambda: ITERABLES["IterableDataset"]().shuffle(seed=5, buffer_size=20)
    own = opened(given=made())
    rows = [own[i]["prompt"] for i in range(120)]
    assert (
        sorted(rows[:60]) == sorted(rows[60:]) and rows[:60] != rows[60:] and rows[:60] != [r["prompt"] for r in ROWS]
    )
    assert [opened(given=made())[i]["prompt"] for i in range(90, 120)] == rows[90:]


def test_streams_are_converted_checked_and_skipped(capsys):
    alpaca = [{"instruction": str(i), "output": "x"} for i in range(30)]

    def check(row):
        if row["prompt"] == "7":
            raise ValueError("no 7")
        return "long" if row["prompt"] == "9" else None

    with pytest.raises(ValueError, match="rows: row 8: no 7"):
        opened(given=(alpaca[:8]).__iter__(), check=check)
    own = opened(given=hf_datasets.Dataset.from_list(alpaca).to_iterable_dataset(), check=check, bad="skip")
    assert [own[i]["prompt"] for i in range(28)] == [str(i) for i in range(30) if i not in (7, 9)]
    said = capsys.readouterr().err
    assert "by --row areax.adapters.data.formats:instruction" in said
    assert "rows: 1 rows were left out since the start, the last bad (--bad-rows skip), such as row 8: no 7" in said


@pytest.mark.parametrize(
    "data, given, words",
    [
        ("x.jsonl", ROWS, "rows=: must be given without --data, got both, --data x.jsonl; write data=''"),
        ("", hf_datasets.DatasetDict({"train": hf_datasets.Dataset.from_list(ROWS)}), "got DatasetDict"),
        ("", "rows.jsonl", "must be a list, a data set or an iterable of rows, got str"),
        ("", pandas.DataFrame(ROWS), r"iterable of rows, got DataFrame; give its to_dict\('records'\)"),
        ("", [3], "rows: row 1: a row must be a dict, got int"),
        ("", iter(ROWS), "an iterator cannot start anew, got a list_iterator; give a list"),
        ("", [], "the data set is empty, got rows"),
    ],
)
def test_what_is_no_data_is_refused(data, given, words):
    with pytest.raises(ValueError, match=words):
        opened(data, given)


@pytest.mark.slow
def test_sft_trains_on_objects_and_resumes_exactly(place):
    """The same as on the file they are of; a stream with its own order, twice the same."""
    sft.main(config(place, "file"))
    sft.main(config(place, "object", data=""), rows=hf_datasets.Dataset.from_list(ROWS))
    assert losses(place / "object") == losses(place / "file")
    made = ITERABLES["DataLoader"]
    sft.main(config(place, "stream", data=""), rows=made())
    tiny.cut_off(place / "stream", place / "stream again", 2)
    sft.main(config(place, "stream again", data=""), rows=made())
    assert losses(place / "stream again") == losses(place / "stream") != losses(place / "file")


def test_rows_hashed_one_by_one_have_the_hash_of_their_text():
    """As states of former versions have it."""
    owns = [[{"b": 1, "a": "\u00e9\ud800"}, {"x": [1, 2.5, None]}], [], [3, {"q": b"z"}]]
    text = json.dumps(owns, sort_keys=True, default=agreement.shown)
    assert sources._content(owns) == xxhash.xxh3_64_hexdigest(text.encode())
