"""The cache of an engine: which pages of its memory sequences and cached prefixes have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...models.paging import Kind
from .device_state import DeviceState
from .live import Live, Saved
from .pages import Pages
from .prefixes import Prefixes


class Cache:
    """Memory for the sequences of `slots` slots; owned by one thread.

    Attributes:
      kinds: of the model's layers.
      pages: which pages of each kind are in use.
      prefixes: the cached ones.
      table_KSX: i32, the pages of each slot by kind; 0 = none.
    """

    def __init__(
        self, kinds: Sequence[Kind], counts: Sequence[int], device: DeviceState, *, slots: int, context: int, C: int
    ):
        self.kinds, self.counts, self.slots, self.context, self.C = kinds, counts, slots, context, C
        self._device = device
        self.paged = [i for i, kind in enumerate(kinds) if not kind.states]
        self.table_KSX = np.zeros((len(self.kinds), slots, -(-context // C)), np.int32)
        self._begin()

    def _begin(self) -> None:
        self.pages = [Pages(count) for count in self.counts]
        self.prefixes = Prefixes(self.kinds, self.pages, self.C)

    @property
    def capacity(self) -> int:
        """The tokens of sequences that fit into it."""
        return self.counts[self.paged[0]] * self.C if self.paged else self.slots * self.context

    @property
    def used(self) -> int:
        """The tokens that fit into those of its pages that sequences have, rather than cached prefixes alone."""
        if not self.paged:
            return 0
        first = self.paged[0]  # of layers that see all tokens, if there are any
        return max(0, self.counts[first] - self.pages[first].free - self.prefixes.spare(first)) * self.C

    def clear(self, *, idle: bool) -> None:
        """Forgets prefixes; if no sequence runs, also wipes pages, to drop any NaN of diverged weights."""
        self.prefixes.clear()
        if self._device.held is None:
            self._device.run("empty")
            self._begin()
        elif idle:
            self._device.run("wipe", [of.most + 1 for of in self.pages])
            self._begin()

    def fits(self, live: Live, running: int) -> bool:
        """Whether there is memory for a request's prompt, the next page of it and of `running` others."""
        position = live.saved.position if live.saved else live.length
        longest = lambda: self.prefixes.longest(None, live.variant, live.prefix, 0, routed=live.routed, seen=live.seen)
        there = 0 if live.scored else len(longest())
        for kind in self.paged:
            wanted = position // self.C + 1 - max(self.kinds[kind].first(position), there) + running
            if wanted > self.pages[kind].free and wanted > self.pages[kind].free + self.prefixes.spare(kind):
                return False
        return True

    def reaches(self, live: Live, position: int) -> bool:
        """Whether a sequence has a page for this position."""
        return all(len(live.pages[kind]) > position // self.C for kind in self.paged)

    def put(self, live: Live, kind: int, page: int) -> None:
        """Adds a page to a sequence."""
        self.table_KSX[kind, live.slot, len(live.pages[kind])] = page
        live.pages[kind].append(page)

    def behind(self, live: Live, position: int) -> None:
        """Gives back the pages that tokens from `position` on do not need."""
        for kind in self.paged:
            own = live.pages[kind]
            for number in range(min(self.kinds[kind].first(position), len(own)) - 1, -1, -1):
                if own[number] == 0:
                    break
                self.pages[kind].give(own[number])
                own[number] = self.table_KSX[kind, live.slot, number] = 0

    def give(self, live: Live) -> None:
        """Gives back all pages of a sequence."""
        for of, own in zip(self.pages, live.pages, strict=True):
            for page in own:
                of.give(page)
        self.table_KSX[:, live.slot] = 0
        live.pages, live.last, live.done = [], None, 0

    def save(self, live: Live, position: int) -> None:
        """Copies what decoding has written to host memory."""
        saved = Saved(live.filled // self.C * self.C, position)
        self._device.run("save", live.number, self._behind_whole(live, saved), live.seat)
        live.saved = saved

    def restore(self, live: Live) -> None:
        """Puts what was saved to new pages, which the sequence has already."""
        assert live.saved
        self._device.run("restore", live.number, self._behind_whole(live, live.saved), live.seat)
        live.filled, live.saved = live.saved.whole, None

    def forget(self, live: Live) -> None:
        """Drops what was saved, if there is anything."""
        if live.saved:
            self._device.run("forget", live.number)
            live.saved = None

    def _behind_whole(self, live: Live, saved: Saved) -> np.ndarray:
        """The pages of a sequence that were `saved`, i32[kinds, N], filled up with 0 to a power of two."""
        whole, end = saved.whole, -(-saved.position // self.C)
        first = [end if kind.states else max(whole // self.C, kind.first(saved.position)) for kind in self.kinds]
        own = [pages[start:end] for start, pages in zip(first, live.pages, strict=True)]
        size = 1 << max(0, max(map(len, own), default=0) - 1).bit_length()
        return np.array([[*pages, *[0] * (size - len(pages))] for pages in own], np.int32)
