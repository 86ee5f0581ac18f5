"""What every recipe needs: memory that is kept, a mesh, a model and rows from a path, a stop that waits for a step."""

import contextlib
import ctypes
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax

from areax import models
from areax.adapters import datasets, hf
from areax.core import metrics, param
from areax.parallel import mesh, rules
from areax.rollout import names

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MOST = 2**31 - 1

merge = jax.jit(metrics.merge_trees)  # one computation instead of five a metric


def keep_memory() -> None:
    """Lets this process keep the memory of a step on the CPU for the next; to be called before JAX computes anything.

    By default each step runs in a thread of its own and the C library gives its memory back to the system, which maps
    and clears it anew for the next: 285,000 page faults a step on a model of 29M weights, 5 % of its time, or 25 % on a
    virtual machine that gives free memory back to its host. Helps calls from the main thread; the first arena alone can
    grow at will. Where the C library is not glibc nothing is kept.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    libc = ctypes.CDLL(None)
    # Setting the second alone would fix the first where it starts, at 128 KiB. Older versions take 32 MiB at most.
    if hasattr(libc, "mallopt") and (libc.mallopt(MMAP_THRESHOLD, MOST) or libc.mallopt(MMAP_THRESHOLD, 1 << 25)):
        libc.mallopt(TRIM_THRESHOLD, MOST)


def open_mesh(layout: mesh.Layout, *, rows: int, length: int) -> jax.sharding.Mesh:
    """The mesh of a layout.

    Raises:
      ValueError: it does not fit the devices, or microbatches of `rows` rows of `length` tokens do not divide by it.
    """
    batch = math.prod(getattr(layout, axis) for axis in mesh.BATCH)
    for option, value, axes, over in (
        ("rows", rows, " x ".join(mesh.BATCH), batch), ("length", length, "cp", layout.cp)
    ):  # fmt: skip
        if value % over:
            raise ValueError(f"--{option} must be a multiple of {axes} = {over}, got {value}")
    return mesh.make(layout)


def open_model(path: str, init: Literal["checkpoint", "random"], seed: int, on: jax.sharding.Mesh):
    """(config, fp32 master weights over the mesh) of a Hugging Face directory; "random" needs its config.json alone."""
    if init == "checkpoint":
        return hf.load(path, dtype="float32", mesh=on)
    config = hf.read_config(path)
    table = models.table(config)
    draw = jax.jit(lambda key: param.init(key, table), out_shardings=rules.of_params(table, on))
    return config, draw(jax.random.key(seed))


def read_rows(source: str, row: str = "", limit: int | None = None) -> list[dict]:
    """The rows of a file, folder or hub name, each through the function that `row` names, if any."""
    rows = datasets.rows(source, limit=limit)
    if not row:
        return rows
    convert = names.resolve(row)
    return [convert(record) for record in rows]


@contextlib.contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets, to be looked at between steps; a second Ctrl-C interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def out_directory(out: str) -> Path:
    """The run's directory, made if it is not there.

    Raises:
      ValueError: something else than a directory has that name.
    """
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out must be a directory, got the file {out}; name another place")
    path.mkdir(parents=True, exist_ok=True)
    return path
