"""Samples as bytes: every field exactly, about 4 bytes a token.

A MessagePack list of the values of each field, compressed by zstd. Of floats, bytes of equal significance stand
together, because the high ones repeat; token ids stay as they are, because words do. Images are named by their hashes;
their bytes are stored once, elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

from ..processes.printable import shown
from ..types import Image, Sample

FIELDS = tuple(field.name for field in dataclasses.fields(Sample))
LEVEL = 9  # of zstd: higher ones take three times as long and gain a per cent
ARRAY, IMAGE, TUPLE = 1, 2, 3  # MessagePack extensions
WHOLE = "biuSUmM"  # kinds of arrays whose bytes stay in their order


def packed(samples: Sequence[Sample], *, exact: bool) -> bytes:
    """Packs samples.

    Args:
      exact: what `info` has beyond data (numbers, texts, arrays, images, lists, tuples and mappings) is an error; else
        it becomes text.

    Raises ValueError for anything that is not data.
    """
    try:
        return _compressed(samples)
    except ValueError:
        if exact:
            raise
        return _compressed([sample.replace(info=_texts(sample.info)) for sample in samples])


def unpacked(data: bytes, image: Callable[[str], bytes]) -> list[Sample]:
    """Unpacks samples; `image` returns the bytes of an image of this hash.

    Raises ValueError for anything else.
    """

    def decoded(code: int, content: bytes) -> Any:
        if code == IMAGE:
            return Image(image(content.decode()))
        return _array(content) if code == ARRAY else tuple(read(content))

    def read(content: bytes) -> Any:
        return msgpack.unpackb(content, ext_hook=decoded, strict_map_key=False, unicode_errors="surrogatepass")

    try:
        columns = read(zstandard.ZstdDecompressor().decompress(data))
        return [Sample(**dict(zip(FIELDS, row, strict=True))) for row in zip(*columns, strict=True)]
    except (zstandard.ZstdError, msgpack.UnpackException, TypeError, KeyError) as error:
        raise ValueError(f"not packed samples ({error})") from error


def mark(row: Any) -> str:
    """A hash of a row; "" of one that is not data, which is not told from others."""
    try:
        return xxhash.xxh3_128_hexdigest(_plain(row))
    except ValueError:
        return ""


def _compressed(samples: Sequence[Sample]) -> bytes:
    return zstandard.ZstdCompressor(LEVEL).compress(
        _plain([[getattr(sample, name) for sample in samples] for name in FIELDS])
    )


def _plain(value: Any) -> bytes:
    try:
        return msgpack.packb(value, default=_encoded, strict_types=True, unicode_errors="surrogatepass")
    except (TypeError, OverflowError, RuntimeError) as error:  # too deep, or changed meanwhile by whoever made it
        raise ValueError(f"not data: {error}") from error


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(TUPLE, _plain(list(value)))
    if kind is np.ndarray or issubclass(kind, np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names:
            raise TypeError(f"an array of {array.dtype}")
        content = np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)
        shape = array.shape if kind is np.ndarray else None  # of a scalar
        return msgpack.ExtType(ARRAY, msgpack.packb([str(array.dtype), shape, _turned(content, array.dtype).tobytes()]))
    if kind is Image:
        return msgpack.ExtType(IMAGE, value.hash.encode())
    if issubclass(kind, dict):
        return dict(dict.items(value))  # whatever its own code does
    raise TypeError(shown(value))


def _array(content: bytes) -> Any:
    import ml_dtypes  # noqa: F401 - names bfloat16 to numpy

    dtype, shape, content = msgpack.unpackb(content)
    of = np.dtype(dtype)
    count = len(content) // of.itemsize
    planes = of.kind not in WHOLE
    data = np.frombuffer(content, np.uint8).reshape((of.itemsize, count) if planes else (count, of.itemsize))
    values = _turned(data, of).copy().view(of)
    return values[0, 0] if shape is None else values.reshape(shape)


def _turned(content: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return content if dtype.kind in WHOLE else content.T


def _texts(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """An info with texts in place of what is not data."""
    data = lambda value: value if _is_data(value) else shown(value)
    return {data(name): data(value) for name, value in info.items()}


def _is_data(value: Any) -> bool:
    try:
        return bool(_plain(value))
    except ValueError:
        return False
