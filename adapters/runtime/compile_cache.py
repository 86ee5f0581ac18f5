"""Persistent compilation cache, so that commands start faster the next time."""

import logging
import os
from pathlib import Path

import jax

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 30  # size of the cache; least recently used programs are evicted


def keep() -> None:
    """Enables JAX's persistent compilation cache; call it before anything is compiled.

    The cache is `areax/programs` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache), unless
    JAX_COMPILATION_CACHE_DIR is set; JAX_ENABLE_COMPILATION_CACHE=0 disables it. Each number of cores has a separate
    folder: XLA compiles for the cores it sees, and JAX would reuse single-core programs on more cores. JAX by default
    skips programs that compile in less than a second, of which a start has dozens; here all are cached, unless
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is set.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = made("programs", f"{cores()}-cores")
        if folder is None:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)  # enables a lock: servers share the folder
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def made(*parts: str) -> Path | None:
    """A folder in areax's part of the user's cache folder, made if needed; None, with a warning, if that fails."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        log.warning("compilation cache disabled: there is no home directory; set JAX_COMPILATION_CACHE_DIR")
        return None
    folder = caches.joinpath("areax", *parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compilation cache disabled: %s: %s", folder, error.strerror)
        return None
    return folder


def cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
