"""TensorBoard sink: a run's scalars and histograms as `kind/name`, in an event file."""

from __future__ import annotations

import pathlib
import time
import uuid
from typing import Any

from . import run_dir
from .tail import START, Mark


class TensorBoard:
    """An event file in a separate folder; each process rewrites it from the first line of the metrics.

    It therefore always has the same content as metrics.jsonl.
    """

    mark = START

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._writer: Any = None
        self._began: float | None = None  # time of day at second 0 of the run

    def begin(self) -> None:
        """Starts over with a new event file."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventsWriter(str(self.folder / "events"), f".{uuid.uuid4().hex[:8]}")
        # Makes a running TensorBoard drop what it has read.
        self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        self._began = None

    def take(self, lines: list[dict], mark: Mark) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if self._began is None:  # wall times follow the lines' seconds, without the time between processes
            self._began = time.time() - lines[-1].get("seconds", 0.0)
        for line in lines:
            at = self._began + line.get("seconds", 0.0)
            self._writer.write_event(Event(wall_time=at, step=line.get("step", 0), summary=_summary(line)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def _summary(line: dict) -> Any:
    from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

    kind = line.get("kind", "run")
    values = [Summary.Value(tag=f"{kind}/{k}", simple_value=x) for k, x in run_dir.numbers(line).items()]
    for name, shape in run_dir.histograms(line).items():
        edges, counts = shape["edges"], shape["counts"]
        middles = [(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
        moments = [sum(n * x**k for n, x in zip(counts, middles, strict=True)) for k in (1, 2)]
        histo = HistogramProto(
            min=edges[0], max=edges[-1], num=sum(counts), sum=moments[0], sum_squares=moments[1],
            bucket_limit=edges[1:], bucket=counts,
        )  # fmt: skip
        values.append(Summary.Value(tag=f"{kind}/{name}", histo=histo))
    return Summary(value=values)
