"""The largest temporaries of a compiled program, from the compiler's own list, in words of the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST = 5  # that are named
DUMP = {"xla_dump_hlo_as_text": True}  # with `xla_dump_to`
ALLOCATION = re.compile(r"^allocation \d+: size \d+(?:, color (\d+))?, preallocated-temp")
VALUE = re.compile(r"^ value: <\d+ (\S+).*> \(size=(\d+),offset=(\d+)\): (\w+)\[([\d,]*)\]")
MEANT = re.compile(r"^\s*(?:ROOT )?%?(\S+) = .*metadata=\{.*?op_name=\"([^\"]*)\"", re.MULTILINE)


@dataclass(frozen=True)
class Names:
    """What sizes of arrays mean.

    Attributes:
      vocab: of the model, and the part of it on a device.
      depths: layers of each stack.
      weights: {shape without axes of size 1, on a device or whole: path}.
    """

    vocab: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    weights: dict[tuple[int, ...], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Buffer:
    """A temporary.

    Attributes:
      meaning: in words of the model.
      shape: as XLA writes it, such as bf16[4,1024].
      operation: of the program, that makes it, "" if it is not known.
    """

    bytes: int
    meaning: str
    shape: str
    operation: str


def largest(folder: Path, text: str, names: Names) -> list[Buffer]:
    """The largest temporaries that are in memory at different places, from the dump of a compilation.

    Args:
      folder: the dump's, made with `DUMP`.
      text: of the compiled program.
    """
    operations = dict(MEANT.findall(text))
    found: list[Buffer] = []
    taken: list[tuple[int, int]] = []
    for size, start, name, dtype, shape in sorted(_values(folder), key=lambda value: (-value[0], value[1])):
        if len(found) == MOST:
            break
        if all(start >= end or start + size <= begin for begin, end in taken):
            taken.append((start, start + size))
            operation = operations.get(name.partition("{")[0], "")
            shown = f"{dtype}[{','.join(map(str, shape))}]"
            found.append(Buffer(size, _meaning(shape, names), shown, operation))
    return found


def _values(folder: Path) -> Iterator[tuple[int, int, str, str, tuple[int, ...]]]:
    """(bytes, offset, instruction, dtype, shape) of the temporaries in a device's main memory, of the largest heap."""
    heaps: list[list] = [[]]
    for file in sorted(folder.glob("*buffer-assignment.txt")):
        inside = False
        for line in file.read_text().splitlines():
            if line.startswith("allocation"):
                match = ALLOCATION.match(line)
                inside = match is not None and match[1] in (None, "0")
                heaps.append([])
            elif inside and (match := VALUE.match(line)):
                name, size, offset, dtype, shape = match.groups()
                heaps[-1].append((int(size), int(offset), name, dtype, tuple(map(int, filter(None, shape.split(","))))))
    yield from max(heaps, key=lambda heap: sum(value[0] for value in heap))


def _meaning(shape: tuple[int, ...], names: Names) -> str:
    sides = tuple(side for side in shape if side > 1)
    for one in (sides, (*sides[:-2], *sides[-2:][::-1])):
        if path := names.weights.get(one):
            return f"{path}, or its gradient"
    if any(side in names.vocab for side in sides):
        return "logits"
    if len(sides) > 2 and sides[0] in names.depths:
        return f"saved by {sides[0]} layers"
    if len(sides) > 1 and math.prod(sides) > 1:
        return "values of a layer"
    return "other"
