"""OpenAI's `/v1/completions`: continues prompts of text or tokens; with `echo` also scores the prompt.

Log-probabilities of a prompt, and of the likeliest tokens at each position, come from a second pass of the server over
the text: they are at temperature 1, under its current weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..chat import fields, openai
from ..chat.fields import Refused, rule
from ..chat.parsers import Piece, Text
from ..chat.trajectory import Interaction
from .ask import Ask
from .chat import Event, error, refuse_seed, usage

TAKEN = {
    "prompt", "model", "stream", "stream_options", "n", "stop", "seed", "max_tokens", "logprobs", "echo",
    *fields.SAMPLING,
}  # fmt: skip
TOP = 20  # most likeliest tokens per position that a request may ask for
Reading = Sequence[tuple[int, float | None, Mapping[int, float]]]  # token, its log-probability, {likeliest token: logp}


def read(body: Mapping[str, Any], tokenizer: Any) -> Ask:
    """Parses a request. Raises Refused."""
    fields.known(body, TAKEN, openai.PASSED, openai.NEUTRAL)
    openai.include_usage(body)
    refuse_seed(body)
    echo = fields.boolean(body, "echo")
    if body.get("logprobs") is not None:
        fields.integer(body, "logprobs", least=0, most=TOP)
    sampling = {"max_new_tokens": openai.COMPLETION_TOKENS, **fields.sampling(body, most=["max_tokens"], stop="stop")}
    if not echo and not sampling["max_new_tokens"]:
        raise Refused("max_tokens", "must be at least 1 without echo, got 0")
    ask = Ask(
        body=body,
        sampling=sampling,
        n=fields.several(body),
        stream=fields.boolean(body, "stream"),
        prompts=openai.prompts(body, tokenizer, len(tokenizer)),
    )
    rule(len(ask.prompts) * ask.n <= fields.MOST, "prompt", f"answers must be at most {fields.MOST}", len(ask.prompts))
    return ask


def reads(ask: Ask) -> bool:
    """Whether log-probabilities need a second pass over prompt and completion."""
    return bool(ask.body.get("logprobs")) or (bool(ask.body.get("echo")) and ask.body.get("logprobs") is not None)


def answer(
    ask: Ask, done: Sequence[Interaction], tokenizer: Any, readings: Mapping[Interaction, Reading]
) -> dict[str, Any]:
    """The response. Each choice has the id of its `interaction`.

    Args:
      readings: if `reads(ask)`, the scored prompt and completion of each choice.
    """
    choices = [
        {
            "index": i,
            "text": _shown(ask, x, tokenizer) + x.text,
            "finish_reason": "stop" if x.completion.finish == "stop" else "length",
            "logprobs": _logprobs(ask, x, readings.get(x), tokenizer),
            "interaction": x.id,
        }
        for i, x in enumerate(done)
    ]
    return {**_frame(ask, done[0].id), "choices": choices, "usage": usage(ask, done)}


class Stream:
    """The chunks of a streamed response, in the order begin, piece..., end or failed."""

    def __init__(self, ask: Ask, ids: Sequence[str], tokenizer: Any):
        if ask.body.get("echo") or ask.body.get("logprobs") is not None:
            raise Refused("stream", "cannot be had with echo or logprobs; leave it out")
        self._ask, self._ids = ask, ids
        self._frame = _frame(ask, ids[0])

    def begin(self) -> Iterator[Event]:
        yield from ()

    def piece(self, i: int, piece: Piece) -> Iterator[Event]:
        assert isinstance(piece, Text)
        yield self._chunk(i, piece.text, None)

    def end(self, done: Sequence[Interaction]) -> Iterator[Event]:
        for i, x in enumerate(done):
            yield self._chunk(i, "", "stop" if x.completion.finish == "stop" else "length")
        if openai.include_usage(self._ask.body):
            yield "", {**self._frame, "choices": [], "usage": usage(self._ask, done)}
        yield "", "[DONE]"

    def failed(self, status: int, message: str) -> Iterator[Event]:
        yield "", error(status, message)

    def _chunk(self, i: int, text: str, finish: str | None) -> Event:
        choice = {"index": i, "text": text, "finish_reason": finish, "logprobs": None, "interaction": self._ids[i]}
        return "", {**self._frame, "choices": [choice]}


def _shown(ask: Ask, x: Interaction, tokenizer: Any) -> str:
    return tokenizer.decode(list(x.prompt)) if ask.body.get("echo") else ""


def _logprobs(ask: Ask, x: Interaction, reading: Reading | None, tokenizer: Any) -> dict[str, Any] | None:
    top = ask.body.get("logprobs")
    if top is None:
        return None
    if reading is None:
        rows: Reading = [(t, p, {}) for t, p in zip(x.completion.tokens, x.completion.logp, strict=True)]
    else:
        rows = reading if ask.body.get("echo") else reading[len(x.prompt) :]
    names = [_name(tokenizer, token) for token, _, _ in rows]
    offsets = list(itertools.accumulate(map(len, names[:-1]), initial=0)) if names else []
    return {
        "tokens": names,
        "token_logprobs": [logp for _, logp, _ in rows],
        "top_logprobs": [_named(tokenizer, others) for _, _, others in rows] if top else None,
        "text_offset": offsets,
    }


def _named(tokenizer: Any, others: Mapping[int, float]) -> dict[str, float] | None:
    """The likeliest tokens by name; of two with the same name, the likelier. None for the first token of a sequence."""
    return {_name(tokenizer, token): logp for token, logp in sorted(others.items(), key=lambda x: x[1])} or None


def _name(tokenizer: Any, token: int) -> str:
    """A token's text; for a part of a character its vocabulary entry, because all such parts decode alike."""
    shown = tokenizer.decode([token])
    return tokenizer.convert_ids_to_tokens(token) if "\ufffd" in shown else shown


def _frame(ask: Ask, id: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(time.time()), "model": ask.body.get("model")}


__all__ = ["Stream", "answer", "error", "read", "reads"]
