"""What happened in a run, event by event: an append-only file of JSON lines, written by a thread of its own.

    with journal.writing("runs/x/journal.jsonl"):
        ...                       # what runs in here, and the tasks that it starts, notes events in that file
        journal.note("push", begun=begun, label="7-abcdef01")

Each line has `kind`, `at` (seconds of the event loop's clock when it was noted; `begun`, where there is one, is by the
same clock) and what `about` said of the task that noted it. A line `open` gives the time of day that belongs to `at`. A
process that is killed loses at most the lines of the last moment, and a cut last line is dropped by the next one.

| kind | of | fields |
|---|---|---|
| call | a completion | url, prompt_tokens, tokens, versions [[version, tokens], ...], finish, resumed |
| episode | an episode that ended | rows: tokens, logp of the sampled ones, versions, reward, turn by turn |
| group | a group that ended | admitted (version), outcome: accepted, rejected (no sample), refused, failed, stopped |
| batch | a batch handed out | version, prompts |
| part | of a training step | name: publish, save, wait, rollout, update, push, evaluate |
| left_out | a row that is too long to train on | tokens |
| push | | label, loaded, failed, pause_s, load_s, prove_s, probe_diff, stage_s, total_s, bytes, stage_bytes |
| server | a server that changed its state | url, state, why |
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

import numpy as np

from .types import Sample

log = logging.getLogger(__name__)

BUFFER = 1 << 20  # bytes of lines that wait to be written together, while more come

_file: contextvars.ContextVar[queue.SimpleQueue | None] = contextvars.ContextVar("journal", default=None)
_watch: contextvars.ContextVar[tuple[Callable[[dict], None], ...]] = contextvars.ContextVar("watch", default=())
_about: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("about", default={})  # noqa: B039 - not changed


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Events noted within are appended to the file; all are in it at the end."""
    lines: queue.SimpleQueue = queue.SimpleQueue()
    _mend(path)
    with open(path, "ab", buffering=0) as file:
        writer = threading.Thread(target=_write, args=(file, lines), name="journal", daemon=True)
        writer.start()
        token = _file.set(lines)
        try:
            note("open", time=time.time())
            yield
        finally:
            _file.reset(token)
            lines.put(None)
            writer.join()


@contextlib.contextmanager
def watching(see: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """`see` is called with each event noted within, at once and in the thread that notes it; it must not change it."""
    token = _watch.set((*_watch.get(), see))
    try:
        yield
    finally:
        _watch.reset(token)


@contextlib.contextmanager
def about(**fields: Any) -> Iterator[None]:
    """What is noted within, in this task and in those that it starts, has these fields too."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def note(kind: str, **fields: Any) -> None:
    """Appends an event; nothing where nobody keeps a journal. Of `rows`, Samples are put into JSON by the thread."""
    lines, watch = _file.get(), _watch.get()
    if lines or watch:
        event = {"kind": kind, "at": now(), **_about.get(), **fields}
        for see in watch:
            see(event)
        if lines:
            lines.put(event)


def runs(values: Sequence[int]) -> list[list[int]]:
    """[[value, how often in a row], ...]."""
    return [[int(value), len(list(some))] for value, some in itertools.groupby(values)]


def now() -> float:
    """Seconds by the event loop's clock."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # in a thread beside the loop, whose clock this is
        return time.monotonic()


def _write(file: BinaryIO, lines: queue.SimpleQueue) -> None:
    waiting = b""
    while (line := lines.get()) is not None:
        try:
            if "rows" in line:
                line["rows"] = [_row(sample) for sample in line["rows"]]
            waiting += json.dumps(line).encode() + b"\n"
        except (ValueError, TypeError) as error:
            log.warning("an event is not in the journal: %s", error)
        if lines.empty() or len(waiting) > BUFFER:
            _append(file, waiting)
            waiting = b""
    _append(file, waiting)


def _append(file: BinaryIO, data: bytes) -> None:
    """All of it or nothing: a full disk must not end the run for its diary, nor leave half a line in it."""
    whole = file.tell()
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        log.warning("%d events are not in the journal: %s", data.count(b"\n"), error)
        with contextlib.suppress(OSError):
            file.truncate(whole)
            file.seek(whole)


def _row(sample: Sample) -> dict[str, Any]:
    mask = np.asarray(sample.mask, bool)
    return {
        "tokens": sample.tokens.tolist(),
        "sampled": runs(mask.tolist()),
        "logp": [round(x, 5) for x in sample.logp[mask].tolist()],
        "versions": runs(sample.version[mask].tolist()),
        "rewards": [[int(at), float(value) if math.isfinite(value) else None] for at, value in sample.rewards],
        "finish": sample.finish,
    }


def _mend(path: str | os.PathLike) -> None:
    """Cuts off a last line without its end."""
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
