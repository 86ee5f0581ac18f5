"""Serves the embedded engine with SGLang's HTTP API: `serve(path)`."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import math
from pathlib import Path
from typing import Any

import jax
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import models
from ...adapters import hf
from ...adapters import tokenizer as tokenizers
from ...models import paging
from ...parallel.multihost import processes
from ...parallel.multihost.channel import Share
from ..chat.api import messages
from ..chat.fields import Refused
from ..processes import http_limits as limits
from ..processes import http_process, keys
from ..servers.engine_mesh import ONE_DEVICE, EngineMesh
from ..servers.labels import read_label
from . import bench, hosts, openapi, replicas
from .adapters_api import Adapters
from .grammar import Grammars
from .metrics_api import Metrics
from .openai_api import OpenAI
from .sglang_api import Answer, Service, read_weights
from .tokenize_api import Tokenizer

log = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {  # of uvicorn; the last: seconds for responses in progress at shutdown
    "loop": "auto", "lifespan": "on", "timeout_graceful_shutdown": 5
}  # fmt: skip
MADE_BY = {"mtp": "drafts by multi-token prediction", "text": "drafts from texts"}
UNGUARDED = ("/health", "/health_generate", "/ready")  # answered without the key


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    slots: int = 0,
    context: int = 2048,
    memory: float = 0,
    mesh: EngineMesh = ONE_DEVICE,
    draft: int = 1,
    kv_cache_dtype: str = "auto",
    dtype: str = "auto",
    version: str | None = None,
    seed: int = 0,
    api_key: str | None = None,
    style: str = "",
    reasoning: bool = True,
) -> None:
    """Serves the checkpoint folder `path` until SIGTERM or SIGINT; prints a line that begins with the URL when ready.

    In a job of several processes (`parallel.multihost.processes`) the mesh has the devices of all. Process 0 serves,
    the others follow it until it ends.

    Args:
      port: 0 = any free port.
      slots: sequences that each replica generates at the same time; further requests wait. 0 = `default_slots`.
      context: longest sequence, prompt and generated tokens; the model's limit if that is lower.
      memory: GB of keys, values and states on each device; 0 = as much as all slots may need, or what a device has
        beside weights.
      mesh: how devices are used.
      draft, kv_cache_dtype: as for `Engine`.
      version: label of the weights until the first update; None = that of a published version, else "default".
      seed: from which requests without a seed get theirs.
      dtype: of weights and computation; "auto" = that of the platform.
      api_key: key that requests must send as `Authorization: Bearer KEY`; whoever has it can also replace the weights.
      style, reasoning: as for `OpenAI`.

    Raises:
      ValueError: the address is not available, or it is reachable from other machines and there is no key; the folder
        cannot be loaded; processes have other options or weights than process 0. Nothing is served then.
      RuntimeError: another process has ended, or the engine of several.
    """
    with hosts.joined() as (index, share), contextlib.ExitStack() as stack:
        if index == 0:
            guarded = http_process.bind_guarded(host, port, key=api_key, variable=keys.SERVER, what="serve")
            sock = stack.enter_context(contextlib.closing(guarded))
        service = load(
            path, share, slots=slots, context=context, memory=memory, mesh=mesh, draft=draft,
            kv_cache_dtype=kv_cache_dtype, dtype=dtype, version=version or published_label(path), seed=seed,
        )  # fmt: skip
        engine = service.engine
        if index > 0:
            engine.device.follow(share)
            return
        url = http_process.address((host, sock.getsockname()[1]))
        ready = f"{url} serves {engine.config.family} {path}, {engine.slots} slots of {engine.context} tokens"
        if draft > 1:
            ready += f", {MADE_BY[engine.draft_from]}"
        if service.tokenizer is None:
            ready += ", token ids only (the folder has no tokenizer)"
        with hosts.serving(engine):
            http_process.serve(app(service, api_key, style, reasoning), sock, ready, ending=engine.abort_all, **OPTIONS)


def benchmark(
    path: str, *, slots: int, context: int, memory: float, mesh: EngineMesh, draft: int = 1,
    kv_cache_dtype: str = "auto", dtype: str,
) -> None:  # fmt: skip
    """Prints how fast the checkpoint folder `path` would be served, as a table; options as for `serve`.

    Raises:
      ValueError: the folder cannot be loaded, or the context is too short to measure.
    """
    with hosts.joined() as (index, share):
        engine = load(
            path, share, slots=slots, context=context, memory=memory, mesh=mesh, draft=draft,
            kv_cache_dtype=kv_cache_dtype, dtype=dtype, version="default",
        ).engine  # fmt: skip
        if index > 0:
            engine.device.follow(share)
            return
        with hosts.serving(engine):
            prompt, answer = bench.lengths(engine.context, draft)
            print(
                f"{engine.config.family} {path}: prompts of {prompt} random tokens, answers of {answer}, "
                f"{known_dtype(dtype)}, {mesh} of {jax.device_count()} ({jax.devices()[0].device_kind})"
                + (f", {MADE_BY[engine.draft_from]}" if draft > 1 else ""),
                flush=True,
            )
            for line in bench.table(bench.measure(engine)):
                print(line, flush=True)


def load(path: str, share: Share, *, dtype: str, **options) -> Service:
    """The service of the checkpoint folder `path`, over all processes of the job; options as for `prepare`.

    Raises:
      ValueError: as `prepare`; processes have other options or weights than process 0.
    """
    dtype = known_dtype(dtype)
    config, params, checksums = read_weights(path, dtype)
    processes.same("options and weights", dtype, options, checksums)
    service = prepare(path, config, params, checksums, dtype=dtype, **options)
    hosts.connect(service, share)
    return service


def known_dtype(dtype: str) -> str:
    """The dtype of weights and computation that "auto" stands for on this platform; any other is returned as given."""
    return models.default_dtype(jax.default_backend()) if dtype == "auto" else dtype


def published_label(path: str) -> str:
    """The label of the published version in the folder `path`; "default" if it is another checkpoint."""
    manifest = Path(path) / hf.MANIFEST
    if not manifest.is_file() or hf.read_json(manifest).get("version") is None:
        return "default"
    return read_label(manifest)


def prepare(
    path: str, config, params, checksums: dict[str, str], *, slots: int, context: int, memory: float = 0,
    mesh: EngineMesh = ONE_DEVICE, draft: int = 1, kv_cache_dtype: str = "auto", dtype: str, version: str,
    seed: int = 0,
) -> Service:  # fmt: skip
    """Makes an engine with a copy of these weights, and its service; with a tokenizer if the folder `path` has one, and
    with drafts by its layer for multi-token prediction."""
    tokenizer, decode, grammars = None, None, None
    if any((Path(path) / name).is_file() for name in tokenizers.FILES):
        tokenizer = tokenizers.load(path)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
        grammars = Grammars(tokenizer, config.vocab, config.eos)
    if not 0 <= memory < math.inf:
        raise ValueError(f"memory must be a number of GB, or 0, got {memory}")
    context = min(context, config.context)
    slots = slots or paging.default_slots(jax.default_backend(), context)
    if draft > 1 and (predictor := hf.mapped_mtp(path, config, dtype)):
        params = {**params, "mtp": predictor}
    processes.same("layer for multi-token prediction", "mtp" in params)
    engine = replicas.serving(
        config, params, slots=slots, context=context, memory=memory * 1e9 or None, mesh=mesh, version=version,
        decode=decode, grammars=grammars, seed=seed, draft=draft, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    return Service(engine, tokenizer, str(path), checksums, dtype)


def app(service: Service, api_key: str | None = None, style: str = "", reasoning: bool = True) -> ASGIApp:
    """The server as an ASGI application; `style` and `reasoning` as for `OpenAI`."""

    @contextlib.asynccontextmanager
    async def lifespan(_):
        service.open()
        yield

    parts = (service, Adapters(service), OpenAI(service, style, reasoning), Tokenizer(service), Metrics(service))
    routes = [route for part in parts for route in part.routes()]
    inner = limits.app(openapi.with_document(routes), failed=_failed, lifespan=lifespan)
    return inner if api_key is None else _guarded(inner, api_key)


async def _failed(http: HTTPRequest, error: Exception) -> Response:
    """The response to an error, in the shape of the API: Anthropic's, or OpenAI's next to SGLang's."""
    status, message = limits.status_of(error)
    if (status, message) == (404, "Not Found"):
        message = _no_route(http.url.path)
    if http.url.path.startswith("/v1/messages"):
        return Answer(messages.error(status, message), status, getattr(error, "headers", None))
    kind = "BadRequestError" if status == 400 else "InternalServerError" if status >= 500 else "Error"
    flat = {
        "message": message,
        "type": kind,
        "param": error.name if isinstance(error, Refused) else None,
        "code": status,
    }
    return Answer({"object": "error", **flat, "error": flat}, status, getattr(error, "headers", None))


def _no_route(path: str) -> str:
    """What is wrong with a path that no route has, most often because of its client's address."""
    if path.startswith("/v1/v1/"):
        return f"there is no {path}; give Anthropic's clients the address without /v1"
    if path in ("/chat/completions", "/completions", "/responses", "/models"):
        return f"there is no {path}; give OpenAI's clients the address with /v1"
    return f"there is no {path}; /openapi.json lists the routes"


def _guarded(inner: ASGIApp, api_key: str) -> ASGIApp:
    expected = f"Bearer {api_key}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in UNGUARDED:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")  # Anthropic's
            if not hmac.compare_digest(given, expected):
                refusal = HTTPException(401, "the key is missing or wrong", limits.CLOSE)
                await (await _failed(HTTPRequest(scope), refusal))(scope, receive, send)
                return
        await inner(scope, receive, send)

    return guarded
