"""`/metrics` for Prometheus, with SGLang's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from .service import Service

GAUGES = {
    "num_running_reqs": ("running", "requests that are generating"),
    "num_queue_reqs": ("queued", "requests that wait for a slot"),
    "num_used_tokens": ("used", "tokens that fit into the pages of running requests"),
    "max_total_num_tokens": ("capacity", "tokens that fit into the cache"),
    "token_usage": ("usage", "the part of the cache that running requests hold"),
    "drafts_from_mtp": ("predicts", "1 = drafts are made by multi-token prediction, 0 = found in texts, or none"),
}
COUNTERS = {  # of requests that have ended
    "prompt_tokens": ("prompt_tokens", "tokens of prompts"),
    "cached_tokens": ("cached_tokens", "tokens of prompts that were in the cache"),
    "generation_tokens": ("tokens", "generated tokens"),
    "draft_tokens": ("drafted", "drafted tokens"),
    "accepted_draft_tokens": ("accepted", "drafted tokens that were sampled"),
    "num_requests": ("ended", "requests that have ended"),
    "num_aborted_requests": ("aborted", "requests that were aborted"),
}


class Metrics:
    """The route, for the engine of `service`."""

    def __init__(self, service: Service):
        self.service = service
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.metrics, methods=["GET"])]

    async def metrics(self, http: HTTPRequest) -> Response:
        """Requests, tokens and the cache, as text for Prometheus."""
        text = prometheus_client.generate_latest(self._registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def collect(self) -> Iterable[Any]:
        """The values of now; called at each scrape."""
        now = self.service.engine.stats()
        now["usage"], now["predicts"] = now["used"] / now["capacity"], int(now["draft_from"] == "mtp")
        named = [self.service.tokenizer_path]
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, (source, what) in table.items():
                family = kind(f"sglang:{name}", what, labels=["model_name"])
                family.add_metric(named, now[source])
                yield family
