"""The journal on disk: what comes back is what was recorded, or nothing, whatever happened to the file."""

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import subprocess

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.journal import codec, store
from areax.rollout.types import Generated, Image, Sample

IDENTITY = {"run": "one", "options": "a"}
RED, BLUE = Image(b"red" * 900), Image(b"blue" * 700)


def sample(n=5, seed=0, **fields):
    rng = np.random.default_rng(seed)
    return Sample(
        tokens=rng.integers(0, 50_000, n, dtype=np.int32),
        mask=np.arange(n) > 1,
        logp=np.where(np.arange(n) > 1, -rng.exponential(size=n), 0).astype(np.float32),
        version=np.where(np.arange(n) > 1, 3, -1).astype(np.int32),
        turn=np.zeros(n, np.int32),
        rewards=((n - 1, 0.1 + seed),),
        **{"prompt": seed, "info": {"text": "a" * seed, "pair": (1, (2, "x"))}, **fields},
    )


def same(one, other):
    """Whether two values are equal, in their types, too; arrays to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Sample):
        return all(same(getattr(one, name), getattr(other, name)) for name in codec.FIELDS)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[name], other[name]) for name in one)
    return one == other or one != one and other != other


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(st.characters()), st.binary(),
    st.floats(width=32).map(np.float32), st.integers(0, 99).map(np.int16), st.just(np.datetime64("2026-01-02")),
    st.sampled_from([RED, np.zeros((2, 0, 3)), np.array(["a", "bc"]), np.ones(3, ml_dtypes.bfloat16)]),
    st.sampled_from([np.array(1.5, ">f4"), np.float64(0.1)]),
)  # fmt: skip
names = st.one_of(st.text(), st.integers(0, 9), st.tuples(st.integers(0, 9), st.text()))
data = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(names, inner)),
    max_leaves=8,
)


@given(st.dictionaries(names, data), st.integers(1, 9))
def test_samples_come_back_to_the_bit(info, n):
    arrays = {"routed": ("input", np.arange(2 * n, dtype=np.int8).reshape(n, 2))}
    made = [sample(n, info=info, arrays=arrays, images=(RED, BLUE), components={"a": float("nan")}), sample(n, 1)]
    known = {image.hash: image.data for image in (RED, BLUE)}
    back = codec.unpacked(codec.packed(made, exact=True), known.__getitem__)
    assert same(made, back) and all(s.tokens.flags.writeable for s in back)


class Odd:
    def __repr__(self):
        raise KeyError("its own code")


@pytest.mark.parametrize("value", [Odd(), {1, 2}, 2**70, [[{"a": Odd()}]], np.array([None]), lambda: 0])
def test_info_that_is_not_data_is_text_or_refused(value):
    made = sample(info={"kept": [1.5], "odd": value, "admitted": 3})
    with pytest.raises(ValueError, match="not data"):
        codec.packed([made], exact=True)
    [back] = codec.unpacked(codec.packed([made], exact=False), None)
    assert same(made.replace(info={}), back.replace(info={}))
    assert back.info["kept"] == [1.5] and back.info["admitted"] == 3 and isinstance(back.info["odd"], str)


def test_a_value_nested_without_end_is_text():
    deep = value = []
    for _ in range(3000):
        value.append(value := [])
    round_ = {}
    round_["self"] = (round_,)
    for info in ({"deep": deep}, {"round": round_}):
        assert codec.unpacked(codec.packed([sample(info=info)], exact=False), None)


def opened(folder, work=None, start=0, **identity):
    """What `work(journal)` returns of a journal that is opened and closed; its past by default."""

    async def main():
        async with store.opened(folder, start, {**IDENTITY, **identity}) as journal:
            return await work(journal) if work else journal.past

    return asyncio.run(main())


def groups(v):
    one = [sample(4 + v, 10 * v + i, images=(RED,) if i else (RED, BLUE)) for i in range(2)]
    return [one, [sample(9, 10 * v + 2)]]


async def keep(journal, prompt, admitted, episodes, row="row"):
    journal.begin(prompt, admitted, row)
    for index, samples in episodes.items():
        journal.keep(prompt, admitted, row, index, samples, 1.0)
    await asyncio.wrap_future(journal.flush())


EPISODES = {0: [sample(6, 70), sample(3, 71)], 1: [], 3: [sample(5, 72, images=(BLUE,))]}


CALL = Generated([*range(90)], [-i / 7 for i in range(90)], [5] * 50 + [6] * 40)


async def six_batches(journal):
    await keep(journal, 0, 0, {0: [sample(4, 1)]})
    for v in range(6):
        journal.close_batch(v, groups(v), {"batch": v + 1}, [0] if v == 0 else []).result()
    await keep(journal, 40, 5, EPISODES)
    for start, end in ((0, 40), (40, 90)):
        journal.keep_calls(40, 5, 2, {(0, start): store.Call("request", CALL.between(start, end))})
    await keep(journal, 41, 6, {})


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A closed journal of six batches and two groups that no batch has taken."""
    path = tmp_path_factory.mktemp("six")
    opened(path, six_batches)
    return path


@pytest.fixture
def copy(six, tmp_path):
    shutil.copytree(six, tmp_path, dirs_exist_ok=True)
    return tmp_path


def all_of(past, path, start):
    """What a process would use: {version: batch}, begun groups; as `opened` has checked it."""

    async def read(journal):
        return {v: await journal.read(v) for v in journal.past.batches}, journal.past.begun

    return opened(path, read, start)


def test_a_process_goes_on_from_any_version(copy, caplog):
    for start in range(7):
        past = opened(copy, start=start)
        assert past.batches == range(start, 6) and past.cursor == ({"batch": 6} if start < 6 else None)
        assert past.begun.keys() == {40, 41} and past.begun[41] == (6, "row", {}, {}, None)
        assert past.begun[40][:2] == (5, "row") and same(past.begun[40].episodes, EPISODES)
        assert past.begun[40].calls == {(2, 0): store.Call("request", CALL)}
        read, _ = all_of(past, copy, start)
        assert all(same(batch, store.Batch(groups(v), {"batch": v + 1})) for v, batch in read.items())
    assert [path.name for path in copy.iterdir()] == [store.FILE] and not caplog.text


def test_images_are_stored_once(copy):
    with contextlib.closing(sqlite3.connect(copy / store.FILE)) as db:
        assert db.execute("SELECT hash, used FROM images ORDER BY used").fetchall() == [(RED.hash, 5), (BLUE.hash, 5)]
        assert b"redred" not in b"".join(samples for (samples,) in db.execute("SELECT samples FROM batches"))


def test_what_lies_before_the_oldest_state_can_be_forgotten(copy):
    async def prune(journal):
        journal.prune(4, 1)

    opened(copy, prune)
    assert opened(copy, start=4).batches == range(4, 6) and opened(copy, start=5).begun[40]
    with contextlib.closing(sqlite3.connect(copy / store.FILE)) as db:
        assert [v for (v,) in db.execute("SELECT version FROM batches")] == [4, 5]


def test_a_journal_with_a_gap_is_used_up_to_it(copy, caplog):
    with contextlib.closing(sqlite3.connect(copy / store.FILE)) as db, db:
        db.execute("DELETE FROM batches WHERE version = 3")
    past = opened(copy, start=1)
    assert past.batches == range(1, 3) and past.cursor == {"batch": 3}
    [line] = caplog.messages
    assert "from version 3 on is generated again" in line and line.endswith("3 cannot be used: it is missing")
    assert opened(copy, start=3).batches == range(3, 3)  # what came behind it is another history's


def test_a_journal_behind_the_state_has_nothing(copy, caplog):
    past = opened(copy, start=9)
    assert past.batches == range(9, 9) and past.cursor is None and not caplog.text


def test_a_journal_of_other_options_keeps_only_what_was_before(copy, caplog):
    past = opened(copy, start=2, options="other")
    assert past == (range(2, 2), None, {}) and "it is of other options" in caplog.text
    assert opened(copy, start=2, options="other").batches == range(2, 2)
    caplog.clear()
    assert opened(copy, start=0).batches == range(0, 0) and "of other options" in caplog.text


def test_batches_of_former_options_are_not_used_when_an_older_state_comes_back(copy, caplog):
    assert opened(copy, start=4, options="other").batches == range(4, 4)
    assert opened(copy, six_batches, start=6, options="other") is None
    caplog.clear()
    assert opened(copy, start=2, options="other") == (range(2, 2), None, {})
    assert "other options were given at version 4" in caplog.text
    opened(copy, six_batches, start=2, options="other")
    assert opened(copy, start=2, options="other").batches == range(2, 6)


def test_batches_of_another_run_are_forgotten(copy, caplog):
    assert opened(copy, start=4, run="other") == (range(4, 4), None, {}) and "it is of another run" in caplog.text
    with contextlib.closing(sqlite3.connect(copy / store.FILE)) as db:
        assert not db.execute("SELECT version FROM batches").fetchall()


def test_a_folder_in_the_place_of_the_file_is_an_error_in_one_line(tmp_path):
    (tmp_path / store.FILE).mkdir()
    with pytest.raises(OSError, match=r"journal\.db: unable to open .*; make it a file"):
        opened(tmp_path)


def test_a_file_of_another_schema_is_put_aside(copy, caplog, monkeypatch):
    monkeypatch.setattr(store, "SCHEMA", "0")
    assert opened(copy).batches == range(0)
    [line] = caplog.messages
    assert "another version of areax; it is now journal.db.aside" in line
    monkeypatch.undo()
    (copy / "journal.db.aside").replace(copy / store.FILE)
    assert opened(copy).batches == range(6)


def test_a_folder_may_have_any_name(tmp_path):
    path = tmp_path / "50% of #1? [a] é"
    path.mkdir()
    opened(path, six_batches)
    assert opened(path).batches == range(6) and [x.name for x in path.iterdir()] == [store.FILE]


def killed(six, folder):
    """A journal as a killed process leaves it, with its write-ahead log."""

    async def copied(journal):
        await six_batches(journal)
        for end in ("", "-wal"):
            shutil.copy(six / f"{store.FILE}{end}", folder / f"{store.FILE}{end}")

    opened(six, copied)


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["closed", "killed"])
def test_damage_anywhere_loses_records_but_changes_none(six, tmp_path, caplog, ended):
    """150 journals, each with bytes flipped, overwritten, or cut off."""
    whole, chance, lost = tmp_path / "whole", random.Random(ended), 0
    whole.mkdir()
    if ended == "killed":
        (tmp_path / "own").mkdir()
        killed(tmp_path / "own", whole)
    else:
        shutil.copytree(six, whole, dirs_exist_ok=True)
    for i in range(150):
        place = tmp_path / f"{i}"
        shutil.copytree(whole, place)
        file = chance.choice([path for path in place.iterdir() if path.stat().st_size])
        content = bytearray(file.read_bytes())
        at = chance.randrange(len(content)) if i % 3 else chance.randrange(min(200, len(content)))
        how = chance.choice(["flip", "flip", "overwrite", "cut"])
        if how == "flip":
            content[at] ^= 1 << chance.randrange(8)
        elif how == "overwrite":
            content[at : at + 700] = chance.randbytes(len(content[at : at + 700]))
        else:
            del content[at:]
        file.write_bytes(content)
        caplog.clear()
        start = chance.randrange(7)
        read, begun = all_of(None, place, start)
        assert [*read] == [*range(start, start + len(read))]
        assert all(same(batch, store.Batch(groups(v), {"batch": v + 1})) for v, batch in read.items())
        assert begun.keys() <= {0, 40, 41}  # 0: as it was before the first batch
        if 40 in begun:
            assert begun[40][:2] == (5, "row")
            assert all(same(samples, EPISODES[index]) for index, samples in begun[40].episodes.items())
            assert all(call.made == CALL.between(0, len(call.made.tokens)) for call in begun[40].calls.values())
        lost += len(read) < 6 - start or 40 not in begun or len(begun[40].episodes) < 3
        opened(place, six_batches)  # it can be written again
        assert opened(place).batches == range(6)
        shutil.rmtree(place)
    assert 20 < lost < 150


@pytest.fixture
def small(tmp_path):
    """A file system of 800 kB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=800k", "none", str(place)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("needs root, to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_loses_records_but_not_the_run(small, caplog):
    made = lambda v: [[sample(2000, 100 * v + i)] for i in range(3)]

    async def fill(journal):
        for v in range(40):
            await keep(journal, v, v, {0: made(v)[0]})
            journal.close_batch(v, made(v), {"batch": v + 1}, [v]).result()
        await keep(journal, 50, 40, {0: made(50)[0]})

    (small / "ballast").write_bytes(bytes(300_000))
    opened(small, fill)
    [line] = caplog.messages
    assert "not all was written (database or disk is full); after a kill, more is generated again" in line
    (small / "ballast").unlink()
    past = opened(small)
    assert 2 < len(past.batches) < 40 and past.cursor == {"batch": past.batches.stop}
    read, begun = all_of(None, small, 0)
    assert all(same(batch.groups, made(v)) for v, batch in read.items())
    assert all(same(one.episodes, {0: made(prompt)[0]}) for prompt, one in begun.items() if one.episodes)


def test_a_number_or_record_beyond_those_of_sqlite_does_not_stop_the_run(tmp_path, caplog):
    async def fill(journal):
        await asyncio.wait_for(keep(journal, 1 << 63, 0, {0: [sample()]}), 10)
        journal.close_batch(0, groups(0), {}, []).result()

    opened(tmp_path, fill)
    [line] = caplog.messages
    assert "not all was written (Python int too large to convert to SQLite INTEGER)" in line
    assert opened(tmp_path).batches == range(1)


def test_a_disk_that_is_full_at_the_start_is_an_error_in_one_line(small):
    with contextlib.suppress(OSError), open(small / "ballast", "wb") as file:
        file.write(bytes(1 << 20))
    with pytest.raises(OSError, match=r"journal\.db: "):
        opened(small)


def test_what_cannot_be_packed_is_said_once(tmp_path, caplog):
    async def odd(journal):
        journal.begin(1, 0, "row")
        for index in range(3):
            journal.keep(1, 0, "row", index, [sample(info={"odd": Odd()})], 1.0, exact=True)
        journal.keep(1, 0, "row", 3, [sample(info={"odd": Odd()})], 1.0)

    opened(tmp_path, odd)
    assert len(caplog.messages) == 1 and "whose info is not data" in caplog.text
    assert [*opened(tmp_path).begun[1].episodes] == [3]


def test_episodes_of_a_group_that_began_anew_are_not_mixed(tmp_path, caplog):
    async def anew(journal):
        await keep(journal, 1, 0, {0: [sample(seed=1)], 1: [sample(seed=2)]})
        await keep(journal, 1, 2, {0: [sample(seed=3)]})
        journal.keep(2, 0, "row", 0, [sample()], 1.0)  # that its group began is lost

    opened(tmp_path, anew)
    past = opened(tmp_path)
    assert [*past.begun] == [1] and same(past.begun[1], store.Begun(2, "row", {0: [sample(seed=3)]}, {}))
    assert [line.count("generated again: its group") for line in caplog.messages] == [1, 1]


def test_rows_are_told_apart():
    rows = [{"a": 1}, {"a": 2}, {"a": 1, "images": [RED]}, {"a": 1, "images": [BLUE]}, {"a": "\ud800"}, {"a": (1,)}]
    assert len({codec.mark(row) for row in rows}) == len(rows) and codec.mark({"a": Odd()}) == ""


def test_an_episode_that_a_batch_takes_at_once_has_no_record_of_its_own(tmp_path, monkeypatch):
    """Others have one before long, and one that took long when it ends."""
    monkeypatch.setattr(store, "AFTER_S", 0.2)

    async def main():
        async with store.opened(tmp_path, 0, IDENTITY) as journal:
            for prompt, seconds in ((1, 0.0), (2, 0.0), (3, 0.3)):
                journal.begin(prompt, 0, "row")
                journal.keep(prompt, 0, "row", 0, [sample(4, prompt)], seconds)
            journal.close_batch(0, [[sample(4, 1)]], {}, [1]).result()
            soon = await asyncio.to_thread(recorded, "soon")
            await asyncio.sleep(0.4)
            return soon, await asyncio.to_thread(recorded, "later")

    def recorded(name):
        copy = shutil.copytree(tmp_path, tmp_path.with_name(name))
        with contextlib.closing(sqlite3.connect(copy / store.FILE)) as db:
            return [prompt for (prompt,) in db.execute("SELECT DISTINCT prompt FROM episodes ORDER BY prompt")]

    assert asyncio.run(main()) == ([3], [2, 3])


def test_of_a_group_that_no_batch_will_take_its_end_is_kept_in_place_of_its_episodes(tmp_path):
    async def main():
        async with store.opened(tmp_path, 0, IDENTITY) as journal:
            for prompt in (1, 2):
                journal.begin(prompt, 0, "row")
                journal.keep(prompt, 0, "row", 0, [sample(4, prompt)], 1.0)
            await asyncio.wrap_future(journal.flush())
            journal.keep(1, 0, "row", 1, [sample(4, 1)], 1.0)
            journal.decline(1, 0, "row", "refused", 0.25)
        async with store.opened(tmp_path, 0, IDENTITY) as journal:
            return journal.past.begun

    begun = asyncio.run(main())
    assert begun[1] == store.Begun(0, "row", {}, {}, ("refused", 0.25)) and [*begun[2].episodes] == [0]
