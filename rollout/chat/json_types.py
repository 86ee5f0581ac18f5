"""What a JSON schema says of a value's type, through $ref, allOf, anyOf, oneOf, const and enum."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
MOST = 64  # alternatives of a schema
VISITS = 256  # of subschemas; nothing is known of a schema that needs more of either


def alternatives(schema: Any, root: Any) -> list[dict[str, Any]]:
    """The alternatives of a schema, each without references and combinations of schemas; [] if nothing satisfies it.

    `type` is the set of the types that an alternative allows, and missing if it allows all; `enum` the values. Objects
    of several schemas that must all hold have the properties and required keys of all. What cannot be resolved, and
    `not`, `if` and the like, allows everything.

    Args:
      root: the document that local references of the schema point into.
    """
    import referencing
    from referencing.jsonschema import DRAFT202012

    left = VISITS

    def flat(schema: Any, resolver: Any, within: tuple[str, ...]) -> list[dict[str, Any]]:
        nonlocal left
        left -= 1
        if left < 0 or not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        combined: list[list[dict[str, Any]]] = [[{}], [_own(schema)]]
        combined += [flat(part, resolver, within) for part in _list(schema, "allOf")]
        for key in ("anyOf", "oneOf"):
            if parts := _list(schema, key):
                combined.append([one for part in parts for one in flat(part, resolver, within)])
        if isinstance(target := schema.get("$ref"), str):
            if target in within:  # of itself: adds no alternative
                return []
            try:
                found = resolver.lookup(target)
            except referencing.exceptions.Unresolvable:
                combined.append([{}])
            else:
                combined.append(flat(found.contents, found.resolver, (*within, target)))
        made = combined[0]
        for others in combined[1:]:
            made = [one for a in made for b in others if (one := _both(a, b)) is not None]
            if len(made) > MOST:
                return [{}]
        return made

    resource = referencing.Resource.from_contents(root, default_specification=DRAFT202012)
    made = flat(schema, referencing.Registry().resolver_with_root(resource), ())
    return made if left >= 0 else [{}]


def types(alternatives: Iterable[Mapping[str, Any]]) -> set[str]:
    """The JSON types that a value may have; empty if nothing is known of them."""
    found: set[str] = set()
    for one in alternatives:
        if "type" not in one:
            return set()
        found |= one["type"]
    return found


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an object's properties."""
    found: dict[str, list[Any]] = {}
    for one in alternatives(schema, schema):
        for key, value in one.get("properties", {}).items():
            found.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else {"anyOf": values} for key, values in found.items()}


def _own(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a schema itself."""
    read = ("allOf", "anyOf", "oneOf", "$ref", "const", "type", "enum", "properties", "required")
    own = {key: value for key, value in schema.items() if key not in read}
    named = [schema["type"]] if isinstance(schema.get("type"), str) else _list(schema, "type")
    values = [schema["const"]] if "const" in schema else _list(schema, "enum")
    own |= {"type": {*map(str, named)}} if named else {}
    own |= {"enum": values} if values else {}
    own |= {"required": required} if (required := _list(schema, "required")) else {}
    return own | ({"properties": schema["properties"]} if isinstance(schema.get("properties"), Mapping) else {})


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    """A schema's list; [] if it is malformed."""
    return schema[key] if isinstance(schema.get(key), list) else []


def _held(types: set[str]) -> set[str]:
    """The types, and integers if numbers are among them."""
    return types | {"integer"} if "number" in types else types


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keywords of two schemas that must both hold; None if nothing satisfies them."""
    both = {**a, **b}
    if "type" in a and "type" in b:
        integers = {"integer"} & (a["type"] | b["type"])
        both["type"] = (a["type"] & b["type"]) | (_held(a["type"]) & _held(b["type"]) & integers)
    if "enum" in a and "enum" in b:
        other = {json.dumps(value, sort_keys=True) for value in b["enum"]}
        both["enum"] = [value for value in a["enum"] if json.dumps(value, sort_keys=True) in other]
    if "enum" in both:
        both["enum"] = [value for value in both["enum"] if type_of(value) in _held(both.get("type", TYPES))]
        both["type"] = {type_of(value) for value in both["enum"]}
    if "properties" in a and "properties" in b:
        shared = {
            key: {"allOf": [a["properties"][key], b["properties"][key]]}
            for key in {*a["properties"]} & {*b["properties"]}
        }
        both["properties"] = {**a["properties"], **b["properties"], **shared}
    if "required" in a and "required" in b:
        both["required"] = [*a["required"], *b["required"]]
    return both if both.get("type", TYPES) else None
