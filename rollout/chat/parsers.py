"""Parses generated text into reasoning, content and tool calls, at once or streamed, in the formats of five families.

Malformed tool calls stay content: those with invalid or truncated JSON, or not in the family's format.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

THINK, THOUGHT = "<think>", "</think>"
DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """A parsed generation."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The answer as a message of OpenAI's chat API."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **reasoning, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True)
class Text:
    """A piece of reasoning or content, to be appended to the pieces before it."""

    kind: Literal["reasoning", "content"]
    text: str


Schemas = Mapping[str, Mapping[str, Any]]  # tool -> JSON schema of its parameters


@dataclass(frozen=True)
class Style:
    """A model family's format for tool calls.

    Attributes:
      open, close: markers around calls; with an empty `close` they extend to the end of the text. The first `close`
        ends them, even inside a JSON string.
      read: parses the text between the markers to (name, arguments) of each call, given the tools' parameters by name;
        ValueError if it is malformed.
      bare: a message that begins with `{` is parsed as calls too, if possible.
      switch: the chat template's variable that turns reasoning on and off.
    """

    open: str
    close: str
    read: Callable[[str, Schemas], list[tuple[str, dict]]]
    bare: bool = False
    switch: str = "enable_thinking"


Piece = Text | ToolCall


def parse(text: str, style: str, **options: Any) -> Answer:
    """Parses a complete text; options as for `Parser`."""
    parser = Parser(style, **options)
    return collect(parser.push(text) + parser.finish())


def collect(pieces: Iterable[Piece]) -> Answer:
    """Joins pieces to an answer."""
    pieces = list(pieces)
    joined = lambda kind: "".join(p.text for p in pieces if isinstance(p, Text) and p.kind == kind)
    calls = tuple(p for p in pieces if isinstance(p, ToolCall))
    return Answer(content=joined("content"), reasoning=joined("reasoning"), tool_calls=calls)


class Parser:
    """Parses streamed text; the joined result does not depend on how the text was split.

    Text that may be part of a marker is held back until that is decided, a tool call until it is complete. White space
    around reasoning and before a tool call belongs to the format and is dropped.

    Args:
      style: a name in STYLES.
      tools: those that the model may call, in OpenAI's format, or True; without any, calls are content.
      reasoning: treat text between <think> and </think> at the beginning as reasoning, without tool calls.
      opened: the prompt already ends with <think>.
      nonce: used in the ids of calls: the same text with the same nonce gives the same ids.
    """

    def __init__(
        self, style: str, *, tools: bool | Sequence[Mapping[str, Any]] = True, reasoning: bool = True,
        opened: bool = False, nonce: str | None = None,
    ):  # fmt: skip
        if style not in STYLES:
            raise ValueError(f"style: must be one of {', '.join(STYLES)}, got {style!r}")
        self._style, self._tools = STYLES[style], bool(tools)
        functions = [tool["function"] for tool in tools] if isinstance(tools, Sequence) else []
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self._nonce = secrets.token_hex(8) if nonce is None else nonce
        self._state = "content" if not reasoning else "reasoning" if opened else "start"
        self._buffer = ""  # not yet classified
        self._gap = ""  # white space that is emitted once text follows it
        self._trim = self._state == "reasoning"  # drop leading white space
        self._started = False  # some content, or a call, was emitted
        self._calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._buffer += text
        return list(self._advance(final=False))

    def finish(self) -> list[Piece]:
        """Ends the text; returns the pieces held back."""
        pieces = list(self._advance(final=True))
        if self._state == "content" and self._gap and not self._calls:
            pieces.append(Text("content", self._gap))
        self._gap = ""
        return pieces

    def _advance(self, final: bool) -> Iterator[Piece]:
        before = ""
        while before != self._state:
            before = self._state
            if before == "start":
                begun = self._buffer.lstrip()
                if begun.startswith(THINK):
                    self._state, self._trim, self._buffer = "reasoning", True, begun[len(THINK) :]
                elif final or not THINK.startswith(begun):
                    self._state = "content"
            elif before == "reasoning":
                text, ended = self._until(THOUGHT, final)
                yield from self._emit("reasoning", text)
                if ended:
                    self._state, self._trim, self._gap = "content", True, ""
            elif before == "content":
                if self._tools and self._style.bare and not self._started and self._buffer.lstrip().startswith("{"):
                    self._state = "bare"
                    continue
                text, calling = self._until(self._style.open if self._tools else "", final)
                yield from self._emit("content", text)
                if calling:
                    self._state = "calls"
            elif before == "calls":
                close = self._style.close
                inner, found, rest = self._buffer.partition(close) if close else (self._buffer, "", "")
                if found or final:
                    self._state, self._buffer = "content", rest
                    well_formed = bool(found) or not close
                    yield from self._called(inner if well_formed else None, self._style.open + inner + found)
            elif before == "bare" and final:
                raw, self._state, self._buffer = self._buffer, "content", ""
                yield from self._called(raw, raw)

    def _until(self, marker: str, final: bool) -> tuple[str, bool]:
        """Takes from the buffer the text before `marker` that cannot be part of it, and the marker if it is there;
        returns (text, whether the marker was found)."""
        text, found, rest = self._buffer.partition(marker) if marker else (self._buffer, "", "")
        if marker and not found and not final:
            held = next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
            text, rest = text[: len(text) - held], text[len(text) - held :]
        self._buffer = rest
        return text, bool(found)

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[Piece]:
        text = self._gap + text
        if self._trim:
            text = text.lstrip()
        shown = text.rstrip()
        self._gap = text[len(shown) :]
        if shown:
            self._trim = False
            self._started |= kind == "content"
            yield Text(kind, shown)

    def _called(self, inner: str | None, raw: str) -> Iterator[Piece]:
        """The calls in `inner`; if it is None or malformed, `raw` as content."""
        try:
            calls = [] if inner is None else self._style.read(inner, self._schemas)
            texts = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
            "".join(map("".join, texts)).encode()  # refuses lone surrogates
        except (ValueError, RecursionError):
            texts = []
        if not texts:
            yield from self._emit("content", raw)
            return
        self._gap, self._trim, self._started = "", False, True
        for name, arguments in texts:
            yield ToolCall(f"call_{self._nonce}{self._calls}", name, arguments)
            self._calls += 1


# -- the text between the markers of each family ----------------------------------------------------


def _hermes(inner: str, schemas: Schemas) -> list[tuple[str, dict]]:
    """{"name": ..., "arguments": {...}}, the keys in any order (Qwen 2.5 and 3, Hermes 2 Pro and later)."""
    return [_call(_json(inner), "arguments")]


def _llama(inner: str, schemas: Schemas) -> list[tuple[str, dict]]:
    """{"name": ..., "parameters": {...}}, several separated by `;` (Llama 3.1 to 3.3).

    The Python code and `tool.call(...)` of Llama's built-in tools have no schema, so they are content.
    """
    calls, rest = [], inner.strip()
    while rest:
        value, end = DECODER.raw_decode(rest)
        calls.append(_call(value, "parameters", "arguments"))
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise ValueError("calls must be separated by ;")
        rest = rest[1:].lstrip()
    return calls


def _deepseek(inner: str, schemas: Schemas) -> list[tuple[str, dict]]:
    """Each call has its own markers: `function<sep>name` and JSON in a fence (V3, R1), or `name<sep>JSON` (V3.1)."""
    begin, separated, ended = DEEPSEEK
    before, *parts = inner.split(begin)
    if before.strip():
        raise ValueError("text before the first call")
    calls = []
    for part in parts:
        body, end, after = part.partition(ended)
        head, separator, tail = body.partition(separated)
        if not end or after.strip() or not separator:
            raise ValueError("a call without its markers")
        fenced = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```\s*", tail, re.DOTALL)
        name, arguments = fenced.groups() if fenced and head.strip() == "function" else (head, tail)
        calls.append(_call({"name": name.strip(), "arguments": _json(arguments)}, "arguments"))
    return calls


def _coder(inner: str, schemas: Schemas) -> list[tuple[str, dict]]:
    """<function=name><parameter=key>value</parameter>...</function>, values typed by the tool's schema (Qwen3-Coder).

    A line break after <parameter=key> and one before </parameter> are not part of the value.
    """
    found = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", inner, re.DOTALL)
    if not found:
        raise ValueError("not a call")
    name, rest = found.groups()
    properties = schemas.get(name, {}).get("properties")
    arguments = {}
    for part in re.split(r"(?<=</parameter>)", rest):
        given = re.fullmatch(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", part, re.DOTALL)
        if given:
            key, value = given.groups()
            arguments[key] = _typed(value, properties.get(key) if isinstance(properties, Mapping) else None)
        elif part.strip():
            raise ValueError("text between parameters")
    return [(name, arguments)]


def _typed(text: str, schema: Any) -> Any:
    """A value in the type of its schema; a text that is not of this type, or has no schema, stays a string."""
    kinds = json_types(schema)
    if "null" in kinds and text.strip() == "null":
        return None
    if not kinds or "string" in kinds:
        return text
    if kinds & {"boolean"} and text.strip() in ("True", "False"):  # as Qwen3-Coder often writes them
        return text.strip() == "True"
    try:
        value = _json(text)
    except ValueError:
        return text
    return int(value) if kinds == {"integer"} and isinstance(value, float) and value.is_integer() else value


def json_types(schema: Any) -> set[str]:
    """The JSON types that a schema names; of an enum those of its values."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {*named} if isinstance(named, list) else set()
    for other in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        kinds |= json_types(other)
    if not kinds and schema.get("enum"):
        kinds = {"string" if isinstance(value, str) else "null" if value is None else "any" for value in schema["enum"]}
    return kinds


def _call(value: Any, *keys: str) -> tuple[str, dict]:
    """(name, arguments) of a call; the arguments are under the first of `keys` that exists."""
    if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]:
        arguments = next((value[key] for key in keys if key in value), None)
        if isinstance(arguments, dict):
            return value["name"], arguments
    raise ValueError("not a call")


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_constant)
_json = DECODER.decode
STYLES = {
    "qwen": Style("<tool_call>", "</tool_call>", _hermes),
    "qwen3_coder": Style("<tool_call>", "</tool_call>", _coder),
    "hermes": Style("<tool_call>", "</tool_call>", _hermes, switch="thinking"),
    "llama": Style("<|python_tag|>", "", _llama, bare=True),
    "deepseek": Style("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek, switch="thinking"),
}
MARKERS = frozenset({THINK, THOUGHT, *DEEPSEEK, *(part for s in STYLES.values() for part in (s.open, s.close))})


def style_of(chat_template: str) -> str:
    """The style in which a chat template shows tool calls, a name in STYLES; "" if it shows none that is known."""
    marks = {
        "<function=": "qwen3_coder", STYLES["deepseek"].open: "deepseek", "<|python_tag|>": "llama",
        "<tool_call>": "qwen" if "enable_thinking" in chat_template or "thinking" not in chat_template else "hermes",
        '"parameters": ': "llama",
    }  # fmt: skip
    return next((style for mark, style in marks.items() if mark in chat_template), "")


def style_for(tokenizer: Any, given: str = "") -> str:
    """`given`, or else the style that the tokenizer's chat template shows, or else "qwen"."""
    return given or style_of(str(getattr(tokenizer, "chat_template", None) or "")) or "qwen"


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Decodes tokens to the text that a Parser reads: of special tokens only MARKERS are kept."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    mute = {id for id, token in added if token.special and token.content not in MARKERS}
    return lambda tokens: tokenizer.decode([token for token in tokens if token not in mute])


def special_markers(tokenizer: Any) -> frozenset[int]:
    """The MARKERS that are special tokens, which a text without special tokens lacks."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset(id for id, token in added if token.special and token.content in MARKERS)
