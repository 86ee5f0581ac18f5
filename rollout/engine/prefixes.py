"""Prefixes of prompts whose pages are kept for later prompts that begin alike; on the host.

A prefix is a chain of chunks of C tokens, each in one page of every kind, and at last perhaps one of fewer. Chunks have
chained hashes: hits end at chunks anyway, as only then a token's keys and values have the bits they would have without.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...models.paging import Kind
from .pages import Pages


@dataclass(eq=False)
class Prefix:
    """The last chunk of a cached prefix.

    Attributes:
      key: hash of all tokens up to its end, of their images, and of `Live.variant`.
      before: the prefix without this chunk; None = it is the first one.
      end: the number of tokens up to its end.
      pages: a page of each kind; 0 = not kept.
      children: how many cached prefixes are one chunk longer.
      used: when it was last used, by a counter.
      routed: i32[tokens, layers, top_k], the experts of the chunk's tokens, if a request needed them.
    """

    key: bytes
    before: Prefix | None
    end: int
    pages: list[int]
    children: int = 0
    used: int = 0
    routed: np.ndarray | None = None


def key(before: Prefix | None, variant: int, tokens: Sequence[int], seen: bytes = b"") -> bytes:
    """The key of a prefix that continues `before` with a chunk; `variant` is that of `Live`, `seen` identifies the
    features of images in the chunk."""
    start = before.key if before else variant.to_bytes(8, "little")
    return hashlib.blake2b(start + np.asarray(tokens, np.int32).tobytes() + seen, digest_size=16).digest()


def no_images(start: int, end: int) -> bytes:
    """What `key` gets as `seen` for the tokens [start, end) of a text."""
    return b""


class Prefixes:
    """The cached prefixes; each holds a use of its pages. What was not used for longest goes first."""

    def __init__(self, kinds: Sequence[Kind], pages: Sequence[Pages], size: int):
        self._kinds, self._pages, self._size = kinds, pages, size
        self._known: dict[bytes, Prefix] = {}
        self._clock = itertools.count()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: bytes, before: Prefix | None, end: int, pages: Sequence[int]) -> Prefix:
        """Keeps a prefix. It becomes one more user of `pages`, but of those of states the only one."""
        for kind, of, page in zip(self._kinds, self._pages, pages, strict=True):
            if page and not kind.states:
                of.share(page)
        made = self._known[key] = Prefix(key, before, end, list(pages), used=next(self._clock))
        if before:
            before.children += 1
        return made

    def get(self, key: bytes) -> Prefix | None:
        return self._known.get(key)

    def longest(
        self, before: Prefix | None, variant: int, tokens: Sequence[int], held: int, *, routed: bool,
        seen: Callable[[int, int], bytes] = no_images,
    ) -> list[Prefix]:  # fmt: skip
        """The chunks of the longest cached prefix of `tokens` behind `before`, with all pages that its last token's
        successor needs; [] if there is none.

        Args:
          held: the number of tokens, those of `before`, whose pages the caller has already.
          routed: only chunks whose experts are known.
          seen: identifies the features of images among tokens [start, end).
        """
        found: list[Prefix] = []
        usable, last = 0, before
        for start in range(held, len(tokens), self._size):
            chunk = tokens[start : start + self._size]
            now = self._known.get(key(last, variant, chunk, seen(start, start + len(chunk))))
            if now is None or (routed and now.routed is None):
                break
            found.append(now)
            last = now
            if all(self._has(kind, i, found, held // self._size) for i, kind in enumerate(self._kinds)):
                usable = len(found)
        del found[usable:]
        time, step = next(self._clock), found[-1] if found else None
        while step:
            step.used, step = time, step.before
        return found

    @staticmethod
    def _has(kind: Kind, i: int, found: list[Prefix], held: int) -> bool:
        first = kind.first(found[-1].end) - held
        return all(one.pages[i] for one in found[max(first, 0) :])

    def spare(self, i: int) -> int:
        """How many pages of kind i have no other user; other threads may ask."""
        return sum(self._pages[i].users(one.pages[i]) == 1 for one in [*self._known.values()] if one.pages[i])

    def evict(self, i: int) -> bool:
        """Frees a page of kind i; False if each has other users, too. Of kinds that need only the last pages a prefix
        may lose others."""
        only = [one for one in self._known.values() if one.pages[i] and self._pages[i].users(one.pages[i]) == 1]
        if self._kinds[i].limited:
            oldest = min(only, key=lambda one: (one.used, one.end), default=None)
            if oldest:
                self._pages[i].give(oldest.pages[i])
                oldest.pages[i] = 0
                self._drop_empty(oldest)
            return oldest is not None
        # One with longer ones goes if a sequence uses all of those, though not this page, as it computed its own.
        oldest = min(only, key=lambda one: (one.children > 0, one.used), default=None)
        if oldest:
            self._drop(oldest)
        return oldest is not None

    def _drop_empty(self, one: Prefix | None) -> None:
        while one and self._known.get(one.key) is one and not one.children and not any(one.pages):
            self._drop(one)
            one = one.before

    def _drop(self, one: Prefix) -> None:
        del self._known[one.key]
        if one.before:
            one.before.children -= 1
        for of, page in zip(self._pages, one.pages, strict=True):
            of.give(page)

    def clear(self) -> None:
        for one in self._known.values():
            for of, page in zip(self._pages, one.pages, strict=True):
                of.give(page)
        self._known = {}
