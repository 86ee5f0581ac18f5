"""Parses generated text into reasoning, content and tool calls, at once or streamed, in the formats of STYLES.

Malformed tool calls stay content: those with invalid JSON, or not in the family's format. One that the limit of tokens
has cut is a call with the beginning of its arguments. `calls.py` has the formats of the calls themselves.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from . import calls, channels, literals
from .calls import FUNCTIONS
from .calls import members as members
from .formats import NAMES as NAMES
from .formats import UNKNOWN as UNKNOWN
from .formats import style_for as style_for
from .formats import style_of as style_of
from .template import special_tokens

THINK, THOUGHT = "<think>", "</think>"


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


@dataclass(frozen=True)
class Style:
    """A model family's format of reasoning and tool calls.

    Attributes:
      open, close: markers around calls; with an empty `close` they extend to the end of the text. The first `close`
        ends them, even inside a JSON string.
      form: yields the calls of the text between the markers (`calls.Format`); None = calls are not read. Of channels it
        gets a call's recipient, `channels.MESSAGE` and its text.
      several: the markers are around several calls.
      bare: a message that begins with this is parsed as calls too, if possible; "" = none.
      inner: markers within calls.
      think: markers of reasoning at the beginning.
      interrupts: `open` ends reasoning too.
      channels: answers are messages in channels (`channels.py`): reasoning, calls, and what is said to the user.
    """

    open: str = ""
    close: str = ""
    form: calls.Format | None = None
    several: bool = False
    bare: str = ""
    inner: tuple[str, ...] = ()
    think: tuple[str, str] = (THINK, THOUGHT)
    interrupts: bool = False
    channels: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """What a Parser reads of special tokens."""
        if self.channels:
            return frozenset(channels.MARKERS)
        return frozenset({token(self.think[0]), self.think[1], self.open, self.close, *self.inner}) - {""}

    @property
    def calls(self) -> bool:
        """Whether calls of this style are read."""
        return self.form is not None

    @property
    def apart(self) -> bool:
        """Whether reasoning is marked in a way of the family's own, which nothing but a Parser knows."""
        return self.channels or self.think != (THINK, THOUGHT)


Piece = Text | ToolCall


def token(marker: str) -> str:
    """The part of a marker that may be a special token, such as <|channel> of "<|channel>thought"."""
    return re.match(r".*?[>\]]", marker)[0]  # type: ignore[index]


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
    called = tuple(p for p in pieces if isinstance(p, ToolCall))
    return Answer(content=joined("content"), reasoning=joined("reasoning"), tool_calls=called, pieces=tuple(pieces))


class Parser:
    """Parses streamed text; the joined result does not depend on how the text was split.

    Text that may be part of a marker is held back until that is decided, a tool call until it is complete. White space
    around reasoning and before a tool call belongs to the format and is dropped.

    Args:
      style: a name in STYLES.
      tools: those that the model may call, in OpenAI's format, or True; without any, calls are content.
      reasoning: treat text between <think> and </think> at the beginning as reasoning, without tool calls; those of a
        style whose calls may interrupt it end it.
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
        self._ids: set[str] = set()
        self._tried = 0  # how much of a text of calls has no complete one
        self._sought = 0  # where the end of a text of calls can begin
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
                interrupts = self._tools and self._style.interrupts
                text, ended = self._until((self._style.think[1], self._style.open if interrupts else ""), final, cut)
                yield from self._emit("reasoning", text)
                if ended:
                    self._state = "content" if ended == self._style.think[1] else "calls"
                    self._trim, self._gap = True, ""
            elif before == "content":
                bare = self._style.bare
                if self._tools and bare and not self._started and self._buffer.lstrip().startswith(bare):
                    self._state = "bare"
                    continue
                text, calling = self._until((self._style.open if self._tools else "",), final, cut)
                yield from self._emit("content", text)
                if calling:
                    self._state = "calls"
            elif before in ("calls", "bare"):
                marker, close = ("", "") if before == "bare" else (self._style.open, self._style.close)
                at = self._buffer.find(close, self._sought) if close else -1
                found = close if at >= 0 else ""
                inner = self._buffer[:at] if found else self._buffer
                self._sought = max(len(self._buffer) - len(close) + 1, 0)
                if first := self._first(inner):
                    self._state, self._buffer, self._sought = "content", "", 0
                    yield from self._made([first])
                elif found or final:
                    rest = self._buffer[len(inner + found) :]
                    self._state, self._buffer, self._tried, self._sought = "content", rest, 0, 0
                    yield from self._called(inner + found, marker, cut and not found, bool(found) or cut or not close)
                else:
                    return
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
                    recipient = f"{message.recipient}{channels.MESSAGE}"
                    yield from self._called(recipient + inner, "", cut, hidden=recipient)
            elif text:
                kind: Literal["reasoning", "content"] = (
                    "reasoning" if message.channel == "analysis" and self._reasoning else "content"
                )
                between = "\n" if self._said.get(kind, message.number) != message.number else ""
                self._said[kind] = message.number
                yield Text(kind, between + text)

    def _first(self, inner: str) -> calls.Call | None:
        """If one call ends the text, the first one of several, once it is complete."""
        new, self._tried = inner[self._tried :], len(inner)
        if not (self._one_call and self._style.several and any(end in new for end in "})>")):
            return None
        assert self._style.form
        found = calls.first(self._style.form, inner, self._schemas)
        return found if found and _texts([found]) else None

    def _until(self, markers: Sequence[str], final: bool, cut: bool) -> tuple[str, str]:
        """Takes from the buffer the text before the first marker that cannot be part of one, and the marker if it is
        there; returns (text, marker or ""). Where the text is cut, the beginning of a marker is dropped."""
        text, markers = self._buffer, [marker for marker in markers if marker]
        at, found = min(((text.find(marker), marker) for marker in markers if marker in text), default=(len(text), ""))
        text, rest = text[:at], text[at + len(found) :]
        if not found and (cut or not final):
            held = max((_begun(text, marker) for marker in markers), default=0)
            if not final:
                rest = text[len(text) - held :]
            if not final or held >= (1 if self._forced or self._calls else channels.DISTINCT):
                text = text[: len(text) - held]
        self._buffer = rest
        return text, found

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

    def _called(self, text: str, marker: str, cut: bool, whole: bool = True, hidden: str = "") -> Iterator[Piece]:
        """The calls in a text, which may be `cut`; if it is not `whole`, or malformed, itself as content, but for what
        is `hidden` at its beginning."""
        assert self._style.form
        found = None
        if whole:
            with contextlib.suppress(ValueError, RecursionError):
                found = calls.read(self._style.form, text, self._schemas, cut)
        if found is None or _texts(found) is None:
            yield from self._emit("content", marker + text.removeprefix(hidden))
        else:
            yield from self._made(found)

    def _made(self, found: Sequence[calls.Call]) -> Iterator[Piece]:
        """The pieces of calls, with ids of the model's, if it wrote one that no call before has."""
        self._gap, self._trim, self._started = "", False, True
        for call, text in zip(found, _texts(found) or (), strict=True):
            id = call.id if call.id not in {"", *self._ids} else f"call_{self._nonce}{self._calls}"
            yield ToolCall(id, call.name, text, cut=isinstance(call.arguments, str))
            self._ids.add(id)
            self._calls += 1


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of a text may begin a marker."""
    return next(n for n in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:n]))


def _texts(found: Sequence[calls.Call]) -> list[str] | None:
    """The arguments of calls as JSON; None if they have none, or a call lone surrogates."""
    try:
        texts = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False, allow_nan=False) for _, x, _ in found]
        "".join([*texts, *(call.name + call.id for call in found)]).encode()
        return texts
    except (ValueError, RecursionError):
        return None


CALL = "<tool_call>", "</tool_call>"
STYLES = {  # of `formats.NAMES`, and UNKNOWN
    "qwen": Style(*CALL, calls.hermes),
    "qwen3_coder": Style(*CALL, partial(calls.tagged, calls.CODER)),
    "hermes": Style(*CALL, calls.hermes),
    "llama": Style("<|python_tag|>", "", calls.llama, several=True, bare="{"),
    "pythonic": Style("<|python_start|>", "", partial(calls.pythonic, ""), several=True, bare="["),
    "deepseek": Style(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", calls.deepseek, several=True, inner=calls.DEEPSEEK
    ),
    "deepseek_v32": Style(
        "<｜DSML｜function_calls>", calls.V32.close, partial(calls.tagged, calls.V32), several=True, inner=(calls.DSML,)
    ),
    "deepseek_v4": Style(
        "<｜DSML｜tool_calls>", calls.V4.close, partial(calls.tagged, calls.V4), several=True, inner=(calls.DSML,)
    ),
    "gpt_oss": Style(form=calls.gpt_oss, channels=True),
    "seed_oss": Style(
        "<seed:tool_call>",
        "</seed:tool_call>",
        partial(calls.tagged, calls.SEED),
        think=("<seed:think>", "</seed:think>"),
    ),
    "gemma4": Style(
        "<|tool_call>", "<tool_call|>", calls.gemma, inner=(literals.GEMMA,),
        think=("<|channel>thought\n", "<channel|>"),
    ),
    "glm4_moe": Style(*CALL, partial(calls.tagged, calls.GLM), inner=calls.GLM_MARKS, interrupts=True),
    "kimi_k2": Style(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", calls.kimi, several=True, inner=calls.KIMI,
        interrupts=True,
    ),
    "minimax_m2": Style(
        "<minimax:tool_call>", "</minimax:tool_call>", partial(calls.tagged, calls.MINIMAX), several=True
    ),
    "mistral": Style("[TOOL_CALLS]", "", calls.mistral, several=True, inner=calls.MISTRAL),
    "magistral": Style(
        "[TOOL_CALLS]", "", calls.mistral, several=True, inner=calls.MISTRAL, think=("[THINK]", "[/THINK]")
    ),
    "lfm2": Style(
        "<|tool_call_start|>", "<|tool_call_end|>", partial(calls.pythonic, "<|tool_call_end|>"), several=True
    ),
    "olmo3": Style("<function_calls>", "</function_calls>", calls.lines, several=True),
    "plain": Style(),
    UNKNOWN: Style(),
}  # fmt: skip


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
