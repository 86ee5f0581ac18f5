"""Runs the requests of models, one at a time, each model's in the order of its `seq`.

A model is in memory once a request of it runs. What it needs then is computed: from the last saved state, and from the
requests that ran after it, which are run again without being answered again. So a server that was killed goes on where
it was, and a model that was parked comes back.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import optim
from . import codec, saves
from .log import DONE, FAILED, Checkpoint, Log, Request
from .model import Adapter, Base
from .order import Order

log = logging.getLogger(__name__)

PASS, STEP, CREATE = "forward_backward", "optim_step", "create_model"
LOAD, SAVE, SAVE_FOR_SAMPLER = "load_weights", "save_weights", "save_weights_for_sampler"
EPS = 1e-30  # least of AdamW: far less is 0 in float32, and a parameter without a gradient would become 0 / 0
CHANGES = PASS, STEP  # what is run again to restore a model; a load is followed by a saved state


class Worker:
    """The thread that trains.

    Args:
      out: folder of what is saved.
      served: the base model's name.
      save_every: updates of a model after which its state is saved; a killed server repeats at most as many.
      settled: called with a request that has run.
      replaced: called with the tinker:// path of weights for sampling that were saved once more.
    """

    def __init__(
        self, base: Base, store: Log, out: Path, served: str, save_every: int, settled: Callable[[Request], None],
        replaced: Callable[[str], None],
    ):  # fmt: skip
        self._base, self._log, self._out, self._served = base, store, out, served
        self._save_every, self._settled, self._replaced = save_every, settled, replaced
        self._order, self._wake = Order(), threading.Condition()
        self._adapters: dict[str, Adapter] = {}  # of this thread
        self._updates: dict[str, int] = {}  # since the last saved state
        self._kept: tuple[str, int] | None = None  # model and request of a state whose older ones may be removed
        self._leaving: list[tuple[str, bool]] = []  # models to take out of memory, and whether for good
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="areax-tinker", daemon=True)

    def start(self) -> None:
        for request in self._log.pending():
            if request.kind in KINDS:
                self.put(request)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the request that runs; the others stay pending."""
        with self._wake:
            self._closing.set()
            self._wake.notify()
        self._thread.join()

    def put(self, request: Request) -> None:
        """Queues an accepted request."""
        with self._wake:
            self._begin(request.owner)
            self._order.put(request.owner, request.seq, request.kind == PASS)
            self._wake.notify()

    def skip(self, owner: str, seq: int) -> None:
        """Notes that a request was refused."""
        with self._wake:
            self._begin(owner)
            self._order.skip(owner, seq)
            self._wake.notify()

    def too_late(self, owner: str, seq: int) -> bool:
        """Whether a later request of the model has run."""
        with self._wake:
            self._begin(owner)
            return self._order.passed(owner, seq)

    def leave(self, model: str, *, for_good: bool) -> None:
        """Takes a model out of memory once nothing of it runs; for good, its states and requests are forgotten too."""
        with self._wake:
            self._leaving.append((model, for_good))
            self._wake.notify()

    def _begin(self, owner: str) -> None:
        if not self._order.owns(owner):
            self._order.begin(owner, self._log.known(owner))

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing.is_set() or self._leaving) and (taken := self._order.take()) is None:
                    self._wake.wait()
                if self._closing.is_set():
                    return
                leaving, self._leaving = self._leaving, []
                if leaving:
                    taken = None
            for model, for_good in leaving:
                self._leave(model, for_good)
            if taken is not None and (request := self._log.request(*taken)) is not None:
                self._execute(request)

    def _leave(self, model: str, for_good: bool) -> None:
        self._adapters.pop(model, None)
        if for_good:
            with self._wake:
                self._order.drop(model)
            saves.drop_states(self._out, model)

    def _execute(self, request: Request) -> None:
        self._kept = None
        try:
            result, write = KINDS[request.kind](self, request)
        except Exception as error:  # the end of this thread would stop all models for a fault of one request
            self._adapters.pop(request.owner, None)  # its gradient may be lost: it is computed again
            kept = self._log.settle(request, FAILED, failure(request, error), self._closing)
        else:
            content = result if isinstance(result, bytes) else json.dumps(result).encode()
            kept = self._log.settle(request, DONE, content, self._closing, write)
            if kept and self._kept:
                saves.drop_states(self._out, *self._kept)
        if kept:
            self._settled(request)

    def _adapter(self, model: str) -> Adapter:
        """The model as it is after all that has run."""
        if model not in self._adapters:
            known = self._log.model(model)
            if known is None:
                raise ValueError(f"{model}: there is no such model; its session has ended")
            if known.saved is None:
                if (first := self._log.request(model, 0)) is not None and first.kind == LOAD:
                    raise ValueError(f"{model}: its weights could not be loaded; load them into another")
                adapter = self._base.new(self._spec(known.about), known.about["seed"])
            else:
                adapter = saves.read(saves.state_folder(self._out, model, known.saved), self._base, moments=True)
            self._updates[model] = 0
            for request in self._log.ran(model, known.saved or 0):
                if request.kind == PASS:
                    if not (asked := self._read(request)).forward_only:
                        self._base.run(adapter, asked)
                elif request.kind == STEP:
                    self._base.update(adapter, hyperparameters(json.loads(request.body or b"")))
                    self._updates[model] += 1
            self._adapters[model] = adapter
        return self._adapters[model]

    def _spec(self, about: dict[str, Any]):
        return self._base.spec(about["rank"], about["train_attn"], about["train_mlp"])

    def _read(self, request: Request) -> codec.Pass:
        return codec.read_pass(request.body or b"", self._base.config.vocab, self._base.context)

    def _keep(self, model: str, seq: int) -> Callable[[], None]:
        """Saves the state of a model after `seq`; returns what notes that, with the request's result."""
        saves.write(
            saves.state_folder(self._out, model, seq), self._base, self._adapters[model], self._served, moments=True
        )
        self._updates[model], self._kept = 0, (model, seq)
        return lambda: self._log.saved(model, seq)

    # -- each kind: (result, what is written with it) --------------------------------------------------

    def _create(self, request: Request) -> tuple[dict, Callable[[], None]]:
        self._adapter(request.owner)
        return {"type": "create_model", "model_id": request.owner}, _nothing

    def _pass(self, request: Request) -> tuple[bytes, Callable[[], None]]:
        loss, of_data = self._base.run(self._adapter(request.owner), self._read(request))
        return codec.pass_result(of_data, {"loss:sum": loss}), _nothing

    def _step(self, request: Request) -> tuple[dict, Callable[[], None]]:
        adapter = self._adapter(request.owner)
        report = self._base.update(adapter, hyperparameters(json.loads(request.body or b"")))
        self._updates[request.owner] += 1
        note = _nothing
        if self._updates[request.owner] >= self._save_every:
            try:
                note = self._keep(request.owner, request.seq)
            except OSError as error:  # the update is made all the same, and repeated if the server is killed
                log.warning("the state of %s is not saved, but after its next update: %s", request.owner, error)
        numbers = {name: x for name, x in report.items() if math.isfinite(x)}  # others are no JSON
        return {"type": "optim_step", "metrics": numbers}, note

    def _save(self, request: Request) -> tuple[dict, Callable[[], None]]:
        """save_weights, and save_weights_for_sampler."""
        body, sampler = json.loads(request.body or b""), request.kind == SAVE_FOR_SAMPLER
        name = body.get("path") or f"unnamed-{request.seq}"
        path = saves.address(request.owner, saves.SAMPLER if sampler else saves.WEIGHTS, name)
        model, session = self._log.model(request.owner), self._log.session(request.session)
        if model is None or session is None:
            raise ValueError(f"{request.owner}: there is no such model; its session has ended")
        for old in self._log.expired(now := time.time()):
            shutil.rmtree(saves.folder(self._out, old), ignore_errors=True)
            self._log.drop_checkpoint(old)
        again = self._log.checkpoint(path, now) is not None
        if again and not body.get("overwrite"):
            raise ValueError(f"{path} exists; choose another name, or save with overwrite=True")
        where = saves.folder(self._out, path)
        saves.write(where, self._base, self._adapter(request.owner), self._served, moments=not sampler)
        if again and sampler:
            self._replaced(path)
        ttl = body.get("ttl_seconds")
        checkpoint = Checkpoint(path, session.key, model.about, now, None if ttl is None else now + ttl)
        result: dict[str, Any] = {"type": request.kind, "path": path}
        sampler_id = ""
        if not body.get("path"):
            sampler_id = f"{request.session}:sample:{body['sampling_session_seq_id']}"
            result = {"type": request.kind, "sampling_session_id": sampler_id}

        def note() -> None:
            self._log.add_checkpoint(checkpoint)
            if sampler_id:
                self._log.add_sampler(sampler_id, request.session, path)

        return result, note

    def _load(self, request: Request) -> tuple[dict, Callable[[], None]]:
        """load_weights: into a new model, or in the older form into one that there is, whose gradient is then 0."""
        body = json.loads(request.body or b"")
        where = saves.folder(self._out, body["path"])
        self._adapters[request.owner] = saves.read(where, self._base, moments=body.get("optimizer", False))
        note = self._keep(request.owner, request.seq)
        return {"type": "load_weights", "path": body["path"], "model_id": request.owner}, note


def _nothing() -> None:
    pass


KINDS: dict[str, Callable[[Worker, Request], tuple[Any, Callable[[], None]]]] = {
    CREATE: Worker._create, PASS: Worker._pass, STEP: Worker._step, SAVE: Worker._save,
    SAVE_FOR_SAMPLER: Worker._save, LOAD: Worker._load,
}  # fmt: skip


def hyperparameters(body: dict[str, Any]) -> optim.AdamW:
    """The AdamW of an optim_step. Raises ValueError for a number out of its range."""
    given = codec.table(body, "adam_params")
    share = lambda name, default: codec.number(given, name, default, 0.0, 1 - 2**-24)
    return optim.AdamW(
        lr=codec.number(given, "learning_rate", 1e-4), b1=share("beta1", 0.9), b2=share("beta2", 0.95),
        eps=codec.number(given, "eps", 1e-12, EPS), weight_decay=codec.number(given, "weight_decay", 0.0),
        clip=codec.number(given, "grad_clip_norm", 0.0),
    )  # fmt: skip


def failure(request: Request, error: Exception) -> bytes:
    """What a client is told of a request that raised an error, which is logged: the user's fault is a ValueError."""
    category = "user" if isinstance(error, ValueError) else "server"
    if isinstance(error, ValueError | RuntimeError | OSError):
        log.warning("%s of %s: %.300s", request.kind, request.id, error)
    else:
        log.critical("%s of %s: a bug of this server", request.kind, request.id, exc_info=error)
    text = " ".join(str(error).split())[:2000] or type(error).__name__
    return json.dumps({"error": text, "category": category}).encode()


def seed_of(text: str) -> int:
    """A seed that is the same for the same text."""
    return zlib.crc32(text.encode())
