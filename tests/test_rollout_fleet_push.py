"""Version labels, weight version spans and the folder of published versions."""

import asyncio
import errno
import json
import pathlib
import tempfile

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.servers.labels import per_token, read_label, version_of
from areax.rollout.simulation import clock
from areax.rollout.weights import store

labels = st.builds("{}-{:08x}".format, st.integers(0, 10**6), st.integers(0, 2**32 - 1))


@given(st.lists(st.tuples(st.sampled_from(["default", "3-00c0ffee", "12-feedbeef"]), st.integers(0, 5)), max_size=8))
def test_spans_expand_to_one_label_per_token(runs):
    spans, expected = [], []
    for label, length in runs:
        start = len(expected)
        expected += [label] * length
        spans.append({"version": label, "start": start, "end": start + length})
    assert per_token(spans, len(expected)) == expected
    with pytest.raises(RuntimeError, match="cover each token once"):
        per_token(spans, len(expected) + 1)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4), st.integers(0, 6))
def test_spans_are_refused_unless_each_token_has_exactly_one_label(bounds, tokens):
    spans = [{"version": str(i), "start": a, "end": b} for i, (a, b) in enumerate(bounds)]
    covering = [[i for i, (a, b) in enumerate(bounds) if a <= t < b] for t in range(6)]
    try:
        got = per_token(spans, tokens)
    except RuntimeError:
        return
    assert [[int(label)] for label in got] == covering[:tokens]
    assert not any(covering[tokens:])


@given(labels)
def test_the_version_number_of_a_label(label):
    assert version_of(label) == int(label.split("-")[0])


@pytest.mark.parametrize("label", ["default", "", "7", "7-abc", "7-ABCDEF01", "-1-00000000", "7-000000000"])
def test_other_labels_have_no_version_number(label):
    assert version_of(label) == -1


def put(root, name, version):
    path = root / name
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"version": version, "tensors": {}}))
    (path / "model.safetensors").write_bytes(b"x")
    return path


def test_a_label_is_the_version_and_the_hash_of_the_manifest(tmp_path):
    path = put(tmp_path, "a", 12) / "manifest.json"
    digest = xxhash.xxh3_128(path.read_bytes()).hexdigest()
    assert read_label(path) == f"12-{digest[:8]}"
    assert version_of(read_label(path)) == 12
    for text in ("{", "[]", "{}", '{"version": "x"}', '{"version": true}', '{"version": -1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=str(path)):
            read_label(path)


def test_prune_keeps_the_newest_and_those_in_use(tmp_path):
    paths = {v: put(tmp_path, f"weights{v}", v) for v in (9, 10, 2, 3, 4)}
    (tmp_path / "notes").mkdir()  # not a published version
    put(tmp_path, ".weights1.removing", 1)  # an earlier removal that was interrupted
    used = read_label(paths[3] / "manifest.json")
    assert store.prune(tmp_path, keep=2, in_use={used}) == [paths[2], paths[4]]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["notes", "weights10", "weights3", "weights9"]
    assert store.prune(tmp_path) == [paths[3]]
    assert store.prune(tmp_path) == []
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        store.prune(tmp_path, keep=0)


def test_choose_root_uses_dev_shm_only_if_three_versions_fit():
    disk = pathlib.Path(tempfile.gettempdir())
    assert store.choose_root() in (pathlib.Path("/dev/shm"), disk)
    assert store.choose_root(2**60) == disk


def test_on_a_full_disk_older_versions_are_pruned_and_writing_is_retried(tmp_path):
    for v in range(3):
        put(tmp_path, str(v), v)
    label = read_label(tmp_path / "0/manifest.json")
    errors = [OSError(errno.ENOSPC, "No space left on device")] * 3

    def write():
        if errors:
            raise errors.pop()
        return put(tmp_path, "3", 3)

    async def main():
        done = await store.written(write, tmp_path, lambda: {label})
        return done, asyncio.get_running_loop().time()

    assert clock.run(main()) == (tmp_path / "3", 1.0 + 2.0 + 4.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3"]


@pytest.mark.parametrize("number, attempts", [(errno.ENOSPC, 7), (errno.EDQUOT, 7), (errno.EACCES, 1)])
def test_a_disk_that_stays_full_ends_the_run(tmp_path, number, attempts):
    tried = []

    def write():
        tried.append(1)
        raise OSError(number, "no")

    with pytest.raises(OSError, match="no"):
        clock.run(store.written(write, tmp_path, set))
    assert len(tried) == attempts
