"""Tries of a training step: what a model computes where the samples of a group share their prompt."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...core import packing
from ...core.trie_packing import aligned


@dataclass(frozen=True)
class Tries:
    """Groups of samples with a prompt in common, as `packing.pack_tries` lays them out if all are equally long.

    Attributes:
      group: samples with the same prompt.
      prompt, new: tokens of a prompt and of a completion.
      most: samples of a group in one trie: fewer than `group` if a row does not hold them all.
      places: of all tries of a group, with the padding after nodes.
      rows: that an optimiser step fills.
      flattened: A, the tokens of samples for which a row has room.
      length: T, places of a row.
      slots: J, segment slots per row.
      tokens: of an optimiser step's samples.
    """

    group: int
    prompt: int
    new: int
    most: int
    places: int
    rows: int
    flattened: int
    slots: int
    length: int
    tokens: int

    @property
    def ratio(self) -> float:
        """Places over tokens of samples."""
        return self.places / (self.group * (self.prompt + self.new))

    @property
    def stems(self) -> int:
        """Tries of a group, each with the prompt."""
        return math.ceil(self.group / self.most)

    def pairs(self, seen: Callable[[int], float]) -> float:
        """Query-key pairs of a group, given those of a sequence of n tokens, `seen(n)`."""
        shared = seen(self.prompt)
        return self.stems * shared + self.group * (seen(self.prompt + self.new) - shared)


def of_groups(groups: int, group: int, prompt: int, new: int, length: int, align: int) -> Tries | None:
    """The tries of so many groups in rows of `length` places, a multiple of `align`; None where they save too little,
    and `packing.pack_tries` takes rows without them."""

    def size(samples: int) -> int:
        return aligned(prompt, align) + samples * aligned(new, align) if samples > 1 else aligned(prompt + new, align)

    fork = align if align > 1 else 0  # that `trie_packing.grow` keeps free for one
    most = (length - fork - aligned(prompt, align)) // aligned(new, align)
    most = max(1, min(group, most))
    full, rest = divmod(group, most)
    kinds = [(full * groups, most)] + [(groups, rest)] * (rest > 0)  # tries, and samples in each
    places = full * size(most) + (size(rest) if rest else 0)
    if places > (1 - packing.SAVED) * group * (prompt + new):
        return None
    a_row = [min(count, length // size(samples)) for count, samples in kinds]
    fullest = max(tries * samples for tries, (_, samples) in zip(a_row, kinds, strict=True))
    flattened, slots = packing.flattened(fullest * (prompt + new), fullest, length)
    return Tries(
        group, prompt, new, most, places,
        rows=sum(math.ceil(count / tries) for tries, (count, _) in zip(a_row, kinds, strict=True)),
        flattened=flattened, slots=slots, length=length, tokens=groups * group * (prompt + new),
    )  # fmt: skip
