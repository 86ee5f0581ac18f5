"""Compiling calls of XLA in C."""

import shutil

import pytest

from areax.models.layers import native


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    native.missing.cache_clear()
    try:
        assert native.missing() == "there is no C compiler cc; install gcc or clang for faster decoding"
        assert not native.ready()
        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        native.missing.cache_clear()
        assert native.missing().endswith("cc failed: no such option")
    finally:
        native.missing.cache_clear()


@pytest.mark.long
def test_a_damaged_library_is_compiled_again(monkeypatch, tmp_path, compiled):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = shutil.which("cc")
    library = native._compiled(compiler)
    whole, hashed = library.read_bytes(), library.with_suffix(".sha256")
    for damage in (
        lambda: library.write_bytes(whole[: len(whole) // 2]),
        lambda: library.write_bytes(b"none"),
        hashed.unlink,
        lambda: hashed.write_bytes(b""),
    ):
        library.unlink()  # this process has it mapped
        library.write_bytes(whole)
        damage()
        assert native._compiled(compiler) == library and native._whole(library)
        assert sorted(library.parent.iterdir()) == sorted([hashed, library])


def test_what_a_compiler_makes_that_is_no_library_is_not_kept(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor out; do :; done\necho rubbish > "$out"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.missing.cache_clear()
    try:
        assert "areax-" in native.missing()
        assert not [*(tmp_path / "areax" / "native").iterdir()]
    finally:
        native.missing.cache_clear()
