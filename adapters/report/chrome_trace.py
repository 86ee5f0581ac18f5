"""Converts a run's events to the Chrome trace format, for ui.perfetto.dev and chrome://tracing.

Tracks: the trainer's phases of each step, pushes, each server's completions, and server states. Times are microseconds
since the file was first opened. The format: "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from ..tracking import run_dir as tracker

EVENTS, TRACE = "events.jsonl", "trace.json"
FORMER = "journal.jsonl"  # what former versions called the events
TRAINER, SERVERS = 1, 2  # processes in the trace
CONCURRENT = ("push", "evaluate")  # phases that overlap others and so have separate tracks


def write(run_dir: pathlib.Path) -> pathlib.Path | None:
    """Writes `trace.json` from a run's events and returns its path; None without any."""
    if not (path := file(run_dir)).is_file():
        return None
    events = list(chrome(tracker.read_lines(path)))
    tracker.write_text(run_dir / TRACE, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return run_dir / TRACE


def file(run_dir: pathlib.Path) -> pathlib.Path:
    """The events of a run, or where they would be."""
    former = run_dir / FORMER
    return former if former.is_file() and not (run_dir / EVENTS).is_file() else run_dir / EVENTS


def chrome(events: Iterable[dict]) -> Iterator[dict[str, Any]]:
    """Converts a run's events to trace events, in order."""
    yield from (_named(TRAINER, "trainer"), _named(SERVERS, "servers"))
    threads: dict[tuple[int, str], int] = {}
    first, offset, calls = None, 0.0, 0

    def row(process: int, name: str) -> dict[str, int]:
        thread = threads.setdefault((process, name), len(threads) + 1)
        return {"pid": process, "tid": thread}

    def span(where: dict, name: str, event: dict, **arguments) -> dict:
        begun = _us(event["begun"] + offset)
        length = _us(event["at"] + offset) - begun
        return {"ph": "X", "name": name, "ts": begun, "dur": length, "args": arguments, **where}

    known = 0
    for event in events:
        if event["kind"] == "open":  # a resumed run has a new process with another clock
            first = event["time"] if first is None else first
            offset = event["time"] - event["at"] - first
        elif event["kind"] == "part":
            yield span(row(TRAINER, event["name"] if event["name"] in CONCURRENT else "steps"), event["name"], event)
        elif event["kind"] == "push":
            args = {name: event[name] for name in ("loaded", "failed", "pause_s", "load_s", "stage_s", "stage_bytes")}
            yield span(row(SERVERS, "pushes"), event["label"], event, **args)
        elif event["kind"] == "server":
            yield {"ph": "i", "s": "t", "name": event["state"], "ts": _us(event["at"] + offset),
                   "args": {"why": event["why"]}, **row(SERVERS, event["url"])}  # fmt: skip
        elif event["kind"] == "call":
            calls += 1
            where = row(SERVERS, event["url"])
            name = f"{event['tokens']} tokens"
            args = {k: event[k] for k in ("prompt", "episode", "of", "versions", "finish", "resumed") if k in event}
            # Calls of a server overlap, so they are async events with ids.
            common = {"cat": "call", "id": calls, "name": name, **where}
            yield {"ph": "b", "ts": _us(event["begun"] + offset), "args": args, **common}
            yield {"ph": "e", "ts": _us(event["at"] + offset), **common}
        for (process, name), thread in list(threads.items())[known:]:
            yield _named(process, name, thread)
        known = len(threads)


def in_flight(events: Iterable[dict]) -> dict[str, float]:
    """{url: mean number of concurrent completions of the server, from its first to its last}."""
    busy: dict[str, list[float]] = {}
    offset = 0.0
    for event in events:
        if event["kind"] == "open":
            offset = event["time"] - event["at"]
        if event["kind"] == "call":
            begun, ended = event["begun"] + offset, event["at"] + offset
            total = busy.setdefault(event["url"], [0.0, begun, ended])
            total[0] += ended - begun
            total[1:] = min(total[1], begun), max(total[2], ended)
    return {url: total / (last - first) for url, (total, first, last) in busy.items() if last > first}


def _named(process: int, name: str, thread: int | None = None) -> dict[str, Any]:
    what = "process_name" if thread is None else "thread_name"
    return {"ph": "M", "name": what, "pid": process, "tid": thread or 0, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
