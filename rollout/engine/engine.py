"""The in-process engine: continuous batching of requests in the slots of one cache, on a dedicated thread.

Between dispatches the thread executes commands of other threads (pause, abort, load, release), admits waiting requests
to free slots, computes some of their prompts, and reports what was generated.
"""

import atexit
import collections
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from ...adapters.runtime import malloc
from ...models.lora import Lora
from ..chat.detokenizer import Text
from .adapters import Loaded
from .commands import Commands
from .grammar import Grammars, Matcher
from .live import Live
from .options import Options
from .pictures import Pictures, Placement
from .request import Progress, Request, check, check_prompt
from .slots import Slots, mesh_of

RELEASABLE = ("kv_cache", "weights", "cuda_graph")  # SGLang's names; the last has no effect here
COUNTED = ("requests", "ended", "aborted", "prompt_tokens", "cached_tokens", "tokens")
COMPUTED = ("dispatches", "prefills", "prefilled_tokens", "preemptions", "drafted", "accepted")
ADAPTERS = 64  # most adapters loaded at the same time
PROMPTS, ON_CPUS = 16384, 2048  # tokens of prompts that are computed between two dispatches
Pair = tuple[Request, Callable[[Progress], None]]
Checked = tuple[Request, Callable[[Progress], None], frozenset[int], Matcher | None, Placement | None]  # and stop ids


class Engine:
    """Generates for many requests at once.

    Samples and log-probabilities are bit-equal whatever else runs, in any slot and order. A request that was retracted,
    or is sent again with its tokens so far, continues its stream of random numbers.

    Attributes:
      grammars: compiles the grammars of requests, or None.
      pictures: makes patches of the images of requests; None = it reads text alone.
      version: label of the weights, stamped on every sampled token.
      paused: nothing is computed until `resume`.
      released: the released ones of RELEASABLE; nothing is computed until it is empty and weights are loaded.
      options: its options, none of them left open but `memory`; also as `slots` and `context`.
      device: what is on the devices, and the operations on it.
      share: tells the other processes which operations to run, if there are others (`hosts`).
    """

    def __init__(
        self,
        config,
        params,
        *,
        devices: Sequence[jax.Device] = (),
        version: str = "default",
        decode: Callable[[list[int]], str] | None = None,
        grammars: Grammars | None = None,
        processor: Any = None,
        seed: int = 0,
        **options: Any,
    ):
        """
        Args:
          params: the model's parameter tree; copied, so the caller may donate its own. With the layer for multi-token
            prediction (`models.mtp.table`) as "mtp", drafts are made by it.
          devices: as many as the mesh has; none = the first of this process.
          decode: converts token ids to text, without special tokens; None = no stop strings, and reading a text raises.
          grammars: compiles the grammars of requests; None = they are refused.
          processor: makes patches of images (`adapters.data.images.load`), if the model was loaded with its vision
            tower; None = requests with images are refused.
          seed: from which requests without a seed get theirs.
          options: slots, context, memory, ...: the fields of `Options`. The mesh's dp must be 1; `replicas.serving`
            makes more engines.

        Raises:
          ValueError: an option out of its range, memory too small for one sequence, or parameters or grammars that do
            not match.
        """
        self.options = Options(**options).resolved()
        if grammars is not None and grammars.vocab != config.vocab:
            raise ValueError(
                f"Engine: grammars must be for the model's {config.vocab} tokens, got {grammars.vocab}; make them with "
                "Grammars(tokenizer, config.vocab, config.eos)"
            )
        mesh = self.options.mesh
        if mesh.dp > 1:
            raise ValueError(f"Engine: dp must be 1, got {mesh.dp}; replicas.serving makes that many engines")
        on = mesh_of(mesh, devices)
        mesh.check(config)
        self.config, self.slots, self.context = config, self.options.slots, self.options.context
        self.version, self.paused = version, False
        self.released: frozenset[str] = frozenset()
        self._decode, self.grammars = decode, grammars
        self.pictures = Pictures(processor, config.vision) if processor and config.vision else None
        self._seeds = random.Random(seed)
        self._slots = Slots(config, params, self.options, on)
        self.device, self.share = self._slots.device, None
        self._arrivals = itertools.count()
        self._counts: collections.Counter[str] = collections.Counter()

        # Shared between threads, guarded by `_wake`; everything else is owned by the engine's thread.
        self._wake = threading.Condition()
        self._queue: collections.deque[Live] = collections.deque()
        self._names: set[str] = set()
        self._adapters: dict[str, Loaded] = {}
        self._leaving: list[tuple[Loaded, Future]] = []  # unloaded, but still used by earlier requests
        self._commands = Commands(self._wake)
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None

    # Called by other threads.

    def start(self) -> None:
        """Starts the engine's thread."""
        if self._closed or self._thread:
            raise RuntimeError("Engine.start: an engine starts once")
        self._thread = threading.Thread(target=self._run, name="areax-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon thread must not be inside XLA while the interpreter shuts down

    def compile_ahead(self) -> threading.Thread:
        """Starts a thread that compiles decoding steps while the first prompts arrive, and are compiled for."""
        thread = threading.Thread(target=self._slots.compile_step, name="areax-compile")  # exit waits for it
        thread.start()
        return thread

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Aborts all requests and ends the engine's thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)

    def submit(self, request: Request, on_progress: Callable[[Progress], None]) -> None:
        """Queues a request. `on_progress` is called on the engine's thread after each dispatch that generated tokens,
        and finally with a `finish`; it must return quickly and not raise. A Progress is not modified afterwards.

        Raises:
          ValueError: the request cannot be served; one line.
          RuntimeError: the engine is closed.
        """
        self._enqueue([(request, on_progress)])

    def submit_all(self, requests: Sequence[Request], on_progress: Callable[[Progress], None]) -> None:
        """`submit`s all of the requests, or none."""
        self._enqueue([(request, on_progress) for request in requests])

    def generate(self, requests: Sequence[Request]) -> list[Progress]:
        """Serves the requests and waits for all of them; starts the engine if necessary."""
        if self._thread is None:
            self.start()
        return collect(self._enqueue, requests)

    def abort(self, *rids: str) -> None:
        """Aborts requests, which finish with their tokens so far; unknown names are ignored."""
        names = frozenset(rids)
        self._post(lambda: self._abort(lambda live: live.request.rid in names))

    def abort_all(self) -> None:
        """Aborts every request, running or waiting."""
        self._post(lambda: self._abort(lambda live: True))

    def pause(self, mode: str) -> None:
        """Stops computation and returns once it has stopped. Requests may still be submitted; they wait.

        Args:
          mode: what happens to running requests: "abort" finishes them with their tokens so far; "retract" requeues
            them with their tokens, to be prefilled again; "in_place" keeps their caches.
        """
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"pause: mode must be abort, retract or in_place, got {mode!r}")

        def act():
            self.paused = True
            if mode == "abort":
                self._abort(lambda live: live.slot is not None or live.saved is not None)
            elif mode == "retract":
                self._retract()

        self._call(act)

    def resume(self) -> None:
        """Continues after a pause."""
        self._call(lambda: setattr(self, "paused", False))

    def stage(self, params) -> Any:
        """Prepares new weights for `swap`, next to the current ones, while requests continue.

        Args:
          params: the model's parameter tree: arrays, or the leaves of `hf.mapped`. The layer for multi-token prediction
            stays as it is if there is no "mtp".

        Raises:
          ValueError: parameters of another shape or dtype.
        """
        return self._slots.stage(params)

    def load(self, params, version: str, *, flush: bool = True) -> None:
        """`stage` and `swap`."""
        self.check_memory()
        self.swap(self.stage(params), version, flush=flush)

    def swap(self, weights, version: str, *, flush: bool = True, agreed: Callable[[], Any] = lambda: None) -> None:
        """Switches to staged weights; returns when they are in use.

        Unless paused, running requests first finish with the old weights; others wait, also those that have lost their
        memory for a time, which then continue with the new ones.

        Args:
          flush: clear the caches of the old weights. False lets requests that were paused in place continue with the
            old weights' cache, which gives neither model's distribution.
          agreed: called on the engine's thread once nothing stands in the way; if it raises, the old weights stay.

        Raises:
          ValueError: flush is requested while requests are paused in place, or the memory for weights is released; the
            old weights stay.
        """

        def swap():
            self.check_memory()
            if flush and self._slots.seated:
                raise ValueError(
                    f"load: the cache cannot be flushed while {len(self._slots.seated)} requests are paused in place; "
                    "pause with retract or abort, or load with flush=False"
                )
            agreed()
            with self._wake:
                for live in self._queue if flush else ():
                    self._slots.cache.forget(live)
            self._slots.swap(weights)
            self.version = version
            if "kv_cache" not in self.released:
                self._slots.clear()

        self._call(swap, when_idle=True)
        malloc.return_memory()  # of the old weights, on a CPU

    def release(self, what: Iterable[str] = RELEASABLE, *, agreed: Callable[[], Any] = lambda: None) -> None:
        """Frees the device memory of weights, caches or both. Requests may still be submitted; they wait.

        The label stays until other weights are loaded.

        Args:
          agreed: as for `swap`.

        Raises:
          ValueError: an unknown name (see RELEASABLE), or requests are running: pause with abort or retract first.
        """
        tags = _releasable(what)

        def act():
            if self._slots.seated:
                raise ValueError(
                    f"release: no requests may be running, got {len(self._slots.seated)}; pause with retract or abort"
                )
            agreed()
            self._slots.release(weights="weights" in tags, caches="kv_cache" in tags)
            self.released |= tags

        self._call(act)

    def reclaim(self, what: Iterable[str] = RELEASABLE) -> None:
        """Allocates released memory again; has no effect on what was not released. Caches are empty, and there are no
        weights before `load`: until then requests wait.

        Raises:
          ValueError: an unknown name (see RELEASABLE).
        """
        tags = _releasable(what)

        def act():
            if "kv_cache" in tags & self.released:
                self._slots.clear()
            self.released -= tags

        self._call(act)

    @property
    def able(self) -> bool:
        """Whether requests are computed: it is not paused, and has memory and weights."""
        return self.loaded and not (self.paused or self.released)

    @property
    def loaded(self) -> bool:
        """Whether there are weights."""
        return self.weights is not None

    @property
    def weights(self) -> Any:
        """The weights in use, as `stage` returned them; None once they are released."""
        return self.device.weights

    @property
    def draft_from(self) -> str | None:
        """What drafts are made by: "mtp", the model's layer for multi-token prediction, or "text"; None = no drafts."""
        return None if self.options.draft == 1 else "mtp" if self._slots.predicts else "text"

    def check_memory(self) -> None:
        """Raises ValueError if the memory for weights is released."""
        if "weights" in self.released:
            raise ValueError("load: the memory for weights is released; resume it first (/resume_memory_occupation)")

    @property
    def adapters(self) -> dict[str, str]:
        """Directories of the adapters that requests may use, by name."""
        with self._wake:
            return {name: loaded.path for name, loaded in self._adapters.items()}

    def load_adapter(self, name: str, spec: Lora, adapters, path: str = "") -> None:
        """Loads an adapter for requests that name it, without interrupting others.

        Args:
          adapters: a tree of `lora.table`, for this model.
          path: where it came from.

        Raises:
          ValueError: the name is taken, ADAPTERS are loaded, or the adapter's rank or targets differ from theirs.
        """
        with self._wake:
            if len(self._adapters) >= ADAPTERS:
                raise ValueError(f"adapters: at most {ADAPTERS} may be loaded; unload one first")
        factors = self._slots.adapter_factors(spec, adapters)

        def act():
            self._free_name(name)
            loaded = Loaded(name, path, self._slots.add_adapter(factors))
            with self._wake:
                self._adapters[name] = loaded

        self._free_name(name)
        self._call(act)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter: new requests may not use it; returns when no running one does.

        Raises ValueError if there is no such adapter.
        """
        self.drop_adapter(name).result()

    def drop_adapter(self, name: str) -> Future:
        """`unload_adapter` without waiting; the result is set once no running request uses the adapter."""

        def act() -> Future:
            with self._wake:
                if name not in self._adapters:
                    raise ValueError(self._unknown(name))
                done: Future = Future()
                self._leaving.append((self._adapters.pop(name), done))
            self._let_go()
            return done

        return self._call(act)

    def flush(self) -> bool:
        """Clears cached prompts; does nothing and returns False while requests are running."""

        def act():
            if not self._slots.seated and "kv_cache" not in self.released:
                self._slots.clear()
            return not self._slots.seated

        return self._call(act)

    def set_version(self, version: str) -> None:
        """Changes the label of the weights, from the next token on."""
        self._call(lambda: setattr(self, "version", version))

    def stats(self) -> dict:
        """Sizes, device memory in use, running and queued requests, tokens that fit into the cache and into the pages
        that requests have, and totals since the start: requests, those that ended or were
        aborted, tokens of their prompts and of these in the cache, generated tokens, dispatches, prefills and prefilled
        tokens, how often a request lost its memory for a time, and tokens that were drafted, and accepted."""
        return {
            "slots": self.slots,
            "context": self.context,
            "draft": self.options.draft,
            "draft_from": self.draft_from,
            "running": len(self._slots.seated),
            "queued": len(self._queue),
            "capacity": self._slots.cache.capacity,
            "used": self._slots.cache.used,
            "paused": self.paused,
            "released": sorted(self.released),
            "bytes": self.device.bytes,
            "version": self.version,
            **{name: self._counts[name] for name in COUNTED},
            **{name: self._slots.counts[name] for name in COMPUTED},
        }

    def run_on_all(self, name: str, *data) -> Any:
        """Runs an operation of `device` in all processes, between two dispatches."""
        return self._call(lambda: self.device.run(name, *data))

    # Between the threads; `Replicas` also uses the public ones.

    @property
    def lock(self) -> threading.Condition:
        """Held by a thread that calls `refuse` and `queue`."""
        return self._wake

    @property
    def requests(self) -> int:
        """The number of requests in the engine."""
        return len(self._names)

    def check_thread(self) -> None:
        """Raises RuntimeError on the engine's thread, which must not wait for itself."""
        if self._thread is threading.current_thread():
            raise RuntimeError("Engine: a callback may only submit and abort; pause, load and flush on another thread")

    def _enqueue(self, pairs: Sequence[Pair]) -> None:
        checked = self.checked(pairs)
        with self.lock:
            self.refuse(checked)
            self.queue(checked)

    def checked(self, pairs: Sequence[Pair]) -> list[Checked]:
        """Validates requests for `queue`; raises as `submit` for one that can never be served."""
        found = []
        for prompt in {id(request.prompt): request.prompt for request, _ in pairs}.values():
            check_prompt(prompt, self.config.vocab)
        placements: dict[Any, Placement | None] = {}
        for request, tell in pairs:
            eos = () if request.sampling.ignore_eos else self.config.eos
            stops = frozenset(eos) | frozenset(request.sampling.stop_token_ids)
            if request.sampling.grammar and self.grammars:
                stops |= frozenset(self.grammars.eos)
            experts = getattr(self.config, "experts", 0) > 0
            check(request, stops, self.config.vocab, self.context, self._decode is not None, experts)
            seen = id(request.prompt), request.images
            if seen not in placements:
                placements[seen] = self._placed(request)
            found.append((request, tell, stops, self._matcher(request, stops), placements[seen]))
        return found

    def refuse(self, checked: Sequence[Checked]) -> None:
        """Raises as `submit` if a name is taken, an adapter is not loaded, or the engine is closed."""
        if self._closing:
            raise RuntimeError("Engine.submit: the engine is closed")
        names = {request.rid for request, *_ in checked}
        if len(names) < len(checked) or names & self._names:
            raise ValueError(f"rid: names must be unique among requests in the engine, got {sorted(names)[:3]}")
        for request, *_ in checked:
            if request.adapter and request.adapter not in self._adapters:
                raise ValueError(self._unknown(request.adapter))

    def queue(self, checked: Sequence[Checked]) -> None:
        """Queues validated requests that `refuse` has passed."""
        for request, tell, stops, matcher, images in checked:
            sampling = request.sampling
            seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
            text = Text(self._decode) if self._decode else None
            progress = Progress(request.rid, len(request.prompt), decoded="" if text else None)
            adapter = self._adapters[request.adapter] if request.adapter else None
            if adapter:
                adapter.users += 1
            number = next(self._arrivals)
            self._names.add(request.rid)
            switches = self._slots.switches
            live = Live(request, tell, seed, stops, text, progress, number, adapter, matcher, images, switches)
            self._queue.append(live)
        self._counts["requests"] += len(checked)
        self._wake.notify()

    def _placed(self, request: Request) -> Placement | None:
        if not request.images:
            return None
        if self.pictures is None:
            raise ValueError("images: this model reads text alone; serve one with a vision tower and its processor")
        return self.pictures.placed(request.prompt, request.images)

    def _matcher(self, request: Request, stops: frozenset[int]) -> Matcher | None:
        if request.sampling.grammar is None:
            return None
        if self.grammars is None:
            raise ValueError(
                "a grammar needs a tokenizer, but the engine has none; in Python: Engine(grammars=Grammars(...))."
            )
        return self.grammars.start(request.sampling.grammar, stops, request.sampling.min_new_tokens)

    def _unknown(self, name: str) -> str:
        return f"adapters: {name!r} is not loaded; loaded are {', '.join(sorted(self._adapters)) or 'none'}"

    def _free_name(self, name: str) -> None:
        with self._wake:
            if name in self._adapters:
                raise ValueError(f"adapters: {name!r} is loaded already; unload it, or choose another name")

    def _post(self, act: Callable[[], Any], *, when_idle: bool = False) -> Future:
        """Has the engine's thread run `act` between dispatches."""
        with self._wake:
            if self._closing:
                raise RuntimeError("Engine: the engine is closed")
            done = self._commands.add(act, when_idle=when_idle)
            self._wake.notify()
        if self._thread is None:
            self._act()
        return done

    def _call(self, act: Callable[[], Any], *, when_idle: bool = False) -> Any:
        self.check_thread()
        return self._post(act, when_idle=when_idle).result()

    # The engine's thread.

    def _run(self) -> None:
        try:
            with self.device.leading(self.share):
                self._loop()
        finally:
            self._end()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._something_to_do)
                if self._closing:
                    return
            self._act()
            if self.able:
                if not self._commands.when_idle:
                    self._admit()
                if self._slots.seated:
                    self._compute_prompts()
                if self._slots.running:
                    self._dispatch()

    def _something_to_do(self) -> bool:
        if self._closing or self._commands.soon:
            return True
        if not self.able:
            return bool(self._commands.when_idle)
        return bool(self._slots.seated or self._queue or self._commands.when_idle)

    def _act(self) -> None:
        """Executes the queued commands; loads wait until nothing is running, unless paused."""
        self._commands.run(lambda: self.paused or not self._slots.seated)

    def _end(self) -> None:
        with self._wake:
            self._closing = self._closed = True
        self._commands.refuse()
        self._abort(lambda live: True)  # which also completes pending unloads of adapters

    def _abort(self, which: Callable[[Live], bool]) -> None:
        with self._wake:
            gone = [live for live in self._queue if which(live)]
            self._queue = collections.deque(live for live in self._queue if not which(live))
        gone += [live for live in self._slots.seated.values() if which(live)]
        for live in gone:
            self._finish(live, {"type": "abort", "message": "Aborted"})

    def _retract(self) -> None:
        back = list(self._slots.seated.values())
        for live in back:
            live.progress.retractions += 1
            self._slots.leave(live)
        self._requeue(back)

    def _requeue(self, back: list[Live]) -> None:
        with self._wake:
            self._queue.extendleft(sorted(back, key=lambda live: -live.number))

    def _finish(self, live: Live, finish: dict) -> None:
        self._slots.leave(live)
        self._slots.cache.forget(live)
        with self._wake:
            self._names.discard(live.request.rid)
            if live.adapter:
                live.adapter.users -= 1
        self._let_go()
        self._counts["ended"] += 1
        self._counts["aborted"] += finish["type"] == "abort"
        self._counts["prompt_tokens"] += live.progress.prompt_tokens
        self._counts["cached_tokens"] += live.progress.cached_tokens
        live.progress.finish = finish
        live.tell(live.progress)

    def _let_go(self) -> None:
        """Frees the indices of unloaded adapters that no request uses any more."""
        for loaded, done in [pair for pair in self._leaving if not pair[0].users]:
            self._leaving.remove((loaded, done))
            self._slots.remove_adapter(loaded.index)
            done.set_result(None)

    def _admit(self) -> None:
        """Gives slots to waiting requests, in order, as far as there is memory."""
        while True:
            with self._wake:
                if not self._queue or not self._slots.admits(self._queue[0]):
                    return
                live = self._queue.popleft()
                self._slots.enter(live)

    def _compute_prompts(self) -> None:
        budget = ON_CPUS if jax.default_backend() == "cpu" else PROMPTS
        for live in self._slots.compute_prompts(budget):
            self._finish(live, self._broken(live, []) or {"type": "length", "length": 0})
        self._requeue_preempted()

    def _requeue_preempted(self) -> None:
        if self._slots.preempted:
            self._requeue(self._slots.preempted)
            self._slots.preempted = []

    def _dispatch(self) -> None:
        # While requests wait for slots, return as soon as half of those that run are free.
        running = len(self._slots.running)
        crowded = self._queue and not self._commands.when_idle and not self._slots.free
        made = self._slots.step(self.slots - running + max(1, running // 2) if crowded else self.slots + 1)
        self._requeue_preempted()
        for each in made:
            self._deliver(*each)

    def _deliver(
        self, live: Live, tokens: list[int], logp: list[float], top: list, routed: list, masks: list
    ) -> None:  # fmt: skip
        """Adds the output of a dispatch for one request, up to its end, and reports it."""
        if broken := self._broken(live, logp):
            self._finish(live, broken)
            return
        before = len(live.progress.tokens)
        finish = live.add(tokens, logp, top, routed, masks, self.version)
        self._counts["tokens"] += len(live.progress.tokens) - before
        if finish:
            self._finish(live, finish)
        else:
            live.tell(live.progress.snapshot())

    def _broken(self, live: Live, logp: list[float]) -> dict | None:
        """How a request ends whose log-probabilities, of new tokens or the prompt, are not finite: the logits were not,
        and such tokens are drawn from no distribution."""
        inputs = () if live.progress.tokens else filter(None, live.progress.input_logp)
        if all(map(math.isfinite, logp)) and all(map(math.isfinite, inputs)):
            return None
        of = f"weights {self.version!r}"
        of = f"adapter {live.adapter.name!r} on {of}" if live.adapter else of
        return {"type": "abort", "message": f"{of}: the logits are not finite; load others", "status_code": 500}


def collect(enqueue: Callable[[Sequence[Pair]], None], requests: Sequence[Request]) -> list[Progress]:
    """Enqueues requests and waits for the last Progress of each."""
    results: list[Future] = [Future() for _ in requests]

    def keep(result):
        return lambda progress: result.set_result(progress) if progress.finish else None

    enqueue([(request, keep(result)) for request, result in zip(requests, results, strict=True)])
    return [result.result() for result in results]


def _releasable(what: Iterable[str]) -> frozenset[str]:
    tags = frozenset(what)
    if not tags <= frozenset(RELEASABLE):
        raise ValueError(f"tags: must be of {', '.join(RELEASABLE)}, got {sorted(tags)}")
    return tags
