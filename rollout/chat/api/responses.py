"""OpenAI's `/v1/responses`: converts requests to asks of a session, interactions to responses and events.

The latest responses are kept (`Stored`), unless `store` is false: a request may refer to them and to their items.
Reasoning is returned as plain text, so `reasoning.encrypted_content` is not needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import fields
from ..fields import Refusal, Table, rule
from ..parsers import Piece, ToolCall
from ..trajectory import Interaction
from . import image_parts
from .abilities import Abilities
from .ask import Ask, Event
from .chat import chosen, error, forced, one_call
from .openai import ROLES
from .stored import Stored

CONTINUED = "continue the conversation by previous_response_id, or send all of it as input"
FIELDS = fields.table(
    [
        "input", "instructions", "model", "tools", "tool_choice", "stream", "text", "max_output_tokens", "temperature",
        "top_p", "chat_template_kwargs", "previous_response_id", "store", "parallel_tool_calls",
        "reasoning",
    ],
    [
        "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "max_tool_calls", "stream_options",
    ],
    {
        "conversation": Refusal(CONTINUED),
        "prompt": Refusal("no prompts are kept; send the conversation as input"),
        "background": Refusal("a response is complete when it is answered", (False,)),
        "truncation": Refusal("the input is read as it is", ("disabled",)),
        "context_management": Refusal("the input is read as it is", ([],)),
        "include": Refusal(but=([], ["reasoning.encrypted_content"])),
        "top_logprobs": Refusal(but=(0,)),
    },
)  # fmt: skip
TEXT = fields.table(["format", "verbosity"])
SUMMARY = Refusal("reasoning is returned in full", ("auto", "detailed"))
REASONING = fields.table(["effort"], refused={"summary": SUMMARY, "generate_summary": SUMMARY})
SHOWN = ("instructions", "metadata", "max_output_tokens", "temperature", "top_p")  # echoed in the response


def read(
    body: Mapping[str, Any],
    abilities: Abilities,
    table: Table = FIELDS,
    *,
    forces: bool = False,
    stored: Stored | None = None,
) -> Ask:
    """Parses a request. Raises Refused.

    Args:
      abilities: of the model.
      table: the fields, and what the server does with them.
      forces: as in `chat.read`.
      stored: the responses of the client, to which this one is added; None = none.
    """
    tools = [_tool(one) for one in fields.objects(body.get("tools") or [], "tools")]
    calls = forced(body.get("tool_choice"), tools) if forces else ()
    fields.known(body, table)
    wanted, reasoning = fields.mapping(body, "text"), fields.mapping(body, "reasoning")
    fields.known(wanted, TEXT)
    fields.known(reasoning, REASONING)
    abilities.check_images(body, "input")
    instructions = body.get("instructions")
    rule(instructions is None or isinstance(instructions, str), "instructions", "must be text", instructions)
    stored = stored or Stored()
    items = stored.items(body)
    keeps = body.get("store") is None or fields.boolean(body, "store")
    return Ask(
        body=body,
        messages=[*([{"role": "system", "content": instructions}] if instructions else []), *_messages(items)],
        tools=chosen(body.get("tool_choice"), tools, forces),
        forced=calls,
        one_call=one_call(body),
        template={
            **abilities.effort(reasoning.get("effort"), "reasoning.effort"),
            **abilities.verbosities(wanted.get("verbosity"), "text.verbosity"),
            **fields.mapping(body, "chat_template_kwargs"),
        },
        sampling={
            **fields.sampling(body, most=["max_output_tokens"], stop="stop"),
            **fields.schema(wanted.get("format"), "text"),
        },
        stream=fields.boolean(body, "stream"),
        keep=stored.keeper(items) if keeps else None,
    )


def answer(ask: Ask, done: Sequence[Interaction], tokenizer: Any, readings: Any = None) -> dict[str, Any]:
    """The response; its id is the interaction's. It has no log-probabilities."""
    (x,) = done
    stream = Stream(ask, [x.id], tokenizer)
    list(stream.pieces(0, x.answer.pieces))
    return list(stream.end(done))[-1][1]["response"]


class Stream:
    """The events of a streamed response, in the order begin, pieces..., finish, end; or failed.

    A tool's arguments are a single delta, because a call is recognised only when it is complete.
    """

    def __init__(self, ask: Ask, ids: Sequence[str], tokenizer: Any):
        self._ask, self._id = ask, ids[0]
        self._count: Callable[[str], int] = lambda text: len(tokenizer.encode(text, add_special_tokens=False))
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open = ""
        self._number = 0

    def begin(self, read: int = 0) -> Iterator[Event]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def pieces(self, i: int, pieces: Sequence[Piece], reading: Any = ()) -> Iterator[Event]:
        for piece in pieces:
            yield from self._piece(piece)

    def _piece(self, piece: Piece) -> Iterator[Event]:
        if not isinstance(piece, ToolCall):
            yield from self.grow("reasoning" if piece.kind == "reasoning" else "message", piece.text)
            return
        item = {"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": ""}
        yield from self._add(item)
        yield self._at("response.function_call_arguments.delta", delta=piece.arguments)
        yield self._at("response.function_call_arguments.done", arguments=piece.arguments)
        self._items[-1]["arguments"] = piece.arguments
        yield from self._close("incomplete" if piece.cut else "completed")

    def grow(self, kind: str, text: str) -> Iterator[Event]:
        """Appends text to the open item; opens a new one if the open item is not of this `kind`."""
        if self._open != kind:
            part = _part(kind, "")
            item = (
                {"content": [part], "summary": []} if kind == "reasoning" else {"role": "assistant", "content": [part]}
            )
            yield from self._add({"type": kind, **item})
            yield self._at("response.content_part.added", content_index=0, part=dict(part))
        self._items[-1]["content"][0]["text"] += text
        yield self._at(f"response.{_TEXT[kind]}.delta", content_index=0, delta=text, **_logprobs(kind))

    def finish(self, i: int, x: Interaction, reading: Any = ()) -> Iterator[Event]:
        yield from self._close(_status(x))

    def end(self, done: Sequence[Interaction]) -> Iterator[Event]:
        (x,) = done
        yield from self._close(_status(x))
        response = self._response(_status(x))
        if x.completion.finish != "stop":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._ask.keep:
            self._ask.keep(response)
        read, sampled = len(x.prompt), len(x.completion.tokens)
        cached = x.completion.info.get("cached_tokens", 0)
        response["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": self._count(x.answer.reasoning)},
            "total_tokens": read + sampled,
        }
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, status: int, message: str) -> Iterator[Event]:
        failure = {"code": "invalid_prompt" if status < 500 else "server_error", "message": message}
        yield self._event("response.failed", response={**self._response("failed"), "error": failure})

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        names = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
        self._open = item["type"]
        item |= {"id": f"{names[self._open]}_{self._id}_{len(self._items)}", "status": "in_progress"}
        self._items.append(item)
        empty = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if not self._open:
            return
        item, kind = self._items[-1], self._open
        if kind in _TEXT:
            (part,) = item["content"]
            yield self._at(f"response.{_TEXT[kind]}.done", content_index=0, text=part["text"], **_logprobs(kind))
            yield self._at("response.content_part.done", content_index=0, part=dict(part))
        self._open, item["status"] = "", status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _at(self, kind: str, **data: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **data)

    def _event(self, kind: str, **data: Any) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **data}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._ask.body
        return {
            **{name: body.get(name) for name in SHOWN},
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": body.get("model"),
            "output": [dict(item) for item in self._items],
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "text": body.get("text") or {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": self._ask.keep is not None,
            "previous_response_id": body.get("previous_response_id"),
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }


def _status(x: Interaction) -> str:
    return "completed" if x.completion.finish == "stop" else "incomplete"


_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": _TEXT[kind], "text": text} | ({"annotations": [], "logprobs": []} if kind == "message" else {})


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts items to messages of OpenAI's chat API; reasoning, text and calls of one answer become one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant message that the next item may belong to
    for item in items:
        kind = item.get("type") or "message"
        assistant = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        complete = turn and (
            (kind == "reasoning" and (turn["content"] or turn.get("tool_calls")))
            or (kind == "message" and turn["content"] and not turn.get("tool_calls"))
        )
        if assistant and (turn is None or complete):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if not assistant:
            turn = None
        if kind == "reasoning":
            if (thought := _reasoning(item)) and turn is not None:
                turn["reasoning_content"] = "\n".join([*filter(None, [turn.get("reasoning_content")]), thought])
        elif kind == "function_call":
            made = fields.call(item.get("call_id"), item.get("name"), item.get("arguments"), "input")
            assert turn is not None
            turn.setdefault("tool_calls", []).append(made)
        elif kind == "function_call_output":
            rule(isinstance(item.get("call_id"), str), "input", "a result needs a call_id", item)
            result = image_parts.content(item.get("output"), "input", ["input_text", "output_text", "text"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": result})
        elif kind == "message":
            role = str(item.get("role"))
            rule(role in ROLES and role != "tool", "input", "a role must be user, assistant, system or developer", role)
            kinds = ["input_text", "output_text", "text", "refusal"]
            if turn is not None:
                turn["content"] += fields.text(item.get("content"), "input", kinds)
            else:
                read = image_parts.content if role == "user" else fields.text
                messages.append({"role": ROLES[role], "content": read(item.get("content"), "input", kinds)})
        else:
            rule(False, "input", "items must be messages, reasoning, function calls or their outputs", kind)
    return messages


def _reasoning(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: its content, or else its summary."""
    return fields.text(item.get("content"), "input", ["reasoning_text"]) or fields.text(
        item.get("summary"), "input", ["summary_text"], "\n"
    )


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    rule(given.get("type") == "function", "tools", "a tool must be a function", given.get("type"))
    return fields.tool(given.get("name"), given.get("description"), given.get("parameters"), "tools")


__all__ = ["Stream", "answer", "error", "read"]
