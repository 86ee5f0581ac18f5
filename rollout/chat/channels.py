"""Splits answers in channels (OpenAI's harmony format, of GPT-OSS) into messages, at once or streamed.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is 3.<|return|>

A prompt ends with `<|start|>assistant`, and the token that ends an answer is not part of its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = ENDS = "<|end|>", "<|call|>", "<|return|>"
MARKERS = START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
DISTINCT = 3  # characters of a marker that are hardly text
BEGUN = re.compile(r"\s*(to=[\w.-]*\s*(<.*)?)?", re.DOTALL)  # the beginning of a header with its recipient first
BEHIND_TEXT, BEHIND_HEADER = (
    re.compile("|".join(map(re.escape, marks))) for marks in ((*ENDS, START, CHANNEL), (MESSAGE, *ENDS))
)
HEADER = re.compile(
    r"\s*(<\|start\|>\w*)?\s*(to=\S*\s*)?(<\|channel\|>\s*\w*(\s+to=[\w.-]*)?(\s*<\|constrain\|>\s*\w*)?)?"
)


@dataclass(frozen=True)
class Message:
    """One message of an answer.

    Attributes:
      number: counted from 0.
      channel: "analysis", "commentary" or "final"; "" = none is named, or the text has no header.
      recipient: such as "functions.add"; "" = the user.
    """

    number: int
    channel: str = ""
    recipient: str = ""


Piece = tuple[Message, str, bool]  # the message, the next part of its text, and whether that is the last


class Channels:
    """Splits streamed text; the joined result does not depend on how the text was split. Text without any header is one
    message."""

    def __init__(self) -> None:
        self._buffer = ""  # a header, or what may begin a marker
        self._sought = 0  # before this place of the buffer no marker begins that ends a header
        self._message: Message | None = None  # whose text is being read; None = a header
        self._count = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._buffer += text
        return list(self._advance(final=False, cut=False))

    def finish(self, cut: bool = False) -> list[Piece]:
        """Ends the text, which may have been `cut` inside a marker; returns the pieces held back."""
        return list(self._advance(final=True, cut=cut))

    def _advance(self, final: bool, cut: bool) -> Iterator[Piece]:
        while self._buffer or final:
            if self._message is None and not self._begin(final):
                return
            if self._message is None:
                continue
            if found := BEHIND_TEXT.search(self._buffer):
                yield self._message, self._buffer[: found.start()], True
                self._drop(found.end() if found[0] in ENDS else found.start())
                self._message = None
                continue
            held = 0 if final and not cut else _held(self._buffer, DISTINCT if final else 1)
            kept = len(self._buffer) - held
            text = self._buffer[:kept]
            self._drop(len(self._buffer) if final else kept)
            yield self._message, text, final
            if final:
                self._message = None
            return

    def _begin(self, final: bool) -> bool:
        """Reads a header, or finds that there is none; returns whether to go on."""
        begun = self._buffer.lstrip()
        if end := next((end for end in ENDS if begun.startswith(end)), ""):  # of nothing
            self._drop(len(self._buffer) - len(begun) + len(end))
            return True
        found = BEHIND_HEADER.search(self._buffer, self._sought)
        at, mark = (found.start(), found[0]) if found else (len(self._buffer), "")
        self._sought = max(at - max(map(len, MARKERS)) + 1, self._sought)
        if not _may_begin(self._buffer):
            self._message = self._new()
        elif mark == MESSAGE:
            self._message = self._read(self._buffer[:at])
            self._drop(at + len(mark))
        elif mark or final:  # a header without a text, and maybe a text behind it
            head = self._buffer[:at]
            rest = head[_incomplete(head) :]
            self._drop(len(head) - len(rest))
            if not rest or (rest.isspace() and self._count):
                self._drop(len(rest) + len(mark))
                return bool(self._buffer)
            self._message = self._new()
        else:
            return False
        return True

    def _drop(self, count: int) -> None:
        """Drops the beginning of the buffer."""
        self._buffer, self._sought = self._buffer[count:], max(self._sought - count, 0)

    def _read(self, header: str) -> Message:
        channel, recipient = NAMED.search(header), RECIPIENT.search(header)
        return self._new(channel[1] if channel else "", recipient[1] if recipient else "")

    def _new(self, channel: str = "", recipient: str = "") -> Message:
        self._count += 1
        return Message(self._count - 1, channel, recipient)


def _held(text: str, least: int) -> int:
    """How many characters at the end may begin a marker, if they are at least so many."""
    longest = max(map(len, MARKERS)) - 1
    begins = lambda n: any(mark.startswith(text[-n:]) for mark in MARKERS)
    return next((n for n in range(min(longest, len(text)), least - 1, -1) if begins(n)), 0)


def _may_begin(text: str) -> bool:
    """Whether a text may be the beginning of a header."""
    begun = text.lstrip()
    marked = any(mark.startswith(begun[: len(mark)]) for mark in (START, CHANNEL, MESSAGE, *ENDS))
    return marked or "to=".startswith(begun) or BEGUN.fullmatch(text) is not None


def _incomplete(text: str) -> int:
    """The length of the header that a text without MESSAGE begins with."""
    found = HEADER.match(text)
    assert found
    return found.end() if START in found[0] or CHANNEL in found[0] else 0
