"""The in-process engine: requests share slots of one cache and are decoded together, on a thread of the engine's own.

Between dispatches the thread carries out what other threads asked for (pause, abort, load), lets waiting requests into
free slots, and hands out what was generated.
"""

import atexit
import collections
import math
import operator
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import models
from ...core import param
from . import decode as programs
from .request import Progress, Request
from .sampling import TOP
from .text import Text

COLUMNS, STOPS = programs.COLUMNS, programs.STOPS
COUNTS = ("requests", "tokens", "dispatches", "prefills", "prefilled_tokens")


@dataclass(eq=False)
class Live:
    """A request in the engine, waiting or in a slot."""

    request: Request
    tell: Callable[[Progress], None]
    seed: int
    stops: frozenset[int]
    text: Text | None
    progress: Progress
    slot: int | None = None

    @property
    def prefix(self) -> tuple[int, ...]:
        """What must lie in the cache before decoding goes on: everything but the last token."""
        return (*self.request.prompt, *self.progress.tokens)[:-1]


@dataclass(eq=False)
class Row:
    """A sequence to prefill for all requests that need it; `scored`: (last token, top) where it is to be scored too."""

    prefix: tuple[int, ...]
    scored: tuple[int, int] | None
    lives: list[Live] = field(default_factory=list)


class Engine:
    """Generates for many requests at once.

    Samples, log-probabilities included, are bit-equal whatever else runs, in whatever slot and order. A request that
    was put back (retracted) or is sent anew with its tokens so far continues its stream of random numbers.

    Attributes:
      version: label of the weights, stamped on every token sampled.
      paused: nothing is computed until `resume`.
    """

    def __init__(
        self,
        config,
        params,
        *,
        slots: int = 16,
        context: int = 2048,
        version: str = "default",
        decode: Callable[[list[int]], str] | None = None,
        seed: int = 0,
        steps: int = 8,
    ):
        """
        Args:
          params: the model's parameter tree; copied, so the caller may donate its own.
          slots: sequences decoded together.
          context: most tokens of a sequence, prompt included.
          decode: text of token ids without special tokens; None = no text and no stop strings.
          seed: of the streams of requests that bring none.
          steps: tokens of each slot a dispatch.

        Raises:
          ValueError: a size below 1, or parameters that are not the config's.
        """
        for name, value in {"slots": slots, "context": context, "steps": steps}.items():
            if value < 1:
                raise ValueError(f"Engine: {name} must be at least 1, got {value}")
        self.config, self.slots, self.context, self.steps = config, slots, context, steps
        self.version, self.paused = version, False
        self._decode = decode
        self._seeds = random.Random(seed)
        self._dtype = params["embed"].dtype
        self._weights = self._staged(params)
        self._counts: collections.Counter[str] = collections.Counter()

        self._state = np.zeros((slots, len(COLUMNS) + STOPS), np.int32)
        self._free = dict.fromkeys(range(slots))  # an ordered set: the slot idle for longest comes first
        self._running: dict[int, Live] = {}
        self._entering: list[Live] = []  # those that are just being let in
        self._clear()

        # Shared between threads, under the lock of `_wake`; everything else belongs to the engine's thread.
        self._wake = threading.Condition()
        self._queue: collections.deque[Live] = collections.deque()
        self._names: set[str] = set()
        self._acts: collections.deque[tuple[Callable[[], Any], Future]] = collections.deque()
        self._loads: collections.deque[tuple[Callable[[], None], Future]] = collections.deque()
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None

    # What other threads call.

    def start(self) -> None:
        """Starts the engine's thread."""
        if self._closed or self._thread:
            raise RuntimeError("Engine.start: an engine starts once")
        self._thread = threading.Thread(target=self._run, name="areax-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon thread must not be inside XLA while the interpreter goes down

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Aborts whatever is in the engine and ends its thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    def submit(self, request: Request, on_progress: Callable[[Progress], None]) -> None:
        """Queues a request. `on_progress` is called on the engine's thread after each dispatch that brought tokens, and
        a last time with a `finish`; it must return soon and not raise, and a Progress it got does not change any more.

        Raises:
          ValueError: a request that cannot be served, in one line.
          RuntimeError: the engine is closed.
        """
        self._enqueue([(request, on_progress)])

    def generate(self, requests: Sequence[Request]) -> list[Progress]:
        """Serves the requests and waits for all of them."""
        if self._thread is None:
            raise RuntimeError("Engine.generate: the engine does not run; call start() first")
        results: list[Future] = [Future() for _ in requests]

        def keep(result):
            return lambda progress: result.set_result(progress) if progress.finish else None

        self._enqueue([(request, keep(result)) for request, result in zip(requests, results, strict=True)])
        return [result.result() for result in results]

    def abort(self, rid: str) -> None:
        """Ends a request, which finishes as abort with its tokens so far; unknown names are passed over."""
        self._post(lambda: self._abort(lambda live: live.request.rid == rid))

    def abort_all(self) -> None:
        """Ends every request, running or waiting."""
        self._post(lambda: self._abort(lambda live: True))

    def pause(self, mode: str) -> None:
        """Stops computing, and returns once nothing is computed any more. Requests may still be submitted; they wait.

        Args:
          mode: what happens to running requests: "abort" finishes them with their tokens so far; "retract" puts them
            back in the queue with their tokens, to be prefilled again; "in_place" keeps their caches.
        """
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause: mode must be abort, retract or in_place, got {mode!r}")

        def act():
            self.paused = True
            if mode == "abort":
                self._abort(lambda live: live.slot is not None)
            elif mode == "retract":
                self._retract()

        self._call(act)

    def resume(self) -> None:
        """Goes on after a pause."""
        self._call(lambda: setattr(self, "paused", False))

    def load(self, params, version: str, *, flush: bool = True) -> None:
        """Serves new weights from the next dispatch on; returns when they are in place.

        They are staged beside the live ones first. While not paused, running requests finish under the old weights and
        others wait.

        Args:
          flush: forget what old weights cached. False lets requests that were paused in place go on over the old
            weights' cache, which is neither model's distribution.

        Raises:
          ValueError: parameters of another shape or dtype, or requests paused in place while flush is asked for; the
            old weights stay.
        """
        weights = self._staged(params)

        def swap():
            if flush and self._running:
                raise ValueError(
                    f"load: the cache cannot be flushed while {len(self._running)} requests are paused in place; "
                    "pause with retract or abort, or load with flush=False"
                )
            self._weights, self.version = weights, version
            self._clear()

        self._call(swap, when_idle=True)

    def flush(self) -> bool:
        """Forgets cached prompts. False, and nothing done, while requests are running."""

        def act():
            if not self._running:
                self._clear()
            return not self._running

        return self._call(act)

    def set_version(self, version: str) -> None:
        """Relabels the weights from the next token on."""
        self._call(lambda: setattr(self, "version", version))

    def stats(self) -> dict:
        """Sizes, requests running and queued, and counts since the start: requests, tokens generated, dispatches,
        prefills and prefilled tokens."""
        return {
            "slots": self.slots,
            "context": self.context,
            "running": len(self._running),
            "queued": len(self._queue),
            "paused": self.paused,
            "version": self.version,
            **{name: self._counts[name] for name in COUNTS},
        }

    # Between the threads.

    def _enqueue(self, pairs: Iterable[tuple[Request, Callable[[Progress], None]]]) -> None:
        lives = [(self._checked(request), tell) for request, tell in pairs]
        with self._wake:
            if self._closing:
                raise RuntimeError("Engine.submit: the engine is closed")
            names = {request.rid for request, _ in lives}
            if len(names) < len(lives) or names & self._names:
                raise ValueError(f"rid: names must be unique among requests in the engine, got {sorted(names)[:3]}")
            self._names |= names
            for request, tell in lives:
                sampling = request.sampling
                seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
                stops = self._stops(request)
                text = Text(self._decode) if self._decode else None
                progress = Progress(request.rid, len(request.prompt))
                self._queue.append(Live(request, tell, seed, stops, text, progress))
            self._counts["requests"] += len(lives)
            self._wake.notify()

    def _stops(self, request: Request) -> frozenset[int]:
        own = () if request.sampling.ignore_eos else self.config.eos
        return frozenset(own) | frozenset(request.sampling.stop_token_ids)

    def _checked(self, request: Request) -> Request:
        """The request, once it is known to be servable."""
        s, prompt, context, vocab = request.sampling, request.prompt, self.context, self.config.vocab

        def must(holds, rule):
            if not holds:
                raise ValueError(rule)

        def ids(what, values):
            bad = [x for x in values if type(x) is not int or not 0 <= x < vocab]
            must(not bad, f"{what} must be integers from 0 to {vocab - 1}, the model's vocabulary, got {bad[:3]}")

        must(len(prompt) > 0, "Either text or input_ids should be provided, with at least one token.")
        ids("input_ids", prompt)
        ids("stop_token_ids", s.stop_token_ids)
        must(
            len(prompt) <= context,
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens).",
        )
        must(s.max_new_tokens >= 0, f"max_new_tokens must be at least 0, got {s.max_new_tokens}.")
        must(
            len(prompt) + s.max_new_tokens <= context,
            f"The input ({len(prompt)} tokens) and max_new_tokens ({s.max_new_tokens}) together are longer than the "
            f"model's context length ({context} tokens).",
        )
        must(
            0 <= s.min_new_tokens <= s.max_new_tokens,
            f"min_new_tokens must be from 0 to max_new_tokens ({s.max_new_tokens}), got {s.min_new_tokens}.",
        )
        must(
            math.isfinite(s.temperature) and s.temperature >= 0,
            f"temperature must be a non-negative finite number, got {s.temperature}.",
        )
        must(0 < s.top_p <= 1, f"top_p must be in (0, 1], got {s.top_p}.")
        must(0 <= s.min_p <= 1, f"min_p must be in [0, 1], got {s.min_p}.")
        must(s.top_k == -1 or 1 <= s.top_k < 2**31, f"top_k must be -1 (off) or at least 1, got {s.top_k}.")
        must(
            s.seed is None or 0 <= operator.index(s.seed) < 2**64,
            f"sampling_seed must be an integer from 0 to 2^64 - 1, got {s.seed}.",
        )
        must(not s.stop or self._decode is not None, "stop strings need a tokenizer, and the engine has none.")
        must(all(s.stop), "stop strings must not be empty.")
        must(len(self._stops(request)) <= STOPS, f"at most {STOPS} stop ids are supported, the model's own included.")
        must(0 <= request.top_logprobs <= TOP, f"top_logprobs must be from 0 to {TOP}, got {request.top_logprobs}.")
        start = request.input_logprobs_from
        must(
            start is None or 0 <= start <= len(prompt),
            f"input logprobs must start within the input ({len(prompt)} tokens), got {start}.",
        )
        return request

    def _post(self, act: Callable[[], Any], *, when_idle: bool = False) -> Future:
        """Has the engine's thread do `act` between dispatches."""
        done: Future = Future()
        with self._wake:
            if self._closing:
                raise RuntimeError("Engine: the engine is closed")
            (self._loads if when_idle else self._acts).append((act, done))
            self._wake.notify()
        if self._thread is None:
            self._act()
        return done

    def _call(self, act: Callable[[], Any], *, when_idle: bool = False) -> Any:
        if self._thread is threading.current_thread():
            raise RuntimeError("Engine: a callback may submit and abort; pause, load and flush belong to other threads")
        return self._post(act, when_idle=when_idle).result()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(self._something_to_do)
                    if self._closing:
                        return
                self._act()
                if not self.paused:
                    if not self._loads:
                        self._admit()
                    if self._running:
                        self._dispatch()
        finally:
            self._end()

    def _something_to_do(self) -> bool:
        if self._closing or self._acts:
            return True
        if self.paused:
            return bool(self._loads)
        return bool(self._running or self._queue or self._loads)

    def _act(self) -> None:
        """Carries out what was asked for; loads wait until nothing runs, unless paused."""
        while True:
            with self._wake:
                if self._acts:
                    act, done = self._acts.popleft()
                elif self._loads and (self.paused or not self._running):
                    act, done = self._loads.popleft()
                else:
                    return
            try:
                done.set_result(act())
            except (ValueError, RuntimeError) as error:
                done.set_exception(error)

    def _end(self) -> None:
        with self._wake:
            self._closing = self._closed = True
            waiting = [done for _, done in (*self._acts, *self._loads)]
            self._acts.clear()
            self._loads.clear()
        for done in waiting:
            done.set_exception(RuntimeError("Engine: the engine is closed"))
        self._abort(lambda live: True)

    def _staged(self, params):
        """Weights for decoding on the engine's device, after a check against the config."""
        expected = param.abstract(models.table(self.config), self._dtype)
        shapes = lambda tree: {
            jax.tree_util.keystr(path, simple=True, separator="."): (tuple(x.shape), jnp.dtype(x.dtype).name)
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        wanted, given = shapes(expected), shapes(params)
        for name in sorted(wanted.keys() | given.keys()):
            if wanted.get(name) != given.get(name):
                raise ValueError(
                    f"Engine: parameter {name} must be {wanted.get(name, 'absent')}, got {given.get(name, 'none')}"
                )
        return jax.block_until_ready(programs.stage(jax.device_put(params, jax.local_devices()[0])))

    def _clear(self) -> None:
        """Forgets what slots hold; new arrays, so that nothing of diverged weights (NaN) lives on in an idle slot."""
        if not self._running:
            self._caches = programs.caches(self.config, self.slots, self.context, self._dtype)
        self._slot_of: dict[tuple[int, ...], int] = {}  # prefilled sequence -> a slot whose cache begins with it
        self._prefix_of: dict[int, tuple[int, ...]] = {}

    def _abort(self, which: Callable[[Live], bool]) -> None:
        with self._wake:
            gone = [live for live in self._queue if which(live)]
            self._queue = collections.deque(live for live in self._queue if not which(live))
        gone += [live for live in {*self._running.values(), *self._entering} if which(live)]
        for live in gone:
            self._finish(live, {"type": "abort", "message": "Aborted"})

    def _retract(self) -> None:
        back = list(self._running.values())
        for live in back:
            live.progress.retractions += 1
            self._release(live)
        with self._wake:
            self._queue.extendleft(reversed(back))

    def _release(self, live: Live) -> None:
        slot, live.slot = live.slot, None
        if slot is not None:
            del self._running[slot]
            self._free[slot] = None
            # `position` stays: an idle slot keeps writing there, behind what its cache is kept for.
            row = self._state[slot]
            row[COLUMNS["active"]] = row[COLUMNS["top"]] = row[COLUMNS["least"]] = row[COLUMNS["temperature"]] = 0

    def _finish(self, live: Live, finish: dict) -> None:
        self._release(live)
        with self._wake:
            self._names.discard(live.request.rid)
        live.progress.finish = finish
        live.tell(live.progress)

    def _admit(self) -> None:
        """Lets waiting requests into free slots, in order; a sequence that several need is computed once."""
        rows: dict[tuple, Row] = {}
        copies: dict[int, list[tuple[int, int]]] = {}  # bucket -> (from slot, to slot)
        while (live := self._next()) is not None:
            self._entering.append(live)
            request, prefix = live.request, live.prefix
            needs_slot = request.sampling.max_new_tokens > 0
            scored = None
            if request.input_logprobs_from is not None and not live.progress.tokens:
                scored = request.prompt[-1], TOP if request.top_logprobs else 0
                if request.input_logprobs_from == 0:  # nothing predicts the first token
                    live.progress.input_logp.append(None)
                    live.progress.input_top += [None] * (request.top_logprobs > 0)
            key = prefix, scored
            holder = None if scored else self._slot_of.get(prefix)
            if (key in rows or holder is not None) and not live.progress.tokens:
                live.progress.cached_tokens = len(prefix)
            if needs_slot:
                live.slot = holder if holder in self._free else next(iter(self._free))
                del self._free[live.slot]
                self._running[live.slot] = live
                if live.slot != holder:
                    self._forget(live.slot)
            if key in rows:
                rows[key].lives.append(live)
            elif holder is None:
                if prefix and (needs_slot or scored):
                    rows[key] = Row(prefix, scored, [live])
            elif needs_slot and live.slot != holder:
                copies.setdefault(programs.bucket(len(prefix), self.context), []).append((holder, live.slot))
                self._remember(prefix, live.slot)
        self._prefill(rows.values())
        for length, pairs in copies.items():
            source_S, target_S = (self._padded(slots) for slots in zip(*pairs, strict=True))
            self._caches = programs.copy(self._caches, source_S, target_S, len(pairs), length=length)
        entering, self._entering = self._entering, []
        for live in entering:
            if live.slot is None:
                self._finish(live, {"type": "length", "length": 0})
            else:
                self._state[live.slot] = self._columns(live)

    def _next(self) -> Live | None:
        """The request whose turn it is, if it can be taken in now."""
        with self._wake:
            if self._queue and (self._free or self._queue[0].request.sampling.max_new_tokens == 0):
                return self._queue.popleft()
        return None

    def _padded(self, values: Sequence[int]) -> np.ndarray:
        out = np.zeros(self.slots, np.int32)
        out[: len(values)] = values
        return out

    def _forget(self, slot: int) -> None:
        prefix = self._prefix_of.pop(slot, None)
        if prefix is not None and self._slot_of.get(prefix) == slot:
            del self._slot_of[prefix]

    def _remember(self, prefix: tuple[int, ...], slot: int) -> None:
        self._slot_of[prefix], self._prefix_of[slot] = slot, prefix

    def _columns(self, live: Live) -> np.ndarray:
        """A slot's row of the state."""
        request, sampling, done = live.request, live.request.sampling, live.progress.tokens
        prompt = len(request.prompt)
        values = {
            "token": (done or request.prompt)[-1],
            "position": prompt + len(done) - 1,
            "end": prompt + sampling.max_new_tokens,
            "least": prompt + sampling.min_new_tokens,
            "active": 1,
            "top": request.top_logprobs,
            "seed_high": np.uint32(live.seed >> 32).view(np.int32),
            "seed_low": np.uint32(live.seed & 0xFFFFFFFF).view(np.int32),
            "top_k": sampling.top_k,
            **{name: np.float32(getattr(sampling, name)).view(np.int32) for name in ("temperature", "top_p", "min_p")},
        }
        stops = sorted(live.stops)
        return np.array([*(values[name] for name in COLUMNS), *stops, *[-1] * (STOPS - len(stops))], np.int32)

    def _prefill(self, rows: Iterable[Row]) -> None:
        """Computes sequences, a bucket's together, and puts them where they are needed."""
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(programs.bucket(len(row.prefix), self.context), []).append(row)
        for T, group in groups.items():
            P = programs.rows(T)
            for start in range(0, len(group), P):
                some = group[start : start + P]
                token_PT = np.zeros((P, T), np.int32)
                for i, row in enumerate(some):
                    token_PT[i, : len(row.prefix)] = row.prefix
                places = [(i, live.slot) for i, row in enumerate(some) for live in row.lives if live.slot is not None]
                row_S, slot_S = (self._padded([place[j] for place in places]) for j in (0, 1))
                self._caches, hidden_PTD = programs.prefill(
                    self._weights, self._caches, token_PT, row_S, slot_S, len(places), config=self.config
                )
                self._counts["prefills"] += 1
                for i, row in enumerate(some):
                    self._counts["prefilled_tokens"] += len(row.prefix)
                    if row.scored:
                        self._score(row, i, hidden_PTD)
                for i, slot in places:
                    self._remember(some[i].prefix, slot)

    def _score(self, row: Row, i: int, hidden_PTD) -> None:
        """Log-probabilities of a prompt's own tokens, for the requests that want them."""
        last, top = row.scored
        n = len(row.prefix)
        target_T = np.zeros(hidden_PTD.shape[1], np.int32)
        target_T[:n] = (*row.prefix[1:], last)
        logp_T, best = jax.device_get(programs.prompt_scores(self._weights, hidden_PTD, i, target_T, top=top))
        for live in row.lives:
            request, progress = live.request, live.progress
            start = max(0, request.input_logprobs_from - 1)  # hidden[t] speaks of token t + 1
            progress.input_logp += logp_T[start:n].tolist()
            if request.top_logprobs:
                progress.input_top += pairs(best[0][start:n], best[1][start:n], request.top_logprobs)

    def _dispatch(self) -> None:
        """A few decode steps for all running requests."""
        before_S = self._state[:, COLUMNS["position"]].copy()
        # While requests wait, come back as soon as a fair part of the slots is free for them.
        free = max(1, self.slots // 8) if self._queue else self.slots + 1
        self._caches, out, position_S = programs.decode(
            self._weights, self._caches, self._state, free, config=self.config, steps=self.steps
        )
        position_S = np.asarray(position_S)
        made_S = (position_S - before_S).tolist()
        token_US, logp_US = np.asarray(out["token"]), np.asarray(out["logp"])
        token_SU, logp_SU = token_US.T.tolist(), logp_US.T.tolist()
        ranked = any(live.request.top_logprobs for live in self._running.values())
        top_logp, top_id = (np.asarray(out[name]) if ranked else None for name in ("top_logp", "top_id"))
        self._state[:, COLUMNS["position"]] = position_S
        self._counts["dispatches"] += 1
        for slot, live in list(self._running.items()):
            n, k = made_S[slot], live.request.top_logprobs
            top = pairs(top_logp[:n, slot], top_id[:n, slot], k) if k else []
            self._state[slot, COLUMNS["token"]] = token_SU[slot][n - 1]
            self._deliver(live, token_SU[slot][:n], logp_SU[slot][:n], top)

    def _deliver(self, live: Live, tokens: list[int], logp: list[float], top: list) -> None:
        """Adds what a dispatch made for one request, up to where it ends."""
        sampling, progress, text = live.request.sampling, live.progress, live.text
        start, finish = len(progress.tokens), None
        if tokens[-1] in live.stops:
            finish = {"type": "stop", "matched": tokens[-1]}
        elif start + len(tokens) == sampling.max_new_tokens:
            finish = {"type": "length", "length": sampling.max_new_tokens}
        if text:
            shown = tokens[:-1] if finish and finish["type"] == "stop" else tokens
            hit = text.feed(shown, sampling.stop)
            if hit:
                count, matched = hit
                tokens, logp, top = tokens[:count], logp[:count], top[:count]
                finish = {"type": "stop", "matched": matched}
            elif finish:
                text.end()
            progress.text = text.text
        progress.tokens += tokens
        progress.logp += logp
        progress.top += top
        end = start + len(tokens)
        if progress.versions and progress.versions[-1][0] == self.version:
            progress.versions[-1] = (self.version, progress.versions[-1][1], end)
        else:
            progress.versions.append((self.version, start, end))
        self._counts["tokens"] += len(tokens)
        if finish:
            self._finish(live, finish)
        else:
            live.tell(snapshot(progress))


def pairs(logp_TK: np.ndarray, id_TK: np.ndarray, k: int) -> list[list[tuple[float, int]]]:
    """The k likeliest (logp, id) of each position."""
    rows = zip(logp_TK[:, :k].tolist(), id_TK[:, :k].tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def snapshot(p: Progress) -> Progress:
    """A copy that stays as it is."""
    return Progress(
        p.rid, p.prompt_tokens, p.tokens[:], p.logp[:], p.versions[:], p.top[:], p.input_logp[:], p.input_top[:],
        p.finish, p.text, p.cached_tokens, p.retractions,
    )  # fmt: skip
