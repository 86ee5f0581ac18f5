"""Atomic replacement of directories: the new directory appears whole, or the old one stays as it was."""

import pytest

from areax.adapters.runtime import atomic_dir


def contents(path):
    return sorted(p.name for p in path.iterdir())


def anything(path):
    return True


def test_the_directory_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "deep" / "target"
    with atomic_dir.replacing(target, anything) as new:
        (new / "a").write_text("1")
        assert not target.exists()
    assert contents(target) == ["a"] and contents(target.parent) == ["target"]


def test_an_old_directory_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "old").write_text("1")
    with atomic_dir.replacing(tmp_path / "t", anything) as new:
        (new / "new").write_text("2")
        assert contents(tmp_path / "t") == ["old"]
    assert contents(tmp_path / "t") == ["new"] and contents(tmp_path) == ["t"]


def test_replacing_works_without_an_atomic_exchange_of_directories(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_dir, "RENAME_EXCHANGE", 1 << 30)  # a flag that the kernel rejects
    test_an_old_directory_is_replaced_as_a_whole(tmp_path)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_directory(tmp_path, error):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "old").write_text("1")
    with pytest.raises(error), atomic_dir.replacing(tmp_path / "t", anything) as new:
        (new / "half").write_text("2")
        raise error
    assert contents(tmp_path / "t") == ["old"] and contents(tmp_path) == ["t"]


def test_a_symlink_stays_a_symlink(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_dir.replacing(tmp_path / "link", anything) as new:
        (new / "a").write_text("1")
    assert (tmp_path / "link").is_symlink() and contents(tmp_path / "real") == ["a"]


def test_files_and_foreign_directories_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, words in (("file", "got a file"), ("full", "contains files other than a checkpoint")):
        with pytest.raises(ValueError, match=words), atomic_dir.replacing(tmp_path / name, lambda path: False):
            pass
    with atomic_dir.replacing(tmp_path / "empty", lambda path: False):
        pass
    assert contents(tmp_path) == ["empty", "file", "full"] and contents(tmp_path / "full") == ["thesis.tex"]
