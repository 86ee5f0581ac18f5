"""Quantised weights of checkpoints as arrays that are dequantised as they are read: block-wise FP8 and MXFP4.

Their values are those of transformers in bfloat16. Each is a function of a code and a scale, so that a table of all
products of the scales in use with all codes, made with one rounding each, is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType

import ml_dtypes
import numpy as np

from ..models.config_json import Quantisation
from . import safetensors

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
BYTES = np.arange(256, dtype=np.uint8)
FLOAT8 = BYTES.view(E4M3).astype(np.float32)  # the value of each code
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FLOAT4 = np.concatenate([FLOAT4, -FLOAT4])
PAIRS = np.stack([FLOAT4[BYTES & 15], FLOAT4[BYTES >> 4]], -1)  # the two values in each byte of MXFP4
SCALES = (np.dtype(np.float32), BF16, np.dtype(np.float16))  # dtypes of FP8's
GROUP = 32  # values that share a scale in MXFP4
LARGEST_EXPONENT = 252  # of MXFP4's scales: 6 * 2^(253 - 127) is more than bfloat16 holds
LARGEST_SCALE = float(ml_dtypes.finfo(BF16).max) / 448  # of FP8's, by the largest code
CHUNK = 1 << 15  # values looked up while their codes, as indices of 8 bytes, are in a core's cache

Cut = tuple[slice, ...] | EllipsisType


@dataclass(frozen=True, eq=False)
class Float8:
    """A weight [..., rows, columns] in FP8 E4M3 whose blocks share scales; indexing it with slices dequantises.

    Attributes:
      name: its name in the checkpoint, for errors.
      codes: u8[..., rows, columns].
      scales: [..., rows / block, columns / block], rounded up.
      block: rows and columns of a block; those at the ends may be smaller.
      start: the row of a block's at which the first row is.
    """

    name: str
    codes: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]
    start: int = 0

    dtype = BF16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, cut: Cut) -> np.ndarray:
        cut = _whole(cut, self.shape)
        codes, scales = self.codes[cut], self.scales[cut[:-2]]
        row, column = (np.arange(size)[one] for size, one in zip(self.shape[-2:], cut[-2:], strict=True))
        row, column = (row + self.start) // self.block[0], column // self.block[1]
        out = np.empty(codes.shape, BF16)
        for at in np.ndindex(codes.shape[:-2]):
            self._fill(out[at].view(np.uint16), codes[at], scales[at], row, column)
        safetensors.forget(self.codes)
        return out

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    def _fill(self, out: np.ndarray, codes: np.ndarray, scales: np.ndarray, row: np.ndarray, column: np.ndarray):
        """Dequantises a matrix, given the blocks that its rows and columns are in."""
        if not codes.size:
            return
        first, last = column[0], column[-1] + 1
        places = (column - first) * 256
        index = np.empty((max(1, CHUNK // len(column)), len(column)), np.intp)
        for block in range(row[0], row[-1] + 1):
            scale = scales[block, first:last].astype(np.float32)
            if bad := [one for one in scale if not 0 <= one <= LARGEST_SCALE]:
                raise ValueError(
                    f"{self.name}: scales must lie in [0, {LARGEST_SCALE:.2g}], got {bad[0]:.3g}; use "
                    "another checkpoint"
                )
            table = (FLOAT8 * scale[:, None]).astype(BF16).view(np.uint16).ravel()
            start, stop = np.searchsorted(row, (block, block + 1))
            if not scale.all() and (codes[start:stop, scale[column - first] == 0] & 0x7F).any():
                raise ValueError(
                    f"{self.name}: a scale must not be 0 where values are not, got a block that it makes 0; use "
                    "another checkpoint"
                )
            for rows in _runs(start, stop, len(index)):
                places_of = index[: rows.stop - rows.start]
                places_of[...] = codes[rows]
                places_of += places
                np.take(table, places_of, out=out[rows], mode="clip")

    def expert(self, e: int, rows: slice) -> Float8:
        """Rows of the matrix e, still to be dequantised."""
        first = self.start + rows.start
        scales = self.scales[e, first // self.block[0] :]
        return replace(self, codes=self.codes[e, rows], scales=scales, start=first % self.block[0])


@dataclass(frozen=True, eq=False)
class Float4:
    """A weight [experts, in, out] in MXFP4, whose rows are its columns as stored; indexing it with slices dequantises.

    Attributes:
      name: its name in the checkpoint, for errors.
      codes: u8[experts, out, in / 32, 16], two values a byte, the first in the low half.
      scales: u8[experts, out, in / 32], exponents of 2 plus 127.
    """

    name: str
    codes: np.ndarray
    scales: np.ndarray

    dtype = BF16

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, groups = self.scales.shape
        return *lead, groups * GROUP, rows

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, cut: Cut) -> np.ndarray:
        experts, inner, rows = _whole(cut, self.shape)
        first, last, _ = inner.indices(self.shape[1])
        groups = slice(first // GROUP, -(-last // GROUP))
        codes, scales = self.codes[experts, rows, groups], self.scales[experts, rows, groups]
        if scales.size and scales.max() > LARGEST_EXPONENT:
            raise ValueError(
                f"{self.name}: exponents of scales must be at most {LARGEST_EXPONENT}, got {scales.max()}; use another "
                "checkpoint"
            )
        low = int(scales.min(initial=255))
        powers = np.ldexp(np.float32(1), np.arange(low, scales.max(initial=0) + 1) - 127)
        table = (PAIRS * powers[:, None, None]).astype(BF16).view(np.uint32).ravel()
        out = np.empty((*scales.shape[:2], scales.shape[2] * GROUP), BF16)
        bytes_ = out.view(np.uint32).reshape(codes.shape)
        for e in range(len(codes)):
            for some in _runs(0, codes.shape[1], max(1, CHUNK // max(1, codes[0, 0].size))):
                index = codes[e, some].astype(np.intp)
                index += (scales[e, some].astype(np.intp)[..., None] - low) * 256
                np.take(table, index, out=bytes_[e, some], mode="clip")
        safetensors.forget(self.codes)
        return out[..., first - groups.start * GROUP : last - groups.start * GROUP].swapaxes(1, 2)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[...], dtype)


def opened(
    tensors: Mapping[str, np.ndarray], scheme: Quantisation | None, where: str
) -> dict[str, np.ndarray | Float8 | Float4]:
    """A checkpoint's tensors by name, with a `Float8` or `Float4` in place of the tensors of each quantised weight.

    Which weights are quantised is seen from their dtypes and names. Scales of activations are left out.

    Raises:
      ValueError: scales are missing or misshapen, or there are scales without a weight; names them, after `where`.
    """
    if scheme is None:
        return dict(tensors)
    return (_open_fp8 if scheme.method == "fp8" else _open_mxfp4)(tensors, scheme, where)


def _open_fp8(tensors, scheme: Quantisation, where: str) -> dict:
    codes = {name for name, tensor in tensors.items() if tensor.dtype == E4M3}
    out = {}
    for name, tensor in tensors.items():
        weight, inputs = name.removesuffix(scheme.scale), name.removesuffix(scheme.activations)
        if name in codes:
            out[name] = _float8(name, tensor, tensors.get(f"{name}{scheme.scale}"), scheme, where)
        elif inputs != name and {f"{inputs}weight", inputs[:-1]} & codes:
            continue
        elif weight != name and weight not in codes:
            found = f"is {tensors[weight].dtype}" if weight in tensors else "is missing"
            raise ValueError(f"{where}: {name} is the scale of {weight}, which {found}; copy the checkpoint again")
        elif weight == name:
            out[name] = tensor
    return out


def _float8(name: str, codes: np.ndarray, scales: np.ndarray | None, scheme: Quantisation, where: str) -> Float8:
    *lead, rows, columns = codes.shape if codes.ndim > 1 else (0, 0, 0)
    height, width = scheme.block or (max(1, rows), None)
    block = (height, width or max(1, columns))
    wanted = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    if scales is None:
        raise ValueError(f"{where}: {name} is in FP8 and needs {name}{scheme.scale}, which is missing; copy it again")
    if codes.ndim < 2:
        raise ValueError(f"{where}: {name} is in FP8 and must be a matrix, got {list(codes.shape)}")
    single = scheme.block is None and not lead and scales.size == 1
    if scales.dtype not in SCALES or not (single or scales.shape == wanted):
        raise ValueError(
            f"{where}: {name}{scheme.scale} must be {list(wanted)} of {' or '.join(map(str, SCALES))}, for blocks of "
            f"{list(block)}, got {list(scales.shape)} of {scales.dtype}"
        )
    return Float8(f"{where}: {name}", codes.view(np.uint8), scales.reshape(wanted), block)


def _open_mxfp4(tensors, scheme: Quantisation, where: str) -> dict:
    out, ends = {}, ("_blocks", "_scales")
    for name, tensor in tensors.items():
        weight = name.removesuffix(ends[0]).removesuffix(ends[1])
        if weight == name:
            out[name] = tensor
            continue
        blocks, scales = (tensors.get(f"{weight}{end}") for end in ends)
        if blocks is None or scales is None:
            lacking = f"{weight}{ends[scales is None]}"
            raise ValueError(f"{where}: {name} needs {lacking}, which is missing; copy the checkpoint again")
        rows = scales.shape if scales.ndim == 3 else ("experts", "out", "in / 32")
        for one, shape in ((f"{weight}_blocks", (*rows, GROUP // 2)), (f"{weight}_scales", rows)):
            if tensors[one].dtype != np.uint8 or tensors[one].shape != shape:
                raise ValueError(
                    f"{where}: {one} must be [{', '.join(map(str, shape))}] of uint8, got {list(tensors[one].shape)} "
                    f"of {tensors[one].dtype}"
                )
        out[weight] = Float4(f"{where}: {weight}", blocks, scales)
    return out


def _whole(cut: Cut, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return (slice(None),) * len(shape) if cut is Ellipsis else cut


def _runs(start: int, stop: int, most: int) -> Iterator[slice]:
    """Consecutive slices of up to `most` entries."""
    return (slice(at, min(at + most, stop)) for at in range(start, stop, most))
