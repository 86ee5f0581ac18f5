"""Parts of fused tensors: which entries of a checkpoint's tensor a weight has, for reading and for writing."""

import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """An axis of the tensor consists of groups of `width` entries; the weight has `start:stop` of each, joined.

    Works on arrays of numpy, JAX and torch.

    Attributes:
      axis: that axis, counted in the weight.
      transposed: the tensor has the last two axes of the weight swapped.
      dropped: an axis of size 1 of the tensor that the weight lacks.
    """

    width: int
    start: int
    stop: int
    axis: int = 0
    transposed: bool = False
    dropped: int | None = None

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor, given that of the weight.

        Raises:
          ValueError: the weight is not a number of whole groups.
        """
        groups, rest = divmod(shape[self.axis], self.stop - self.start)
        if rest:
            raise ValueError(f"{self}: axis {self.axis} of a weight must be a multiple of its columns, got {shape}")
        sizes = [*shape[: self.axis], groups * self.width, *shape[self.axis + 1 :]]
        if self.transposed:
            sizes[-2:] = reversed(sizes[-2:])
        if self.dropped is not None:
            sizes.insert(self.dropped, 1)
        return tuple(sizes)

    def take(self, tensor, cut: tuple[slice, ...] | None = None) -> Any:
        """The weight in a tensor: a view, but a copy if it joins stripes of several entries.

        Args:
          cut: reads only these entries of the weight, one slice with bounds per axis.
        """
        axis, size = self.axis, self.stop - self.start
        if cut is None:
            return self._joined(tensor[...])
        rows = cut[axis]
        first, end = rows.start // size, -(-rows.stop // size)
        if size == 1 or end - first == 1:  # a slice of the tensor
            start, step = first * self.width + self.start + rows.start - first * size, self.width if size == 1 else 1
            return self._turned(self._read(tensor, cut, slice(start, start + (rows.stop - rows.start) * step, step)))
        x = self._joined(self._read(tensor, cut, slice(first * self.width, end * self.width)))
        return x[*[slice(None)] * axis, rows.start - first * size : rows.stop - first * size]

    def put(self, tensor, weight) -> None:
        """Writes the weight into a tensor of numpy or torch."""
        stripes = self._stripes(tensor)
        stripes[...] = weight.reshape(stripes.shape)

    def _read(self, tensor, cut: tuple[slice, ...], groups: slice) -> Any:
        """The entries of the tensor that a cut with this range of the axis needs; no others are read."""
        there = [*cut]
        there[self.axis] = groups
        if self.transposed:
            there[-2:] = reversed(there[-2:])
        if self.dropped is not None:
            there.insert(self.dropped, slice(None))
        return tensor[tuple(there)]

    def _turned(self, tensor) -> Any:
        """The tensor in the order of the weight's axes."""
        x = tensor if self.dropped is None else tensor.squeeze(self.dropped)
        return x.swapaxes(-1, -2) if self.transposed else x

    def _stripes(self, tensor) -> Any:
        """The weight as a view of the tensor, its axis as two: [..., groups, stop - start, ...]."""
        x, axis = self._turned(tensor), self.axis
        x = x.reshape(*x.shape[:axis], x.shape[axis] // self.width, self.width, *x.shape[axis + 1 :])
        return x[*[slice(None)] * (axis + 1), self.start : self.stop]

    def _joined(self, tensor) -> Any:
        x, axis = self._stripes(tensor), self.axis
        return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def split(*sizes: int, axis: int = 0, transposed: bool = False, dropped: int | None = None) -> tuple[Part, ...]:
    """The parts that side by side fill each group of an axis; a single one, all of the tensor, only rearranges it."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(Part(ends[-1], *bounds, axis, transposed, dropped) for bounds in itertools.pairwise(ends))
