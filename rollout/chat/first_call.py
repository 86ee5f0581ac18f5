"""Where an answer ends that may have a single tool call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .detokenizer import Reader
from .parsers import Parser, ToolCall


class FirstCall:
    """Finds the first tool call in a growing list of tokens.

    Args:
      decode: converts token ids to text.
      parser: a new one, of answers with `one_call`.
      stops: strings that end the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], parser: Parser, stops: Sequence[str] = ()):
        self._reader, self._parser = Reader(decode, stops), parser
        self._read, self._end = 0, False

    def end(self, tokens: Sequence[int]) -> int | None:
        """The number of tokens up to the one that completes the call; None while there is no call."""
        while not self._end and self._read < len(tokens):
            pieces = self._parser.push(self._reader.push(tokens[self._read]))
            self._end = any(isinstance(piece, ToolCall) for piece in pieces)
            self._read += 1
        return self._read if self._end else None
