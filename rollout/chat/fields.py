"""The fields of requests, checked by name: rules that the gateway's APIs and the engine's server have in common."""

from __future__ import annotations

import difflib
import json
import reprlib
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SAMPLING = {  # names in requests -> names of `Fleet.generate`
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
}
FRACTIONS = {"temperature", "top_p", "min_p"}
MOST = 128  # most answers per request
MOST_STOPS, LONGEST_STOP = 128, 1024  # stop strings per request, and characters of one: each token is compared with all
LONGEST_TEXT = 2**21  # characters of a prompt: tokens take a hundred times the memory of their text
LONGEST_PROMPT = 2**20  # tokens
MOST_PROMPTS = 1024  # of a request, or samples in all
LONGEST_NAME = 4096  # characters of names and paths


class Refused(ValueError):
    """A request that cannot be honoured; `name` is the field."""

    def __init__(self, name: str, rule: str):
        super().__init__(f"{name}: {rule}")
        self.name, self.rule = name, rule


def rule(held: Any, name: str, text: str, value: Any) -> None:
    """Raises Refused unless the rule `held`."""
    if not held:
        raise Refused(name, f"{text}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value as errors show it, in at most 80 characters; takes no longer for large ones."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_REPR = reprlib.Repr()
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 160


USED, NO_EFFECT = "used", "no effect"  # what a server does with a field


@dataclass(frozen=True)
class Refusal:
    """Why a server refuses a field, except for values that ask for nothing, such as a penalty of 0."""

    why: str = "cannot be honoured by this server"
    but: tuple = ()


Table = Mapping[str, str | Refusal]  # field -> USED, NO_EFFECT (it cannot change an answer), or why it is refused


def table(used: Iterable[str], ignored: Iterable[str] = (), refused: Table | None = None) -> Table:
    """A table of all fields that a request may have."""
    return {**dict.fromkeys(used, USED), **dict.fromkeys(ignored, NO_EFFECT), **(refused or {})}


def known(body: Mapping[str, Any], table: Table) -> None:
    """Raises Refused for fields that are unknown or refused; null asks for nothing."""
    for name, value in body.items():
        held = table.get(name)
        if value is None or held in (USED, NO_EFFECT):
            continue
        if not isinstance(held, Refusal):
            near = difflib.get_close_matches(name, table, 1)
            raise Refused(shown(name)[1:-1], "unknown field" + (f"; did you mean {near[0]}?" if near else ""))
        if not any(value == other for other in held.but):
            raise Refused(name, f"{held.why}, got {shown(value)}; leave it out")


def with_model(body: Mapping[str, Any], served: str) -> dict[str, Any]:
    """The body, with the name of the served model if it has none."""
    return {**body, "model": served if body.get("model") is None else name(body, "model")}


def refuse(body: Mapping[str, Any], neutral: Mapping[str, Collection]) -> None:
    """Refuses the fields of `neutral`, unless they are null or have a value that is there: it asks for nothing."""
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and not any(value == other for other in values):
            raise Refused(name, f"cannot be honoured by this server, got {shown(value)}; leave it out")


def sampling(body: Mapping[str, Any], *, most: Iterable[str], stop: str) -> dict[str, Any]:
    """The arguments of `generate`, but for the seed.

    Args:
      most: field names for the token limit, in order of precedence.
      stop: the field name for stop strings.
    """
    found: dict[str, Any] = {}
    for name, ours in SAMPLING.items():
        if body.get(name) is not None:
            found[ours] = number(body, name) if name in FRACTIONS else integer(body, name)
    given = next((name for name in most if body.get(name) is not None), None)
    if given:
        found["max_new_tokens"] = integer(body, given, least=0)
    if words := stops(body, stop):
        found["stop"] = words
    return found


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The strings to stop at."""
    value = body.get(name)
    words = () if value is None else (value,) if isinstance(value, str) else value
    right = isinstance(words, list | tuple) and all(isinstance(word, str) and word for word in words)
    rule(right, name, "must be a string or a list of strings, none empty", value)
    short = len(words) <= MOST_STOPS and all(len(word) <= LONGEST_STOP for word in words)
    rule(short, name, f"must be at most {MOST_STOPS} strings of {LONGEST_STOP} characters", value)
    return tuple(words)


def schema(form: Any, name: str) -> dict[str, Any]:
    """Converts {"type": "text" | "json_object" | "json_schema", ...} to the `json_schema` argument of `generate`."""
    if form is None:
        return {}
    kind = form.get("type") if isinstance(form, Mapping) else None
    rule(
        kind in ("text", "json_object", "json_schema"), name, "its type must be text, json_object or json_schema", form
    )
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    named = form.get("json_schema", form)
    wanted = named.get("schema") if isinstance(named, Mapping) else None
    rule(isinstance(wanted, Mapping), name, "must have a schema", form)
    return {"json_schema": json.dumps(wanted)}


def tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool in OpenAI's format, without `strict`, which is not enforced."""
    rule(isinstance(name, str) and name != "", where, "a tool needs a name", name)
    rule(
        parameters is None or isinstance(parameters, Mapping),
        where,
        "the schema of a tool must be an object",
        parameters,
    )
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def call(id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A tool call in OpenAI's format; `arguments` is the text of a JSON object, of one that was cut its beginning, or
    empty."""
    rule(
        isinstance(id, str) and isinstance(name, str) and name != "", where, "a call needs an id and a name", [id, name]
    )
    arguments = arguments or "{}"
    rule(isinstance(arguments, str), where, "the arguments of a call must be text, the JSON of an object", arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text(content: Any, where: str, kinds: Collection[str] = ("text",), between: str = "") -> str:
    """The text of a message's content: a string, or parts of the `kinds`, joined by `between`."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = objects(content, where)
    for part in parts:
        rule(part.get("type") in kinds, where, "only text can stand here", part.get("type"))
        words = part.get("text", part.get("refusal"))
        rule(isinstance(words, str), where, "a part needs a text", part)
    return between.join(part.get("text", part.get("refusal")) for part in parts)


def objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Checks that `value` is a list of objects."""
    right = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
    rule(right, name, "must be a list of objects", value)
    return value


def number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    rule(right, name, "must be a finite number", value)
    return float(value)


def name(body: Mapping[str, Any], field: str) -> str:
    """A name or path that the request must have."""
    value = body.get(field)
    right = isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and "\0" not in value
    rule(right, field, f"must be a string of 1 to {LONGEST_NAME} characters", value)
    return str(value)


def integer(body: Mapping[str, Any], name: str, *, least: int | None = None, most: int | None = None) -> int:
    value = body[name]
    rule(type(value) is int, name, "must be a whole number", value)
    rule(least is None or value >= least, name, f"must be at least {least}", value)
    rule(most is None or value <= most, name, f"must be at most {most}", value)
    return value


def boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    rule(value is None or isinstance(value, bool), name, "must be true or false", value)
    return bool(value)


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    rule(value is None or isinstance(value, Mapping), name, "must be an object", value)
    return value or {}


def several(body: Mapping[str, Any], most: int) -> int:
    """Answers per prompt: the field `n`, 1 by default."""
    n = 1 if body.get("n") is None else integer(body, "n")
    rule(1 <= n <= most, "n", f"must be from 1 to {most}", n)
    return n
