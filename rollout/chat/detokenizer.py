"""Incremental detokenisation with stop strings."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

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


def growing(decode: Callable[[list[int]], str], tokens: Sequence[int]) -> Iterator[str]:
    """For each token the text that is complete with it and was not before."""
    text, before = Text(decode), 0
    for token in tokens:
        text.feed([token])
        yield text.text[before:]
        before = len(text.text)


def completing(decode: Callable[[list[int]], str], tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each number of characters the index of the token that completes them; the last token if they are all."""
    return completed(growing(decode, tokens), ends)


def completed(pieces: Iterable[str], ends: Sequence[int]) -> list[int]:
    """As `completing`, given the text of each token."""
    lengths = [*accumulate(map(len, pieces))]
    return [len(lengths) - 1 if end >= lengths[-1] else bisect_left(lengths, end) for end in ends]


class Reader:
    """The text of a completion while it grows, token by token. Characters that may begin a stop string are held back.

    Args:
      decode: converts token ids to text.
      stops: strings that end the text, and are not part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self._decode, self._stops = decode, stops
        self._first = {stop[0] for stop in stops}
        self._reach = max(map(len, stops), default=1) - 1
        self._text, self._shown, self._stopped = Text(decode), 0, False

    def push(self, token: int) -> str:
        """The text that is certain once `token`, which does not end the completion, is known."""
        if self._stopped:
            return ""
        self._stopped = self._text.feed([token], self._stops) is not None
        text = self._text.text
        return self.rest(text if self._stopped else text[: self._certain(text)])

    def finish(self, tokens: Sequence[int], stopped: bool) -> tuple[str, str]:
        """(complete text, the part of it that `push` has not returned).

        Args:
          tokens: all of the completion.
          stopped: it was ended by a stop string or by its last token, which are not part of the text.
        """
        text = Text(self._decode)
        if text.feed(tokens, self._stops) is None:
            text = Text(self._decode)
            text.feed(tokens[:-1] if stopped else tokens)
            text.end()
        return text.text, self.rest(text.text)

    def _certain(self, text: str) -> int:
        """Characters of the text before the first that may begin a stop string."""
        for at in range(max(0, len(text) - self._reach), len(text)):
            if text[at] in self._first and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)

    def rest(self, text: str) -> str:
        """The part of `text`, which begins with what was returned so far, that was not."""
        new = text[self._shown :]
        self._shown += len(new)
        return new
