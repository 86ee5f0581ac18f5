"""Parses generated text into reasoning, content and tool calls, at once or streamed, in the formats of STYLES.

Malformed tool calls stay content: those with invalid JSON, or not in the family's format. One that the limit of tokens
has cut is a call with the beginning of its arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import channels, json_types
from .formats import NAMES as NAMES
from .formats import UNKNOWN as UNKNOWN
from .formats import style_for as style_for
from .formats import style_of as style_of
from .template import special_tokens

THINK, THOUGHT = "<think>", "</think>"
DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model; `arguments` is the text of a JSON object, of one that was `cut` only its beginning."""

    id: str
    name: str
    arguments: str
    cut: bool = False


@dataclass(frozen=True)
class Answer:
    """A parsed generation; `pieces`, if they are known, in the order in which they were generated."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    pieces: tuple[Piece, ...] = field(default=(), compare=False)

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
Reader = Callable[[str, Schemas], Sequence[tuple[str, dict | str]]]  # as `Style.begun`


@dataclass(frozen=True)
class Style:
    """A model family's format of reasoning and tool calls.

    Attributes:
      open, close: markers around calls; with an empty `close` they extend to the end of the text. The first `close`
        ends them, even inside a JSON string.
      read: parses the text between the markers to (name, arguments) of each call, given the tools' parameters by name;
        ValueError if it is malformed.
      begun: parses the beginning of such a text to (name, arguments) of each call, the arguments of a cut one as the
        beginning of their JSON; ValueError if it is not one.
      each: marker after each call; "" = the end of its JSON.
      bare: a message that begins with `{` is parsed as calls too, if possible.
      think: markers of reasoning at the beginning.
      channels: answers are messages in channels (`channels.py`): reasoning, calls, and what is said to the user. `read`
        gets a call's recipient, `channels.MESSAGE` and its text.
    """

    open: str
    close: str
    read: Callable[[str, Schemas], list[tuple[str, dict]]]
    begun: Reader
    each: str
    bare: bool = False
    channels: bool = False
    think: tuple[str, str] = (THINK, THOUGHT)

    @property
    def markers(self) -> frozenset[str]:
        """What a Parser reads of special tokens."""
        if self.channels:
            return frozenset(channels.MARKERS)
        calls = (*DEEPSEEK, self.open, self.close) if self.read is _deepseek else (self.open, self.close)
        begun, ended = self.think
        return frozenset({begun[: begun.index(">") + 1], ended, *calls}) - {""}

    @property
    def calls(self) -> bool:
        """Whether calls of this style are read."""
        return self.read is not _no_calls

    @property
    def apart(self) -> bool:
        """Whether reasoning is marked in a way of the family's own, which nothing but a Parser knows."""
        return self.channels or self.think != (THINK, THOUGHT)


Piece = Text | ToolCall


def parse(text: str, style: str, *, cut: bool = False, **options: Any) -> Answer:
    """Parses a complete text; `cut` as for `Parser.finish`, options as for `Parser`."""
    return parsed(Parser(style, **options), text, cut)


def parsed(parser: Parser, text: str, cut: bool = False) -> Answer:
    """A complete text as a new parser reads it; `cut` as for `Parser.finish`."""
    return collect(parser.push(text) + parser.finish(cut))


def collect(pieces: Iterable[Piece]) -> Answer:
    """Joins pieces to an answer."""
    pieces = list(pieces)
    joined = lambda kind: "".join(p.text for p in pieces if isinstance(p, Text) and p.kind == kind)
    calls = tuple(p for p in pieces if isinstance(p, ToolCall))
    return Answer(content=joined("content"), reasoning=joined("reasoning"), tool_calls=calls, pieces=tuple(pieces))


class Parser:
    """Parses streamed text; the joined result does not depend on how the text was split.

    Text that may be part of a marker is held back until that is decided, a tool call until it is complete. White space
    around reasoning and before a tool call belongs to the format and is dropped.

    Args:
      style: a name in STYLES.
      tools: those that the model may call, in OpenAI's format, or True; without any, calls are content.
      reasoning: treat text between <think> and </think> at the beginning as reasoning, without tool calls.
      opened: the prompt already opens the reasoning (`opened`).
      one_call: a call ends the text: what follows the first one is dropped.
      forced: the text has no content: it is calls.
      nonce: used in the ids of calls: the same text with the same nonce gives the same ids.
    """

    def __init__(
        self, style: str, *, tools: bool | Sequence[Mapping[str, Any]] = True, reasoning: bool = True,
        opened: bool = False, one_call: bool = False, forced: bool = False, nonce: str | None = None,
    ):  # fmt: skip
        if style not in STYLES:
            raise ValueError(f"style: must be one of {', '.join(NAMES)}, got {style!r}")
        self._style, self._tools = STYLES[style], bool(tools)
        functions = [tool["function"] for tool in tools] if isinstance(tools, Sequence) else []
        self._schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self._one_call, self._forced = one_call, forced
        self._nonce = secrets.token_hex(8) if nonce is None else nonce
        self._state = "content" if not reasoning else "reasoning" if opened else "start"
        self._buffer = ""  # not yet classified
        self._gap = ""  # white space that is emitted once text follows it
        self._trim = self._state == "reasoning"  # drop leading white space
        self._started = False  # some content, or a call, was emitted
        self._calls = 0
        self._channels = channels.Channels() if self._style.channels else None
        self._reasoning = reasoning
        self._said: dict[str, int] = {}  # kind -> number of its last message with a text

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        if self._channels:
            return list(self._spoken(self._channels.push(text)))
        self._buffer += text
        return list(self._advance(final=False))

    def finish(self, cut: bool = False) -> list[Piece]:
        """Ends the text; returns the pieces held back.

        Args:
          cut: the limit of tokens ended it. A call that it cut is one with the beginning of its arguments; before its
            name is complete it is nothing.
        """
        final = self._spoken(self._channels.finish(cut), cut) if self._channels else self._advance(True, cut)
        pieces = list(final)
        if self._state == "content" and self._gap and not self._calls:
            pieces.append(Text("content", self._gap))
        self._gap = ""
        return pieces

    def _advance(self, final: bool, cut: bool = False) -> Iterator[Piece]:
        before = ""
        while before != self._state:
            before = self._state
            if before == "start":
                begun = self._buffer.lstrip()
                think = self._style.think[0]
                if begun.startswith(think):
                    self._state, self._trim, self._buffer = "reasoning", True, begun[len(think) :]
                elif cut and len(begun) >= channels.DISTINCT and think.startswith(begun):
                    self._buffer = ""
                elif final or not think.startswith(begun):
                    self._state = "content"
            elif before == "reasoning":
                text, ended = self._until(self._style.think[1], final, cut)
                yield from self._emit("reasoning", text)
                if ended:
                    self._state, self._trim, self._gap = "content", True, ""
            elif before == "content":
                if self._tools and self._style.bare and not self._started and self._buffer.lstrip().startswith("{"):
                    self._state = "bare"
                    continue
                text, calling = self._until(self._style.open if self._tools else "", final, cut)
                yield from self._emit("content", text)
                if calling:
                    self._state = "calls"
            elif before in ("calls", "bare"):
                style, bare = self._style, before == "bare"
                close = "" if bare else style.close
                inner, found, rest = self._buffer.partition(close) if close else (self._buffer, "", "")
                if first := self._first(inner):
                    inner, found, rest = first, "", ""
                elif not (found or final):
                    return
                well_formed = bool(first or found or not (close or cut))
                self._state, self._buffer = "content", rest
                read = style.read if well_formed else style.begun if cut else None
                yield from self._called(inner, ("" if bare else style.open) + inner + found, read, cut)
            if self._one_call and self._calls:
                self._state, self._buffer = "ended", ""

    def _spoken(self, given: Iterable[channels.Piece], cut: bool = False) -> Iterator[Piece]:
        """The pieces of messages in channels. Those of a kind are lines of one text."""
        for message, text, last in given:
            if self._one_call and self._calls:
                return
            if self._tools and message.recipient.startswith(FUNCTIONS):
                self._buffer += text
                if last:
                    inner, self._buffer = self._buffer, ""
                    read = self._style.begun if cut else self._style.read
                    yield from self._called(f"{message.recipient}{channels.MESSAGE}{inner}", inner, read, cut)
            elif text:
                kind: Literal["reasoning", "content"] = (
                    "reasoning" if message.channel == "analysis" and self._reasoning else "content"
                )
                between = "\n" if self._said.get(kind, message.number) != message.number else ""
                self._said[kind] = message.number
                yield Text(kind, between + text)

    def _first(self, inner: str) -> str:
        """If one call ends the text, that of the first one, once it is complete."""
        each = self._style.each
        if not self._one_call or (each or "}") not in inner:
            return ""
        try:
            if each:
                first = inner[: inner.index(each) + len(each)]
            else:
                first = inner[: DECODER.raw_decode(inner, len(inner) - len(inner.lstrip()))[1]]
            return first if self._style.read(first, self._schemas) else ""
        except (ValueError, RecursionError):
            return ""

    def _until(self, marker: str, final: bool, cut: bool) -> tuple[str, bool]:
        """Takes from the buffer the text before `marker` that cannot be part of it, and the marker if it is there;
        returns (text, whether the marker was found). Where the text is cut, the beginning of a marker is dropped."""
        text, found, rest = self._buffer.partition(marker) if marker else (self._buffer, "", "")
        if marker and not found and (cut or not final):
            held = next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))
            if not final:
                rest = text[len(text) - held :]
            if not final or held >= (1 if self._forced or self._calls else channels.DISTINCT):
                text = text[: len(text) - held]
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

    def _called(self, inner: str, raw: str, read: Reader | None, cut: bool) -> Iterator[Piece]:
        """The calls that `read` finds in `inner`; if it is None or `inner` malformed, `raw` as content."""
        texts: list[tuple[str, str]] | None
        try:
            calls = [] if read is None else read(inner, self._schemas)
            texts = [(name, x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)) for name, x in calls]
            "".join(map("".join, texts)).encode()  # refuses lone surrogates
        except (ValueError, RecursionError):
            texts = None
        if texts is None or not (texts or (read and cut)):
            yield from self._emit("content", raw)
            return
        self._gap, self._trim, self._started = "", False, True
        for (name, text), (_, arguments) in zip(texts, calls, strict=True):
            yield ToolCall(f"call_{self._nonce}{self._calls}", name, text, cut=isinstance(arguments, str))
            self._calls += 1


# -- the text between the markers of each family ----------------------------------------------------


def _hermes(inner: str, schemas: Schemas) -> list[tuple[str, dict]]:
    """{"name": ..., "arguments": {...}}, the keys in any order (Qwen 2.5 and 3, Hermes 2 Pro and later)."""
    return [_call(_json(inner), "arguments")]


def _hermes_begun(inner: str, schemas: Schemas) -> list[tuple[str, dict | str]]:
    return _json_begun(inner, schemas, "arguments")


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


def _llama_begun(inner: str, schemas: Schemas) -> list[tuple[str, dict | str]]:
    calls: list[tuple[str, dict | str]] = []
    rest = inner.strip()
    while rest:
        try:
            value, end = DECODER.raw_decode(rest)
        except ValueError:
            return calls + _json_begun(rest, schemas, "parameters", "arguments")
        calls.append(_call(value, "parameters", "arguments"))
        rest = rest[end:].lstrip("; \n")
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


def _deepseek_begun(inner: str, schemas: Schemas) -> list[tuple[str, dict | str]]:
    begin, separated, ended = DEEPSEEK
    whole, _, last = inner.rpartition(begin)
    if ended in last or begin not in inner:
        body, _, rest = inner.rpartition(ended)
        if not any(marker.startswith(rest.strip()) for marker in (begin, STYLES["deepseek"].close)):
            raise ValueError("text between calls")
        return [*_deepseek(body + ended, schemas)] if body else []
    head, _, tail = last.partition(separated)
    name, _, arguments = tail.partition("\n```json\n") if head.strip() == "function" else (head, "", tail)
    if arguments:
        return [*_deepseek(whole, schemas), (name.strip(), _arguments(arguments))]
    return [*_deepseek(whole, schemas)]


def _gpt_oss(inner: str, schemas: Schemas) -> list[tuple[str, dict]]:
    recipient, _, text = inner.partition(channels.MESSAGE)
    return [_call({"name": recipient.removeprefix(FUNCTIONS), "arguments": _json(text)}, "arguments")]


def _gpt_oss_begun(inner: str, schemas: Schemas) -> list[tuple[str, dict | str]]:
    recipient, _, text = inner.partition(channels.MESSAGE)
    return [(recipient.removeprefix(FUNCTIONS), _arguments(text))]


def _no_calls(inner: str, schemas: Schemas) -> list:
    raise ValueError("calls of this format are not known")


def _coder(inner: str, schemas: Schemas) -> list[tuple[str, dict]]:
    """<function=name><parameter=key>value</parameter>...</function>, values typed by the tool's schema (Qwen3-Coder).

    A line break after <parameter=key> and one before </parameter> are not part of the value.
    """
    found = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", inner, re.DOTALL)
    if not found:
        raise ValueError("not a call")
    name, rest = found.groups()
    schema = schemas.get(name, {})
    properties = json_types.properties(schema)
    arguments = {}
    for part in re.split(r"(?<=</parameter>)", rest):
        given = re.fullmatch(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", part, re.DOTALL)
        if given:
            key, value = given.groups()
            arguments[key] = _typed(value, properties.get(key, {}), schema)
        elif part.strip():
            raise ValueError("text between parameters")
    return [(name, arguments)]


def _coder_begun(inner: str, schemas: Schemas) -> list[tuple[str, dict | str]]:
    head = "<function="
    found = re.fullmatch(rf"\s*{head}([^>\s]+)>(.*)", inner, re.DOTALL)
    if not found:
        if head.startswith(inner.strip()) or re.fullmatch(rf"\s*{head}[^>\s]*", inner):
            return []
        raise ValueError("not a call")
    whole = found[2].rpartition("</parameter>")
    [(name, arguments)] = _coder(f"{head}{found[1]}>{''.join(whole[:2])}</function>", schemas)
    return [(name, arguments if "</function>" in whole[2] else json.dumps(arguments, ensure_ascii=False)[:-1])]


def _typed(text: str, schema: Any, root: Any) -> Any:
    """A value in the type of its schema; a text that is not of this type, or has no schema, stays a string."""
    kinds = json_types.types(json_types.alternatives(schema, root))
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
    if isinstance(value, float) and value.is_integer() and "number" not in kinds:
        value = int(value)
    kind = json_types.type_of(value)
    return value if kind in kinds or (kind == "integer" and "number" in kinds) else text


def _call(value: Any, *keys: str) -> tuple[str, dict]:
    """(name, arguments) of a call; the arguments are under the first of `keys` that exists."""
    if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]:
        arguments = next((value[key] for key in keys if key in value), None)
        if isinstance(arguments, dict):
            return value["name"], arguments
    raise ValueError("not a call")


def _json_begun(text: str, schemas: Schemas, *keys: str) -> list[tuple[str, dict | str]]:
    """The call whose JSON begins with `text`: none before its name is complete."""
    found = re.match(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(.*)', text, re.DOTALL)
    if not found:
        begun = re.sub(r"\s", "", text)
        if not (begun or '"').startswith('{"name":"') and not '{"name":"'.startswith(begun):
            raise ValueError("not a call")
        return []
    name, rest = _json(found[1]), found[2]
    given = re.match(rf',\s*"(?:{"|".join(keys)})"\s*:\s*(\{{.*)', rest, re.DOTALL)
    if (schemas and name not in schemas) or not (given or rest[:1] in ("", ",")):
        raise ValueError("not a call")
    return [(name, _arguments(given[1]) if given else "")]


def _arguments(text: str) -> dict | str:
    """Arguments of which JSON, and perhaps the end of the call, begins with `text`: an object, or the cut text."""
    try:
        found, _ = DECODER.raw_decode(text)
    except ValueError:
        found = text
    if not isinstance(found, dict | str):
        raise ValueError("not a call")
    return found


SEPARATOR = re.compile(r"\s*([{:,])\s*")


def members(text: str) -> dict[str, Any]:
    """The members of a JSON object that are surely complete, because another follows, where only its text's beginning
    is known."""
    found: dict[str, Any] = {}
    key, value, at = "", None, 0
    while separator := SEPARATOR.match(text, at):
        if separator[1] == ",":
            found[key] = value
        try:
            item, at = DECODER.raw_decode(text, separator.end())
        except (ValueError, RecursionError):
            break
        key, value = (key, item) if separator[1] == ":" else (str(item), value)
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_constant)
_json = DECODER.decode
FUNCTIONS = "functions."  # recipients that are the request's tools
STYLES = {  # of `formats.NAMES`, and UNKNOWN
    "qwen": Style("<tool_call>", "</tool_call>", _hermes, _hermes_begun, "</tool_call>"),
    "qwen3_coder": Style("<tool_call>", "</tool_call>", _coder, _coder_begun, "</tool_call>"),
    "hermes": Style("<tool_call>", "</tool_call>", _hermes, _hermes_begun, "</tool_call>"),
    "llama": Style("<|python_tag|>", "", _llama, _llama_begun, "", bare=True),
    "deepseek": Style("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek, _deepseek_begun, DEEPSEEK[2]),
    "gpt_oss": Style("", "", _gpt_oss, _gpt_oss_begun, channels.CALL, channels=True),
    "seed_oss": Style(
        "<seed:tool_call>",
        "</seed:tool_call>",
        _coder,
        _coder_begun,
        "</seed:tool_call>",
        think=("<seed:think>", "</seed:think>"),
    ),
    "gemma4": Style("", "", _no_calls, _no_calls, "", think=("<|channel>thought\n", "<channel|>")),
    "plain": Style("", "", _no_calls, _no_calls, ""),
    UNKNOWN: Style("", "", _no_calls, _no_calls, ""),
}


def decoder(tokenizer: Any, style: str = "") -> Callable[[Sequence[int]], str]:
    """Decodes tokens to the text that a Parser of this style (`style_for`) reads: of special tokens only its markers
    are kept."""
    markers = STYLES[style_for(tokenizer, style)].markers
    mute = {id for id, text in special_tokens(tokenizer).items() if text not in markers}
    return lambda tokens: tokenizer.decode([token for token in tokens if token not in mute])


def special_markers(tokenizer: Any, style: str = "") -> frozenset[int]:
    """The style's markers that are special tokens, which a text without special tokens lacks."""
    markers = STYLES[style_for(tokenizer, style)].markers
    return frozenset(id for id, text in special_tokens(tokenizer).items() if text in markers)


def opened(prompt: str, style: str) -> bool:
    """Whether a prompt already opens the reasoning, so that an answer's text begins inside it."""
    return prompt[-100:].rstrip().endswith(STYLES[style].think[0].rstrip())


def said(text: str, style: str, cut: bool = False, prompt: str = "") -> Answer:
    """An answer where no tools are called, as rewards and environments read it: all is content, reasoning between
    <think> and </think> too; where a format marks reasoning in another way, what is said to the user.

    Args:
      cut: the limit of tokens ended the text. If it is then still the reasoning that `prompt` opened, it begins with
        <think>, as if the answer had opened it.
    """
    begun, (think, thought) = opened(prompt, style), STYLES[style].think
    if STYLES[style].apart:
        return parse(text, style, cut=cut, opened=begun, tools=False)
    return Answer(think + text if begun and cut and thought not in text else text)
