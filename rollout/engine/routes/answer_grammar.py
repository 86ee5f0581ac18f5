"""The grammar of an answer in a conversation: reasoning if the model may reason, then a document or tool calls.

Calls are written as the model's family writes them (`parsers.STYLES`), their arguments as the tools' JSON schemas say.
In Lark, as llguidance reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...chat import json_types
from ...chat.calls import DEEPSEEK, FUNCTIONS, KIMI
from ...chat.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from ...chat.fields import Refused, rule
from ...chat.parsers import STYLES, UNKNOWN, token
from ..grammar import formatted, literal, pieces
from ..request import Grammar

Marker = Callable[[str], str]  # a marker in Lark: a token of its own, or text
UNFORCED = (
    "cannot be forced, because the format of this model's answers is not known; name it with --style, plain if answers "
    "are plain text"
)
NEWLINE = literal("\n")
FORCED = "qwen", "qwen3_coder", "hermes", "llama", "deepseek", "gpt_oss", "seed_oss", "kimi_k2"  # formats of calls
UNWRITABLE = ("pattern", "format", "minLength", "maxLength")  # of strings that are not written as JSON


def of(
    document: Grammar | None,
    tools: Sequence[Mapping[str, Any]],
    forced: Sequence[str],
    *,
    one_call: bool,
    style: str,
    chat_template: str,
    tokens: Mapping[str, int],
    reasoning: str,
) -> Grammar | None:
    """The grammar of a whole answer; None if it may be any text.

    Args:
      document: what the answer must be, unless it calls tools.
      tools: in OpenAI's format; with a document the model may call them instead.
      forced: names of the tools of which one must be called; none = the model decides.
      one_call: at most one call.
      style: a name in `parsers.STYLES`.
      tokens: ids of the markers (`parsers.Style.markers`) that are tokens of their own, by text.
      reasoning: "" = none, "may" = the answer may begin with it, "open" = the prompt has begun it.

    Raises:
      Refused: calls, or a tool's parameters, cannot be forced in this style.
    """
    if not (document or forced):
        return None
    if document and style == UNKNOWN:
        raise Refused(document.field or document.kind, UNFORCED)
    if not (tools or reasoning or STYLES[style].channels):
        return document
    marker = lambda text: f"<[{tokens[text]}]>" if text in tokens else literal(text)
    said = f"{marker(CHANNEL)} {literal('final')} {marker(MESSAGE)} " if STYLES[style].channels else ""
    before, rules = {"": "", "may": "reasoning? ", "open": "rest "}[reasoning], []
    if reasoning:
        begin, end = STYLES[style].think
        first, after = token(begin), begin.removeprefix(token(begin))
        head = marker(first) + (f" {literal(after)}" if after else "")
        rest = f"thought: /(.|\\n)*/ {marker(end)}" if end in tokens else _until("thought", re.escape(end))
        rules += [f"reasoning: {head} rest", "rest: thought /\\n{0,2}/", rest]
    functions = [tool["function"] for tool in tools if not forced or tool["function"]["name"] in forced]
    if STYLES[style].channels:
        before, rules = "analysis? ", [*_analysis(marker, END in tokens)]
    if functions:
        rules += _calls(functions, style, chat_template, marker, one_call)
    bodies = [f"{said}@document"] * (not forced) + ["calls"] * bool(functions)
    parts: list[dict[str, Any]] = [{"lark_grammar": "\n".join([f"start: {before}({' | '.join(bodies)})", *rules])}]
    if document and not forced:
        parts += pieces(document, name="document")
    return Grammar(
        "llguidance", json.dumps({"grammars": parts}), "tools" if functions or not document else document.field
    )


def _analysis(marker: Marker, is_token: bool) -> Iterator[str]:
    """The rule `analysis`, of a message in this channel and the beginning of the next one."""
    yield f"thought: /(.|\\n)*/ {marker(END)}" if is_token else _until("thought", END.replace("|", "\\|"))
    head = f"{marker(CHANNEL)} {literal('analysis')} {marker(MESSAGE)}"
    yield f"analysis: {head} thought {marker(START)} {literal('assistant')}"


def _until(name: str, text: str) -> str:
    """The rule `name`: anything up to the first `text`, which is part of it."""
    return f"{name}[lazy]: /(.|\\n)*{text.replace('/', chr(92) + '/')}/"


def _calls(
    functions: Sequence[Mapping[str, Any]], style: str, chat_template: str, marker: Marker, one_call: bool
) -> Iterator[str]:
    """The rules of `calls`."""
    rule(style in FORCED, "tools", f"calls can be forced in the formats {', '.join(FORCED)}", style)
    mark, names = STYLES[style], [f"call_{i}" for i in range(len(functions))]
    one, between = f"({' | '.join(names)})", {"llama": "; ", "kimi_k2": ""}.get(style, "\n")
    several = one if one_call or style == "gpt_oss" else f"{one} ({literal(between) if between else ''} {one})*"
    if style in ("deepseek", "kimi_k2"):
        yield f"calls: {marker(mark.open)} {several} {marker(mark.close)}"
    else:
        yield f"calls: {several}"
    for name, function in zip(names, functions, strict=True):
        schema = {"type": "object", **(function.get("parameters") or {})}
        if style in ("qwen3_coder", "seed_oss"):
            yield from _coder(name, function["name"], schema, marker, style)
            continue
        value = f"arguments_{name}"
        if style == "gpt_oss":
            rule(
                _plain(function["name"]),
                "tools",
                f"names must have no space, < or > for the format {style}",
                function["name"],
            )
            head = literal(f"commentary to={FUNCTIONS}{function['name']} ")
            called = f"{marker(CHANNEL)} {head} {marker(CONSTRAIN)} {literal('json')} {marker(MESSAGE)} {value}"
            yield f"{name}: {called}"
            yield f"{value}: {_json(schema)}"
            continue
        if style == "deepseek":
            begin, separated, end = map(marker, DEEPSEEK)
            called = f"{begin} {literal(function['name'])} {separated} {value} {end}"
            if "```json" in chat_template:  # V3 and R1
                head, tail = literal(f"{function['name']}\n```json\n"), literal("\n```")
                called = f"{begin} {literal('function')} {separated} {head} {value} {tail} {end}"
        elif style == "kimi_k2":
            begin, separated, end = map(marker, KIMI)
            rule(
                _plain(function["name"]), "tools", f"names must have no space, < or > for the format {style}", function
            )
            head = literal(f"{FUNCTIONS}{function['name']}:")
            called = f"{begin} {head} /[0-9]/ {separated} {value} {end}"
        else:
            key = "parameters" if style == "llama" else "arguments"
            head = f'{{"name": {literal(function["name"])}, "{key}": '
            called = f"{literal(head)} {value} {literal('}')}"
            if style != "llama":
                called = f"{marker(mark.open)} {NEWLINE} {called} {NEWLINE} {marker(mark.close)}"
        yield f"{name}: {called}"
        yield f"{value}: {_json(schema)}"


def _coder(name: str, function: str, schema: Mapping[str, Any], marker: Marker, style: str) -> Iterator[str]:
    """Qwen3-Coder's call: strings are plain text, other values JSON; parameters come in the schema's order. Seed-OSS
    writes the same without line breaks around values."""
    rule(_plain(function), "tools", f"names must have no space, < or > for the format {style}", function)
    objects = json_types.alternatives(schema, schema)
    rule(len(objects) == 1, "tools", f"parameters must be one object for the format {style}", schema)
    mark, gap, parts, rules = STYLES[style], "\n" if style == "qwen3_coder" else "", [], []
    required = objects[0].get("required", ())
    for i, (key, value) in enumerate(json_types.properties(schema).items()):
        rule(_plain(key), "tools", f"parameters must have no space, < or > for the format {style}", key)
        options = json_types.alternatives(value, schema)
        kinds = json_types.types(options)
        rule(kinds, "tools", f"parameters need a type for {style}", value)
        part, end = f"{name}_{i}", literal(f"{gap}</parameter>\n")
        strings = [option for option in options if "string" in option["type"]]
        if not strings:
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            written, made = f"{part}_json {end}", f"{part}_json: {_json({**shared, **value})}"
        elif all("enum" in option for option in strings):
            words = [word for option in strings for word in option["enum"] if isinstance(word, str)]
            choices = [literal(word) for word in [*words, *["null"] * ("null" in kinds)]]
            written, made = f"{part}_word {end}", f"{part}_word: {' | '.join(choices)}"
        else:
            unwritable = [name for name in UNWRITABLE for option in strings if name in option]
            rule(not unwritable, "tools", f"strings are plain text for {style}, which cannot be limited", unwritable)
            written, made = f"{part}_text {NEWLINE}", _until(f"{part}_text", "</parameter>")
        rules += [f"{part}: {literal(f'<parameter={key}>' + gap)} {written}", made]
        parts.append(part if key in required else f"{part}?")
    begin, end = literal(f"\n<function={function}>\n"), literal("</function>\n")
    yield f"{name}: {marker(mark.open)} {begin} {' '.join([*parts, end])} {marker(mark.close)}"
    yield from rules


def _plain(name: str) -> bool:
    return bool(name) and not any(c.isspace() or c in "<>" for c in name)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(formatted(schema), ensure_ascii=False)
