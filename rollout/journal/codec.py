"""Samples as bytes: every field exactly, about 4 bytes a token.

A MessagePack list of field values a sample, compressed by zstd. Bytes of equal significance of an array stand together,
because the high ones repeat. Images are named by their hashes; their bytes are stored once, elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import zstandard

from ..processes.printable import shown
from ..types import Image, Sample

FIELDS = tuple(field.name for field in dataclasses.fields(Sample))
LEVEL = 3  # of zstd: higher ones take longer and gain a few per cent
ARRAY, IMAGE = 1, 2  # MessagePack extensions


def packed(samples: Sequence[Sample]) -> bytes:
    """Packs samples. What their `info` has beyond numbers, texts, arrays, lists and mappings becomes text."""
    rows = [[getattr(sample, name) for name in FIELDS] for sample in samples]
    return zstandard.ZstdCompressor(LEVEL).compress(msgpack.packb(rows, default=_encoded))


def unpacked(data: bytes, image: Callable[[str], bytes]) -> list[Sample]:
    """Unpacks samples; `image` returns the bytes of an image of this hash.

    Raises ValueError for anything else.
    """

    def decoded(code: int, content: bytes) -> Any:
        return Image(image(content.decode())) if code == IMAGE else _array(content)

    try:
        plain = zstandard.ZstdDecompressor().decompress(data)
        rows = msgpack.unpackb(plain, ext_hook=decoded, strict_map_key=False)
        return [_sample(dict(zip(FIELDS, row, strict=True))) for row in rows]
    except (zstandard.ZstdError, msgpack.UnpackException, TypeError, KeyError) as error:
        raise ValueError(f"not packed samples ({error})") from error


def _sample(fields: dict[str, Any]) -> Sample:
    """The sample of these fields, whose tuples MessagePack has made lists."""
    fields["rewards"] = tuple(map(tuple, fields["rewards"]))
    fields["images"] = tuple(fields["images"])
    fields["arrays"] = {name: tuple(entry) for name, entry in fields["arrays"].items()}
    return Sample(**fields)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        planes = np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8).T
        return msgpack.ExtType(ARRAY, msgpack.packb([str(value.dtype), value.shape, planes.tobytes()]))
    if isinstance(value, Image):
        return msgpack.ExtType(IMAGE, value.hash.encode())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict | tuple):  # of a subclass
        return dict(value) if isinstance(value, dict) else list(value)
    return shown(value)


def _array(content: bytes) -> np.ndarray:
    import ml_dtypes  # noqa: F401 - names bfloat16 to numpy

    dtype, shape, planes = msgpack.unpackb(content)
    of = np.dtype(dtype)
    return np.frombuffer(planes, np.uint8).reshape(of.itemsize, -1).T.copy().view(of).reshape(shape)
