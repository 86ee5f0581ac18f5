"""Images in requests: parts of OpenAI's and Anthropic's APIs to those of `chat/images.py`. No address is fetched."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .. import fields
from ..fields import rule

KINDS = "image_url", "input_image", "image"
DETAILS = None, "auto", "high", "original"  # the model's image processor decides


def content(
    given: Any, where: str, kinds: Collection[str] = ("text",), between: str = ""
) -> str | list[dict[str, Any]]:
    """A content as `fields.text`, or if it has images as parts. Raises Refused."""
    parts = given if isinstance(given, list) else []
    if not any(isinstance(part, Mapping) and part.get("type") in KINDS for part in parts):
        return fields.text(given, where, kinds, between)
    found = [_image(part, where) if part.get("type") in KINDS else part for part in fields.objects(given, where)]
    as_text = lambda part: {"type": "text", "text": fields.text([part], where, kinds)}
    return [dict(part) if part.get("type") == "image" else as_text(part) for part in found]


def within(given: Any) -> bool:
    """Whether there are images in messages or items, and in what they contain."""
    if isinstance(given, list):
        return any(map(within, given))
    if not isinstance(given, Mapping):
        return False
    return given.get("type") in KINDS or within(given.get("content")) or within(given.get("output"))


def _image(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A part of the kinds above, with a data URL."""
    if part["type"] == "image":
        source = fields.mapping(part, "source")
        encoded = isinstance(source.get("media_type"), str) and isinstance(source.get("data"), str)
        rule(source.get("type") == "base64" and encoded, where, "an image needs a source of base64 data", source)
        url: Any = f"data:{source['media_type']};base64,{source['data']}"
    else:
        named = part.get("image_url")
        url, detail = (named.get("url"), named.get("detail")) if isinstance(named, Mapping) else (named, None)
        detail = part.get("detail", detail)
        rule(detail in DETAILS, where, "the detail of an image must be auto or high: images are read in full", detail)
    right = isinstance(url, str) and url[:11].lower() == "data:image/"
    rule(right, where, "an image must be a data URL, data:image/png;base64,...: addresses are not fetched", url)
    return {"type": "image", "image": url}
