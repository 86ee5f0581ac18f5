"""Types of JSON schemas, against the validator of jsonschema and by hand."""

import cpu
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.rollout.chat import json_types

DEFS = {
    "$defs": {
        "colour": {"enum": ["red", "blue"], "type": "string"},
        "count": {"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]},
        "chain": {"$ref": "#/$defs/count"},
        "tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}, {"type": "array"}]},
        "loop": {"$ref": "#/$defs/loop"},
        "a/b": {"const": True},
    }
}


def types(schema):
    return json_types.types(json_types.alternatives(schema, {**DEFS, "properties": {"p": schema}}))


@pytest.mark.parametrize(
    "schema, kinds",
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["integer", "null"]}, "integer null"),
        ({"$ref": "#/$defs/colour"}, "string"),
        ({"$ref": "#/$defs/chain"}, "integer"),
        ({"$ref": "#/$defs/chain", "description": "how many"}, "integer"),
        ({"$ref": "#/$defs/a~1b"}, "boolean"),
        ({"$ref": "#/$defs/tree"}, "null array"),
        ({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]}, "string null"),
        ({"oneOf": [{"const": 1}, {"const": None}, {"const": [1]}]}, "integer null array"),
        ({"allOf": [{"$ref": "#/$defs/count"}], "default": 3}, "integer"),
        ({"allOf": [{"type": ["string", "null", "boolean"]}, {"not": {"type": "null"}}, {"type": "string"}]}, "string"),
        ({"type": ["object", "null"], "anyOf": [{"type": "object"}, {"type": "string"}]}, "object"),
        ({"type": "number", "anyOf": [{"type": "integer"}, {"type": "string"}]}, "integer"),
        ({"type": ["number", "integer", "string"], "allOf": [{"type": "string"}]}, "string"),
        ({"const": 1.5}, "number"),
        ({"const": {"a": 1}}, "object"),
        ({"enum": [1, "a", None, True]}, "integer string null boolean"),
        ({"enum": [1, "a", None], "type": ["number", "null"]}, "integer null"),
        ({"enum": ["a", 1], "const": 1}, "integer"),
        # nothing is known
        ({}, ""),
        (True, ""),
        (None, ""),
        ({"description": "x"}, ""),
        ({"anyOf": [{"type": "integer"}, {}]}, ""),
        ({"$ref": "#/$defs/gone"}, ""),
        ({"$ref": "http://127.0.0.1:1/x"}, ""),
        ({"$ref": "#/$defs/loop"}, ""),
        ({"type": 3, "enum": {}, "anyOf": 1, "allOf": "x", "$ref": 1, "properties": [], "required": 2}, ""),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, ""),
    ],
)
def test_types(schema, kinds):
    assert types(schema) == set(kinds.split())


VALUES = [None, True, False, 0, 1, 1.5, "", "a", [], [1], {}, {"a": 1}]
LEAVES = (
    st.builds(lambda kind: {"type": kind}, st.sampled_from(sorted(json_types.TYPES)))
    | st.builds(
        lambda kinds: {"type": kinds}, st.lists(st.sampled_from(sorted(json_types.TYPES)), min_size=1, unique=True)
    )
    | st.builds(lambda value: {"const": value}, st.sampled_from(VALUES))
    | st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(VALUES), min_size=1, max_size=3))
    | st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from(["colour", "count", "chain"]))
    | st.sampled_from([{}, {"minimum": 1}, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}])
)


def _joined(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    parts = st.fixed_dictionaries({}, optional={"allOf": several, "anyOf": several, "oneOf": several})
    return st.builds(lambda a, b: {**a, **b}, inner, parts)


@settings(max_examples=30)
@given(st.recursive(LEAVES, _joined, max_leaves=8))
def test_the_types_are_those_of_all_valid_values(schema):
    kinds = types(schema)
    validator = jsonschema.Draft202012Validator({**schema, **DEFS})
    valid = {json_types.type_of(value) for value in VALUES if validator.is_valid(value)}
    found = kinds | ({"integer"} if "number" in kinds else set())
    assert not kinds or valid <= found


def test_properties_through_references():
    schema = {
        "$ref": "#/$defs/args",
        "$defs": {
            "args": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "string"}}, "required": ["b"]}]},
            "base": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"maxLength": 3}},
                "required": ["a"],
            },
        },
    }
    assert json_types.properties(schema) == {
        "a": {"type": "integer"}, "b": {"allOf": [{"maxLength": 3}, {"type": "string"}]}
    }  # fmt: skip
    assert json_types.alternatives(schema, schema)[0]["required"] == ["a", "b"]
    either = {"oneOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"const": "x"}}}]}
    assert json_types.properties(either) == {"a": {"anyOf": [{"type": "integer"}, {"const": "x"}]}}
    assert json_types.properties({}) == json_types.properties({"properties": 3}) == {}


def test_hostile_schemas_end():
    two = lambda name: {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"$ref": f"#/$defs/{name}"}]}
    wide = {"$defs": {f"d{i}": two(f"d{i + 1}") for i in range(50)}, "$ref": "#/$defs/d0"}
    deep = {"type": "string"}
    for _ in range(300):
        deep = {"allOf": [deep]}
    product = {"allOf": [{"anyOf": [{"minimum": i} for i in range(9)]}] * 9}
    with cpu.limit(2):
        for schema in (wide, deep, product):
            assert json_types.alternatives(schema, schema) == [{}]
