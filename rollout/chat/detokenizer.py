"""Incremental detokenisation with stop strings."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # decoded from bytes that are not a character, or not yet
CONTEXT = 8  # tokens decoded again together with new ones: a token's text may depend on its neighbours


class Text:
    """Decodes a growing list of tokens incrementally.

    Attributes:
      text: text so far, without an incomplete character at the end, up to the first stop string.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.text = ""
        self._decode = decode
        self._window: list[int] = []  # the last tokens
        self._given = 0  # characters of the window's text that are in `text`

    def feed(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> tuple[int, str] | None:
        """Adds tokens; returns (number of `tokens` used, stop string) once a stop string is complete.

        If a token completes several, the one that begins first counts; of those that begin together, the longest.
        """
        if not stops:
            self._add(tokens)
            return None
        for count, token in enumerate(tokens, 1):
            before = len(self.text)
            self._add([token])
            found = [
                (at, -len(stop), stop)
                for stop in stops
                if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if found:
                at, _, stop = min(found)
                self.text = self.text[:at]
                return count, stop
        return None

    def end(self) -> None:
        """Ends the text: an incomplete character is appended as U+FFFD."""
        self.text += self._decode(self._window)[self._given :]

    def _add(self, tokens: Sequence[int]) -> None:
        self._window += tokens
        decoded = self._decode(self._window)
        finished = decoded.rstrip(UNFINISHED)
        self.text += finished[self._given :]
        self._given = max(self._given, len(finished))
        if len(self._window) > 2 * CONTEXT and len(finished) == len(decoded):
            self._window = self._window[-CONTEXT:]
            self._given = len(self._decode(self._window))
