"""The slots of an engine: assigns requests to slots, tracks what their caches hold, and runs the compiled programs.

A prompt is computed once for all requests that arrive together, and copied from a slot that has it for later ones,
unless they need its log-probabilities or experts, which are known only while it is computed. Several samples of one
prompt cost one prefill. Models with recurrent layers never copy: a slot that has decoded no longer has the state after
its prompt. Owned by one thread.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import models
from ...core import param
from ...models.layer import Recurrent
from ...models.lora import Lora
from ..chat.detokenizer import Text
from . import adapters, grammar, penalties
from . import caches as caching
from . import decode as programs
from .adapters import Adapters, Factors, Loaded
from .decode import COLUMNS, INTEGERS, REALS
from .request import STOPS, TOP, Progress, Request


@dataclass(eq=False)
class Live:
    """A request in the engine, waiting or in a slot."""

    request: Request
    tell: Callable[[Progress], None]
    seed: int
    stops: frozenset[int]
    text: Text | None
    progress: Progress
    adapter: Loaded | None = None
    matcher: grammar.Matcher | None = None
    slot: int | None = None

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that must be in the cache before decoding continues: all but the last."""
        return (*self.request.prompt, *self.progress.tokens)[:-1]

    @property
    def cached(self) -> Cached:
        """The key of the prefix's cache: the adapter it is computed with, and the prefix."""
        return self.adapter, self.prefix


Cached = tuple[Loaded | None, tuple[int, ...]]


@dataclass(eq=False)
class Row:
    """A sequence to prefill for all requests that need it; `scored`: (last token, top) if it must be scored too,
    `routed`: whether its experts are needed."""

    cached: Cached
    scored: tuple[int, int] | None
    routed: bool
    lives: list[Live] = field(default_factory=list)

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.cached[1]


class Slots:
    """Weights, caches and state of `count` sequences of at most `context` tokens.

    Attributes:
      running: {slot: Live}.
      free: the other slots, the longest idle first.
      weights: from `stage`; replaced between calls. None once they are released.
      adapters: the loaded adapters.
      counts: prefills, prefilled_tokens, dispatches.
    """

    def __init__(self, config, params, count: int, context: int, steps: int):
        self.count, self.context, self.steps = count, context, steps
        self.config = dataclasses.replace(config, eos=(), source="{}")  # similar models share compiled programs
        self.running: dict[int, Live] = {}
        self.free = dict.fromkeys(range(count))  # an ordered set
        self.counts: collections.Counter[str] = collections.Counter()
        self._recurrent = any(isinstance(layer, Recurrent) and layer.state for layer in config.records)
        self._dtype, self._device = params["embed"].dtype, jax.local_devices()[0]
        self.weights: Any = self.stage(params)
        self.adapters = Adapters()
        self._caches: Any = None
        self._filled = 0  # positions of the caches that have been written to
        self._state = np.zeros((count, len(COLUMNS) + STOPS), np.int32)
        with self._without_mesh():
            self._tables, self._masks = penalties.empty(count, config.vocab), grammar.Masks(count, config.vocab)
        self.clear()

    def stage(self, params):
        """Prepares weights for decoding, next to the ones in use.

        Raises:
          ValueError: they do not match the config, or the dtype of the first ones.
        """
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
        with self._without_mesh():
            return programs.stage(params, models.table(self.config), self._device)

    def release(self, *, weights: bool, caches: bool) -> None:
        """Frees device memory at once, while nothing runs. `clear` makes new caches; weights have to be set."""
        for x in jax.tree.leaves((self.weights if weights else None, self._caches if caches else None)):
            x.delete()  # even if something else refers to it
        if weights:
            self.weights = None
        if caches:
            self._caches, self._filled = None, 0
            self._forget()

    @property
    def bytes(self) -> int:
        """Device memory of weights and caches, in bytes."""
        return sum(x.nbytes for x in jax.tree.leaves((self.weights, self._caches)))

    def stage_adapter(self, spec: Lora, tree) -> Factors:
        """Prepares an adapter for `add_adapter`, next to those in use; raises as `adapters.stage`."""
        with self._without_mesh():
            return jax.block_until_ready(
                adapters.stage(spec, tree, models.table(self.config), self._dtype, self._device)
            )

    def add_adapter(self, staged: Factors) -> int:
        """Adds an adapter and returns its index; raises as `Adapters.add`."""
        with self._without_mesh():
            return self.adapters.add(staged)

    def clear(self) -> None:
        """Forgets which prompts slots hold; while nothing runs, wipes caches, to drop any NaN of diverged weights."""
        if not self.running:
            with self._without_mesh():
                if self._caches is None:
                    self._caches = caching.empty(self.config, self.count, self.context, self._dtype)
                else:
                    self._caches = caching.wipe(self._caches, self._filled)
                self._filled = 0
        self._forget()

    def _forget(self) -> None:
        self._slot_of: dict[Cached, int] = {}  # prefilled sequence -> a slot whose cache begins with it
        self._cached_of: dict[int, Cached] = {}

    def held(self) -> int:
        """The number of tokens that running requests have in the cache."""
        return int(self._state[list(self.running), COLUMNS["position"]].sum())

    def _without_mesh(self):
        """A context without the mesh that the calling thread may train on."""
        return jax.set_mesh(jax.sharding.Mesh(np.array(self._device), ()))

    def enter(self, lives: Sequence[Live]) -> None:
        """Prefills requests and gives slots to those that generate; enough slots must be free."""
        rows: dict[tuple, Row] = {}
        copies: dict[int, list[tuple[int, int]]] = {}  # bucket -> (from slot, to slot)
        for live in lives:
            prefix, scored, routed = live.prefix, self._scored(live), live.request.routed_experts
            key = live.cached, scored, routed
            holder = None if scored or routed else self._slot_of.get(live.cached)
            if (key in rows or holder is not None) and not live.progress.tokens:
                live.progress.cached_tokens = len(prefix)
            slot = self._seat(live, holder) if live.request.sampling.max_new_tokens else None
            if key in rows:
                rows[key].lives.append(live)
            elif holder is None:
                if prefix and (scored or routed or slot is not None):
                    rows[key] = Row(live.cached, scored, routed, [live])
                elif self._recurrent and slot is not None:  # the states of the slot's last sequence have to go
                    rows[key] = Row(live.cached, None, False, [live])
            elif slot is not None and slot != holder:
                copies.setdefault(programs.bucket(len(prefix), self.context), []).append((holder, slot))
                self._remember(live.cached, slot)
        self._prefill(rows.values())
        # A holder is running or keeps its slot, and the copies of a prompt are made in order: none is overwritten
        # before it is read.
        for length, pairs in copies.items():
            source_S, target_S = (self._padded(slots) for slots in zip(*pairs, strict=True))
            self._caches = caching.copy(self._caches, source_S, target_S, len(pairs), length=length)
        for live in lives:
            if live.slot is not None:
                self._write(live, self._state[live.slot])
                if live.request.sampling.penalised:
                    self._tables = penalties.rewritten(
                        self._tables, live.slot, live.progress.tokens, live.request.sampling.logit_bias
                    )

    def leave(self, live: Live) -> None:
        """Frees the request's slot, if it has one."""
        slot, live.slot = live.slot, None
        if slot is not None:
            del self.running[slot]
            self.free[slot] = None
            # `position` stays: an idle slot keeps writing there, after the prompt for which its cache is kept.
            row = self._state[slot]
            row[COLUMNS["adapter"]] = 0
            row[COLUMNS["active"]] = row[COLUMNS["top"]] = row[COLUMNS["least"]] = row[COLUMNS["temperature"]] = 0

    def step(self, wanted: int) -> list[tuple[Live, list[int], list[float], list, list]]:
        """Runs a dispatch of decode steps, which stops early once `wanted` slots are idle; returns (request, tokens,
        logp, likeliest tokens, experts of the input tokens) for each running request."""
        position = COLUMNS["position"]
        before_S = self._state[:, position].copy()
        mask_SM = self._masks.fill({slot: live.matcher for slot, live in self.running.items() if live.matcher})
        self._caches, self._tables, out, position_S = programs.decode(
            self._with_adapters(), self._caches, self._state, wanted, self._tables, mask_SM, config=self.config,
            steps=self.steps,
        )  # fmt: skip
        self._state[:, position] = position_S
        self._filled = max(self._filled, int(self._state[:, position].max()) + 1)
        self.counts["dispatches"] += 1
        made_S = (self._state[:, position] - before_S).tolist()
        token_SU, logp_SU = (np.asarray(out[name]).T.tolist() for name in ("token", "logp"))
        ranked = any(live.request.top_logprobs for live in self.running.values())
        top_USK = [np.asarray(out[name]) for name in ("top_logp", "top_id")] if ranked else []
        made = []
        for slot, live in self.running.items():
            n, k = made_S[slot], live.request.top_logprobs
            top = pairs(*(x_USK[:n, slot, :k] for x_USK in top_USK)) if k else []
            routed = list(np.asarray(out["routed"])[:n, slot]) if live.request.routed_experts else []
            made.append((live, token_SU[slot][:n], logp_SU[slot][:n], top, routed))
            self._state[slot, COLUMNS["token"]] = token_SU[slot][n - 1]
            if live.matcher:
                live.matcher.take(token_SU[slot][0])
        return made

    def _with_adapters(self):
        return self.weights if self.adapters.factors is None else self.weights | {"adapters": self.adapters.factors}

    def _scored(self, live: Live) -> tuple[int, int] | None:
        """Which log-probabilities of its prompt a request needs, for `Row.scored`."""
        request, progress = live.request, live.progress
        if request.input_logprobs_from is None or progress.tokens:
            return None
        if request.input_logprobs_from == 0:  # nothing predicts the first token
            progress.input_logp.append(None)
            progress.input_top += [None] * (request.top_logprobs > 0)
        return request.prompt[-1], TOP if request.top_logprobs else 0

    def _seat(self, live: Live, holder: int | None) -> int:
        """Gives a request a free slot: the one that already holds its prompt, if that is free."""
        slot = holder if holder is not None and holder in self.free else next(iter(self.free))
        del self.free[slot]
        self.running[slot], live.slot = live, slot
        if slot != holder:
            before = self._cached_of.pop(slot, None)
            if before is not None and self._slot_of.get(before) == slot:
                del self._slot_of[before]
        return slot

    def _remember(self, cached: Cached, slot: int) -> None:
        """Notes that a slot's cache begins with this sequence; recurrent layers hold it only until they decode."""
        if self._recurrent:
            return
        self._slot_of[cached], self._cached_of[slot] = slot, cached

    def _padded(self, values: Sequence[int]) -> np.ndarray:
        out = np.zeros(self.count, np.int32)
        out[: len(values)] = values
        return out

    def _prefill(self, rows: Iterable[Row]) -> None:
        """Computes sequences, batched by bucket, and writes them to the slots that need them."""
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(programs.bucket(len(row.prefix), self.context), []).append(row)
        for T, group in groups.items():
            P = programs.rows(T, self.count)
            for start in range(0, len(group), P):
                self._prefill_rows(group[start : start + P], np.zeros((P, T), np.int32))

    def _prefill_rows(self, rows: list[Row], token_PT: np.ndarray) -> None:
        length_P, adapter_P = np.zeros((2, len(token_PT)), np.int32)
        for i, row in enumerate(rows):
            token_PT[i, : len(row.prefix)] = row.prefix
            length_P[i] = len(row.prefix)
            adapter_P[i] = row.cached[0].index if row.cached[0] else 0
        places = [(i, live.slot) for i, row in enumerate(rows) for live in row.lives if live.slot is not None]
        row_S, slot_S = (self._padded([place[j] for place in places]) for j in (0, 1))
        self._caches, hidden_PTD, routed_PTLK = programs.prefill(
            self._with_adapters(), self._caches, token_PT, length_P, adapter_P, row_S, slot_S, len(places),
            config=self.config,
        )  # fmt: skip
        self._filled = max(self._filled, token_PT.shape[1])
        self.counts["prefills"] += 1
        self.counts["prefilled_tokens"] += sum(len(row.prefix) for row in rows)
        for i, slot in places:
            self._remember(rows[i].cached, slot)
        if any(row.routed for row in rows):
            routed_PTLK = np.asarray(routed_PTLK)
        for i, row in enumerate(rows):
            for live in row.lives if row.routed else ():  # experts that a retracted request has already are kept
                live.progress.routed.extend(routed_PTLK[i, len(live.progress.routed) : len(row.prefix)])
            if row.scored:
                self._score(row, row.scored, i, hidden_PTD)

    def _score(self, row: Row, scored: tuple[int, int], i: int, hidden_PTD) -> None:
        """Computes log-probabilities of a prompt's tokens, for the requests that need them."""
        (last, top), n = scored, len(row.prefix)
        target_T = np.zeros(hidden_PTD.shape[1], np.int32)
        target_T[:n] = (*row.prefix[1:], last)
        made = programs.prompt_scores(self.weights, hidden_PTD, i, target_T, config=self.config, top=top)
        logp_T, best = jax.device_get(made)
        for live in row.lives:
            progress, k = live.progress, live.request.top_logprobs
            start = max(0, (live.request.input_logprobs_from or 0) - 1)  # hidden[t] predicts token t + 1
            progress.input_logp += logp_T[start:n].tolist()
            if k:
                progress.input_top += pairs(*(x_TK[start:n, :k] for x_TK in best))

    @staticmethod
    def _write(live: Live, row: np.ndarray) -> None:
        """Fills a slot's row of the state."""
        request, sampling, done = live.request, live.request.sampling, live.progress.tokens
        prompt = len(request.prompt)
        values = {
            "token": (done or request.prompt)[-1],
            "position": prompt + len(done) - 1,
            "end": prompt + sampling.max_new_tokens,
            "least": 0 if live.matcher else prompt + sampling.min_new_tokens,  # a matcher's mask takes care of it
            "active": 1,
            "top": request.top_logprobs,
            "seed_high": live.seed >> 32,
            "seed_low": live.seed & 0xFFFFFFFF,
            "top_k": sampling.top_k,
            "adapter": live.adapter.index if live.adapter else 0,
            "grammar": int(live.matcher is not None),
            "penalised": int(sampling.penalised),
        }
        row.view(np.uint32)[: len(INTEGERS)] = [values[name] & 0xFFFFFFFF for name in INTEGERS]
        row.view(np.float32)[len(INTEGERS) : len(COLUMNS)] = [getattr(sampling, name) for name in REALS]
        row[len(COLUMNS) :] = -1
        row[len(COLUMNS) : len(COLUMNS) + len(live.stops)] = list(live.stops)


def pairs(logp_TK: np.ndarray, id_TK: np.ndarray) -> list[list[tuple[float, int]]]:
    """Zips arrays to [(logp, id), ...] per position."""
    rows = zip(logp_TK.tolist(), id_TK.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]
