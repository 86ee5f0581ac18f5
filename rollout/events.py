"""The events of a run: an append-only JSON Lines file, written by a background thread.

    with events.writing("runs/x/events.jsonl"):
        ...                       # code in this block, and the tasks it starts, append events to that file
        events.emit("push", begun=begun, label="7-abcdef01")

Each line has `kind`, `at` (when it was emitted, in seconds of the event loop's clock; `begun`, if present, uses the
same clock) and the fields that `about` set for the emitting task. An `open` line maps `at` to wall-clock time. A killed
process loses at most its last few lines; a truncated last line is removed when the file is opened again.

| kind | emitted for | fields |
|---|---|---|
| call | a completion | url, prompt_tokens, tokens, versions [[version, tokens], ...], finish, resumed, out_of_time |
| episode | an episode that ended | rows: number of tokens and of sampled ones, reward, finish |
| group | a group that ended | admitted (version), outcome: accepted, rejected (no sample), refused, failed, stopped |
| batch | a batch handed out | version, prompts |
| part | a part of a training step | name: publish, save, wait, rollout, update, push, evaluate |
| left_out | a row too long to train on | tokens |
| push | a push | label, loaded, failed, pause_s, load_s, prove_s, probe_diff, stage_s, total_s, bytes, stage_bytes |
| canary | a comparison of canaries | url, label, after, drifts, trainer, cache, limits, worst |
| server | a change of a server's state | url, state, why |
| options | a run that goes on with other options | version, former: the file with those before it |
| alarm | a metric beyond its bound | step, name, rule, shown: metrics and values, what, advice |
| not_finite | the first step with a number that is not finite | step, where: what the run says of it |
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from .types import Sample

log = logging.getLogger(__name__)

BUFFER = 1 << 20  # bytes of lines buffered before a write, while more are queued

_file: contextvars.ContextVar[queue.SimpleQueue | None] = contextvars.ContextVar("events", default=None)
_watch: contextvars.ContextVar[tuple[Callable[[dict], None], ...]] = contextvars.ContextVar("watch", default=())
_about: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("about", default={})  # noqa: B039 - not changed


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Appends events emitted within the block to the file, which is complete when the block ends."""
    lines: queue.SimpleQueue = queue.SimpleQueue()
    _truncate_partial_line(path)
    with open(path, "ab", buffering=0) as file:
        writer = threading.Thread(target=_write, args=(file, lines), name="events", daemon=True)
        writer.start()
        token = _file.set(lines)
        try:
            emit("open", time=time.time())
            yield
        finally:
            _file.reset(token)
            lines.put(None)
            writer.join()


@contextlib.contextmanager
def watching(see: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Calls `see` with each event emitted within the block, at once and in the emitting thread; read-only."""
    token = _watch.set((*_watch.get(), see))
    try:
        yield
    finally:
        _watch.reset(token)


@contextlib.contextmanager
def context(**fields: Any) -> Iterator[None]:
    """Adds these fields to all events emitted within the block, by this task and the tasks it starts."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def emit(kind: str, **fields: Any) -> None:
    """Emits an event to the file and watchers, if any. The writer thread converts the Samples in `rows` to JSON."""
    lines, watch = _file.get(), _watch.get()
    if lines or watch:
        event = {"kind": kind, "at": now(), **_about.get(), **fields}
        for see in watch:
            see(event)
        if lines:
            lines.put(event)


def runs(values: Sequence[int]) -> list[list[int]]:
    """Run-length encoding: [[value, count], ...]."""
    return [[int(value), len(list(run))] for value, run in itertools.groupby(values)]


def now() -> float:
    """The time in seconds on the event loop's clock."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # in another thread; the loop uses the same clock
        return time.monotonic()


def _write(file: BinaryIO, lines: queue.SimpleQueue) -> None:
    waiting = b""
    while (line := lines.get()) is not None:
        try:
            if "rows" in line:
                line["rows"] = [_row(sample) for sample in line["rows"]]
            waiting += json.dumps(line).encode() + b"\n"
        except (ValueError, TypeError) as error:
            log.warning("events: one could not be written as JSON: %s", error)
        if lines.empty() or len(waiting) > BUFFER:
            _append(file, waiting)
            waiting = b""
    _append(file, waiting)


def _append(file: BinaryIO, data: bytes) -> None:
    """Appends all of `data` or nothing: a full disk must neither end the run nor leave a partial line."""
    start = file.tell()
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        log.warning("%d events could not be written: %s", data.count(b"\n"), error)
        with contextlib.suppress(OSError):
            file.truncate(start)
            file.seek(start)


def _row(sample: Sample) -> dict[str, Any]:
    reward = sample.reward
    return {
        "tokens": len(sample.tokens),
        "sampled": int(sample.mask.sum()),
        "reward": reward if math.isfinite(reward) else None,
        "finish": sample.finish,
    }


def _truncate_partial_line(path: str | os.PathLike) -> None:
    """Removes a last line that does not end with a newline."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
