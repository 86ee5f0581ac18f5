"""Compiled programs are cached on disk for the next start, in the directory that the environment names."""

import os
import subprocess
import sys

import jax
import pytest

from areax.adapters.runtime import compile_cache

PROGRAM = """
from areax.adapters.runtime import compile_cache
compile_cache.keep()
import jax
print(jax.jit(lambda x: x + 1)(1))
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "given, where",
    [
        ({"XDG_CACHE_HOME": "{here}"}, f"areax/programs/{compile_cache.cores()}-cores"),
        ({"HOME": "{here}"}, f".cache/areax/programs/{compile_cache.cores()}-cores"),
        ({"HOME": "{here}", "JAX_COMPILATION_CACHE_DIR": "{here}/mine"}, "mine"),
        ({"HOME": "{here}", "JAX_ENABLE_COMPILATION_CACHE": "0"}, None),
    ],
)
def test_small_programs_are_cached(tmp_path, given, where):
    ours = ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    environ |= {name: value.format(here=tmp_path) for name, value in given.items()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    kept = [path for path in tmp_path.rglob("*-cache") if path.is_file()]
    assert [path.parent.relative_to(tmp_path).as_posix() for path in kept] == ([where] if where else [])


def test_programs_run_without_a_home_directory(monkeypatch, caplog):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError: a user without an entry
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compile_cache.keep()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    [record] = caplog.records
    assert record.getMessage().startswith("compilation cache disabled: there is no home directory; ")


@pytest.mark.slow
def test_programs_run_without_a_writable_cache_directory(tmp_path):
    (tmp_path / "file").write_text("")
    environ = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environ["XDG_CACHE_HOME"] = str(tmp_path / "file")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert done.stderr.startswith("compilation cache disabled: ")
