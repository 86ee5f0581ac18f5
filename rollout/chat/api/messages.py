"""Anthropic's `/v1/messages` and `count_tokens`: converts requests to asks of a session, interactions to messages.

`thinking` sets the chat template's variable that turns reasoning on or off. A thinking budget is not enforced: only
`max_tokens` limits a generation. The `is_error` of a tool result is ignored; its text must say so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import fields, images, parsers, template
from ..fields import Refusal, Refused, Table, rule
from ..parsers import Piece, ToolCall
from ..trajectory import Interaction
from . import abilities, image_parts
from .abilities import Abilities
from .ask import Ask, Event, render, seen

FIELDS = fields.table(
    [
        "messages", "model", "system", "tools", "tool_choice", "thinking", "output_config", "stream", "stop_sequences",
        "max_tokens", "temperature", "top_p", "top_k",
    ],
    [
        "metadata", "service_tier", "cache_control", "user_profile_id", "workspace_id", "inference_geo", "diagnostics",
        "speed",
    ],
    {
        "mcp_servers": Refusal("this server calls no tools", ([],)),
        "betas": Refusal("no beta is implemented", ([],)),
        "context_management": Refusal("the conversation is read as it is", ({},)),
        "container": Refusal("this server runs no code"),
    },
)  # fmt: skip
OUTPUT_CONFIG = fields.table(["format", "effort"])
THINKING = fields.table(["type"], ["budget_tokens"], {"display": Refusal(but=("summarized",))})
TOOL = fields.table(
    ["name", "description", "input_schema", "type"],
    ["cache_control", "strict", "eager_input_streaming"],
    {
        "defer_loading": Refusal(but=(False,)),
        "input_examples": Refusal(but=([],)),
        "allowed_callers": Refusal(but=(["direct"],)),
    },
)
BETWEEN = "\n"  # blocks of text, which become one
SIGNATURE = "unsigned"  # of thinking blocks, which nothing checks here


def read(body: Mapping[str, Any], model: Abilities, table: Table = FIELDS, *, forces: bool = False) -> Ask:
    """Parses a request; `model` are its abilities, the others as for `chat.read`. Raises Refused."""
    rule(body.get("max_tokens") is not None, "max_tokens", "must be given", None)
    return Ask(
        **_asked(body, model, table, forces),
        sampling={
            **fields.sampling(body, most=["max_tokens"], stop="stop_sequences"),
            **fields.schema(fields.mapping(body, "output_config").get("format"), "output_config"),
        },
        stream=fields.boolean(body, "stream"),
    )


def count(
    body: Mapping[str, Any],
    tokenizer: Any,
    table: Table = FIELDS,
    *,
    forces: bool = False,
    processor: images.Processor | None = None,
) -> dict[str, int]:
    """The answer of `count_tokens`; `forces` as in `chat.read`, `processor` as in `seen`. Raises Refused."""
    ask = seen(Ask(**_asked(body, abilities.of(tokenizer, processor), table, forces)), processor)
    ids = template.encode(tokenizer, render(tokenizer, ask, processor=processor))
    return {"input_tokens": len(processor.expanded(ids, images.of(ask.messages)) if processor else ids)}


def _asked(body: Mapping[str, Any], model: Abilities, table: Table, forces: bool) -> dict[str, Any]:
    fields.known(body, table)
    output = fields.mapping(body, "output_config")
    fields.known(output, OUTPUT_CONFIG)
    model.check_images(body, "messages")
    tools = [_tool(one) for one in fields.objects(body.get("tools") or [], "tools")]
    system = fields.text(body.get("system"), "system", between=BETWEEN)
    messages = [message for one in fields.objects(body.get("messages"), "messages") for message in _messages(one)]
    rule(bool(messages), "messages", "must not be empty", messages)
    if messages[-1]["role"] == "assistant":
        raise Refused("messages", "the last one must not be the assistant's: prefilling an answer is not supported")
    forced = _forced(body, tools) if forces else ()
    choice = fields.mapping(body, "tool_choice")
    return {
        "body": body,
        "messages": [*([{"role": "system", "content": system}] if system else []), *messages],
        "tools": tools if forced else _chosen(choice, tools),
        "forced": forced,
        "one_call": choice.get("type") == "tool" or fields.boolean(choice, "disable_parallel_tool_use"),
        "template": {
            **model.effort(output.get("effort"), "output_config.effort", "high"),
            **_thinking(body, model.switch),
        },
    }


def answer(ask: Ask, done: Sequence[Interaction], tokenizer: Any, readings: Any = None) -> dict[str, Any]:
    """The message; its id is the interaction's. It has no log-probabilities."""
    (x,) = done
    blocks = [block for kind, group in itertools.groupby(x.answer.pieces, _kind) for block in _blocks(kind, [*group])]
    return {**_frame(ask, x.id), "content": blocks, **_stop(ask, x), "usage": _usage(x)}


def _kind(piece: Piece) -> str:
    return "tool_use" if isinstance(piece, ToolCall) else piece.kind


def _blocks(kind: str, pieces: list[Any]) -> list[dict[str, Any]]:
    """The blocks of adjacent pieces of one kind."""
    if kind == "tool_use":
        input = lambda call: parsers.members(call.arguments) if call.cut else json.loads(call.arguments)
        return [{"type": kind, "id": call.id, "name": call.name, "input": input(call)} for call in pieces]
    text = "".join(piece.text for piece in pieces)
    if kind == "reasoning":
        return [{"type": "thinking", "thinking": text, "signature": SIGNATURE}]
    return [{"type": "text", "text": text, "citations": None}]


class Stream:
    """The events of a streamed message, in the order begin, pieces..., finish, end; or failed.

    A tool's input is a single delta, because a call is recognised only when it is complete.
    """

    def __init__(self, ask: Ask, ids: Sequence[str], tokenizer: Any):
        self._ask, self._id = ask, ids[0]
        self._index, self._open = -1, ""

    def begin(self, read: int = 0) -> Iterator[Event]:
        """The first event, which says how many tokens were `read`."""
        message = {**_frame(self._ask, self._id), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=message | {"usage": {"input_tokens": read, "output_tokens": 0}})

    def pieces(self, i: int, pieces: Sequence[Piece], reading: Any = ()) -> Iterator[Event]:
        for piece in pieces:
            yield from self._piece(piece)

    def _piece(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, ToolCall):
            yield from self._start({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        elif piece.kind == "reasoning":
            if self._open != "thinking":
                yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.text})
        else:
            if self._open != "text":
                yield from self._start({"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": piece.text})

    def finish(self, i: int, x: Interaction, reading: Any = ()) -> Iterator[Event]:
        yield from self._stop()
        yield _event("message_delta", delta=_stop(self._ask, x), usage=_usage(x))

    def end(self, done: Sequence[Interaction]) -> Iterator[Event]:
        yield _event("message_stop")

    def failed(self, status: int, message: str) -> Iterator[Event]:
        yield "error", error(status, message)

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._stop()
        self._index, self._open = self._index + 1, block["type"]
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""


def error(status: int, message: str, name: str | None = None) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
             429: "rate_limit_error"}  # fmt: skip
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _frame(ask: Ask, id: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "model": ask.body.get("model")}


def _usage(x: Interaction) -> dict[str, int]:
    return {"input_tokens": len(x.prompt), "output_tokens": len(x.completion.tokens)}


def _stop(ask: Ask, x: Interaction) -> dict[str, Any]:
    """The stop reason; with the stop sequence, if the server reports which one matched."""
    if x.completion.finish != "stop":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    matched = x.completion.info.get("finish_reason")
    matched = matched.get("matched") if isinstance(matched, Mapping) else None
    if matched in ask.sampling.get("stop", ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": "tool_use" if x.answer.tool_calls else "end_turn", "stop_sequence": None}


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Converts a message to OpenAI's format; each tool result, and the text around them, becomes its own message."""
    role, content = given.get("role"), given.get("content")
    rule(role in ("user", "assistant", "system"), "messages", "a role must be user, assistant or system", role)
    if role == "system":
        return [{"role": role, "content": fields.text(content, "messages", between=BETWEEN)}]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else fields.objects(content, "messages")
    if role == "assistant":
        return [_assistant(blocks)]
    messages: list[dict[str, Any]] = []
    texts: list[Mapping[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            messages.append({"role": "user", "content": image_parts.content(texts, "messages", between=BETWEEN)})
            texts = []
        rule(isinstance(block.get("tool_use_id"), str), "messages", "a result needs a tool_use_id", block)
        result = image_parts.content(block.get("content"), "messages", between=BETWEEN)
        messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
    if texts or not blocks:
        messages.append({"role": "user", "content": image_parts.content(texts, "messages", between=BETWEEN)})
    return messages


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    thoughts = [block for block in blocks if block.get("type") == "thinking"]
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    others = [block for block in blocks if block.get("type") not in ("thinking", "tool_use")]
    message: dict[str, Any] = {"role": "assistant", "content": fields.text(others, "messages")}
    if thoughts:
        right = all(isinstance(block.get("thinking"), str) for block in thoughts)
        rule(right, "messages", "a thinking block needs its thinking", thoughts)
        message["reasoning_content"] = "\n".join(block["thinking"] for block in thoughts)
    if uses:
        message["tool_calls"] = [
            fields.call(block.get("id"), block.get("name"), _arguments(block.get("input")), "messages")
            for block in uses
        ]
    return message


def _arguments(given: Any) -> str:
    rule(isinstance(given, Mapping), "messages", "the input of a tool must be an object", given)
    return json.dumps(given, ensure_ascii=False)


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    rule(
        given.get("type") in (None, "custom"), "tools", "only tools with an input_schema can be used", given.get("type")
    )
    fields.known(given, TOOL)
    return fields.tool(given.get("name"), given.get("description"), given.get("input_schema"), "tools")


def _chosen(choice: Mapping[str, Any], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kind = choice.get("type", "auto")
    if kind not in ("auto", "none"):
        raise Refused("tool_choice", f'must be "auto" or "none", because tool calls cannot be forced, got {kind!r:.80}')
    return tools if kind == "auto" else []


def _forced(body: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[str, ...]:
    """Names of the tools of which one must be called; () if none must be."""
    choice = fields.mapping(body, "tool_choice")
    kind, names = choice.get("type"), tuple(tool["function"]["name"] for tool in tools)
    if kind not in ("any", "tool"):
        return ()
    rule(names, "tool_choice", f'"{kind}" needs tools', choice)
    if kind == "any":
        return names
    rule(choice.get("name") in names, "tool_choice", "must name one of the tools", choice.get("name"))
    return (choice["name"],)


def _thinking(body: Mapping[str, Any], switch: str) -> dict[str, bool]:
    given = fields.mapping(body, "thinking")
    kind = given.get("type")
    if not given:
        return {}
    rule(kind in ("enabled", "disabled", "adaptive"), "thinking", "must be enabled, disabled or adaptive", kind)
    fields.known(given, THINKING)
    return {switch: kind != "disabled"} if switch else {}
