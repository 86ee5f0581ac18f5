"""SGLang's native routes for the embedded engine: generation, state and health, pauses and aborts.

Requests that SGLang would get silently wrong or crash on are refused with 400.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from .... import __version__
from ...chat import fields
from ...processes.http_limits import off_loop, read_json
from ..request import Progress, Request, Sampling
from . import request_parsing
from .replies import Answer, disconnected, events, failure
from .service import Service

PAUSES = ("abort", "retract", "in_place")
HEALTHY_S = 20.0  # how long /health waits for progress


class SGLang:
    """Handlers of these routes, for the engine of `service`."""

    def __init__(self, service: Service):
        self.service, self.engine = service, service.engine

    def routes(self) -> list[Route]:
        get, post, either = ["GET"], ["POST"], ["GET", "POST"]
        return [
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            Route("/health", self.health, methods=get),
            Route("/health_generate", self.health, methods=get),
            Route("/ready", self.ready, methods=get),
            Route("/model_info", self.model_info, methods=get),
            Route("/get_model_info", self.model_info, methods=get),
            Route("/server_info", self.server_info, methods=get),
            Route("/get_server_info", self.server_info, methods=get),
            Route("/v1/loads", self.loads, methods=get),
            Route("/pause_generation", self.pause_generation, methods=post),
            Route("/continue_generation", self.continue_generation, methods=post),
            Route("/abort_request", self.abort_request, methods=post),
            Route("/flush_cache", self.flush_cache, methods=either),
        ]

    # -- generation ------------------------------------------------------------------------------

    async def generate(self, http: HTTPRequest) -> Response:
        """Continues prompts of text or token ids."""
        start = time.perf_counter()
        body = await read_json(http)
        given = body, self.service.tokenizer, self.engine.context, self.engine.pictures
        ask = await off_loop(http, request_parsing.generate, *given)
        self.service.bridge.check_room(ask.requests)
        await self.service.compile([request.sampling for request in ask.requests])
        if ask.stream:
            return events(self._answers(ask, self.service.bridge.stream(ask.requests, every=ask.every), start))
        done = await self.service.bridge.finish(ask.requests, disconnected(http))
        if done is None:
            return Response(status_code=499)  # nobody reads it
        if failed := failure(done):
            raise HTTPException(*failed)
        answers = [self.service.answer(progress, ask, i, start) for i, progress in enumerate(done)]
        return Answer(answers[0] if ask.single else answers)

    async def _answers(
        self, ask: request_parsing.Ask, news: AsyncIterator[tuple[int, Progress]], start: float
    ) -> AsyncIterator[dict]:
        async for i, progress in news:
            if failed := failure([progress]):
                yield {"error": {"message": failed[1], "code": failed[0]}}
                return
            answer = self.service.answer(progress, ask, i, start)
            yield answer if ask.single else answer | {"index": i}

    # -- state -----------------------------------------------------------------------------------

    async def health(self, http: HTTPRequest) -> Response:
        """200 if the engine generates, else 503.

        It does if it makes progress on any request while a one-token probe is queued.
        """
        if not self.engine.able:
            return Response(status_code=503)
        begin = time.monotonic()
        probe = Request(f"health-{time.monotonic_ns()}", (0,), Sampling(temperature=0.0, max_new_tokens=1))
        task = asyncio.create_task(self.service.bridge.finish([probe], disconnected(http)))
        try:
            while time.monotonic() < begin + HEALTHY_S and self.engine.able:
                await asyncio.wait({task}, timeout=0.05)
                if self.service.bridge.heard > begin:
                    return Response(status_code=200)
                if task.done():  # the engine has ended
                    task.exception()
                    break
        finally:
            task.cancel()
        return Response(status_code=503)

    async def ready(self, http: HTTPRequest) -> Response:
        """200 if the engine can generate."""
        return Response(status_code=200 if self.engine.able else 503)

    async def model_info(self, http: HTTPRequest) -> Response:
        """The model and the label of its weights."""
        source = json.loads(self.engine.config.source)
        return Answer(
            {
                "model_path": self.service.path,
                "served_model_name": self.service.path,
                "tokenizer_path": self.service.tokenizer_path if self.service.tokenizer is not None else None,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.version,
                "load_format": "safetensors",
                "has_image_understanding": self.service.sees,
                "has_audio_understanding": False,
                "model_type": self.engine.config.family,
                "architectures": source.get("architectures"),
            }
        )

    async def server_info(self, http: HTTPRequest) -> Response:
        """The server's options and state."""
        options = self.engine.options
        return Answer(
            {
                "model_path": self.service.tokenizer_path,
                "dtype": self.service.dtype,
                "quantization": " ".join(x for x in (options.weights, options.kv_cache_dtype) if x != "auto") or None,
                "context_length": self.engine.context,
                "max_running_requests": self.engine.slots,
                "max_total_num_tokens": self.engine.stats()["capacity"],
                "max_req_input_len": self.engine.context,
                "enable_deterministic_inference": True,
                "enable_lora": True,
                "stages_weights": True,
                "max_lora_rank": None,
                "lora_target_modules": ["all"],
                "startup_time": self.service.started,
                "internal_states": [self.engine.stats()],
                "version": f"areax {__version__}",
            }
        )

    async def loads(self, http: HTTPRequest) -> Response:
        """Queue lengths and cache usage, with SGLang's names."""
        now = self.engine.stats()
        load = {
            "dp_rank": 0,
            "num_running_reqs": now["running"],
            "num_waiting_reqs": now["queued"],
            "num_used_tokens": now["used"],
            "max_total_num_tokens": now["capacity"],
            "max_running_requests": self.engine.slots,
            "token_usage": round(now["used"] / now["capacity"], 4),
        }
        return Answer({"timestamp": time.time(), "version": __version__, "loads": [load]})

    # -- pauses and aborts -----------------------------------------------------------------------

    async def pause_generation(self, http: HTTPRequest) -> Response:
        """Pauses generation: aborts requests, requeues them, or keeps them in place."""
        mode = (await read_json(http)).get("mode", "abort")
        fields.rule(mode in PAUSES, "mode", f"must be one of {', '.join(PAUSES)}", mode)
        await asyncio.to_thread(self.engine.pause, mode)
        return Answer({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: HTTPRequest) -> Response:
        """Continues generation after a pause."""
        await read_json(http)
        await asyncio.to_thread(self.engine.resume)
        return Answer({"message": "Generation continued successfully.", "status": "ok"})

    async def abort_request(self, http: HTTPRequest) -> Response:
        """Aborts one request, or all."""
        body = await read_json(http)
        rid = body.get("rid") or ""
        right = isinstance(rid, str) and len(rid) <= request_parsing.LONGEST_RID
        fields.rule(right, "rid", f"must be a string of at most {request_parsing.LONGEST_RID} characters", rid)
        if fields.boolean(body, "abort_all"):
            self.engine.abort_all()
        elif rid:
            self.service.bridge.abort(rid)
        return Response(status_code=200)

    async def flush_cache(self, http: HTTPRequest) -> Response:
        """Forgets the keys and values of prompts, if no request runs."""
        flushed = await asyncio.to_thread(self.engine.flush)
        return PlainTextResponse("Cache flushed.\n" if flushed else "Flush cache failed.\n", 200 if flushed else 400)
