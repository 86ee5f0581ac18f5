"""Threads, memory, limits, disk and the hub's token."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .finding import Finding, note, ok

THREADS, FILES, DISK, SHM = 4, 4096, 20e9, 1e9  # fewer of these get a note
ROOT = Path("/")


def machine(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What else a run needs of the machine.

    Args:
      root: the folder that has `dev/shm`.
    """
    yield _threads()
    yield _shm(root / "dev/shm")
    yield _files()
    yield _disk()
    yield _cache(environ)
    yield _token(environ)


def _threads() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{count} CPU threads, {memory / 1e9:.0f} GB of memory"
    if count < THREADS:
        return note(f"{text}: trainer, servers and rewards share them; {THREADS} or more are better")
    return ok(text)


def _shm(folder: Path) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return note(f"{folder} is missing: weights reach servers here through the disk")
    text = f"{folder}: {free / 1e9:.1f} GB free"
    if free < SHM or not os.access(folder, os.W_OK):
        return note(f"{text}: larger weights reach servers here through the disk; docker run --shm-size 16g")
    return ok(f"{text}, for weights on their way to servers here")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        return note(
            f"{soft} open files at most: few for many requests at a time; ulimit -n {max(FILES, min(hard, 65536))}"
        )
    return ok(f"{'any number of' if soft == resource.RLIM_INFINITY else soft} open files at most")


def _disk() -> Finding:
    try:
        here = Path.cwd()
        free = shutil.disk_usage(here).free
    except OSError as error:
        return note(f"the working directory cannot be read ({error.strerror}); change to another")
    text = f"{here}: {free / 1e9:.0f} GB free"
    if not os.access(here, os.W_OK):
        return note(f"{text}, but not writable; name runs with --out")
    if free < DISK:
        return note(f"{text}: little for checkpoints; name another place with --out")
    return ok(f"{text}, for runs")


def _cache(environ: Mapping[str, str]) -> Finding:
    """The compilation cache, which `runtime/compile_cache.py` chooses likewise."""
    if environ.get("JAX_ENABLE_COMPILATION_CACHE", "1").lower() in ("0", "false"):
        return note("compiled programs are not kept: JAX_ENABLE_COMPILATION_CACHE=0")
    try:
        folder = Path(
            environ.get("JAX_COMPILATION_CACHE_DIR")
            or Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areax" / "programs"
        )
    except RuntimeError:
        return note("there is no home directory: each start compiles anew; set JAX_COMPILATION_CACHE_DIR")
    if "://" in str(folder) or ":/" in str(folder):  # a bucket
        return ok(f"compiled programs are kept in {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return note(
            f"{folder} cannot be written ({error.strerror}): each start compiles anew; set JAX_COMPILATION_CACHE_DIR"
        )
    return ok(f"compiled programs are kept in {folder}")


def _token(environ: Mapping[str, str]) -> Finding:
    """Whether there is a token; never the token."""
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return note("HF_HUB_OFFLINE is set: models and data sets come from the hub's cache only")
    if environ.get("HF_TOKEN"):
        return ok("a token of the Hugging Face hub is set")
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    try:
        path = Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
        if path.is_file() and os.access(path, os.R_OK):
            return ok("a token of the Hugging Face hub is set")
        reason = f"{path} cannot be read" if path.is_file() else ""
    except (OSError, RuntimeError) as error:  # another user's folder; no home directory
        reason = str(error)
    why = f" ({reason})" if reason else ""
    return note(f"no token of the Hugging Face hub{why}, for gated and private models: hf auth login")
