"""OpenAI's `/v1/chat/completions`: converts requests to asks of a session, interactions to answers and chunks.

Extensions, as in vLLM and SGLang: `top_k`, `min_p`, `min_tokens`, `chat_template_kwargs`, `reasoning_content` in
messages, and `return_token_ids`: the answer has "prompt_token_ids", each choice "token_ids"; streamed, its last chunk
has both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import fields
from ..fields import Refusal, Refused, rule
from ..parsers import Piece, Text
from ..trajectory import Interaction
from . import logprobs, openai
from .abilities import Abilities
from .ask import Ask, Event

FIELDS = fields.table(
    [
        "messages", "model", "tools", "tool_choice", "stream", "stream_options", "n", "stop", "seed", "response_format",
        "max_tokens", "max_completion_tokens", "logprobs", "chat_template_kwargs", "parallel_tool_calls",
        "reasoning_effort", "verbosity", "return_token_ids",
        *fields.SAMPLING,
    ],
    openai.PASSED,
    {
        **openai.REFUSED,
        "top_logprobs": Refusal(but=(0,)),
        "functions": Refusal("give the functions as tools", ([],)),
        "function_call": Refusal("give the functions as tools", ("none", "auto")),
        "modalities": Refusal("answers are text", (["text"],)),
        "audio": Refusal("answers are text"),
        "web_search_options": Refusal("this server searches nothing"),
        "add_generation_prompt": Refusal("an answer is a new message; use /v1/completions", (True,)),
    },
)  # fmt: skip


def read(
    body: Mapping[str, Any],
    abilities: Abilities,
    table: fields.Table = FIELDS,
    most: int = fields.MOST,
    *,
    forces: bool = False,
) -> Ask:
    """Parses a request. Raises Refused.

    Args:
      abilities: of the model.
      table: the fields, and what the server does with them.
      most: answers that a request may ask for.
      forces: whether the server can force a tool call.
    """
    given = tools(body)
    calls = forced(body.get("tool_choice"), given) if forces else ()
    fields.known(body, table)
    openai.include_usage(body)
    fields.boolean(body, "logprobs")
    fields.boolean(body, "return_token_ids")
    abilities.check_images(body, "messages")
    return Ask(
        body=body,
        messages=openai.messages(body),
        tools=chosen(body.get("tool_choice"), given, forces),
        forced=calls,
        one_call=one_call(body),
        template=variables(body, abilities),
        sampling={
            **fields.sampling(body, most=openai.CHAT_BUDGET, stop="stop"),
            **fields.schema(body.get("response_format"), "response_format"),
        },
        n=fields.several(body, most),
        stream=fields.boolean(body, "stream"),
    )


def variables(body: Mapping[str, Any], abilities: Abilities) -> dict[str, Any]:
    """Variables of the chat template: those that the request names, before those of its fields. Raises Refused."""
    return {
        **abilities.effort(body.get("reasoning_effort"), "reasoning_effort"),
        **abilities.verbosities(body.get("verbosity"), "verbosity"),
        **fields.mapping(body, "chat_template_kwargs"),
    }


def tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request. Raises Refused."""
    return [_tool(one) for one in fields.objects(body.get("tools") or [], "tools")]


def chosen(choice: Any, tools: list[dict[str, Any]], forces: bool = False) -> list[dict[str, Any]]:
    """The tools that the model sees: all of them, or none if `choice` is "none"; `forces` as in `read`."""
    if choice in (None, "auto") or (forces and forced(choice, tools)):
        return tools
    if choice == "none":
        return []
    raise Refused("tool_choice", f'must be "auto" or "none", because tool calls cannot be forced, got {choice!r:.80}')


def forced(choice: Any, tools: list[dict[str, Any]]) -> tuple[str, ...]:
    """Names of the tools of which one must be called: all of them, or the one that is named; () = none must."""
    if choice in (None, "auto", "none"):
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice == "required" and names:
        return names
    named = choice if isinstance(choice, Mapping) and choice.get("type") == "function" else {}
    inner = named.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else named.get("name")
    rule(name in names, "tool_choice", 'must be "auto", "none", or, given tools, "required" or one of them', choice)
    return (str(name),)


def one_call(body: Mapping[str, Any]) -> bool:
    """Whether an answer may have a single call: of a named tool, or if parallel calls are not wanted."""
    several = body.get("parallel_tool_calls") is None or fields.boolean(body, "parallel_tool_calls")
    return isinstance(body.get("tool_choice"), Mapping) or not several


def answer(
    ask: Ask, done: Sequence[Interaction], tokenizer: Any, readings: Mapping[Interaction, logprobs.Reading]
) -> dict[str, Any]:
    """The response.

    Args:
      readings: tokens with log-probabilities, of the choices for which the default, the sampled ones, is not enough.
    """
    choices = [
        {
            "index": i,
            "message": {"refusal": None, **x.answer.message()},
            "finish_reason": finish(x),
            "logprobs": _logprobs(ask, readings.get(x) or logprobs.sampled(x), tokenizer),
            **token_ids(ask, x),
        }
        for i, x in enumerate(done)
    ]
    frame = _frame(ask, done[0].id, "chat.completion")
    return {**frame, "choices": choices, "usage": usage(ask, done), **prompt_ids(ask, done[0])}


class Stream:
    """The chunks of a streamed response, in the order begin, pieces..., finish of each choice, end; or failed.

    A tool call is a single chunk, because it is recognised only when it is complete.
    """

    def __init__(self, ask: Ask, ids: Sequence[str], tokenizer: Any):
        self._ask, self._n, self._tokenizer = ask, len(ids), tokenizer
        self._frame = _frame(ask, ids[0], "chat.completion.chunk")
        self._calls = [0] * len(ids)

    def begin(self, read: int = 0) -> Iterator[Event]:
        for i in range(self._n):
            yield self._chunk(i, {"role": "assistant", "content": ""})

    def pieces(self, i: int, pieces: Sequence[Piece], reading: logprobs.Reading = ()) -> Iterator[Event]:
        """The chunks of new pieces, at least one; the first has the log-probabilities of the tokens in `reading`."""
        for piece in pieces or [Text("content", "")]:
            more = {"logprobs": _logprobs(self._ask, reading, self._tokenizer)} if reading else {}
            yield self._chunk(i, self._delta(i, piece), **more)
            reading = ()

    def _delta(self, i: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Text):
            return {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text}
        function = {"name": piece.name, "arguments": piece.arguments}
        self._calls[i] += 1
        return {"tool_calls": [{"index": self._calls[i] - 1, "id": piece.id, "type": "function", "function": function}]}

    def finish(self, i: int, x: Interaction, reading: logprobs.Reading = ()) -> Iterator[Event]:
        """The last chunk of a choice; `reading` as in `pieces`."""
        more = {"logprobs": _logprobs(self._ask, reading, self._tokenizer)} if reading else {}
        name, chunk = self._chunk(i, {}, finish_reason=finish(x), **more, **token_ids(self._ask, x))
        yield name, chunk | prompt_ids(self._ask, x)

    def end(self, done: Sequence[Interaction]) -> Iterator[Event]:
        if openai.include_usage(self._ask.body):
            yield "", {**self._frame, "choices": [], "usage": usage(self._ask, done)}
        yield "", "[DONE]"

    def failed(self, status: int, message: str) -> Iterator[Event]:
        yield "", error(status, message)

    def _chunk(self, i: int, delta: dict[str, Any], **more: Any) -> Event:
        choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None}
        return "", {**self._frame, "choices": [choice | more]}


def error(status: int, message: str, name: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": name, "code": str(status)}}


def finish(x: Interaction) -> str:
    """The `finish_reason`; "abort", as in SGLang, if the server ended the request."""
    return "tool_calls" if x.completion.finish == "stop" and x.answer.tool_calls else x.completion.finish


def usage(ask: Ask, done: Sequence[Interaction]) -> dict[str, int]:
    """Token counts; each prompt counts once."""
    prompts = sum(len(x.prompt) for x in done[:: ask.n])
    completions = sum(len(x.completion.tokens) for x in done)
    return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": prompts + completions}


def token_ids(ask: Ask, x: Interaction) -> dict[str, list[int]]:
    """The sampled tokens of a choice, if the request asks for ids."""
    return {"token_ids": list(x.completion.tokens)} if ask.body.get("return_token_ids") else {}


def prompt_ids(ask: Ask, x: Interaction) -> dict[str, list[int]]:
    """The tokens that an answer continues, if the request asks for ids."""
    return {"prompt_token_ids": list(x.prompt)} if ask.body.get("return_token_ids") else {}


def _frame(ask: Ask, id: str, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": ask.body.get("model")}


def _logprobs(ask: Ask, reading: logprobs.Reading, tokenizer: Any) -> dict[str, Any] | None:
    return logprobs.chat(reading, tokenizer) if ask.body.get("logprobs") else None


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    rule(given.get("type") == "function", "tools", "a tool must be a function", given.get("type"))
    function = fields.mapping(given, "function")
    return fields.tool(function.get("name"), function.get("description"), function.get("parameters"), "tools")
