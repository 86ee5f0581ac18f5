"""OpenAI's `/v1/completions`: continues prompts of text or tokens; with `echo` also scores the prompt.

With `return_token_ids`, as in vLLM, each choice has "prompt_token_ids" and "token_ids"; streamed, its last chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import fields
from ..fields import Refusal, rule
from ..parsers import Piece, Text
from ..trajectory import Interaction
from . import logprobs, openai
from .ask import Ask, Event
from .chat import error, finish, prompt_ids, token_ids, usage

FIELDS = fields.table(
    [
        "prompt", "model", "stream", "stream_options", "n", "stop", "seed", "max_tokens", "logprobs", "echo",
        "return_token_ids",
        *fields.SAMPLING,
    ],
    openai.PASSED,
    {
        **openai.REFUSED,
        "best_of": Refusal("every sample is returned; use n", (1,)),
        "suffix": Refusal("text is only continued at its end", ("",)),
    },
)  # fmt: skip
TOP = 20  # most likeliest tokens per position that a request may ask for


def read(
    body: Mapping[str, Any],
    tokenizer: Any,
    table: fields.Table = FIELDS,
    most: int = fields.MOST,
    vocabulary: int | None = None,
) -> Ask:
    """Parses a request. Raises Refused.

    Args:
      table: the fields, and what the server does with them.
      most: answers that a request may ask for.
      vocabulary: number of token ids; None = checked by the caller.
    """
    fields.known(body, table)
    openai.include_usage(body)
    fields.boolean(body, "echo")
    fields.boolean(body, "return_token_ids")
    if body.get("logprobs") is not None:
        fields.integer(body, "logprobs", least=0, most=TOP)
    ask = Ask(
        body=body,
        sampling={
            "max_new_tokens": openai.COMPLETION_TOKENS,
            **fields.sampling(body, most=["max_tokens"], stop="stop"),
        },
        n=fields.several(body, most),
        stream=fields.boolean(body, "stream"),
        prompts=openai.prompts(body, tokenizer, vocabulary),
    )
    rule(
        len(ask.prompts) * ask.n <= most,
        "n",
        f"must give at most {most} samples, prompts times n",
        len(ask.prompts) * ask.n,
    )
    return ask


def reads(ask: Ask) -> bool:
    """Whether log-probabilities need a second pass over prompt and completion."""
    return bool(ask.body.get("logprobs")) or (bool(ask.body.get("echo")) and ask.body.get("logprobs") is not None)


def answer(
    ask: Ask, done: Sequence[Interaction], tokenizer: Any, readings: Mapping[Interaction, logprobs.Reading]
) -> dict[str, Any]:
    """The response.

    Args:
      readings: tokens with log-probabilities, those of the prompt first if the answer echoes it, of the choices for
        which the default, the sampled ones, is not enough.
    """
    choices = [
        {
            "index": i,
            "text": echoed(ask, x.prompt, tokenizer) + x.text,
            "finish_reason": finish(x),
            "logprobs": _logprobs(
                ask,
                readings.get(x) or logprobs.sampled(x),
                tokenizer,
                logprobs.Offsets(tokenizer, len(x.prompt) if ask.body.get("echo") else 0),
            ),
            **token_ids(ask, x),
            **prompt_ids(ask, x),
        }
        for i, x in enumerate(done)
    ]
    return {**_frame(ask, done[0].id), "choices": choices, "usage": usage(ask, done)}


class Stream:
    """The chunks of a streamed response, in the order begin, pieces..., finish of each choice, end; or failed."""

    def __init__(self, ask: Ask, ids: Sequence[str], tokenizer: Any):
        self._ask, self._tokenizer = ask, tokenizer
        self._frame = _frame(ask, ids[0])
        self._offsets: dict[int, logprobs.Offsets] = {}

    def begin(self, read: int = 0) -> Iterator[Event]:
        yield from ()

    def pieces(self, i: int, pieces: Sequence[Piece], reading: logprobs.Reading = ()) -> Iterator[Event]:
        """The chunk of new text, with the log-probabilities of the tokens in `reading`."""
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        yield self._chunk(i, text, None, reading)

    def finish(self, i: int, x: Interaction, reading: logprobs.Reading = ()) -> Iterator[Event]:
        """The last chunk of a choice; `reading` as in `pieces`."""
        yield self._chunk(i, "", finish(x), reading, **token_ids(self._ask, x), **prompt_ids(self._ask, x))

    def end(self, done: Sequence[Interaction]) -> Iterator[Event]:
        if openai.include_usage(self._ask.body):
            yield "", {**self._frame, "choices": [], "usage": usage(self._ask, done)}
        yield "", "[DONE]"

    def failed(self, status: int, message: str) -> Iterator[Event]:
        yield "", error(status, message)

    def _chunk(self, i: int, text: str, finish: str | None, reading: logprobs.Reading, **more: Any) -> Event:
        if i not in self._offsets:  # what is echoed comes first
            echoed = len(reading) if self._ask.body.get("echo") else 0
            self._offsets[i] = logprobs.Offsets(self._tokenizer, echoed)
        rows = _logprobs(self._ask, reading, self._tokenizer, self._offsets[i])
        choice = {"index": i, "text": text, "finish_reason": finish, "logprobs": rows, **more}
        return "", {**self._frame, "choices": [choice]}


def echoed(ask: Ask, prompt: Sequence[int], tokenizer: Any) -> str:
    """The prompt's text if the answer begins with it, else ""."""
    return tokenizer.decode(list(prompt)) if ask.body.get("echo") and tokenizer is not None else ""


def _logprobs(ask: Ask, reading: logprobs.Reading, tokenizer: Any, offsets: logprobs.Offsets) -> dict[str, Any] | None:
    top = ask.body.get("logprobs")
    return None if top is None else logprobs.completion(reading, tokenizer, top, offsets)


def _frame(ask: Ask, id: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(time.time()), "model": ask.body.get("model")}


__all__ = ["Stream", "answer", "echoed", "error", "read", "reads"]
