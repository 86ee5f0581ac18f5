"""Fits sizes into rows of few shapes: which shape a batch takes, and where in it each size goes (numpy)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GRAIN = 128  # rows shorter than the longest allowed are multiples of it, as attention kernels need
STEPS = 8, 7, 6, 5  # eighths of a power of two that a length may be
MICROBATCH = 512  # positions that cost about what a microbatch does beside its positions: gathering weights, adding up
CLOSE = 1.05  # shapes that cost up to so much more than the cheapest are as good

Shape = tuple[int, int]  # T, and rows of a microbatch


@dataclass(frozen=True)
class Places:
    """Where each size goes.

    Attributes:
      T, B: length of a row, rows of a microbatch.
      row, start: of each size, int [n]; rows are numbered over all microbatches.
      rows: that are in use.
    """

    T: int
    B: int
    row: np.ndarray
    start: np.ndarray
    rows: int


def shapes(length: int, rows: int, unit: int, multiple: int = 1) -> list[Shape]:
    """The shapes that batches take: few, so that few programs compile, and none of more positions than `rows` x
    `length`.

    Lengths are `length` and shorter multiples of `GRAIN` that are 2^k or 5/8, 6/8 or 7/8 of it; those of at most half
    come with `unit` rows alone, others with `unit` times 2^k or with `rows`. So positions grow by an eighth to a
    quarter from one shape to the next.

    Args:
      length: that of the longest row.
      rows: of `length`, a multiple of `unit`.
      unit: devices along the batch axes.
      multiple: of which every length is one.
    """
    grain = math.lcm(GRAIN, multiple)
    eighths = (step << n for n in range(length.bit_length()) for step in STEPS)
    lengths = {length, *(T for T in eighths if T < length and T % grain == 0)}
    counts = {rows, *(unit << n for n in range((rows // unit).bit_length()))}
    return sorted((T, B) for T in lengths for B in counts if B == unit or 2 * T > length)


def place(
    sizes: np.ndarray, pairs: Sequence[int] | np.ndarray, given: Sequence[Shape], named: Sequence[int], most: int = 0
) -> Places:  # fmt: skip
    """Places sizes by `first_fit` in rows of the shape that computes fewest positions, `MICROBATCH` more for each
    microbatch in use; of several that are `CLOSE`, the roundest.

    Args:
      sizes, pairs: as in `first_fit`.
      given: allowed shapes.
      named: the sample to name for each size in errors.
      most: of the second number, in a row of the longest shape; shorter ones hold less in proportion, and any one size.

    Raises:
      ValueError: no shape holds a pair, or a size.
    """
    widest, total = int(sizes[:, 0].max()), int(sizes[:, 0].sum())
    least = lambda T, B: _cost(T, B, -(-total // T))
    order = sorted((shape for shape in {*given} if shape[0] >= widest), key=lambda shape: (least(*shape), shape))
    alone = all(pair < 0 for pair in pairs)
    longest = max(T for T, _ in given)
    rows_of: dict[int, tuple | None] = {}
    found: list[tuple[float, Places]] = []
    for T, B in order:
        if found and least(T, B) > CLOSE * min(cost for cost, _ in found):
            break
        if not alone or T not in rows_of:
            second = [max(most * T // longest, int(largest)) for largest in sizes[:, 1:].max(0)]
            rows_of[T] = first_fit(sizes, pairs, (T, *second), B)
        if (fitted := rows_of[T]) is not None:
            found.append((_cost(T, B, fitted[2]), Places(T, B, *fitted)))
    if not found:
        T, B = max(given, key=lambda shape: shape[0] * shape[1])
        unit = max(_units(sizes[:, 0], pairs), key=lambda unit: sizes[unit, 0].sum())
        raise ValueError(
            f"pack: samples of one pair must fit into {B} rows of {T} tokens, got {sizes[unit, 0].tolist()} tokens in "
            f"samples {[named[i] for i in unit]}; raise rows or length"
        )
    close = CLOSE * min(cost for cost, _ in found)
    odd = lambda n: n // (n & -n)
    roundness = lambda made: (1 if made.T == longest else odd(made.T)) * odd(made.B)
    rank = lambda pair: (roundness(pair[1]), pair[0], pair[1].T)
    return min((pair for pair in found if pair[0] <= close), key=rank)[1]


def _cost(T: int, B: int, rows: int) -> int:
    """Of so many rows in microbatches of B, in positions."""
    return -(-rows // B) * (B * T + MICROBATCH)


def first_fit(
    sizes: np.ndarray, pairs: Sequence[int] | np.ndarray, limits: tuple, B: int
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Row and start of each size, and the number of rows in use; None if a pair does not fit into a microbatch.

    Sizes [n, 1] are places; [n, 2] have a second number that a row has a limit of.

    Units (pairs or single sizes) are placed longest first, each into the first microbatch with room for all of it;
    there each size of the unit, longest first, into the first row with room.
    """
    places = sizes[:, 0]
    order = sorted(_units(places, pairs), key=lambda unit: -places[unit].sum())
    room = np.full((len(order), B, len(limits)), limits)
    row_of, start_of = (np.zeros(len(sizes), int) for _ in range(2))
    used = 0  # microbatches
    for unit in order:
        unit = [unit[k] for k in np.argsort(-places[unit], kind="stable")]
        left, rows = room[: used + 1].copy(), []  # of every microbatch in use and the next, at once
        for i in unit:
            row = (left >= sizes[i]).all(2).argmax(1)
            left[np.arange(len(left)), row] -= sizes[i]
            rows.append(row)
        fits = (left >= 0).all((1, 2))
        if not fits.any():
            return None
        m = int(fits.argmax())
        used = max(used, m + 1)
        for i, row in zip(unit, rows, strict=True):
            b = row[m]
            row_of[i], start_of[i] = m * B + b, limits[0] - room[m, b, 0]
            room[m, b] -= sizes[i]
    return row_of, start_of, int(row_of.max()) + 1


def _units(places: np.ndarray, pairs: Sequence[int] | np.ndarray) -> list[list[int]]:
    """Indices that stay together: those of a pair, and each of the others."""
    units: dict = {}
    for i, pair in enumerate(pairs):
        units.setdefault(pair if pair >= 0 else (i,), []).append(i)
    return [*units.values()]
