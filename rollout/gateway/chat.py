"""OpenAI's `/v1/chat/completions`: converts requests to asks of a session, interactions to answers and chunks.

Extensions, as in vLLM and SGLang: `top_k`, `min_p`, `min_tokens`, `chat_template_kwargs`, and `reasoning_content` in
messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..chat import fields, openai
from ..chat.fields import Refused, rule
from ..chat.parsers import Piece, Style, Text
from ..chat.trajectory import Interaction
from .ask import Ask

Event = tuple[str, Any]  # name of a server-sent event, or "", and its data

TAKEN = {
    "messages", "model", "tools", "tool_choice", "stream", "stream_options", "n", "stop", "seed", "response_format",
    "max_tokens", "max_completion_tokens", "logprobs", "chat_template_kwargs", *fields.SAMPLING,
}  # fmt: skip


def read(body: Mapping[str, Any], style: Style) -> Ask:
    """Parses a request. Raises Refused."""
    tools = [_tool(one) for one in fields.objects(body.get("tools") or [], "tools")]
    neutral = openai.NEUTRAL if tools else {**openai.NEUTRAL, "parallel_tool_calls": [True, False]}
    fields.known(body, TAKEN, openai.PASSED, neutral)
    openai.include_usage(body)
    refuse_seed(body)
    fields.boolean(body, "logprobs")
    return Ask(
        body=body,
        messages=openai.messages(body),
        tools=chosen(body.get("tool_choice"), tools),
        template=fields.mapping(body, "chat_template_kwargs"),
        sampling={
            **fields.sampling(body, most=openai.CHAT_BUDGET, stop="stop"),
            **fields.schema(body.get("response_format"), "response_format"),
        },
        n=fields.several(body),
        stream=fields.boolean(body, "stream"),
    )


def refuse_seed(body: Mapping[str, Any]) -> None:
    """Refuses a seed unless the temperature is 0, where it has no effect."""
    if body.get("seed") is not None and body.get("temperature") != 0:
        raise Refused("seed", "cannot be honoured by this server; leave it out, or ask for temperature 0")


def chosen(choice: Any, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that the model sees: all of them, or none if `choice` is "none"."""
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return []
    raise Refused("tool_choice", f'must be "auto" or "none", because tool calls cannot be forced, got {choice!r:.80}')


def answer(ask: Ask, done: Sequence[Interaction], tokenizer: Any) -> dict[str, Any]:
    """The response. Each choice has the id of its `interaction`."""
    choices = [
        {
            "index": i,
            "message": {"refusal": None, **x.answer.message()},
            "finish_reason": finish(x),
            "logprobs": _logprobs(ask, x, tokenizer),
            "interaction": x.id,
        }
        for i, x in enumerate(done)
    ]
    return {**_frame(ask, done[0].id, "chat.completion"), "choices": choices, "usage": usage(ask, done)}


class Stream:
    """The chunks of a streamed response, in the order begin, piece..., end or failed.

    A tool call is a single chunk, because it is recognised only when it is complete.
    """

    def __init__(self, ask: Ask, ids: Sequence[str], tokenizer: Any):
        self._ask, self._ids, self._tokenizer = ask, ids, tokenizer
        self._frame = _frame(ask, ids[0], "chat.completion.chunk")
        self._calls = [0] * len(ids)

    def begin(self) -> Iterator[Event]:
        for i in range(len(self._ids)):
            yield self._chunk(i, {"role": "assistant", "content": ""})

    def piece(self, i: int, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, Text):
            yield self._chunk(i, {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text})
            return
        function = {"name": piece.name, "arguments": piece.arguments}
        call = {"index": self._calls[i], "id": piece.id, "type": "function", "function": function}
        self._calls[i] += 1
        yield self._chunk(i, {"tool_calls": [call]})

    def end(self, done: Sequence[Interaction]) -> Iterator[Event]:
        for i, x in enumerate(done):
            yield self._chunk(i, {}, finish_reason=finish(x), logprobs=_logprobs(self._ask, x, self._tokenizer))
        if openai.include_usage(self._ask.body):
            yield "", {**self._frame, "choices": [], "usage": usage(self._ask, done)}
        yield "", "[DONE]"

    def failed(self, status: int, message: str) -> Iterator[Event]:
        yield "", error(status, message)

    def _chunk(self, i: int, delta: dict[str, Any], **more: Any) -> Event:
        choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None, "interaction": self._ids[i]}
        return "", {**self._frame, "choices": [choice | more]}


def error(status: int, message: str, name: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": name, "code": str(status)}}


def finish(x: Interaction) -> str:
    if x.completion.finish != "stop":
        return "length"
    return "tool_calls" if x.answer.tool_calls else "stop"


def usage(ask: Ask, done: Sequence[Interaction]) -> dict[str, int]:
    """Token counts; each prompt counts once."""
    prompts = sum(len(x.prompt) for x in done[:: ask.n])
    completions = sum(len(x.completion.tokens) for x in done)
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def _frame(ask: Ask, id: str, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": ask.body.get("model")}


def _logprobs(ask: Ask, x: Interaction, tokenizer: Any) -> dict[str, Any] | None:
    """Log-probabilities of all sampled tokens, including reasoning, tool calls and the stop token."""
    if not ask.body.get("logprobs"):
        return None
    content = []
    for token, logp in zip(x.completion.tokens, x.completion.logp, strict=True):
        shown = tokenizer.decode([token])
        whole = "\ufffd" not in shown  # else part of a character
        bytes_ = list(shown.encode()) if whole else None
        content.append({"token": shown, "logprob": logp, "bytes": bytes_, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    rule(given.get("type") == "function", "tools", "a tool must be a function", given.get("type"))
    function = fields.mapping(given, "function")
    return fields.tool(function.get("name"), function.get("description"), function.get("parameters"), "tools")
