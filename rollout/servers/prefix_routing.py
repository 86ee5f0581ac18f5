"""Prefix-aware routing: sends requests with a common prefix to the same server, for example samples of a prompt.

A server caches the keys and values of what it has read and generated (RadixAttention, arXiv:2312.07104), and computes
only the rest of a prompt with a cached prefix. The fleet remembers in blocks what it sent where, and prefers the server
with the longest match unless that is much busier than the least loaded one. SGLang's router does the same with a radix
tree (its policy cache_aware); here each block's hash covers all blocks before it, so one set of hashes per server is
enough.
"""

from __future__ import annotations

import bisect
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import xxhash

BLOCK = 64  # tokens; shorter prompts are cheap to compute anywhere
TOKENS = 1 << 20  # tokens remembered for a server that does not report its cache size
NONE: Mapping[int, str] = MappingProxyType({})
COMPARED, SAMPLED = 64, 16  # servers up to which all are compared; of more, so many at random
PROMPTS, HOLDERS = 1 << 16, 4  # prompts whose most recent servers are remembered; servers of each
SLACK, RATIO = 8, 1.25  # much busier = more than SLACK requests more, and more than RATIO times as many


class Routable(Protocol):
    """The attributes of a server that routing uses."""

    @property
    def load(self) -> int: ...

    @property
    def cached(self) -> Cached: ...


Choice = TypeVar("Choice", bound=Routable)


def chain(tokens: Sequence[int], block: int = BLOCK, marks: Mapping[int, str] = NONE) -> list[int]:
    """For each complete block of so many tokens, a hash of it and all blocks before it.

    Args:
      marks: by the index of a token what else tells it apart, such as the hash of the image that begins there.
    """
    data = memoryview(array("q", tokens)).cast("B")
    state, hashes = xxhash.xxh3_64(), []
    for end in range(block, len(tokens) + 1, block):
        for index in sorted(marks.keys() & range(end - block, end)):
            state.update(f"{index} {marks[index]} ".encode())
        state.update(data[8 * (end - block) : 8 * end])
        hashes.append(state.intdigest())
    return hashes


class Cached:
    """The blocks that a server is expected to have cached: an LRU set of at most `tokens` tokens."""

    def __init__(self, tokens: int = TOKENS, block: int = BLOCK):
        self._most = max(1, tokens // block)
        self._known: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def match(self, hashes: Sequence[int]) -> int:
        """The number of leading blocks of a chain that are cached."""
        if not hashes or hashes[0] not in self._known:  # as of most servers
            return 0
        return bisect.bisect_left(hashes, True, key=lambda block: block not in self._known)

    def add(self, hashes: Sequence[int]) -> None:
        """Marks these blocks as just used."""
        for block in reversed(hashes):  # the first block last: the end of a chain is evicted first, as on servers
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Forgets all blocks: the server's cache was flushed."""
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


class Recent(Generic[Choice]):
    """The servers that got each prompt's first block most recently: of very many, a request compares only a few."""

    def __init__(self):
        self._holders: OrderedDict[int, deque[Choice]] = OrderedDict()

    def add(self, hashes: Sequence[int], server: Choice) -> None:
        """Records that `server` got a prompt of these blocks."""
        if hashes:
            holders = self._holders.setdefault(hashes[0], deque(maxlen=HOLDERS))
            if server not in holders:
                holders.append(server)
            self._holders.move_to_end(hashes[0])
            if len(self._holders) > PROMPTS:
                self._holders.popitem(last=False)

    def candidates(self, servers: Sequence[Choice], hashes: Sequence[int]) -> list[Choice]:
        """Those of `servers` among which to choose: all, or of many the holders of the prompt and some at random, the
        least loaded of which is nearly the least loaded of all (the power of d choices)."""
        if len(servers) <= COMPARED:
            return list(servers)
        holders = self._holders.get(hashes[0], ()) if hashes else ()
        drawn = (servers[int(random.random() * len(servers))] for _ in range(SAMPLED))  # a tenth of `sample`'s time
        return [*{*drawn, *(holder for holder in holders if holder in servers)}]


def choose(servers: Iterable[Choice], hashes: Sequence[int]) -> Choice:
    """The server with the longest cached prefix, among those not much busier than the least loaded one; of equal ones
    the least loaded."""
    servers = list(servers)
    if not hashes or len(servers) == 1:
        return min(servers, key=lambda server: server.load)
    least = min(server.load for server in servers)
    near = [server for server in servers if server.load <= max(least + SLACK, RATIO * least)]
    return max(near, key=lambda server: (server.cached.match(hashes), -server.load))
