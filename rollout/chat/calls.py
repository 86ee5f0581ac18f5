"""The texts of tool calls between the markers of each family.

A format is a function that yields each call of a text, which begins behind the first marker and has the last one, and
the place behind the call. It raises Cut where the text ends too early, with what the last call has so far, and
ValueError for what is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import channels, json_types, literals

DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MISTRAL = "[CALL_ID]", "[ARGS]"
GLM_MARKS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
DSML = "｜DSML｜"
FUNCTIONS = "functions."  # recipients that are the request's tools


class Call(NamedTuple):
    """A call in a text.

    Attributes:
      arguments: an object; of a cut call the beginning of its JSON.
      id: the one that the model wrote; "" = none.
    """

    name: str
    arguments: dict[str, Any] | str
    id: str = ""


class Cut(ValueError):
    """The text ends within a call; `calls` has it if its name is complete."""

    def __init__(self, *calls: Call):
        super().__init__("the text ends within a call")
        self.calls = calls


Schemas = Mapping[str, Mapping[str, Any]]  # tool -> JSON schema of its parameters
Calls = Iterator[tuple[Call, int]]  # each call of a text, and the place behind it
Format = Callable[[str, Schemas], Calls]


def read(form: Format, text: str, schemas: Schemas, cut: bool = False) -> list[Call]:
    """The calls of a text, the last of which may be `cut`; raises ValueError if it is malformed."""
    found: list[Call] = []
    try:
        for call, _ in form(text, schemas):
            found.append(call)
    except Cut as end:
        if not cut or not all(call.name for call in end.calls):
            raise
        return [*found, *end.calls]
    if not found:
        raise ValueError("no call")
    return found


def first(form: Format, text: str, schemas: Schemas) -> Call | None:
    """The first call of a text that may go on; None while it is not complete, or if the text is malformed."""
    try:
        return next((call for call, _ in form(text, schemas)), None)
    except (ValueError, RecursionError):
        return None


def hermes(text: str, schemas: Schemas) -> Calls:
    """{"name": ..., "arguments": {...}}, the keys in any order (Qwen 2.5 and 3, Hermes 2 Pro and later)."""
    value, end = _json_at(text, 0, schemas, "arguments")
    yield _call(value, "arguments"), end
    _end(text, end, "</tool_call>")


def llama(text: str, schemas: Schemas) -> Calls:
    """{"name": ..., "parameters": {...}}, several separated by `;` (Llama 3.1 to 3.3).

    The Python code and `tool.call(...)` of Llama's built-in tools have no schema, so they are content.
    """
    at = 0
    while at < len(text) or not at:
        value, at = _json_at(text, at, schemas, "parameters", "arguments")
        yield _call(value, "parameters", "arguments"), at
        at = literals.skip(text, at)
        if at < len(text) and text[at] != ";":
            raise ValueError("calls must be separated by ;")
        at = literals.skip(text, at + 1)


def deepseek(text: str, schemas: Schemas) -> Calls:
    """Each call has its own markers: `function<sep>name` and JSON in a fence (V3, R1), or `name<sep>JSON` (V3.1)."""
    for head, tail, end in _marked(text, DEEPSEEK, "<｜tool▁calls▁end｜>"):
        fences = head.strip() == "function"
        if end < 0:
            name, _, arguments = tail.partition("\n```json\n") if fences else (head, "", tail)
            raise Cut(*[Call(name.strip(), _arguments(arguments))] * bool(arguments))
        fenced = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```\s*", tail, re.DOTALL) if fences else None
        name, arguments = fenced.groups() if fenced else (head, tail)
        yield _call({"name": name.strip(), "arguments": _json(arguments)}, "arguments"), end


def kimi(text: str, schemas: Schemas) -> Calls:
    """Each call has its own markers: `functions.name:number<argument>JSON` (Kimi K2); the first part is its id."""
    for head, arguments, end in _marked(text, KIMI, "<|tool_calls_section_end|>"):
        id = head.strip()
        found = re.fullmatch(rf"(?:{re.escape(FUNCTIONS)})?(\S+?)(:\d+)?", id)
        if not found:
            raise ValueError("a call needs a name")
        id = id if found[2] else ""
        if end < 0:
            raise Cut(*[Call(found[1], _arguments(arguments), id)] * bool(arguments))
        yield _call({"name": found[1], "arguments": _json(arguments)}, "arguments")._replace(id=id), end


def _marked(text: str, marks: tuple[str, str, str], close: str) -> Iterator[tuple[str, str, int]]:
    """(text before the second of three marks around each call, text behind it, place behind the third); the place is -1
    where the text ends before the third."""
    begin, separated, ended = marks
    at = literals.skip(text, 0)
    while text.startswith(begin, at):
        at += len(begin)
        end = text.find(ended, at)
        head, separator, tail = text[at : end if end >= 0 else None].partition(separated)
        if end < 0 and not separator:
            raise Cut
        if not separator:
            raise ValueError("a call without its markers")
        yield head, tail, end + len(ended) if end >= 0 else -1
        at = literals.skip(text, end + len(ended))
    _end(text, at, close, begin)


def gpt_oss(text: str, schemas: Schemas) -> Calls:
    """A recipient, `channels.MESSAGE`, and JSON."""
    recipient, _, arguments = text.partition(channels.MESSAGE)
    name = recipient.removeprefix(FUNCTIONS)
    try:
        value = _json(arguments)
    except ValueError:
        raise Cut(Call(name, _arguments(arguments))) from None
    yield _call({"name": name, "arguments": value}, "arguments"), len(text)


def mistral(text: str, schemas: Schemas) -> Calls:
    """`[{"name": ..., "arguments": {...}, "id": ...}, ...]` (Mistral's tokenizers v3 and v7), or each call as
    `name[CALL_ID]id[ARGS]JSON` (v11) or `name[ARGS]JSON` (v13), with another [TOOL_CALLS] before the next one."""
    at = literals.skip(text, 0)
    while True:
        if at == len(text):
            raise Cut
        if text[at] == "[":
            end = at + 1
            while not text.startswith("]", end):
                value, end = _json_at(text, end, schemas, "arguments")
                id = value.get("id") if isinstance(value, dict) else None
                yield _call(value, "arguments")._replace(id=id if isinstance(id, str) else ""), end
                end = literals.skip(text, end)
                if end == len(text):
                    raise Cut
                if text[end] not in ",]":
                    raise ValueError("calls must be separated by commas")
                end = literals.skip(text, end + (text[end] == ","))
            at = end + 1
        else:
            call, at = _named(text, at)
            yield call, at
        at = literals.skip(text, at)
        if not text.startswith("[TOOL_CALLS]", at):
            return _end(text, at, "", "[TOOL_CALLS]")
        at = literals.skip(text, at + len("[TOOL_CALLS]"))


def _named(text: str, at: int) -> tuple[Call, int]:
    """A call of Mistral's that begins with its name."""
    found = re.compile(r"([^\s\[{]+)\s*(?:\[CALL_ID\]\s*([^\s\[]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)").match(text, at)
    if not found:
        name = re.compile(r"([^\s\[{]+)\s*(\[.*)?").fullmatch(text, at)
        if name and any(mark.startswith(name[2] or "") or (name[2] or "").startswith(mark) for mark in MISTRAL):
            raise Cut(*[Call(name[1], "")] * bool(name[2]))
        raise ValueError("a call needs a name and arguments")
    try:
        value, end = DECODER.raw_decode(text, found.end())
    except ValueError:
        raise Cut(Call(found[1], text[found.end() :], found[2] or "")) from None
    return _call({"name": found[1], "arguments": value}, "arguments")._replace(id=found[2] or ""), end


@dataclass(frozen=True)
class Tags:
    """How a call is written whose arguments have tags of their own, and their values are text or JSON.

    Attributes:
      begin: how the tag with the name begins.
      begun: what may follow it in a text that ends within the tag.
      head: the tag with the name.
      key: the tag before a value: its name, and, if the tag says so, whether it is a string.
      stop: the tag behind it.
      end: the tag behind the call.
      close: what follows the last call; "" = nothing.
      several: there may be more than one call.
    """

    begin: str
    begun: str
    head: re.Pattern[str]
    key: re.Pattern[str]
    stop: re.Pattern[str]
    end: str
    close: str
    several: bool = False


def _functions(close: str) -> Tags:
    """<function=name><parameter=key>value</parameter>...</function> (Qwen3-Coder, Seed-OSS).

    A line break after <parameter=key> and one before </parameter> are not part of the value.
    """
    key, stop = re.compile(r"<parameter=([^>\s]+)()>\n?"), re.compile(r"\n?</parameter>")
    head = re.compile(r"<function=([^>\s]+)>")
    return Tags("<function=", r"[^>\s]*", head, key, stop, "</function>", close)


def _invocations(prefix: str, close: str) -> Tags:
    """<invoke name="name"><parameter name="key">value</parameter>...</invoke> (MiniMax M2, DeepSeek V3.2 and V4)."""
    key = re.compile(rf'<{prefix}parameter name="([^"]+)"(?: string="(true|false)")?>')
    stop, head = re.compile(f"</{prefix}parameter>"), re.compile(rf'<{prefix}invoke name="([^"]+)">')
    return Tags(f"<{prefix}invoke name=", r'("[^"]*"?)?', head, key, stop, f"</{prefix}invoke>", close, several=True)


CODER, SEED = _functions("</tool_call>"), _functions("</seed:tool_call>")
MINIMAX = _invocations("", "</minimax:tool_call>")
V32, V4 = _invocations(DSML, f"</{DSML}function_calls>"), _invocations(DSML, f"</{DSML}tool_calls>")
GLM = Tags(  # name<arg_key>key</arg_key><arg_value>value</arg_value>..., in GLM-4.5 and 4.6 each in its own line
    "", r"[^\s<]*\s*(<[a-z_/]*)?", re.compile(r"([^\s<]+)(?=\s*(?:<arg_key>|</tool_call>))"),
    re.compile(r"<arg_key>\s*([^\s<](?:[^<]*[^\s<])?)\s*</arg_key>\s*()<arg_value>"), re.compile("</arg_value>"),
    "</tool_call>", "",
)  # fmt: skip


def tagged(tags: Tags, text: str, schemas: Schemas) -> Calls:
    """Calls with tags, their values typed by the tool's schema."""
    at = literals.skip(text, 0)
    while True:
        head = tags.head.match(text, at)
        if not head:
            if re.fullmatch(re.escape(tags.begin) + tags.begun, text[at:]):
                raise Cut
            _end(text, at, tags.begin)
            raise ValueError("not a call")
        name, at = head[1], literals.skip(text, head.end())
        schema = schemas.get(name, {})
        properties = json_types.properties(schema)
        arguments: dict[str, Any] = {}
        while not text.startswith(tags.end, at):
            given = tags.key.match(text, at)
            stop = tags.stop.search(text, given.end()) if given else None
            if not (given and stop):
                raise Cut(Call(name, json.dumps(arguments, ensure_ascii=False)[:-1]))
            arguments[given[1]] = _typed(
                text[given.end() : stop.start()], properties.get(given[1], {}), schema, given[2]
            )
            at = literals.skip(text, stop.end())
        at += len(tags.end)
        yield Call(name, arguments), at
        at = literals.skip(text, at)
        if not (tags.several and text.startswith(tags.begin, at)):
            return _end(text, at, tags.close, *[tags.begin] * tags.several)


def gemma(text: str, schemas: Schemas) -> Calls:
    """call:name{key:value,...}, the values as `literals` reads them (Gemma 4)."""
    found = re.match(r"\s*call:([^\s{]+)\s*\{", text)
    if not found:
        if re.fullmatch(r"(c|ca|cal|call|call:[^\s{]*)?", text.strip()):
            raise Cut
        raise ValueError("not a call")
    arguments, at = _members(found[1], text, found.end(), re.compile(r"([^\s:<>{}\[\],]+)\s*:"), "}")
    yield Call(found[1], arguments), at
    _end(text, at, "<tool_call|>")


def pythonic(close: str, text: str, schemas: Schemas) -> Calls:
    """[name(key=value, ...), ...], the values as `literals` reads them (LFM2, Llama 3.2 and 4)."""
    at = literals.skip(text, 0)
    if at < len(text) and text[at] != "[":
        raise ValueError("calls must be a list")
    at = literals.skip(text, at + 1)
    while not text.startswith("]", at):
        call, at = _python_call(text, at)
        yield call, at
        at = literals.skip(text, at)
        if at < len(text) and text[at] not in ",]":
            raise ValueError("calls must be separated by commas")
        at = literals.skip(text, at + text.startswith(",", at))
    at = literals.skip(text, at + 1)
    _end(text, at + text.startswith("<|python_end|>", at) * len("<|python_end|>"), close)


def lines(text: str, schemas: Schemas) -> Calls:
    """name(key=value, ...), one a line (Olmo 3)."""
    at = literals.skip(text, 0)
    while not "</function_calls>".startswith(text[at:].rstrip()):
        call, at = _python_call(text, at)
        yield call, at
        at = literals.skip(text, at)
    _end(text, at, "</function_calls>")


def _python_call(text: str, at: int) -> tuple[Call, int]:
    found = re.compile(r"([A-Za-z_][\w.-]*)\s*\(").match(text, at)
    if not found:
        if re.compile(r"([A-Za-z_][\w.-]*)?\s*").fullmatch(text, at):
            raise Cut
        raise ValueError("not a call")
    arguments, at = _members(found[1], text, found.end(), re.compile(r"(\w+)\s*=(?!=)"), ")")
    return Call(found[1], arguments), at


def _members(name: str, text: str, at: int, key: re.Pattern[str], end: str) -> tuple[dict[str, Any], int]:
    """The arguments of a call up to its `end`, and the place behind that."""
    made: dict[str, Any] = {}
    try:
        while not text.startswith(end, at := literals.skip(text, at)):
            found = key.match(text, at)
            if not found:
                if re.compile(r"[\w.-]*\s*").fullmatch(text, at):
                    raise literals.Unfinished
                raise ValueError("an argument needs a name")
            value, at = literals.value(text, found.end())
            made[found[1]], at = value, literals.separated(text, at, end)
    except literals.Unfinished:
        raise Cut(Call(name, json.dumps(made, ensure_ascii=False)[:-1])) from None
    return made, at + len(end)


def _end(text: str, at: int, close: str, *more: str) -> None:
    """Raises Cut if the text ends in `close`, or in one of `more`, and ValueError unless it is `close`."""
    rest = text[at:].strip()
    if rest != close:
        raise Cut if any(marker.startswith(rest) for marker in (close, *more)) else ValueError("text behind a call")


def _json_at(text: str, at: int, schemas: Schemas, *keys: str) -> tuple[Any, int]:
    """(value, place behind it) of the JSON of a call, the arguments under one of `keys`."""
    at = literals.skip(text, at)
    try:
        return DECODER.raw_decode(text, at)
    except ValueError:
        raise Cut(*_json_begun(text[at:], schemas, *keys)) from None


def _typed(text: str, schema: Any, root: Any, string: str | None = None) -> Any:
    """A value in the type of its schema, or as its tag says: `string` is "true", or "false" = JSON. A text that is not
    of this type, or has no schema, stays a string."""
    if string == "true":
        return text
    if string == "false":
        try:
            return _json(text)
        except ValueError:
            return text
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


def _call(value: Any, *keys: str) -> Call:
    """The call of an object; the arguments are under the first of `keys` that exists."""
    if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]:
        arguments = next((value[key] for key in keys if key in value), None)
        if isinstance(arguments, dict):
            return Call(value["name"], arguments)
    raise ValueError("not a call")


def _json_begun(text: str, schemas: Schemas, *keys: str) -> list[Call]:
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
    return [Call(name, _arguments(given[1]) if given else "")]


def _arguments(text: str) -> dict | str:
    """Arguments of which JSON, and perhaps the end of the call, begins with `text`: an object, or the cut text."""
    try:
        found, _ = DECODER.raw_decode(text)
    except ValueError:
        found = text
    if not (isinstance(found, dict) or text.lstrip()[:1] in ("", "{")):
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


DECODER = json.JSONDecoder(parse_constant=_constant, parse_float=literals.finite)
_json = DECODER.decode
