"""Rows of data for other processes, as JSON: images as data URLs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ..types import Image

KINDS = {b"\xff\xd8": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}  # by the first bytes; others are PNG


def json_row(value: Any) -> Any:
    """A row with data URLs instead of bytes, and of what `datasets` stores of images, {"bytes", "path"}."""
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"} and value.get("bytes"):
        value = value["bytes"]
    if isinstance(value, Mapping):
        return {name: json_row(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_row(each) for each in value]
    if isinstance(value, Image):
        value = value.data
    if isinstance(value, bytes | bytearray | memoryview):
        kind = next((kind for start, kind in KINDS.items() if bytes(value[:4]).startswith(start)), "png")
        return f"data:image/{kind};base64,{base64.b64encode(value).decode()}"
    return value
