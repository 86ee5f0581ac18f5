"""Prompts on their way into the cache: which chunks are computed next, and which are found there.

A prompt is computed in whole chunks of C tokens and a shorter one at last. Each goes into the cache of prefixes as soon
as it is scheduled, so that a group of samples computes its prompt once: whole chunks are shared, the last one, to which
decoding appends, is copied.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from . import prefixes as hashing
from .cache import Cache
from .device_state import DeviceState
from .live import Live
from .prefixes import Prefix
from .programs import prefill as programs
from .programs.images import Part, Views
from .request import FEW, TOP


@dataclass(eq=False)
class Chunk:
    """The tokens [start, end) of a sequence, which are to be computed; they end the prefix.

    Attributes:
      seeing: there are features of images before its end. Whether a chunk is computed as text alone thus depends on
        nothing else than its prefix.
    """

    live: Live
    tokens: Sequence[int]
    start: int
    end: int
    prefix: Prefix

    @property
    def seeing(self) -> bool:
        return self.live.images is not None and self.live.images.begun(self.end)


class Prompts:
    """The requests whose prompts are not complete, in order of arrival; owned by one thread.

    Attributes:
      entering: these requests; each has a slot.
      counts: totals: prefills, prefilled_tokens.
    """

    def __init__(self, cache: Cache, device: DeviceState, room: Callable[[Live, int], bool]):
        """
        Args:
          room: room(live, kind) makes room for a page of this kind, if need be at the cost of later requests; False if
            it cannot. It may call `drop`.
        """
        self._cache, self._device, self._room = cache, device, room
        self.entering: list[Live] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self._states = next((i for i, kind in enumerate(cache.kinds) if kind.states), None)
        self._chunks: list[Chunk] = []
        self._encoded: set[str] = set()  # hashes of images with features on the devices
        self._no_copies()

    def _no_copies(self) -> None:
        self._copied: dict[int, list[tuple[int, int]]] = {kind: [] for kind in self._cache.paged}  # pages (from, to)
        self._kept: list[tuple[int, int]] = []  # states (slot, row)
        self._restored: list[tuple[int, int]] = []  # states (row, slot)

    def enter(self, live: Live) -> None:
        """Adds a request that has just got a slot, or whose tokens are to be computed again in its slot."""
        live.pages = [[] for _ in self._cache.kinds]
        live.done, live.last = 0, None
        progress, request = live.progress, live.request
        if not progress.tokens:
            progress.cached_tokens = 0
        if not (progress.tokens or live.saved):  # what there is may be of other weights
            progress.input_logp, progress.input_top, progress.routed = [], [], []
        if live.scored and request.input_logprobs_from == 0:
            progress.input_logp.append(None)  # nothing predicts the first token
            progress.input_top += [None] * (request.top_logprobs > 0)
        if self._states is not None and live.length == 0:
            self._restored.append((0, live.seat))  # the state before any token
        self.entering.append(live)

    def drop(self, live: Live) -> None:
        """Takes a request out; nothing of it may be scheduled."""
        if live in self.entering:
            self.entering.remove(live)
            self._forget_used_features()

    def forget(self) -> None:
        """Keeps what follows in the prompts begun out of other prompts, as it depends on replaced weights, and drops
        features of images."""
        self.forget_features()
        for live in self.entering:
            live.last = live.last and replace(live.last, key=os.urandom(16))

    def forget_features(self, but: Set[str] = frozenset()) -> None:
        """Drops the features of images but for those with these hashes."""
        if gone := self._encoded - but:
            self._device.run("forget_features", sorted(gone))
            self._encoded -= gone

    def _forget_used_features(self) -> None:
        """Drops those that no prompt here needs any more."""
        if self._encoded:
            left = ((live, live.images) for live in self.entering)
            needed = {one.hash for live, own in left if own for _, one in own.within(live.done, live.length)}
            self.forget_features(but=needed)

    def advance(self, budget: int) -> Iterator[Live]:
        """Computes chunks until `budget` tokens are spent, nothing is left, or memory is short; yields each request
        whose prompt is complete, which leaves. It may lose its memory before the next one is complete."""
        moved = True
        while self.entering and budget > 0 and moved:
            moved = False
            for live in list(self.entering):
                if live in self.entering and budget > 0:
                    before = live.done
                    budget -= self._schedule(live, budget)
                    moved |= live.done > before
            self.flush()
            ready = [live for live in self.entering if live.done >= live.length and self._put_back(live)]
            for live in ready:
                self.drop(live)
            yield from ready
            moved |= bool(ready)

    def _put_back(self, live: Live) -> bool:
        """Ends a complete prompt with what was saved of the request; False while memory is short."""
        if live.saved is None:
            live.filled = live.done
            return True
        end = -(-live.saved.position // self._cache.C)
        while any(len(live.pages[kind]) < end for kind in self._cache.paged):
            if not self.next_page(live, live.saved.position):
                return False
        self._cache.restore(live)
        return True

    def _schedule(self, live: Live, budget: int) -> int:
        """Schedules chunks of a request; returns the number of tokens."""
        spent, tokens, C = 0, live.prefix, self._cache.C
        if live.done < len(tokens) and not live.scored and (self._match(live, tokens) or self._led(live, tokens)):
            return 0
        while live.done < len(tokens) and spent < budget:
            if not self.next_page(live, live.done):
                break
            start, live.done = live.done, min(live.done + C, len(tokens))
            self._add(live, start, tokens)
            spent += live.done - start
            if self._states is not None:
                break  # the next chunk needs the state after this one
        return spent

    def _match(self, live: Live, tokens: Sequence[int]) -> bool:
        """Takes what is cached of a prompt; True if the rest has to wait for copies."""
        cache, variant = self._cache, live.variant
        if live.routed:
            chunk = tokens[live.done : live.done + cache.C]
            seen = live.seen(live.done, live.done + len(chunk))
            next_one = cache.prefixes.get(hashing.key(live.last, variant, chunk, seen))
            if next_one and next_one.routed is None and self._chunks:
                self.flush()  # then its experts are known
        found = cache.prefixes.longest(live.last, variant, tokens, live.done, routed=live.routed, seen=live.seen)
        if not found:
            return False
        end, last = found[-1].end, found[-1]
        held = [(i, page) for one in found for i, page in enumerate(one.pages) if page]
        for i, page in held:
            cache.pages[i].share(page)  # so that none is lost while room is made
        short = end % cache.C > 0
        new = {kind: self._page(live, kind) for kind in cache.paged} if short else {}
        fits = all(new.values())
        if fits:
            for one in found:
                for kind in cache.paged:
                    needed = (one.end - 1) // cache.C >= cache.kinds[kind].first(end)
                    if one is last and short:
                        self._copied[kind].append((cache.pages[kind].share(one.pages[kind]), new[kind]))
                        cache.put(live, kind, new[kind])
                    else:
                        cache.put(live, kind, cache.pages[kind].share(one.pages[kind]) if needed else 0)
            if self._states is not None:
                row = cache.pages[self._states].share(last.pages[self._states])
                self._restored.append((row, live.seat))
            if not live.progress.tokens:
                live.progress.cached_tokens += end - live.done
            for one in found if live.routed else ():
                _extend(live.progress.routed, one.routed, one.end)
            live.done, live.last = end, last
        for i, page in [*held, *(() if fits else new.items())]:
            cache.pages[i].give(page)
        return fits and (short or self._states is not None)

    def _led(self, live: Live, tokens: Sequence[int]) -> bool:
        """Whether a request before this one will keep a state that it can take; others keep each chunk."""
        if self._states is None:
            return False
        for other in self.entering[: self.entering.index(live)]:
            theirs = other.prefix
            end = len(theirs) // self._cache.C * self._cache.C
            behind = max(live.done, other.done) < end and other.variant == live.variant
            if behind and tokens[:end] == theirs[:end] and live.seen(0, end) == other.seen(0, end):
                return True
        return False

    def next_page(self, live: Live, position: int) -> bool:
        """Adds a page of each kind to a sequence, as far as tokens from `position` on need it; False if there is no
        room."""
        needed = [
            kind for kind in self._cache.paged if len(live.pages[kind]) >= self._cache.kinds[kind].first(position)
        ]
        made = {kind: self._page(live, kind) for kind in needed}
        if not all(made.values()):
            for kind, page in made.items():
                self._cache.pages[kind].give(page)
            return False
        for kind in self._cache.paged:
            self._cache.put(live, kind, made.get(kind, 0))
        return True

    def _page(self, live: Live, kind: int) -> int:
        """A page; 0 if there is no room. What is scheduled is computed first: that may free some."""
        while not (page := self._cache.pages[kind].take()):
            if self._chunks or any(self._copied.values()):
                self.flush()
            elif not self._room(live, kind):
                return 0
        return page

    def _add(self, live: Live, start: int, tokens: Sequence[int]) -> None:
        """Schedules the chunk from `start` to what is done."""
        cache, chunk = self._cache, tokens[start : live.done]
        key = hashing.key(live.last, live.variant, chunk, live.seen(start, live.done))
        prefix, at = cache.prefixes.get(key), start // cache.C
        if prefix is None:
            prefix = cache.prefixes.add(key, live.last, live.done, [own[at] if own else 0 for own in live.pages])
        for kind in cache.paged:
            if not prefix.pages[kind]:  # it was evicted
                prefix.pages[kind] = cache.pages[kind].share(live.pages[kind][at])
        if (
            self._states is not None
            and live.done >= len(tokens) // cache.C * cache.C
            and not prefix.pages[self._states]
        ):
            rows = cache.pages[self._states]
            if row := rows.take() or (cache.prefixes.evict(self._states) and rows.take()):
                prefix.pages[self._states] = row
                self._kept.append((live.seat, row))
        live.last = prefix
        self._chunks.append(Chunk(live, chunk, start, live.done, prefix))

    def flush(self) -> None:
        """Computes what is scheduled, then copies pages and states."""
        chunks, C, slots = self._chunks, self._cache.C, self._cache.slots
        self._chunks = []
        alike: dict[tuple[int, bool], list[Chunk]] = {}
        for chunk in sorted(chunks, key=lambda chunk: chunk.end % C > 0):  # short ones may need whole ones before them
            T = programs.width(chunk.end - chunk.start, C)
            alike.setdefault((T, chunk.seeing), []).append(chunk)
        for (T, seeing), group in sorted(alike.items(), key=lambda each: (-each[0][0], each[0][1])):
            R = programs.rows(T, slots if T < C or self._states is not None else None)
            for i in range(0, len(group), R):
                self._compute(group[i : i + R], R, T, seeing)
        if self._kept or self._restored or any(self._copied.values()):
            self._copy()
        for live in dict.fromkeys(chunk.live for chunk in chunks):
            self._cache.behind(live, live.done)
        self._forget_used_features()

    def _copy(self) -> None:
        cache, states = self._cache, self._states
        pages = {kind: _filled(pairs, cache.slots, (0, 0)) for kind, pairs in self._copied.items()}
        keep = _filled(self._kept, cache.slots, (0, cache.counts[states] + 1 if states is not None else 0))
        restore = _filled(self._restored, cache.slots, (0, cache.slots))
        each = [pages.get(i, keep) for i in range(len(cache.kinds))]
        self._device.run("copy", each, keep, restore)
        for kind, pairs in self._copied.items():
            for source, _ in pairs:
                cache.pages[kind].give(source)
        for row, _ in self._restored:
            if states is not None:
                cache.pages[states].give(row)
        self._no_copies()

    def _compute(self, chunks: Sequence[Chunk], R: int, T: int, seeing: bool) -> None:
        cache = self._cache
        token_RT = np.zeros((R, T), np.int32)
        next_R, start_R, length_R, adapter_R, total_R = np.zeros((5, R), np.int32)
        slot_R = np.full(R, cache.slots, np.int32)
        table_KRX = np.zeros((len(cache.kinds), R, cache.table_KSX.shape[2]), np.int32)
        for i, chunk in enumerate(chunks):
            length_R[i], start_R[i], slot_R[i] = chunk.end - chunk.start, chunk.start, chunk.live.seat
            token_RT[i, : length_R[i]], next_R[i] = chunk.tokens, chunk.live.token(chunk.end)
            adapter_R[i] = chunk.live.adapter.index if chunk.live.adapter else 0
            total_R[i] = chunk.live.total
            table_KRX[:, i] = cache.table_KSX[:, chunk.live.seat]
        scored, routed = (any(getattr(chunk.live, name) for chunk in chunks) for name in ("scored", "routed"))
        routed_RTLK = self._device.run(
            "prefill", token_RT, next_R, start_R, length_R, total_R, adapter_R, slot_R, table_KRX, scored, routed,
            self._views(chunks, R, T) if seeing else None,
        )  # fmt: skip
        self.counts["prefills"] += 1
        self.counts["prefilled_tokens"] += int(length_R.sum())
        for i, chunk in enumerate(chunks):
            if chunk.live.routed:
                chunk.prefix.routed = routed_RTLK[i, : length_R[i]].copy()
                _extend(chunk.live.progress.routed, chunk.prefix.routed, chunk.end)
            if chunk.live.scored:
                self._score(chunk, i, T)

    def _views(self, chunks: Sequence[Chunk], R: int, T: int) -> Views:
        """What chunks see of images, whose features are made if they are not there yet."""
        feature_RT, position_RT3, parts = np.full((R, T), -1, np.int32), np.zeros((R, T, 3), np.int32), list[Part]()
        for i, chunk in enumerate(chunks):
            assert chunk.live.images
            position_RT3[i, : chunk.end - chunk.start] = chunk.live.images.positions(chunk.start, chunk.end)
            for at, picture in chunk.live.images.within(chunk.start, chunk.end):
                if picture.hash not in self._encoded:
                    self._device.run("encode", picture.hash, picture.take())
                    self._encoded.add(picture.hash)
                first, end = max(at, chunk.start), min(at + picture.count, chunk.end)
                of = slice(first - chunk.start, end - chunk.start)
                feature_RT[i, of] = np.arange(of.start, of.stop)
                parts.append(Part(picture.hash, i, of.start, first - at, end - first))
        return Views(feature_RT, position_RT3, parts)

    def _score(self, chunk: Chunk, row: int, T: int) -> None:
        """Adds the log-probabilities of the tokens that a chunk predicts, as far as the request needs them."""
        request, progress = chunk.live.request, chunk.live.progress
        first = (request.input_logprobs_from or 0) + len(progress.input_logp)  # the next one to report
        if first > chunk.end:
            return
        target_T = np.zeros(T, np.int32)
        target_T[: chunk.end - chunk.start] = request.prompt[chunk.start + 1 : chunk.end + 1]
        top = request.top_logprobs and (FEW if request.top_logprobs <= FEW else TOP)
        logp_T, best = self._device.run("scores", row, target_T, top)
        of = slice(max(first - 1 - chunk.start, 0), chunk.end - chunk.start)  # hidden[t] predicts token t + 1
        progress.input_logp += logp_T[of].tolist()
        if request.top_logprobs:
            progress.input_top += pairs(*(x_TK[of, : request.top_logprobs] for x_TK in best))


def _extend(routed: list, new: np.ndarray | None, end: int) -> None:
    """Appends the experts of tokens up to `end`, of which `new` has the last; those that are there already are kept."""
    assert new is not None
    start = end - len(new)
    if len(routed) >= start:
        routed.extend(new[len(routed) - start :])


def _filled(some: Sequence[tuple[int, int]], size: int, fill: tuple[int, int]) -> np.ndarray:
    """Pairs as i32[2, size]."""
    return np.array([*some, *[fill] * (size - len(some))], np.int32).T


def pairs(logp_TK: np.ndarray, id_TK: np.ndarray) -> list[list[tuple[float, int]]]:
    """Zips arrays to [(logp, id), ...] per position."""
    rows = zip(logp_TK.tolist(), id_TK.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]
