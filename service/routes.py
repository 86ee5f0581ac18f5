"""The HTTP routes: what a request must be, whose it is, and what is answered at once."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..rollout.processes import http_limits
from . import codec, saves, worker
from .futures import Futures
from .log import DONE, PENDING, REFUSED, Checkpoint, Log, Model, Request
from .model import Base
from .sampling import ASAMPLE, Sampler, samples
from .sessions import Sessions

log = logging.getLogger(__name__)

API = "/api/v1"
HELD_S = 40.0  # most seconds that a poll is held; clients give up after 45
NOTE = (
    "areax: adapters have alpha 32 at every rank and none on the output head: train_unembed has no effect. "
    "What else differs is in docs/tinker.md."
)
MODELS = worker.PASS, worker.STEP, worker.SAVE, worker.SAVE_FOR_SAMPLER  # routes whose body names a model and a seq_id


@dataclass(frozen=True)
class Service:
    """What the routes share.

    Attributes:
      out: folder of what is saved.
      served: the base model's name; `names`: all that it has.
      rank: the highest rank of adapters.
    """

    base: Base
    store: Log
    sessions: Sessions
    futures: Futures
    worker: worker.Worker
    sampler: Sampler
    out: Path
    served: str
    names: frozenset[str]
    rank: int


def routes(service: Service) -> list[Route]:
    """All routes of the API."""
    handle = Handlers(service)
    posts = {
        "client/config": handle.config, "client/dynamic_config": handle.config, "telemetry": handle.telemetry,
        "create_session": handle.create_session, "session_heartbeat": handle.heartbeat,
        "sessions/{id}/finish": handle.finish, "create_model": handle.create_model, "load_weights": handle.load_weights,
        "get_info": handle.get_info, "weights_info": handle.weights_info,
        "create_sampling_session": handle.create_sampling_session, "asample": handle.asample,
        "retrieve_future": handle.retrieve_future, "cancel_future": handle.cancel_future,
        **{kind: handle.of_model for kind in MODELS},
    }  # fmt: skip
    gets = {
        "get_server_capabilities": handle.capabilities, "samplers/{id:path}": handle.sampler_info,
        "training_runs/{id}/checkpoints": handle.checkpoints,
    }  # fmt: skip
    one = f"{API}/training_runs/{{id}}/checkpoints/{{kind}}/{{name}}"
    return [
        Route(one, handle.of_key(handle.delete_checkpoint), methods=["DELETE"]),
        *(Route(f"{API}/{path}", handle.of_key(answer), methods=["POST"]) for path, answer in posts.items()),
        *(Route(f"{API}/{path}", handle.of_key(answer), methods=["GET"]) for path, answer in gets.items()),
        Route(f"{API}/healthz", handle.healthz, methods=["GET"]),
    ]


async def failed(http: Http, error: Exception) -> Response:
    """The answer to a request that raised an error: {"detail": text}."""
    status, message = http_limits.status_of(error)
    if status != http_limits.GONE:
        log.warning("%s %.100r: %d: %.300s", http.method, http.url.path, status, message)
    return JSONResponse({"detail": message}, status, getattr(error, "headers", None))


Answer = Callable[[Http, str], Awaitable[Response]]


class Handlers:
    """The routes; each gets the request and what stands for its key."""

    def __init__(self, service: Service):
        self._of = service

    def of_key(self, answer: Answer) -> Callable[[Http], Awaitable[Response]]:
        async def handled(http: Http) -> Response:
            return await answer(http, self._of.sessions.key(http))

        return handled

    # -- without a model -----------------------------------------------------------------------------

    async def healthz(self, http: Http) -> Response:
        return JSONResponse({"status": "ok"})

    async def config(self, http: Http, key: str) -> Response:
        """The client's flags: those of clients before 0.25 that make them send passes in protobuf, as later ones do.
        What other flags turn on is not served."""
        return JSONResponse({"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True})

    async def telemetry(self, http: Http, key: str) -> Response:
        await http.body()
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, http: Http, key: str) -> Response:
        about = {
            "model_name": self._of.served, "max_context_length": self._of.base.context, "trainable": True,
            "sampleable": True,
        }  # fmt: skip
        return JSONResponse({"supported_models": [about]})

    async def create_session(self, http: Http, key: str) -> Response:
        body = await _json(http)
        about = {"sdk_version": codec.text(body, "sdk_version", "")}
        id = await asyncio.to_thread(self._of.sessions.create, key, about)
        return JSONResponse({"type": "create_session", "session_id": id, "info_message": NOTE})

    async def heartbeat(self, http: Http, key: str) -> Response:
        self._of.sessions.heartbeat(key, codec.text(await _json(http), "session_id"))
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, http: Http, key: str) -> Response:
        for model in await asyncio.to_thread(self._of.sessions.end, key, http.path_params["id"]):
            self._of.worker.leave(model, for_good=True)
        return Response(status_code=204)

    # -- models --------------------------------------------------------------------------------------

    async def create_model(self, http: Http, key: str) -> Response:
        body = await _json(http)
        session = self._of.sessions.of(key, codec.text(body, "session_id"))
        self._check_base(codec.text(body, "base_model"))
        _check_optimizer(body)
        lora = codec.table(body, "lora_config")
        rank = codec.whole(lora, "rank", least=1, most=self._of.rank)
        about = {name: codec.flag(lora, name, True) for name in ("train_attn", "train_mlp")}
        self._of.base.spec(rank, about["train_attn"], about["train_mlp"])  # refuses what has no matrices
        model = f"{session.id}:train:{codec.whole(body, 'model_seq_id')}"
        seed = lora.get("seed")
        drawn = worker.seed_of(model) if seed is None else codec.whole(lora, "seed")
        request = Request(model, 0, session.id, worker.CREATE, await http.body())
        return await self._created(request, {**about, "rank": rank, "seed": drawn})

    async def load_weights(self, http: Http, key: str) -> Response:
        body = await _json(http)
        if body.get("session_id") is None:
            return await self.of_model(http, key)
        session = self._of.sessions.of(key, codec.text(body, "session_id"))
        about = self._loadable(body, key)
        model = f"{session.id}:train:{codec.whole(body, 'model_seq_id')}"
        return await self._created(Request(model, 0, session.id, worker.LOAD, await http.body()), about)

    async def of_model(self, http: Http, key: str) -> Response:
        """A request of a model, by `seq_id`. One that is refused has used it up, as clients go on with the next."""
        kind, body = http.url.path.rpartition("/")[2], await http.body()
        fields: dict[str, Any] = {}
        if kind == worker.PASS:
            id, seq = await http_limits.off_loop(http, codec.read_pass_order, body)
        else:
            fields = await _json(http)
            id, seq = codec.text(fields, "model_id"), codec.whole(fields, "seq_id", least=1, most=2**31 - 1)
        model = self._of.sessions.model(key, id)
        request = Request(id, seq, model.session, kind, body)
        if known := await asyncio.to_thread(self._of.store.request, id, seq):
            return _same(known, request)
        try:
            if kind == worker.PASS:
                await asyncio.to_thread(codec.read_pass, body, self._of.base.config.vocab, self._of.base.context)
            else:
                self._check(kind, fields, model, key)
        except (ValueError, HTTPException):
            await asyncio.to_thread(self._refuse, request)
            raise
        return await self._accepted(request, self._of.worker.put)

    def _check(self, kind: str, body: Mapping[str, Any], model: Model, key: str) -> None:
        if kind == worker.STEP:
            if body.get("optimizer_params"):
                raise ValueError("optimizer_params: AdamW is served alone; give adam_params")
            worker.hyperparameters(dict(body))
        elif kind == worker.LOAD:
            if (rank := self._loadable(body, key)["rank"]) != model.about["rank"]:
                raise ValueError(f"path must be of a model of rank {model.about['rank']}, got {rank}")
        elif kind == worker.SAVE or body.get("path") is not None:
            codec.saved_name(body)
            codec.flag(body, "overwrite", False)
        else:
            codec.whole(body, "sampling_session_seq_id")
        if body.get("ttl_seconds") is not None:
            codec.whole(body, "ttl_seconds", least=1, most=10**10)
        if body.get("kind") not in (None, "snapshot"):
            raise ValueError(f"kind must be snapshot, got {body['kind']!r:.80}; inflight is not served")

    def _refuse(self, request: Request) -> None:
        if self._of.store.add(replace(request, body=None, state=REFUSED)):
            self._of.worker.skip(request.owner, request.seq)

    def _check_base(self, name: str) -> None:
        if name not in self._of.names:
            raise ValueError(f"base_model must be {self._of.served}, which this server has, got {name!r:.200}")

    def _loadable(self, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """What is known of the saved state that a load_weights names."""
        _check_optimizer(body)
        codec.flag(body, "optimizer", False)
        path = codec.text(body, "path")
        checkpoint = self._saved(path, key)
        if path.split("/")[-2] != saves.WEIGHTS:
            raise ValueError(f"path must be of save_state, which has the optimizer's state, got {path:.200}")
        return checkpoint

    def _saved(self, path: str, key: str) -> dict[str, Any]:
        """What is known of a tinker:// path. Raises HTTPException 404."""
        checkpoint = self._of.store.checkpoint(path, time.time())
        if checkpoint is None or checkpoint.key != key:
            raise HTTPException(404, f"path: nothing is saved as {path!r:.200}")
        return checkpoint.about

    async def _created(self, request: Request, about: dict[str, Any]) -> Response:
        if known := self._of.store.request(request.owner, 0):
            return _same(known, request)

        def add(request: Request) -> None:
            self._of.store.add_model(request.owner, request.session, about)

        return await self._accepted(request, self._of.worker.put, add)

    async def _accepted(
        self, request: Request, put: Callable[[Request], None], add: Callable[[Request], None] = lambda request: None,
        **more: Any,
    ) -> Response:  # fmt: skip
        """Makes a request durable, queues it, and answers with its id."""

        def accept() -> None:
            if self._of.worker.too_late(request.owner, request.seq):
                raise ValueError(f"seq_id {request.seq}: a later request of {request.owner} has run already")
            with self._of.store.together():
                if not (new := self._of.store.add(request)):
                    return
                add(request)
            if new:
                put(request)

        await asyncio.to_thread(accept)
        return JSONResponse({"request_id": request.id, **more})

    async def get_info(self, http: Http, key: str) -> Response:
        model = self._of.sessions.model(key, codec.text(await _json(http), "model_id"))
        about = {"arch": self._of.base.config.family, "model_name": self._of.served, "tokenizer_id": self._of.served}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": about,
                "is_lora": True,
                "lora_rank": model.about["rank"],
                "model_name": self._of.served,
            }  # fmt: skip
        )

    async def weights_info(self, http: Http, key: str) -> Response:
        about = self._saved(codec.text(await _json(http), "tinker_path"), key)
        train = {name: about[name] for name in ("train_attn", "train_mlp")}
        return JSONResponse({"base_model": self._of.served, "is_lora": True, "lora_rank": about["rank"], **train})

    async def checkpoints(self, http: Http, key: str) -> Response:
        """What a model has saved, also if its session has ended."""
        found = self._of.store.checkpoints(key, f"{saves.SCHEME}{http.path_params['id']}/", time.time())
        return JSONResponse({"checkpoints": [_listed(each) for each in found]})

    async def delete_checkpoint(self, http: Http, key: str) -> Response:
        path = saves.address(*(http.path_params[name] for name in ("id", "kind", "name")))
        self._saved(path, key)

        def delete() -> None:
            self._of.store.drop_checkpoint(path)
            self._of.sampler.forget(path)
            shutil.rmtree(saves.folder(self._of.out, path), ignore_errors=True)

        await asyncio.to_thread(delete)
        return Response(status_code=204)

    # -- sampling ------------------------------------------------------------------------------------

    async def create_sampling_session(self, http: Http, key: str) -> Response:
        body = await _json(http)
        session = self._of.sessions.of(key, codec.text(body, "session_id"))
        if path := codec.text(body, "model_path", ""):
            self._saved(path, key)
        else:
            self._check_base(codec.text(body, "base_model"))
        id = f"{session.id}:sample:{codec.whole(body, 'sampling_session_seq_id')}"
        await asyncio.to_thread(self._of.store.add_sampler, id, session.id, path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": id})

    def _sampler(self, id: str, key: str) -> tuple[str, str]:
        found = self._of.store.sampler(id)
        if found is None:
            raise HTTPException(404, f"sampling_session_id: there is no sampling session {id!r:.80}")
        self._of.sessions.heartbeat(key, found[0])
        return found

    async def sampler_info(self, http: Http, key: str) -> Response:
        _, path = self._sampler(id := http.path_params["id"], key)
        about = {"model_path": path} if path else {}
        return JSONResponse({"sampler_id": id, "base_model": self._of.served, **about})

    async def asample(self, http: Http, key: str) -> Response:
        body = await _json(http)
        id, seq = codec.text(body, "sampling_session_id"), codec.whole(body, "seq_id")
        session, _ = self._sampler(id, key)
        request = Request(id, seq, session, ASAMPLE, await http.body())
        names = {"sample_sequence_ids": [f"{request.id}:{i}" for i in range(samples(body))]}
        if known := await asyncio.to_thread(self._of.store.request, id, seq):
            return _same(known, request, **names)
        await asyncio.to_thread(self._of.sampler.check, body)

        def accept() -> None:
            if self._of.store.add(request):
                self._of.sampler.put(request)

        await asyncio.to_thread(accept)
        return JSONResponse({"request_id": request.id, **names})

    # -- results -------------------------------------------------------------------------------------

    def _request(self, found: Request | None, id: str, key: str) -> Request:
        if found is None:
            raise HTTPException(404, f"request_id: there is no request {id!r:.200}")
        self._of.sessions.of(key, found.session)
        return found

    async def retrieve_future(self, http: Http, key: str) -> Response:
        id = codec.text(await _json(http), "request_id")
        self._request(self._of.futures.find(id), id, key)
        found = self._request(await self._of.futures.wait(id, HELD_S), id, key)
        if found.state == PENDING:
            return JSONResponse({"detail": f"request {id} has not run yet; ask again"}, 408)
        binary = found.state == DONE and found.kind in (worker.PASS, ASAMPLE)
        return Response(found.result, media_type=codec.PROTOBUF if binary else "application/json")

    async def cancel_future(self, http: Http, key: str) -> Response:
        """Ends a sample; what trains is not cancelled, because later requests count on it."""
        id = codec.text(await _json(http), "request_id")
        found = self._request(self._of.futures.find(id), id, key)
        if found.state == PENDING and found.kind == ASAMPLE:
            await asyncio.to_thread(self._of.sampler.cancel, found)
        return JSONResponse({})


async def _json(http: Http) -> dict[str, Any]:
    return await http_limits.read_json(http) if await http.body() else {}


def _same(known: Request, request: Request, **more: Any) -> Response:
    """The answer to a request whose `seq` its owner has used: the same as at first, if it is the same route."""
    if known.kind != request.kind or known.state == REFUSED:
        what = "was refused" if known.state == REFUSED else f"is a {known.kind}"
        raise ValueError(f"seq_id {known.seq} of {known.owner} {what}; take the next one")
    return JSONResponse({"request_id": known.id, **more})


def _listed(checkpoint: Checkpoint) -> dict[str, Any]:
    *_, kind, name = checkpoint.path.split("/")
    iso = lambda seconds: datetime.fromtimestamp(seconds, UTC).isoformat()
    return {
        "checkpoint_id": f"{kind}/{name}", "checkpoint_type": "sampler" if kind == saves.SAMPLER else "training",
        "time": iso(checkpoint.made), "tinker_path": checkpoint.path, "public": False,
        "expires_at": None if checkpoint.expires is None else iso(checkpoint.expires),
    }  # fmt: skip


def _check_optimizer(body: Mapping[str, Any]) -> None:
    config = codec.table(body, "optimizer_config")
    if config.get("type", "adamw") != "adamw":
        raise ValueError(f"optimizer_config: type must be adamw, got {config['type']!r:.80}")
