"""Deltas of published versions: exact for arbitrary bytes, refused on a mismatch."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.rollout.weights import delta


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in ("base", "new", "out")]
    for folder in made:
        folder.mkdir()
    return made


def write(folders, files, path=None, labels=("1-aaaaaaaa", "2-bbbbbbbb")):
    base, new, _ = folders
    for name, (then, now) in files.items():
        (base / name).write_bytes(then)
        (new / name).write_bytes(now)
    path = path or base.parent / "delta"
    return path, delta.write(path, base, new, list(files), labels)


@settings(max_examples=50)
@given(data=st.data(), size=st.integers(0, 300), block=st.sampled_from([1, 7, 64, 1000]))
def test_applying_a_delta_gives_the_new_version(tmp_path_factory, data, size, block):
    root = tmp_path_factory.mktemp("delta")
    folders = [root / name for name in ("base", "new", "out")]
    for folder in folders:
        folder.mkdir()
    then = data.draw(st.binary(min_size=size, max_size=size))
    now = data.draw(st.one_of(st.just(then), st.binary(min_size=size, max_size=size)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK", block)
        path, written = write(folders, {"a": (then, now), "b": (now, then)})
        assert path.stat().st_size == written
        assert delta.apply(path, folders[0], folders[2], "1-aaaaaaaa") == ["a", "b"]
    assert (folders[2] / "a").read_bytes() == now and (folders[2] / "b").read_bytes() == then


def test_a_few_changed_weights_take_a_few_bytes(folders):
    rng = np.random.default_rng(0)
    then = (0.02 * rng.standard_normal(1_000_000)).astype(ml_dtypes.bfloat16).view(np.uint16)
    changed = rng.random(then.size) < 0.03
    now = then + changed * rng.choice([1, -1], then.size).astype(np.uint16)
    path, written = write(folders, {"w": (then.tobytes(), now.tobytes())})
    assert written < 0.05 * then.nbytes  # the entropy of their positions and signs is 0.014 of the size
    delta.apply(path, folders[0], folders[2], "1-aaaaaaaa")
    assert (folders[2] / "w").read_bytes() == now.tobytes()


def test_mismatched_or_damaged_deltas_are_refused(folders):
    base, new, out = folders
    path, _ = write(folders, {"w": (b"0" * 99, b"1" * 99)})
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="the delta needs the base 1-aaaaaaaa, got 1-cccccccc"):
        delta.apply(path, base, out, "1-cccccccc")
    (base / "w").write_bytes(b"0" * 98)
    with pytest.raises(ValueError, match="'w' must be a file of 99 bytes"):
        delta.apply(path, base, out, "1-aaaaaaaa")
    (base / "w").write_bytes(b"0" * 99)
    head = len(delta.MAGIC) + 4 + int.from_bytes(whole[8:12], "little")
    for damaged in (
        b"",
        b"x" + whole[1:],
        whole[:20],
        whole[: head + 2],
        whole[:-3],
        whole[:-3] + b"xxx",
        whole[:head],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            delta.apply(path, base, out, "1-aaaaaaaa")
    strange = json.dumps({"base": "1-aaaaaaaa", "label": "2", "files": [["../w", 99]]}).encode()
    path.write_bytes(delta.MAGIC + len(strange).to_bytes(4, "little") + strange + whole[head:])
    with pytest.raises(ValueError, match="'../w' must be a file"):
        delta.apply(path, base, out, "1-aaaaaaaa")


def test_files_of_another_size_have_no_delta(folders):
    with pytest.raises(ValueError, match="w must have the same size in both versions, got 3 and 4 bytes"):
        write(folders, {"w": (b"123", b"1234")})
    with pytest.raises(ValueError, match="got None and None"):
        delta.write(folders[0].parent / "d", folders[0], folders[1], ["v"], ("1", "2"))
