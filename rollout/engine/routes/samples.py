"""A sample of the engine as the APIs show it: text without stop strings, parsed, with the tokens' log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ...chat.api.logprobs import Reading
from ...chat.detokenizer import Reader
from ...chat.first_call import FirstCall
from ...chat.parsers import Parser, Piece, Text, collect
from ...chat.trajectory import Interaction
from ...types import Completion
from ..request import Progress, Request


class Sample:
    """One sample, while it grows or at its end.

    Args:
      decode: converts token ids to text.
      parser: of its text; None = all of it is content.
      markers: tokens that `decode` shows and the engine's own text lacks.
      first: finds the first call, which ends the sample; None = nothing does but the engine.
    """

    def __init__(
        self,
        request: Request,
        decode: Callable[[list[int]], str],
        parser: Parser | None = None,
        markers: frozenset[int] = frozenset(),
        first: FirstCall | None = None,
    ):
        self.request, self._parser, self._markers, self._first = request, parser, markers, first
        self._called = False  # a call has ended it
        self._reader = Reader(decode, request.sampling.stop)
        self._read = 0  # tokens
        self._pieces: list[Piece] = []
        self._text: str | None = None  # once it is complete

    def ended(self, progress: Progress) -> Progress:
        """The progress; if a call ends the sample in it, that up to there, finished."""
        end = self._first.end(progress.tokens) if self._first else None
        if end is None:
            return progress
        self._called = True
        return dataclasses.replace(
            progress, tokens=progress.tokens[:end], logp=progress.logp[:end], top=progress.top[:end],
            versions=[(version, a, min(b, end)) for version, a, b in progress.versions if a < end],
            routed=progress.routed[: end - 1], finish={"type": "stop", "matched": None},
        )  # fmt: skip

    def news(self, progress: Progress) -> Iterator[tuple[list[Piece], Reading]]:
        """(the pieces that it completes, its log-probabilities) for each new token."""
        end = len(progress.tokens)
        for i in range(self._read, end - 1 if progress.finish else end):
            yield self._take(self._reader.push(progress.tokens[i])), _outputs(progress, i, i + 1)
        if progress.finish:
            rest = self._end(progress)
            if rest or self._read < end:
                yield rest, _outputs(progress, max(self._read, end - 1), end)
        self._read = end

    def done(self, progress: Progress) -> Interaction:
        """The finished sample."""
        if self._text is None:
            self._end(progress)
        finish = progress.finish or {}
        completion = Completion(
            tokens=progress.tokens,
            logp=progress.logp,
            version=[-1] * len(progress.tokens),
            finish=finish["type"],
            info={"finish_reason": finish, "cached_tokens": progress.cached_tokens},
        )
        return Interaction(
            prompt=self.request.prompt,
            temperature=self.request.sampling.temperature,
            id=self.request.rid,
            completion=completion,
            text=self._text or "",
            answer=collect(self._pieces),
        )

    def reading(self, progress: Progress) -> Reading:
        """The log-probabilities of all tokens; those of the prompt first, if the request asks for them."""
        return [*self.inputs(progress), *_outputs(progress, 0, len(progress.tokens))]

    def inputs(self, progress: Progress) -> Reading:
        """The log-probabilities of the prompt's tokens, if the request asks for them."""
        start = self.request.input_logprobs_from
        tokens = () if start is None else self.request.prompt[start:]
        tops: Sequence = progress.input_top or [()] * len(tokens)
        return [_row(*row) for row in zip(tokens, progress.input_logp, tops, strict=False)]

    def _take(self, text: str) -> list[Piece]:
        pieces: list[Piece] = self._parser.push(text) if self._parser else [Text("content", text)] if text else []
        self._pieces += pieces
        return pieces

    def _end(self, progress: Progress) -> list[Piece]:
        assert progress.finish
        if self._markers.isdisjoint(progress.tokens) and not self._called:  # the engine's thread has done the work
            self._text = progress.decoded or ""
            rest = self._reader.rest(self._text)
        else:
            stopped = progress.finish["type"] == "stop" and not self._called
            self._text, rest = self._reader.finish(progress.tokens, stopped)
        pieces = self._take(rest)
        held = self._parser.finish(cut=progress.finish["type"] == "length") if self._parser else []
        self._pieces += held
        return pieces + held


def _outputs(progress: Progress, start: int, end: int) -> Reading:
    tops: Sequence = progress.top[start:end] or [()] * (end - start)
    return [_row(*row) for row in zip(progress.tokens[start:end], progress.logp[start:end], tops, strict=True)]


def _row(token, logp, top):
    return token, logp, {other: p for p, other in top or ()}
