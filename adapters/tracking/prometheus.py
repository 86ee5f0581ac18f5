"""Prometheus sink: an HTTP endpoint with the latest value of each of a run's metrics, `areax_<kind>_<name>`.

Metrics in `metric_catalog.COUNTED` are counters, `areax_<kind>_<name>_total`, summed over all lines of metrics.jsonl;
all others are gauges.
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
    """The endpoint, open until `close`.

    Attributes:
      live: called at each scrape for current values {name: value}; names that end in _total are counters.
    """

    mark = START

    def __init__(self, host: str, port: int):
        """Raises ValueError if the address is in use or not of this machine."""
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
        """Discards all values received so far."""
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
        """Called at each scrape, in a separate thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            gauges = {_clean(kind, name): (name, value) for (kind, name), value in self._newest.items()}
            counters = {_clean(kind, name): (name, value) for (kind, name), value in self._sums.items()}
        for name, value in self.live().items():
            where = counters if name.endswith("_total") else gauges
            where[_clean(name.removesuffix("_total"))] = name, value
        for names, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, (metric, value) in sorted(names.items()):
                yield family(name, metric_catalog.meaning(metric), value=value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _clean(*words: str) -> str:
    return re.sub(r"\W", "_", "_".join(("areax", *words)), flags=re.ASCII)


def _taken(host: str, port: int, error: OSError) -> str:
    return f"--track.prometheus must be a free port of {host}, got {port} ({error.strerror}); use another one"
