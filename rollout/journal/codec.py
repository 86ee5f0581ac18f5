"""Samples as bytes: every field exactly, less than 4 bytes a token.

The values of each field are a MessagePack list, or the lengths of arrays and one array of them all, compressed by zstd;
those of a single sample, which a batch takes soon, in less time. Of floats, bytes of equal significance stand together,
because the high ones repeat; integers take no more bytes each than the largest needs. Images are named by their hashes;
their bytes are stored once, elsewhere. Tokens of a completion that goes on are packed alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

from ..processes.printable import shown
from ..types import Generated, Image, Sample

FIELDS = tuple(field.name for field in dataclasses.fields(Sample))
LEVEL = 9  # of zstd; 15 takes ten times as long for 4 % less of tokens and texts
QUICK = 1  # level of a single sample, and of floats
ARRAY, IMAGE, TUPLE = 1, 2, 3  # MessagePack extensions
NO_IMAGES: dict[str, bytes] = {}
WHOLE = "biuSUmM"  # kinds of arrays whose bytes stay in their order
SIGNED, UNSIGNED = ([np.iinfo(kind) for kind in kinds] for kinds in ("bhiq", "BHIQ"))


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
    with _named("samples"):
        columns = [_apart(column) for part in msgpack.unpackb(data) for column in _inflated(part, image)]
        return [Sample(**dict(zip(FIELDS, row, strict=True))) for row in zip(*columns, strict=True)]


def packed_tokens(made: Generated) -> bytes:
    """Packs the tokens of a completion that goes on, or has ended."""
    arrays = np.array(made.tokens, np.int64), np.array(made.logp, np.float64), np.array(made.version, np.int64)
    return zstandard.ZstdCompressor(LEVEL).compress(_plain([*arrays, made.finish]))


def unpacked_tokens(data: bytes) -> Generated:
    """Unpacks what `packed_tokens` packed; raises ValueError for anything else."""
    with _named("tokens"):
        tokens, logp, version, finish = _inflated(data, NO_IMAGES.__getitem__)
        return Generated(tokens.tolist(), logp.tolist(), version.tolist(), finish)


def mark(row: Any) -> str:
    """A hash of a row; "" of one that is not data, which is not told from others."""
    try:
        return xxhash.xxh3_128_hexdigest(_plain(row))
    except ValueError:
        return ""


def _compressed(samples: Sequence[Sample]) -> bytes:
    columns: list[Any] = [[getattr(one, name) for one in samples] for name in FIELDS]
    if len(samples) < 2:
        return msgpack.packb([zstandard.ZstdCompressor(QUICK).compress(_plain(columns))])
    return msgpack.packb([_deflated(column) for column in map(_together, columns)])


def _deflated(column: list[Any] | tuple[list[int], np.ndarray]) -> bytes:
    """Compresses a field's values; of floats, bytes of equal significance are a block with a code of its own, which
    makes them as small as the highest level does, in a hundredth of the time."""
    data = _plain([column])
    if isinstance(column, list) or column[1].dtype.kind != "f" or not column[1].size:
        return zstandard.ZstdCompressor(LEVEL).compress(data)
    stream, floats = zstandard.ZstdCompressor(QUICK).compressobj(size=len(data)), column[1]
    starts = 0, *range(len(data) - floats.nbytes, len(data), floats.size), len(data)
    blocks = [
        stream.compress(data[start:end]) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for start, end in itertools.pairwise(starts)
    ]
    return b"".join([*blocks, stream.flush()])


def _inflated(data: bytes, image: Callable[[str], bytes]) -> Any:
    def decoded(code: int, content: bytes) -> Any:
        if code == IMAGE:
            return Image(image(content.decode()))
        return _array(content) if code == ARRAY else tuple(read(content))

    def read(content: bytes) -> Any:
        return msgpack.unpackb(content, ext_hook=decoded, strict_map_key=False, unicode_errors="surrogatepass")

    return read(zstandard.ZstdDecompressor().decompress(data))


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except (zstandard.ZstdError, msgpack.UnpackException, TypeError, KeyError) as error:
        raise ValueError(f"not packed {what} ({error})") from error


def _together(values: list[Any]) -> list[Any] | tuple[list[int], np.ndarray]:
    """A field's values; if they are rows of one type, their lengths and one row of them all."""
    types = {value.dtype.str if type(value) is np.ndarray and value.ndim == 1 else "" for value in values}
    if len(types) != 1 or "" in types:
        return values
    return [*map(len, values)], np.concatenate(values, dtype=values[0].dtype)


def _apart(column: list[Any] | tuple[list[int], np.ndarray]) -> list[Any]:
    if isinstance(column, list):
        return column
    lengths, whole = column
    return np.split(whole, np.cumsum(lengths)[:-1])


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
        narrow = array.astype(_narrowest(array))
        content = _turned(np.ascontiguousarray(narrow).reshape(-1, 1).view(np.uint8), narrow.dtype).tobytes()
        shape = array.shape if kind is np.ndarray else None  # of a scalar
        return msgpack.ExtType(ARRAY, msgpack.packb([_name(array.dtype), _name(narrow.dtype), shape, content]))
    if kind is Image:
        return msgpack.ExtType(IMAGE, value.hash.encode())
    if issubclass(kind, dict):
        return dict(dict.items(value))  # whatever its own code does
    raise TypeError(shown(value))


def _array(content: bytes) -> Any:
    import ml_dtypes  # noqa: F401 - names bfloat16 to numpy

    dtype, narrow, shape, content = msgpack.unpackb(content)
    of = np.dtype(narrow)
    count = len(content) // of.itemsize
    planes = of.kind not in WHOLE
    data = np.frombuffer(content, np.uint8).reshape((of.itemsize, count) if planes else (count, of.itemsize))
    values = _turned(data, of).copy().view(of).astype(dtype)
    return values[0, 0] if shape is None else values.reshape(shape)


def _narrowest(array: np.ndarray) -> np.dtype:
    """The smallest type that holds an array's integers; its own for other arrays."""
    if array.dtype.kind not in "iu" or not array.size:
        return array.dtype
    low, high = int(array.min()), int(array.max())
    return next(one.dtype for one in (SIGNED if low < 0 else UNSIGNED) if one.min <= low and high <= one.max)


_name = functools.cache(str)  # of a dtype


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
