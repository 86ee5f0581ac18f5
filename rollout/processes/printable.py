"""Texts from files on a terminal, and values of others' code in messages."""

from typing import Any

LONGEST = 80  # characters of a value in a message


def printable(line: str) -> str:
    """A line for a terminal: names from files may have characters that control it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def one_line(error: BaseException) -> str:
    """An exception's message in one line, whatever its own code does; many have several, such as aiohttp's."""
    try:
        text = str(error)
    except Exception:  # its code may raise anything
        text = "(its text cannot be read)"
    return printable(" ".join(text.split()))


def shown(value: Any) -> str:
    """A value as a short line, whatever its own code does."""
    try:
        text = " ".join(repr(value.item() if hasattr(type(value), "dtype") and not value.ndim else value).split())
    except Exception:  # its code may raise anything
        text = f"a value of type {type(value).__name__}"
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
