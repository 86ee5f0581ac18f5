"""Compiling calls of XLA in C."""

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
