"""Prometheus as a sink of a run's metrics: an HTTP endpoint that tells the newest value of each, `areax_<kind>_<name>`.

What a step has a part of its own of (`glossary.COUNTED`) is a counter, the sum over all lines of metrics.jsonl, under
`areax_<kind>_<name>_total`; all else is a gauge.
"""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import metric_catalog, run_dir
from .tail import START, Mark


class Prometheus:
    """The endpoint, which is open until `close`.

    Attributes:
      live: asked for at each scrape: {name: value now}; names that end in _total are counters.
    """

    mark = START

    def __init__(self, host: str, port: int):
        """Raises ValueError where the address is taken, or not of this machine."""
        import prometheus_client

        self.live: Callable[[], Mapping[str, float]] = dict
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], float] = {}
        self._sums: dict[tuple[str, str], float] = collections.defaultdict(float)
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise ValueError(_taken(host, port, error)) from None

    def begin(self) -> None:
        """What was taken so far is void."""
        with self._lock:
            self._newest.clear()
            self._sums.clear()

    def take(self, lines: list[dict], mark: Mark) -> None:
        with self._lock:
            for line in lines:
                kind = str(line.get("kind", "run"))
                self._newest |= {(kind, name): line[name] for name in ("step", "seconds") if name in line}
                for name, value in run_dir.numbers(line).items():
                    if name in metric_catalog.COUNTED:
                        self._sums[kind, name] += value
                    else:
                        self._newest[kind, name] = value

    def collect(self) -> Iterable[Any]:
        """Called at each scrape, in a thread of its own."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            gauges = {_clean(kind, name): (name, value) for (kind, name), value in self._newest.items()}
            counters = {_clean(kind, name): (name, value) for (kind, name), value in self._sums.items()}
        for name, value in self.live().items():
            where = counters if name.endswith("_total") else gauges
            where[_clean(name.removesuffix("_total"))] = name, value
        for names, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, (own, value) in sorted(names.items()):
                yield family(name, metric_catalog.meaning(own), value=value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _clean(*words: str) -> str:
    return re.sub(r"\W", "_", "_".join(("areax", *words)), flags=re.ASCII)


def _taken(host: str, port: int, error: OSError) -> str:
    return f"--track.prometheus must be a free port of {host}, got {port} ({error.strerror}); name another one"
