"""Compiled programs are kept on disk, so that the next start of a command finds them."""

import logging
import os
from pathlib import Path

import jax

log = logging.getLogger(__name__)

MOST = 4 << 30  # bytes of programs kept; those not used for longest go first


def keep() -> None:
    """Has JAX keep the programs that it compiles; to be called before it compiles anything.

    They lie in `areax/programs` of the user's cache folder (XDG_CACHE_HOME, or ~/.cache), unless
    JAX_COMPILATION_CACHE_DIR names another; JAX_ENABLE_COMPILATION_CACHE=0 keeps none. Each number of cores has a
    folder of its own: XLA compiles for those that it sees, and JAX would take programs for one core where there are
    more. JAX by itself leaves out what compiled in less than a second, of which a start has dozens; here all are kept,
    as long as JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS says nothing else.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = (
            Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            / "areax"
            / "programs"
            / f"{cores()}-cores"
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("compiled programs are not kept: %s: %s", folder, error.strerror)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", MOST)  # with a lock: servers share the folder
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
