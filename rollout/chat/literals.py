"""Reads the values of calls that are written as in Python, in JSON or by Gemma 4, in the middle of a text."""

from __future__ import annotations

import re
import sys
from typing import Any

WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
WORD = re.compile(r"[^\s,:(){}\[\]'\"<]+")
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
NAME = rf"{WORD.pattern}+(?: ++{WORD.pattern}+)*+"
BARE = re.compile(rf"({NAME})\s*+(?=:)")  # a name in an object without quotes, as Gemma's
BEGUN = re.compile(rf"{NAME}\s*+")
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\n|.)", re.DOTALL)
QUOTED = re.compile(r"""'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+\"""", re.DOTALL)
ESCAPED = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "/": "/", "\n": "",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
GEMMA = '<|"|>'  # around a string in which nothing is escaped
PAIR = {"[": "]", "(": ")", "{": "}"}


class Unfinished(ValueError):
    """The text ends before the value does."""


def value(text: str, at: int) -> tuple[Any, int]:
    """(value, place behind it) of the value at a place in a text.

    Strings have single quotes, double quotes or Gemma's marks; line breaks in them need no escape. Lists and tuples are
    lists.

    Raises:
      Unfinished: the text ends in it, or at once behind a number or word, which may be longer.
      ValueError: there is none.
    """
    at = skip(text, at)
    first = text[at : at + 1]
    if text.startswith(GEMMA, at):
        end = text.find(GEMMA, at + len(GEMMA))
        if end < 0:
            raise Unfinished
        return text[at + len(GEMMA) : end], end + len(GEMMA)
    if first and first in "'\"":
        return _quoted(text, at)
    if first and first in PAIR:
        return _object(text, at) if first == "{" else _list(text, at)
    if GEMMA.startswith(text[at:]):
        raise Unfinished
    found = WORD.match(text, at)
    if not found:
        raise ValueError(f"no value at {text[at : at + 20]!r}")
    if found.end() == len(text):
        raise Unfinished
    if found[0] in WORDS:
        return WORDS[found[0]], found.end()
    if not NUMBER.fullmatch(found[0]):
        raise ValueError(f"not a value: {found[0]:.40}")
    return (int if found[0].lstrip("+-").isdigit() else finite)(found[0]), found.end()


def skip(text: str, at: int) -> int:
    """The place of the next character that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _quoted(text: str, at: int) -> tuple[str, int]:
    found = QUOTED.match(text, at)
    if not found:
        raise Unfinished
    made = ESCAPE.sub(_unescaped, found[0][1:-1])
    return made.encode("utf-16", "surrogatepass").decode("utf-16"), found.end()  # joins halves, as JSON writes them


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    return chr(int(code, 8)) if code[0] in "01234567" else ESCAPED.get(code, found[0])


def _list(text: str, at: int) -> tuple[list[Any], int]:
    made, end, at = [], PAIR[text[at]], at + 1
    while not (closed := text.startswith(end, at := skip(text, at))):
        item, at = value(text, at)
        made.append(item)
        at = separated(text, at, end)
    return made, at + closed


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    made: dict[str, Any] = {}
    at += 1
    while not (closed := text.startswith("}", at := skip(text, at))):
        if bare := BARE.match(text, at):
            key, at = bare[1], bare.end()
        elif BEGUN.fullmatch(text, at):
            raise Unfinished
        else:
            key, at = value(text, at)
            at = skip(text, at)
        if at == len(text):
            raise Unfinished
        if not isinstance(key, str) or text[at] != ":":
            raise ValueError("an object needs names")
        made[key], at = value(text, at + 1)
        at = separated(text, at, "}")
    return made, at + closed


def separated(text: str, at: int, end: str) -> int:
    """The place behind the comma after an item, or of the end of the list."""
    at = skip(text, at)
    if at == len(text):
        raise Unfinished
    if text[at] == "," or text[at] == end:
        return at + (text[at] == ",")
    raise ValueError(f"items need a comma between them, got {text[at : at + 20]!r}")


def finite(text: str) -> float:
    """The number that a text like 1e999 stands for, as the nearest that JSON can be written with again."""
    most = sys.float_info.max
    return min(max(float(text), -most), most)
