"""Images in conversations: where those of a row stand, and what stands for them in messages.

The content of a message is a text or a list of parts. A part with an image is {"type": "image", "image": source}, as
Hugging Face has it, with "url" or "path" instead of "image" if so wanted; or OpenAI's {"type": "image_url",
"image_url": {"url": source}}. A source is what `adapters.data.images.read` takes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..types import Image

FIELDS = "images", "image"  # of rows
MARK = re.compile("(<image>)")  # where an image of the row stands in a text, as verl and LLaVA have it
UNREAD = (
    "this model reads no images, got a message with one; leave it out, or take a model with a vision tower and its "
    "preprocessor_config.json"
)
SOURCES = "image", "url", "path", "image_url"
Message = Mapping[str, Any]


class Processor(Hashable, Protocol):
    """What conversations need of a model's image processor, `adapters.data.images.Processor`."""

    @property
    def token(self) -> int:
        """The id of the token that stands for a feature of an image."""

    @property
    def video(self) -> int | None:
        """That of a video; None = the model knows none."""

    def read(self, source: Any) -> Image:
        """An image; raises ValueError for what is none."""

    def expanded(self, tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Tokens with each image's one token as often as it has features."""


def given(row: Mapping[str, Any]) -> list[Any]:
    """The sources in a row's field `images`, or the one in its field `image`."""
    fields = [name for name in FIELDS if not empty(row.get(name))]
    if len(fields) > 1:
        raise ValueError(f"a row needs its images in one field, {' or '.join(FIELDS)}, got both")
    value = row[fields[0]] if fields else []
    return list(value) if isinstance(value, list | tuple) else [value]


def empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and not value)


def placed(messages: Sequence[Message], sources: Sequence[Any]) -> list[Any]:
    """A new list of the messages, with the images of their row as parts.

    They take the places of parts {"type": "image"} without an image of their own, in order; without such parts those of
    `<image>` in texts that are not the assistant's; without these the beginning of the first user message.

    Raises:
      ValueError: there are more or fewer places than images, or no user message.
    """
    messages = list(messages)
    places = _places(messages)
    if sources and not places:
        messages = [_split(message) for message in messages]
        places = _places(messages)
    if places and places != len(sources):
        raise ValueError(f"a row needs as many images as placeholders of images, got {len(sources)} for {places}")
    if places or not sources:
        left = iter(sources)
        return [_filled(message, left) for message in messages]
    at = next((i for i, message in enumerate(messages) if _role(message) == "user"), None)
    if at is None:
        raise ValueError(f"a row with images needs a user message, got {len(messages)} messages without one")
    messages[at] = {**messages[at], "content": [*map(_part, sources), *_parts(messages[at])]}
    return messages


def located(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row with paths of images as seen from `folder`, where its file is, if there are such files."""
    moved = {name: _at(row[name], folder) for name in FIELDS if not empty(row.get(name))}
    for name in ("messages", "prompt"):
        if isinstance(row.get(name), list) and within(row[name]):
            moved[name] = [_moved(message, folder) for message in row[name]]
    return {**row, **moved} if moved else row


def _moved(message: Any, folder: Path) -> Any:
    parts = [_at(part, folder) if _is_image(part) else part for part in _parts(message)]
    return {**message, "content": parts} if any(map(_is_image, parts)) else message


def _at(source: Any, folder: Path) -> Any:
    if isinstance(source, list):
        return [_at(each, folder) for each in source]
    if isinstance(source, Mapping) and empty(source.get("bytes")):
        return {**source, **{name: _at(source[name], folder) for name in SOURCES if isinstance(source.get(name), str)}}
    if isinstance(source, str) and ":" not in source[:16] and os.path.isfile(joined := folder / source):
        return str(joined)
    return source


def shown(value: Any) -> Any:
    """A row for logs: instead of an image its hash and size."""
    if isinstance(value, Mapping):
        return {name: shown(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    if isinstance(value, Image):
        value = value.data
    if isinstance(value, str) and value[:11].lower() == "data:image/":
        value = value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return f"image of {len(value):,} bytes, sha256 {hashlib.sha256(value).hexdigest()[:16]}"
    return value


def within(messages: Sequence[Message]) -> bool:
    """Whether there are images in the messages."""
    return any(True for _ in found(messages))


def of_row(row: Mapping[str, Any]) -> bool:
    """Whether there are images in a row's fields or messages."""
    messages = row.get("messages")
    return any(not empty(row.get(name)) for name in FIELDS) or (isinstance(messages, list) and within(messages))


def read(messages: Sequence[Message], processor: Processor | None) -> list[dict[str, Any]]:
    """The messages with each image read: parts are {"type": "image", "image": Image} and {"type": "text", "text": ...}.

    Raises:
      ValueError: a source is no image, a part is neither text nor image, or there are images and no processor.
    """
    if processor is None:
        if within(messages):
            raise ValueError(UNREAD)
        return [dict(message) for message in messages]
    read = lambda content: [_read(part, processor) for part in content] if isinstance(content, list) else content
    return [{name: read(x) if name == "content" else x for name, x in message.items()} for message in messages]


def _read(part: Any, processor: Processor) -> dict[str, Any]:
    if _is_image(part):
        return _part(processor.read(_source(part)))
    if _is_text(part):
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"a part of a message must be text or an image, got {kind!r:.80}")


def of(messages: Sequence[Message]) -> tuple[Image, ...]:
    """Those of messages that were `read`, in order."""
    return tuple(part["image"] for part in found(messages))


def refuse(answer: Sequence[int], processor: Processor) -> None:
    """Raises ValueError if an answer to learn has the token of images or videos, which would stand for a feature."""
    for kind, token in (("image", processor.token), ("video", processor.video)):
        if token in answer:
            raise ValueError(f"an answer must have no {kind} token, id {token}, got one; take it out of the text")


def text(content: Any) -> Any:
    """A content's text: of parts those that are texts, joined; None and texts as they are.

    Raises:
      ValueError: a part is no text.
    """
    if not isinstance(content, list):
        return content
    for part in content:
        if not _is_text(part):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a part of a message must be text or an image, got {kind!r:.80}")
    return "".join(part["text"] for part in content)


def words(content: Any) -> str:
    """The texts of a content, without its images."""
    return content if isinstance(content, str) else "".join(map(_words, content or ()))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _parts(message: Any) -> list[Any]:
    """A message's content as parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def found(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of messages that are images, in order."""
    return (part for message in messages for part in _parts(message) if _is_image(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _part(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def _source(part: Mapping[str, Any]) -> Any:
    """Where an image of a part comes from; None if the part only keeps its place."""
    source = next((part[name] for name in SOURCES if not empty(part.get(name))), None)
    if part.get("type") == "image_url" and isinstance(source, Mapping):
        return source.get("url")
    return source


def _waits(part: Any) -> bool:
    return _is_image(part) and _source(part) is None


def _places(messages: Sequence[Any]) -> int:
    return sum(map(_waits, found(messages)))


def _filled(message: Any, left: Iterator[Any]) -> Any:
    """A message with images at its places."""
    if not any(map(_waits, _parts(message))):
        return message
    return {**message, "content": [_part(next(left)) if _waits(part) else part for part in _parts(message)]}


def _split(message: Any) -> Any:
    """A message with a place for an image instead of each `<image>` in its texts."""
    if _role(message) == "assistant" or not any(MARK.search(_words(part)) for part in _parts(message)):
        return message
    return {**message, "content": [piece for part in _parts(message) for piece in _pieces(part)]}


def _words(part: Any) -> str:
    words = part.get("text") if isinstance(part, Mapping) else None
    return words if isinstance(words, str) else ""


def _pieces(part: Any) -> list[Any]:
    if not _words(part):
        return [part]
    pieces = [piece for piece in MARK.split(_words(part)) if piece]
    return [{"type": "image"} if MARK.fullmatch(piece) else {"type": "text", "text": piece} for piece in pieces]
