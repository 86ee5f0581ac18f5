"""SGLang's native routes for the embedded engine: generation, pauses, weights, versions, health.

Requests that SGLang would get silently wrong or crash on are refused with 400, and a refused update changes nothing:
a checkpoint with a missing, unexpected or misshapen tensor, or an update during an in-place pause after which requests
would continue with the cache of the old weights.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ... import __version__
from ...adapters import hf
from ...models import wrappers
from ..chat import fields
from ..chat.api import logprobs
from ..processes.http_limits import off_loop, read_json
from ..servers import labels
from . import request_parsing
from .async_bridge import Bridge
from .engine import RELEASABLE
from .request import Progress, Request, Sampling

PAUSES = ("abort", "retract", "in_place")
HEALTHY_S = 20.0  # how long /health waits for progress
CONFIG_BYTES = 2**20  # largest config.json, of a model or an adapter


@dataclasses.dataclass(frozen=True)
class Staged:
    """Weights prepared for an update.

    Attributes:
      files: the `state_of` of the folder `path` when they were read.
    """

    path: str
    files: frozenset
    weights: Any
    checksums: dict[str, str]


class Service:
    """The engine, the state of the server, and a handler for each route.

    Attributes:
      engine, bridge: process the requests.
      tokenizer: None = the model folder has none, and prompts are token ids.
      path: folder of the weights in use; `tokenizer_path`: the folder served initially.
      checksums: of the weights in use, from `read_weights`.
      dtype: of the weights in the engine.
      read: reads and stages a folder of weights, as `read_here`; replaced where other processes read, too (`hosts`).
    """

    def __init__(self, engine, tokenizer: Any, path: str, checksums: dict[str, str], dtype: str):
        self.engine, self.tokenizer, self.checksums, self.dtype = engine, tokenizer, checksums, dtype
        self.path = self.tokenizer_path = path
        self.read, self.started = self.read_here, time.time()
        self.bridge: Bridge  # made on the event loop, when the server starts
        self.piece = functools.partial(logprobs.piece, tokenizer)
        self._updating: asyncio.Lock
        self._staged: Staged | None = None

    def open(self) -> None:
        """Must be called on the event loop before the first request."""
        self.bridge, self._updating = Bridge(self.engine), asyncio.Lock()

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
            Route("/release_memory_occupation", self.release_memory_occupation, methods=post),
            Route("/resume_memory_occupation", self.resume_memory_occupation, methods=post),
            Route("/stage_weights_from_disk", self.stage_weights_from_disk, methods=post),
            Route("/update_weights_from_disk", self.update_weights_from_disk, methods=post),
            Route("/update_weight_version", self.update_weight_version, methods=post),
            Route("/weights_checker", self.weights_checker, methods=either),
        ]

    # -- generation ------------------------------------------------------------------------------

    async def generate(self, http: HTTPRequest) -> Response:
        """Continues prompts of text or token ids."""
        start = time.perf_counter()
        body = await read_json(http)
        ask = await off_loop(http, request_parsing.generate, body, self.tokenizer, self.engine.context)
        self.bridge.check_room(ask.requests)
        await self.compile([request.sampling for request in ask.requests])
        if ask.stream:
            return events(self._answers(ask, self.bridge.stream(ask.requests), start))
        done = await self.bridge.finish(ask.requests, disconnected(http))
        if done is None:
            return Response(status_code=499)  # nobody reads it
        answers = [self.answer(progress, ask, i, start) for i, progress in enumerate(done)]
        return Answer(answers[0] if ask.single else answers)

    async def compile(self, chosen: Sequence[Sampling]) -> None:
        """Compiles grammars, in a thread; raises as `Grammars.compile`, or Refused if there is no tokenizer."""
        grammars = self.engine.grammars
        for grammar in {one.grammar for one in chosen if one.grammar}:
            if grammars is None:
                raise fields.Refused(grammar.field, "a grammar needs a tokenizer, but the model folder has none")
            if not grammars.known(grammar):
                await asyncio.to_thread(grammars.compile, grammar)

    async def _answers(
        self, ask: request_parsing.Ask, news: AsyncIterator[tuple[int, Progress]], start: float
    ) -> AsyncIterator[dict]:
        async for i, progress in news:
            answer = self.answer(progress, ask, i, start)
            yield answer if ask.single else answer | {"index": i}

    def answer(self, progress: Progress, ask: request_parsing.Ask, i: int, start: float) -> dict:
        """The `/generate` answer for request i of a body, finished or in progress."""
        meta: dict[str, Any] = {
            "id": progress.rid,
            "finish_reason": progress.finish,
            "prompt_tokens": progress.prompt_tokens,
            "weight_version": progress.versions[-1][0] if progress.versions else self.engine.version,
            "num_retractions": progress.retractions,
            "lora_path": ask.requests[i].adapter or None,
            "constrained": ask.requests[i].sampling.constrained,
        }
        if ask.logprobs[i]:
            request = ask.requests[i]
            named = lambda logp, id: [logp, id, self.piece(id) if ask.texts else None]
            tops = lambda rows: [row if row is None else [named(*pair) for pair in row] for row in rows]
            if request.input_logprobs_from is None:
                meta["input_token_logprobs"] = []
            else:  # the contract's first entry never has a score
                inputs = request.prompt[request.input_logprobs_from :]
                scores = [None, *progress.input_logp[1:]]
                meta["input_token_logprobs"] = [named(logp, id) for logp, id in zip(scores, inputs, strict=False)]
            meta["output_token_logprobs"] = [
                named(logp, id) for logp, id in zip(progress.logp, progress.tokens, strict=True)
            ]
            meta["output_token_logprobs_length"] = len(progress.tokens)
            if request.top_logprobs:
                meta["input_top_logprobs"] = tops([None, *progress.input_top[1:]][: len(meta["input_token_logprobs"])])
                meta["output_top_logprobs"] = tops(progress.top)
        meta["completion_tokens"] = len(progress.tokens)
        meta["cached_tokens"] = progress.cached_tokens
        if ask.requests[i].routed_experts and progress.finish:  # i32[tokens but the last, layers, top_k]
            routed = np.array(progress.routed, np.int32)
            meta["routed_experts"] = base64.b64encode(routed.tobytes()).decode()
        if progress.finish:
            spans = progress.versions or [(meta["weight_version"], 0, 0)]
            meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
            meta["e2e_latency"] = time.perf_counter() - start
        return {"text": progress.decoded or "", "output_ids": progress.tokens, "meta_info": meta}

    # -- state -----------------------------------------------------------------------------------

    async def health(self, http: HTTPRequest) -> Response:
        """200 if the engine generates, else 503.

        It does if it makes progress on any request while a one-token probe is queued.
        """
        if not self.engine.able:
            return Response(status_code=503)
        begin = time.monotonic()
        probe = Request(f"health-{time.monotonic_ns()}", (0,), Sampling(temperature=0.0, max_new_tokens=1))
        task = asyncio.create_task(self.bridge.finish([probe], disconnected(http)))
        try:
            while time.monotonic() < begin + HEALTHY_S and self.engine.able:
                await asyncio.wait({task}, timeout=0.05)
                if self.bridge.heard > begin:
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
                "model_path": self.path,
                "served_model_name": self.path,
                "tokenizer_path": self.tokenizer_path if self.tokenizer is not None else None,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.version,
                "load_format": "safetensors",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self.engine.config.family,
                "architectures": source.get("architectures"),
            }
        )

    async def server_info(self, http: HTTPRequest) -> Response:
        """The server's options and state."""
        return Answer(
            {
                "model_path": self.tokenizer_path,
                "dtype": self.dtype,
                "context_length": self.engine.context,
                "max_running_requests": self.engine.slots,
                "max_total_num_tokens": self.engine.stats()["capacity"],
                "max_req_input_len": self.engine.context,
                "enable_deterministic_inference": True,
                "enable_lora": True,
                "stages_weights": True,
                "max_lora_rank": None,
                "lora_target_modules": ["all"],
                "startup_time": self.started,
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
            self.bridge.abort(rid)
        return Response(status_code=200)

    async def flush_cache(self, http: HTTPRequest) -> Response:
        """Forgets the keys and values of prompts, if no request runs."""
        flushed = await asyncio.to_thread(self.engine.flush)
        return PlainTextResponse("Cache flushed.\n" if flushed else "Flush cache failed.\n", 200 if flushed else 400)

    # -- memory ----------------------------------------------------------------------------------

    async def release_memory_occupation(self, http: HTTPRequest) -> Response:
        """Releases the memory of caches, weights, or both."""
        named = tags(await read_json(http))
        if "weights" in named:
            self._staged = None
        await asyncio.to_thread(self.engine.release, named)
        return Answer(None)

    async def resume_memory_occupation(self, http: HTTPRequest) -> Response:
        """Allocates released memory.

        Unlike SGLang, whose weights then have arbitrary content, this server generates only once weights are loaded;
        and it is not an error if nothing was released.
        """
        await asyncio.to_thread(self.engine.reclaim, tags(await read_json(http)))
        return Answer(None)

    # -- weights ---------------------------------------------------------------------------------

    async def update_weights_from_disk(self, http: HTTPRequest) -> Response:
        """Loads a checkpoint folder of the same model, once all of it is read and checked."""
        body = await read_json(http)
        async with self._updating:
            try:
                version = await self._update(body)
            except ValueError as error:
                return Answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        return Answer({"success": True, "message": message, "num_paused_requests": 0})

    async def stage_weights_from_disk(self, http: HTTPRequest) -> Response:
        """Reads a checkpoint folder of the same model while requests continue.

        An update from this folder then only swaps the weights, which shortens the pause.
        """
        body = await read_json(http)
        async with self._updating:
            try:
                await self._stage(body)
            except ValueError as error:
                return Answer({"success": False, "message": str(error)}, 400)
        return Answer({"success": True, "message": "Staged model weights."})

    async def _stage(self, body: dict) -> Staged:
        path = fields.name(body, "model_path")
        fields.refuse(body, {"load_format": ("auto", "safetensors")})
        files = await asyncio.to_thread(state_of, path)
        if self._staged is None or (self._staged.path, self._staged.files) != (path, files):
            self._staged = None  # never three versions in memory
            self._staged = Staged(path, files, *await asyncio.to_thread(self.read, path))
        return self._staged

    def read_here(self, path: str) -> tuple[Any, dict[str, str]]:
        """Stages the weights of a checkpoint folder of the same model; returns them, and the checksums of its tensors.

        Raises:
          ValueError: as `read_weights`, or it is another model; the memory for weights is released.
        """

        def stage(config, params):
            self._same_model(config, path)
            self.engine.check_memory()
            if self.engine.draft_from == "mtp" and (predictor := hf.mapped_mtp(path, config, self.dtype)):
                params = {**params, "mtp": predictor}
            return self.engine.stage(params)

        with readable(path):
            self._check_config(path)
            _, weights, checksums = read_weights(path, self.dtype, stage)
        return weights, checksums

    def _check_config(self, path: str) -> None:
        """Refuses another model by its config.json, before anything of it is built, which could be of any size."""
        file = Path(path) / "config.json"
        if file.is_file():
            check_file_size(file, CONFIG_BYTES)
            layers = wrappers.text(hf.read_json(file)).get("num_hidden_layers")
            if layers != self.engine.config.layers:
                problem = f"num_hidden_layers {fields.shown(layers)} instead of {self.engine.config.layers}"
                raise ValueError(f"{path}: must contain the model that is served, but has {problem}")
        self._same_model(hf.read_config(path), path, but=("source", "rest", "prefix", "value_head"))

    async def _update(self, body: dict) -> str:
        flush = fields.boolean({"flush_cache": True, **body}, "flush_cache")
        version = None if body.get("weight_version") is None else fields.name(body, "weight_version")
        staged = await self._stage(body)
        # Tokens must not get the old weights' label.
        version = version or f"unnamed-{together(staged.checksums)[:8]}"
        if fields.boolean(body, "abort_all_requests"):
            self.engine.abort_all()
        await asyncio.to_thread(self.engine.swap, staged.weights, version, flush=flush)  # waits for running requests
        self.path, self.checksums, self._staged = staged.path, staged.checksums, None
        return version

    def _same_model(self, config, path: str, but: Sequence[str] = ("source", "rest")) -> None:
        ours, theirs = dataclasses.asdict(self.engine.config), dataclasses.asdict(config)
        if other := [name for name in ours if name not in but and ours[name] != theirs.get(name)]:
            shown = ", ".join(f"{name} {fields.shown(theirs.get(name))} instead of {ours[name]!r}" for name in other)
            raise ValueError(f"{path}: must contain the model that is served, but has {shown}")

    async def update_weight_version(self, http: HTTPRequest) -> Response:
        """Renames the weights in use; a trainer's label must be theirs."""
        body = await read_json(http)
        version = fields.name(body, "new_version")
        held = labels.version_of(version) < 0 or await asyncio.to_thread(self._may_have, version)
        fields.rule(held, "new_version", "a trainer's label must be that of the content served", version)
        if fields.boolean({"abort_all_requests": True, **body}, "abort_all_requests"):
            self.engine.abort_all()
        await asyncio.to_thread(self.engine.set_version, version)
        message = f"Weight version updated to {version}"
        return Answer({"success": True, "message": message, "new_version": version})

    def _may_have(self, label: str) -> bool:
        """Whether a trainer's label is that of the weights in use: theirs already, or the hash of their manifest."""
        if label == self.engine.version:
            return True
        path = Path(self.path) / hf.MANIFEST
        if not path.is_file():
            return False
        with readable(self.path):
            manifest = hf.read_json(path)
            own = {name: entry["xxh3_128"] for name, entry in manifest["tensors"].items()}
        numbered = hf.json_bytes(manifest | {"version": labels.version_of(label)})
        return own == self.checksums and label == labels.label_of(numbered)

    async def weights_checker(self, http: HTTPRequest) -> Response:
        """The xxh3-128 hash of each loaded tensor, as in a published manifest.json."""
        action = (await read_json(http)).get("action", "checksum") if await http.body() else "checksum"
        if action != "checksum":
            message = f"action: must be checksum, got {fields.shown(action)}"
            return Answer({"success": False, "message": message}, 400)
        if not self.engine.loaded:
            return Answer({"success": False, "message": "weights: released, and none loaded since"}, 400)
        total = together(self.checksums)
        ranks = [{"checksums": self.checksums, "per_gpu_checksum": total}]
        return Answer({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": total})


def state_of(path: str) -> frozenset:
    """(name, inode, size, modification time) of the files in a folder; empty if there is no folder."""
    if not os.path.isdir(path):
        return frozenset()
    with readable(path):
        found = ((file.name, file.stat()) for file in os.scandir(path))
        return frozenset((name, is_.st_ino, is_.st_size, is_.st_mtime_ns) for name, is_ in found)


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Raises ValueError if the folder cannot be read, or its files have what no such file has."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: malformed ({type(error).__name__}: {error!s:.100})") from error


def check_file_size(path: Path, most: int) -> None:
    """Raises ValueError if a file is larger than `most` bytes."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"{path}: must have at most {most} bytes, got {size}")


def read_weights(
    path: str, dtype: str, take: Callable[[Any, Any], Any] = lambda config, params: params
) -> tuple[Any, Any, dict[str, str]]:
    """Reads a checkpoint folder: (config, parameters, xxh3-128 of each tensor by name), complete and verified against
    its manifest.json, if it has one. The parameters are views of its files, as in `hf.mapped`.

    Args:
      take: `take(config, parameters)` is returned instead of the parameters; it runs while the hashes are verified.

    Raises:
      ValueError: as `hf.load`, `hf.verify` and `take`.
    """
    with ThreadPoolExecutor(1) as pool:
        config, params, verify = hf.mapped(path, dtype)
        verified = pool.submit(verify)
        params = take(config, params)
        manifest = verified.result()
    if manifest is not None:
        return config, params, {name: entry["xxh3_128"] for name, entry in manifest["tensors"].items()}
    stored = hf.mapped(path, None)[1]
    specs, tensors = hf.to_tensors(config, stored, hf.save_dtype(config, stored))
    digest = lambda tensor: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return config, params, {name: digest(tensor) for name, tensor in zip(specs, tensors, strict=True)}


def together(checksums: dict[str, str]) -> str:
    """Combines checksums into one."""
    return xxhash.xxh3_128_hexdigest(json.dumps(checksums, sort_keys=True).encode())


def tags(body: dict) -> Sequence[str]:
    """The kinds of memory that a request names; all of them if it names none."""
    named = body.get("tags") or RELEASABLE
    right = isinstance(named, list | tuple) and all(tag in RELEASABLE for tag in named)
    fields.rule(right, "tags", f"must be a list of {', '.join(RELEASABLE)}", named)
    return named


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Answer(JSONResponse):
    """A JSON response that keeps NaN (a log-probability of broken weights) as Python's json module reads it."""

    def render(self, content: Any) -> bytes:
        return _encode(content).encode()


def events(answers: AsyncIterator[dict]) -> Response:
    """Streams answers as server-sent events."""

    async def lines() -> AsyncIterator[str]:
        async for answer in answers:
            yield f"data: {_encode(answer)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def disconnected(http: HTTPRequest):
    """A coroutine function that returns when the client disconnects; the body must have been read."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    return gone
