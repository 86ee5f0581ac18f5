"""Samples from the engine beside the training, with the base's weights or saved ones."""

from __future__ import annotations

import collections
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ..rollout.engine import engine as engines
from ..rollout.engine.request import Progress, Sampling
from ..rollout.engine.request import Request as Generation
from . import codec, saves
from .log import DONE, FAILED, Log, Request
from .model import Base, padded
from .worker import failure

ASAMPLE = "asample"
MOST = 1024  # samples of a request
LOADED = engines.ADAPTERS - 1  # adapters that are in the engine at the same time
UNSERVED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")


class Sampler:
    """Runs sample requests.

    Args:
      rank: of the adapters in the engine; others are padded to it.
      settled: called with a request that has run.
    """

    def __init__(
        self, engine: engines.Engine, base: Base, store: Log, out: Path, rank: int, settled: Callable[[Request], None]
    ):  # fmt: skip
        self._engine, self._base, self._log, self._out = engine, base, store, out
        self._rank, self._settled = rank, settled
        self._loaded: collections.OrderedDict[str, None] = collections.OrderedDict()  # the latest used last
        self._closing = threading.Event()
        self._begins = ThreadPoolExecutor(1, "areax-tinker-samples")
        self._ends = ThreadPoolExecutor(1, "areax-tinker-results")

    def start(self) -> None:
        self._engine.start()
        for request in self._log.pending():
            if request.kind == ASAMPLE:
                self.put(request)

    def close(self) -> None:
        """What has not ended stays pending."""
        self._closing.set()
        self._begins.shutdown(cancel_futures=True)
        self._engine.close()
        self._ends.shutdown(cancel_futures=True)

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises ValueError for a request that cannot be served."""
        wanted = generations("", body, "", self._engine.context)
        self._engine.checked([(each, _ignore) for each in wanted])

    def put(self, request: Request) -> None:
        """Queues an accepted request."""
        self._run(self._begins, self._begin, request)

    def _run(self, executor: ThreadPoolExecutor, function: Callable, request: Request, *more: Any) -> None:
        """Runs a function on an executor; what it raises is the request's result."""

        def ended(future: Future) -> None:
            if not future.cancelled() and (error := future.exception()):
                self._finish(request, FAILED, failure(request, cast(Exception, error)))

        executor.submit(function, request, *more).add_done_callback(ended)

    def cancel(self, request: Request) -> None:
        """Ends a request with what it has."""
        body = json.loads(request.body or b"{}")
        self._engine.abort(*(f"{request.id}#{i}" for i in range(samples(body))))

    def _begin(self, request: Request) -> None:
        body = json.loads(request.body or b"")
        known = self._log.sampler(request.owner)
        if known is None:
            raise ValueError(f"{request.owner}: there is no such sampling session")
        wanted = generations(request.id, body, self._load(known[1]), self._engine.context)
        together = Together(len(wanted), lambda done: self._run(self._ends, self._end, request, body, done))
        self._engine.submit_all(wanted, together.tell)

    def _load(self, path: str) -> str:
        """The engine's name of saved weights, which it then has; those that were not used for longest make room.

        "" is the base's."""
        if not path:
            return ""
        if path not in self._loaded:
            spec, weights = saves.weights(saves.folder(self._out, path), self._base)
            if len(self._loaded) >= LOADED:
                self._engine.drop_adapter(self._loaded.popitem(last=False)[0])
            self._engine.load_adapter(path, *padded(self._base, spec, weights, self._rank))
        self._loaded[path] = None
        self._loaded.move_to_end(path)
        return path

    def forget(self, path: str) -> None:
        """Takes weights that were saved anew out of the engine, so that the new ones are loaded."""

        def act() -> None:
            if path in self._loaded:
                del self._loaded[path]
                self._engine.drop_adapter(path)

        self._begins.submit(act).result()

    def _end(self, request: Request, body: Mapping[str, Any], done: list[Progress]) -> None:
        aborted = next((each.finish for each in done if each.finish and each.finish["type"] == "abort"), None)
        if aborted and self._closing.is_set():
            return
        if aborted:
            raise RuntimeError(aborted["message"]) if "status_code" in aborted else ValueError("cancelled")
        self._finish(request, DONE, result(body, done))

    def _finish(self, request: Request, state: str, content: bytes) -> None:
        if self._log.settle(request, state, content, self._closing):
            self._settled(request)


class Together:
    """Waits for the last progress of the generations of a request, whose names end with #0, #1, ..."""

    def __init__(self, count: int, done: Callable[[list[Progress]], Any]):
        self._found: list[Progress | None] = [None] * count
        self._left, self._done, self._lock = count, done, threading.Lock()

    def tell(self, progress: Progress) -> None:
        if not progress.finish:
            return
        with self._lock:
            self._found[int(progress.rid.rpartition("#")[2])] = progress
            self._left -= 1
            complete = self._left == 0
        if complete:
            self._done([each for each in self._found if each is not None])


def _ignore(progress: Progress) -> None:
    pass


def samples(body: Mapping[str, Any]) -> int:
    return codec.whole(body, "num_samples", 1, 1, MOST)


def generations(id: str, body: Mapping[str, Any], adapter: str, context: int) -> list[Generation]:
    """The engine's requests of an asample; raises ValueError if it asks for what is not served."""
    for name in UNSERVED:
        if body.get(name):
            raise ValueError(f"{name} is not served, got {body[name]!r:.80}; leave it out")
    prompt = codec.tokens(body, "prompt")
    asked = codec.table(body, "sampling_params")
    room = max(0, context - len(prompt))
    top_k, last = codec.whole(asked, "top_k", -1, -1), body.get("prompt_logprobs_last_n")
    tops, prompt_tops = _tops(body)
    stop = asked.get("stop")
    words, ids = _stops(stop)
    sampling = Sampling(
        temperature=codec.number(asked, "temperature", 1.0),
        top_p=codec.number(asked, "top_p", 1.0, most=1.0),
        top_k=-1 if top_k == 0 else top_k,
        max_new_tokens=codec.whole(asked, "max_tokens", room),
        stop=words,
        stop_token_ids=ids,
        ignore_eos=stop is not None,
    )
    reads = codec.flag(body, "prompt_logprobs", False) or prompt_tops > 0
    start = max(0, len(prompt) - codec.whole(body, "prompt_logprobs_last_n", least=1)) if last is not None else 0
    seed = asked.get("seed")
    source = id if seed is None else f"seed {codec.whole(asked, 'seed', least=-(2**63), most=2**64 - 1)}"
    return [
        Generation(
            f"{id}#{i}",
            prompt,
            _seeded(sampling, f"{source} {i}"),
            start if reads and i == 0 else None,
            max(tops, prompt_tops if i == 0 else 0),
            adapter=adapter,
        )  # fmt: skip
        for i in range(samples(body))
    ]


def _tops(body: Mapping[str, Any]) -> tuple[int, int]:
    """How many of the likeliest tokens are reported of samples, and of the prompt."""
    return codec.whole(body, "topk_sample_logprobs", 0), codec.whole(body, "topk_prompt_logprobs", 0)


def _stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Strings and token ids that end a sample."""
    given = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return tuple(given), ()
    if isinstance(given, list) and all(type(each) is int for each in given):
        return (), tuple(given)
    raise ValueError(f"stop must be a string, strings or token ids, got {stop!r:.80}")


def _seeded(sampling: Sampling, source: str) -> Sampling:
    """With a seed that is the same for the same text."""
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little"))


def result(body: Mapping[str, Any], done: list[Progress]) -> bytes:
    """The SampleResponse of generations that have ended."""
    tops, prompt_tops = _tops(body)
    first, count = done[0], len(codec.tokens(body, "prompt"))
    sequences = [
        codec.Sampled(
            each.tokens, each.logp, (each.finish or {})["type"] == "length", each.top if tops else None
        )  # fmt: skip
        for each in done
    ]
    if not (body.get("prompt_logprobs") or prompt_tops):
        return codec.sample_result(sequences, cached=first.cached_tokens, k=tops)
    ahead = count - len(first.input_logp)
    logp: list = [None] * ahead + first.input_logp
    top: list | None = [None] * ahead + first.input_top if prompt_tops else None
    return codec.sample_result(sequences, [None, *logp[1:]], top, first.cached_tokens, tops, prompt_tops)
