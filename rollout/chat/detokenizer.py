"""Text of tokens as they come, and where a stop string ends it."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what decoding writes for bytes that are no character, or not yet
CONTEXT = 8  # tokens decoded again with new ones: a token's text may depend on its neighbours


class Text:
    """Decodes a growing list of tokens without decoding all of it again each time.

    Attributes:
      text: of the tokens so far, without an unfinished character at the end, up to the first stop string.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.text = ""
        self._decode = decode
        self._window: list[int] = []  # the last tokens
        self._given = 0  # characters of the window's text that `text` has

    def feed(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> tuple[int, str] | None:
        """Adds tokens. With stop strings: (how many of `tokens` it took, stop string) once one is complete.

        Of stop strings that one token completes, the one that begins first counts, the longest where several do.
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
        """No more tokens will come: an unfinished character is shown as such."""
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
