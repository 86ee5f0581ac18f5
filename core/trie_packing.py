"""Tries of samples: which samples share a trie, and the places of their tokens (numpy).

Reads the fields of a sample by name and imports no type.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .trie import Trie

UNREAD = "observation", "state"  # arrays that no model reads: each row of an episode has its own
SHARE = 1 / 8  # a sample joins a trie that has at least this part of its tokens; less is cheaper to repeat


@dataclass
class Branch:
    """Tokens `start` to `stop` of a sample: those it does not share with samples before it in its trie.

    `forks` are the depths in between from which later samples go on; they and the ends delimit the trie's nodes.
    """

    sample: int
    start: int
    stop: int
    forks: set[int] = field(default_factory=set)

    def nodes(self) -> list[tuple[int, int]]:
        edges = [self.start, *sorted(self.forks), self.stop]
        return list(zip(edges, edges[1:], strict=False))

    def size(self, align: int) -> int:
        return sum(aligned(stop - start, align) for start, stop in self.nodes())


@dataclass
class Tree:
    """A trie in depth-first order: a branch per sample, empty for one that is all in the trie before it.

    Attributes:
      size: places, with the padding after nodes.
      tokens: of its samples.
      pair: of its samples, if the pair needs several tries; else -1.
      path: the branches that lead to the token added last.
    """

    pair: int = -1
    size: int = 0
    tokens: int = 0
    branches: list[Branch] = field(default_factory=list)
    path: list[Branch] = field(default_factory=list)

    def add(self, sample: int, length: int, shared: int, align: int) -> None:
        """Adds a sample that shares its first `shared` tokens with the one added last."""
        branch = Branch(sample, shared, length)
        self.branches.append(branch)
        self.tokens += length
        if shared == length:
            return
        while self.path and self.path[-1].start >= shared:
            self.path.pop()
        if shared and shared < (forked := self.path[-1]).stop:
            self.size -= forked.size(align)
            forked.forks.add(shared)
            self.size += forked.size(align)
        self.path.append(branch)
        self.size += branch.size(align)


def grow(samples: Sequence, length: int, align: int, tokens: float = math.inf, apart: Sequence[int] = ()) -> list[Tree]:
    """Tries of at most `length` places, a multiple of `align`, that hold all samples.

    Samples, sorted by tokens, go one by one into the trie with which they share most, of those with room; one that
    would share less than `SHARE` of its tokens starts a new one. So a trie longer than `length` is cut into several,
    each with its own stem, and a header that all samples begin with ties nothing together. Samples of a pair go into
    one trie, or if that exceeds `length`, each into its own. No trie has samples of more than `tokens` tokens in all.
    Samples on two sides of a length in `apart` share nothing.
    """
    units, shared = _sorted(samples, apart)
    sizes = [len(s.tokens) for s in samples]
    trees: list[Tree] = []
    most, room, held = np.zeros((3, len(samples)), int)  # of each trie: tokens shared, places left, tokens of samples
    fork = align if align > 1 else 0  # places that one inside a node costs at most
    done = 0
    for unit in units:
        first, own = sizes[unit[0]], shared[done : done + len(unit)]
        done += len(unit)
        rest = sum(aligned(sizes[i] - k, align) + fork for i, k in zip(unit[1:], own[1:], strict=True))
        most = np.minimum(most, own[0])
        fits = (most >= SHARE * first) & (aligned(first - most, align) + fork + rest <= room)
        fits &= held + sum(sizes[i] for i in unit) <= tokens
        if fits.any():
            best = int(np.where(fits, most, -1).argmax())
            added = [(best, unit, [int(most[best]), *own[1:]])]
        elif aligned(first, align) + rest <= length:
            added = [(len(trees), unit, [0, *own[1:]])]
        else:
            added = [(len(trees) + j, [i], [0]) for j, i in enumerate(unit)]
        most = np.minimum(most, min(own))
        for t, members, begun in added:
            if t == len(trees):
                trees.append(Tree(pair=-1 if len(added) == 1 else samples[unit[0]].pair))
            for i, k in zip(members, begun, strict=True):
                trees[t].add(i, sizes[i], k, align)
            if len(added) == 1:  # others may join
                most[t], room[t], held[t] = sizes[members[-1]], length - trees[t].size, trees[t].tokens
    return trees


def places(
    trees: Sequence[Tree], row: np.ndarray, start: np.ndarray, at: np.ndarray, shape: tuple[int, int, int], align: int,
    apart: Sequence[int] = (),
) -> Trie:  # fmt: skip
    """The Trie of trees in rows, [rows, ...].

    Args:
      row, start: of each tree; its first place in that row.
      at: of each sample; its first place in A of that row.
      shape: (rows, T, A).
      align, apart: as in `grow`.
    """
    rows, T, A = shape
    here = np.broadcast_to(np.arange(T, dtype=np.int32), (rows, T))
    first, parent, until = np.full((rows, T), -1, np.int32), here.copy(), here + 1
    place = np.zeros((rows, A), np.int32)
    path = np.zeros(T, np.int32)  # places of the tokens that lead to the one placed last
    for tree, b, free in zip(trees, row, start, strict=True):
        depth = end = 0
        for branch in tree.branches:
            k, n = branch.start, branch.stop
            if k < n:
                until[b, path[k:depth]] = end  # the subtrees that end here
                for left, right in branch.nodes():
                    path[left:right] = np.arange(free, free + right - left)
                    end, free = free + right - left, free + aligned(right - left, align)
                first[b, path[k:n]] = at[branch.sample] + np.arange(k, n)
                parent[b, path[max(k, 1) : n]] = path[max(k, 1) - 1 : n - 1]
                depth = n
            place[b, at[branch.sample] : at[branch.sample] + n] = path[:n]
        until[b, path[:depth]] = end
    return Trie(first, parent, until, place, align, tuple(apart))


def dtypes(samples: Sequence) -> dict[str, np.dtype]:
    """{name: dtype in which the samples' arrays of that name are packed}: one that holds all of their numbers."""
    return {name: np.result_type(*{s.arrays[name][1].dtype for s in samples}) for name in sorted(samples[0].arrays)}


def _sorted(samples: Sequence, apart: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Samples in depth-first order, those of a pair together, and the tokens that each shares with the one before.

    Tokens are shared while they and the values of all extra arrays there but UNREAD agree to the bit, as they are
    packed, by samples on the same side of each length in `apart`.
    """
    own = dtypes(samples)
    keys = [_bytes(s, own, sum(len(s.tokens) > length for length in apart)) for s in samples]
    texts = [key.tobytes() for key in keys]
    units: dict = {}
    for i in sorted(range(len(samples)), key=texts.__getitem__):
        units.setdefault(samples[i].pair if samples[i].pair >= 0 else (i,), []).append(i)
    order = [i for unit in units.values() for i in unit]
    shared = [_common(keys[i], keys[j]) for i, j in zip(order, order[1:], strict=False)]
    return list(units.values()), [0, *shared]


def _bytes(sample, dtypes: dict, side: int) -> np.ndarray:
    """The bytes of each token and its extra arrays, in the dtypes in which they are packed, behind a byte that only
    samples of the same side have, u8[n, ...]."""
    arrays: list[np.ndarray] = [np.full(len(sample.tokens), side, np.uint8), np.asarray(sample.tokens, np.int32)]
    read = {name: dtype for name, dtype in dtypes.items() if name not in UNREAD}
    arrays += [np.ascontiguousarray(sample.arrays[name][1], dtype) for name, dtype in read.items()]
    return np.concatenate([x.reshape(len(x), math.prod(x.shape[1:])).view(np.uint8) for x in arrays], 1)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of equal rows at the beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero((a[:n] != b[:n]).any(1))
    return int(differ[0]) if len(differ) else n


def aligned(count, align: int):
    """The smallest multiple of `align` that is at least the count."""
    return -(-count // align) * align
