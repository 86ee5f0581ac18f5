"""Which server has the beginning of a prompt in its cache: the samples of a prompt, and the turns of an episode, meet.

A server keeps the keys and values of what it has read and generated (RadixAttention, arXiv:2312.07104), and reads only
the rest of a prompt that begins likewise. The fleet remembers what it sent where, in blocks, and prefers the server
with the longest match while that is not much busier than the least loaded one; else the least loaded server is best.
SGLang's router decides likewise (its policy cache_aware), over a radix tree; here a block's hash covers all that stands
before it, so that a set of hashes a server will do.
"""

from __future__ import annotations

import bisect
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import xxhash

BLOCK = 64  # tokens; shorter prompts are cheap to read anywhere
TOKENS = 1 << 20  # remembered of a server that does not say how many it can cache
SLACK, RATIO = 8, 1.25  # a server is much busier than another with SLACK requests more, and RATIO times as many


class Held(Protocol):
    """What is asked of a server here."""

    load: int
    cached: Cached


Choice = TypeVar("Choice", bound=Held)


def chain(tokens: Sequence[int]) -> list[int]:
    """The hash of each whole block of BLOCK tokens, together with all blocks before it."""
    data = memoryview(array("q", tokens)).cast("B")
    state, hashes = xxhash.xxh3_64(), []
    for end in range(8 * BLOCK, len(data) + 1, 8 * BLOCK):
        state.update(data[end - 8 * BLOCK : end])
        hashes.append(state.intdigest())
    return hashes


class Cached:
    """What a server is taken to hold: the blocks used last, at most `tokens` tokens of them."""

    def __init__(self, tokens: int = TOKENS):
        self._most = max(1, tokens // BLOCK)
        self._known: OrderedDict[int, None] = OrderedDict()  # used longest ago first

    def match(self, hashes: Sequence[int]) -> int:
        """How many blocks of a chain it holds, from the first on."""
        return bisect.bisect_left(hashes, True, key=lambda block: block not in self._known)

    def add(self, hashes: Sequence[int]) -> None:
        """It has used these blocks now."""
        for block in reversed(hashes):  # the first is used last: the end of a chain is forgotten first, as by servers
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Its cache was flushed."""
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


def choose(servers: Iterable[Choice], hashes: Sequence[int]) -> Choice:
    """The server that holds most of the chain, of those that are not much busier than the least loaded one; of equals,
    as where nobody holds any of it, the least loaded."""
    servers = list(servers)
    if not hashes or len(servers) == 1:
        return min(servers, key=lambda server: server.load)
    least = min(server.load for server in servers)
    near = [server for server in servers if server.load <= max(least + SLACK, RATIO * least)]
    return max(near, key=lambda server: (server.cached.match(hashes), -server.load))
