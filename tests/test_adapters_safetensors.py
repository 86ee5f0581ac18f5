"""The official library reads our files, and our reader rejects damaged or incomplete ones."""

import json
import os
import resource

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as some

from areax.adapters import safetensors as files

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.bool_, np.float64, np.int64]


def tensor(rng, shape, dtype):
    return (rng.normal(size=shape) * 50).astype(dtype)


def some_tensors():
    rng = np.random.default_rng(0)
    return {f"layers.{i}.w": tensor(rng, (i + 1, 7), np.float32) for i in range(6)}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(max_examples=40)
@given(
    some.lists(
        some.tuples(some.lists(some.integers(0, 5), max_size=3), some.sampled_from(DTYPES)), min_size=1, max_size=6
    ),
    some.integers(1, 400),
)
def test_tensors_round_trip(tmp_path_factory, shapes, shard_bytes):
    rng = np.random.default_rng(1)
    tensors = {f"t{i}": tensor(rng, shape, dtype) for i, (shape, dtype) in enumerate(shapes)}
    folder = tmp_path_factory.mktemp("files")
    described = files.write(folder, tensors, tensors.values(), shard_bytes=shard_bytes)
    read = files.read(folder)
    assert list(read) == list(tensors) == list(described)
    for name, x in tensors.items():
        assert same(read[name], x)
        assert described[name]["xxh3_128"] == xxhash.xxh3_128_hexdigest(x.tobytes()) == files.digest(x)
    official = {}
    for file in folder.glob("*.safetensors"):
        official |= safetensors.numpy.load_file(file)
    assert official.keys() == tensors.keys() and all(same(official[name], tensors[name]) for name in tensors)


def test_arrays_of_any_memory_layout_are_written_correctly(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors = {"turned": x.T, "strided": x[::2, ::3], "scalar": np.array(3.0, np.float32), "reversed": x[::-1]}
    files.write(tmp_path, tensors, tensors.values())
    official = safetensors.numpy.load_file(tmp_path / files.FILE)
    assert all(np.array_equal(official[name], tensors[name]) for name in tensors)


def test_files_of_the_official_library_are_read(tmp_path):
    tensors = some_tensors() | {"b": np.ones((3, 2), ml_dtypes.bfloat16)}
    safetensors.numpy.save_file(tensors, tmp_path / files.FILE, {"format": "pt"})
    read = files.read(tmp_path)
    assert read.keys() == tensors.keys() and all(same(read[name], tensors[name]) for name in tensors)
    assert files.read(tmp_path / files.FILE).keys() == tensors.keys()


def test_shards_are_named_and_indexed_as_hugging_face_does_it(tmp_path):
    tensors = some_tensors()
    files.write(tmp_path, tensors, tensors.values(), shard_bytes=200)
    index = json.loads((tmp_path / files.INDEX).read_text())
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    n = len(shards)
    assert n > 2 and shards == [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["weight_map"].keys() == tensors.keys() and set(index["weight_map"].values()) == set(shards)
    assert not list(tmp_path.glob(".*"))


@given(some.lists(some.integers(0, 50), max_size=30), some.integers(1, 6))
def test_parts_are_balanced_and_complete(sizes, parts):
    entries = {f"w{i}": {"dtype": "U8", "shape": [n]} for i, n in enumerate(sizes)}
    found = files.split(entries, parts)
    assert found == files.split(dict(entries), parts) and len(found) == parts
    assert {name: entry for part in found for name, entry in part.items()} == entries
    assert sum(map(len, found)) == len(entries)
    assert all([*part] == [name for name in entries if name in part] for part in found)
    loads = [sum(entry["shape"][0] for entry in part.values()) for part in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.parametrize("shard_bytes", [80, 10**9])
def test_parts_written_apart_are_the_checkpoint(tmp_path, shard_bytes):
    tensors, rest = some_tensors(), {"tower.w": np.ones((3, 3), np.float32)}
    whole, parted = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parted.mkdir()
    wanted = files.write(whole, tensors, tensors.values(), apart=rest)
    layout = files.layout(tensors, rest, shard_bytes, 3)
    own = [[tensors[name] for entries in part.values() for name in entries] for part in layout[:-1]]

    def others():
        entries = {}
        for part, arrays in zip(layout[1:-1], own[1:], strict=True):
            source = iter(arrays)
            for file, described in part.items():
                entries |= files.write_file(parted / file, described, source)
        return entries

    got = files.write(parted, tensors, own[0], apart=rest, shard_bytes=shard_bytes, parts=3, others=others)
    assert json.dumps(got) == json.dumps(wanted)  # in this order, too
    a, b = files.read(parted), files.read(whole)
    assert a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def test_tensors_are_fetched_one_at_a_time(tmp_path):
    tensors = some_tensors()
    written = []

    def arrays():
        for x in tensors.values():
            # Everything fetched earlier has already been written.
            (temporary,) = tmp_path.glob(".*.tmp")
            header = 8 + int.from_bytes(temporary.read_bytes()[:8], "little")
            assert temporary.stat().st_size == header + sum(written)
            written.append(x.nbytes)
            yield x

    files.write(tmp_path, tensors, arrays())
    assert len(written) == len(tensors)


def test_reading_copies_nothing(tmp_path):
    files.write(tmp_path, some_tensors(), some_tensors().values())
    x = files.read(tmp_path)["layers.3.w"]
    assert not x.flags.owndata and not x.flags.writeable and x.flags.aligned
    assert np.array_equal(x[1:3], some_tensors()["layers.3.w"][1:3])


@pytest.mark.parametrize(
    "arrays, words",
    [
        ([np.ones(3, np.float32)], "there are no more"),
        ([np.ones(3, np.float32), np.ones(5, np.float32)], "must be F32\\[4\\] by its spec, got float32\\[5\\]"),
        ([np.ones(3, np.float32), np.ones(4)], "got float64"),
        ([np.ones(3, np.float32), np.ones(4, np.float32), np.ones(1)], "as many arrays as specs, 2, got more"),
    ],
)
def test_arrays_must_match_their_announced_specs(tmp_path, arrays, words):
    specs = {"a": np.ones(3, np.float32), "b": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match=words):
        files.write(tmp_path, specs, arrays)
    assert not list(tmp_path.glob(".*"))


def test_a_dtype_unknown_to_the_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="z must have one of the dtypes .* complex64"):
        files.write(tmp_path, {"z": np.ones(2, np.complex64)}, [np.ones(2, np.complex64)])
    assert not list(tmp_path.iterdir())


def refused(path, *words):
    with pytest.raises(ValueError) as caught:
        files.read(path)
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words) and len(text) < 1000, text


@pytest.mark.parametrize("kept", [0, 5, 8, 30, 300, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    files.write(tmp_path, some_tensors(), some_tensors().values())
    path = tmp_path / files.FILE
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    refused(tmp_path, str(path), "half-written or damaged", "copy")


def test_a_header_that_would_fill_memory_is_refused(tmp_path):
    with open(tmp_path / files.FILE, "wb") as file:
        file.write((8 << 30).to_bytes(8, "little"))
        file.truncate(9 << 30)  # sparse
    refused(tmp_path, files.FILE, "at most 100,000,000 bytes, got 8,589,934,592")


def test_a_header_beyond_the_file_is_refused(tmp_path):
    (tmp_path / files.FILE).write_bytes((2**50).to_bytes(8, "little") + b"{}" * 50)
    refused(tmp_path, files.FILE, "do not hold the header")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        b'"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        b'"c": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"1, " * 99 + b'2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"b": {"dtype": "F32", "shape": [0, %d], "data_offsets": [8, 8]}}' % 2**70,
        b"[" * 100_000,
        b"\xff" * 100_000,
        b'{"%s": {"dtype": "%s", "shape": [2], "data_offsets": [0, 8]}}' % (b"n" * 10_000, b"F" * 10_000),
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, %d]}}' % 10**4000,
        b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}' % b",".join([b"1"] * 10_000),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header):
    (tmp_path / files.FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refused(tmp_path, files.FILE)


def test_an_incomplete_set_of_shards_is_refused(tmp_path):
    tensors = some_tensors()
    files.write(tmp_path, tensors, tensors.values(), shard_bytes=200)
    index = (tmp_path / files.INDEX).read_text()
    first = sorted(tmp_path.glob("*.safetensors"))[0]

    (tmp_path / files.INDEX).write_text(index[:40])
    refused(tmp_path, files.INDEX, "not an index")
    (tmp_path / files.INDEX).write_text(index.replace("layers.0.w", "layers.9.w"))
    refused(tmp_path, first.name, "lacks layers.9.w")
    (tmp_path / files.INDEX).write_text(index)
    first.rename(tmp_path / "elsewhere")
    refused(tmp_path, first.name, "missing", "copy the checkpoint again")
    (tmp_path / files.INDEX).unlink()
    refused(tmp_path, "the index is missing")
    os.mkfifo(tmp_path / files.INDEX)  # reading it would wait for a writer
    refused(tmp_path, "the index is missing")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """Tools differ in which one they take."""
    tensors = some_tensors()
    files.write(tmp_path, tensors, tensors.values(), shard_bytes=200)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    both = {"layers.0.w": tensors["layers.0.w"] + 1, "layers.5.w": tensors["layers.5.w"]}
    files.write_file(last, {name: files.describe(name, x) for name, x in both.items()}, both.values())
    refused(tmp_path, last.name, "holds layers.0.w, which model.safetensors.index.json lists in model-00001-of-")


def test_a_stale_file_beside_an_index_is_refused(tmp_path):
    """transformers takes the single file, others the shards: neither may be guessed."""
    tensors, old = some_tensors(), {"a": np.zeros(3, np.float32)}
    files.write(tmp_path, tensors, tensors.values(), shard_bytes=200)
    files.write(tmp_path, old, old.values())
    refused(tmp_path, "holds both model.safetensors and model.safetensors.index.json of other files", "remove that one")
    index = (tmp_path / files.INDEX).read_text()
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": {"a": files.FILE}}))
    assert files.read(tmp_path).keys() == old.keys()  # an index of the file itself
    (tmp_path / files.INDEX).write_text(index)
    (tmp_path / files.FILE).unlink()
    assert files.read(tmp_path).keys() == tensors.keys()


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '{"weight_map": {"a": "../other.safetensors"}}',
            "must be a file beside the index, got '../other.safetensors'",
        ),
        ('{"weight_map": {"a": "/tmp/other.safetensors"}}', "must be a file beside the index, got '/tmp/other.safe"),
        ('{"weight_map": {"a": ".."}}', "must be a file beside the index, got '..'"),
        ('{"weight_map": {"a": ""}}', "must be a file beside the index, got ''"),
        ('{"weight_map": {"a": "b\\u0000"}}', "must be a file beside the index, got 'b\\x00'"),
        ('{"weight_map": {"a": 3}}', "must be a file beside the index, got 3"),
        ('{"weight_map": {"a": ["b"]}}', "not an index of shards"),
        ('{"weight_map": [1]}', "not an index of shards"),
        ("[]", "not an index of shards"),
        ("[" * 100_000, "not an index of shards"),
    ],
)
def test_an_index_names_files_beside_it(tmp_path, text, message):
    """One that was downloaded must not make the reader open other files of the machine."""
    files.write(tmp_path, some_tensors(), some_tensors().values())
    (tmp_path / files.FILE).rename(tmp_path.parent / "other.safetensors")
    (tmp_path / files.INDEX).write_text(text)
    refused(tmp_path, files.INDEX, message)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    refused(tmp_path, str(tmp_path), "needs model.safetensors or")
    refused(tmp_path / "nowhere", "nowhere", "exists")


def test_a_full_disk_is_an_error_with_the_files_name(tmp_path):
    """Also of a file that is written in parts, whose errors have none."""
    x = np.ones(1 << 16, np.float32)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        for name, write in (
            ("model.safetensors", lambda: files.write(tmp_path, {"x": x}, [x])),
            ("manifest.json", lambda: files.write_bytes(tmp_path / "manifest.json", bytes(10_000))),
        ):
            with pytest.raises(OSError, match="File too large") as caught:
                write()
            assert caught.value.filename == str(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())
