"""Types of a Config's values: the command line parses them, in Python they may be anything."""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from .options import JSON, dataclasses_of, groups

KINDS: dict[Any, tuple[str, Any]] = {  # what a type is called, and what passes for it
    str: ("a text", (str, os.PathLike)),
    int: ("an integer", numbers.Integral),
    float: ("a number", numbers.Real),
    bool: ("True or False", bool),
}
BY_NAME = "a function is given by its name, such as 'my_file.py:my_function', for the processes that load it"


def check(config: Any) -> None:
    """Checks the values of a Config and of its groups; their parts, such as an objective, check their own.

    Raises:
      ValueError: the first of a wrong type, or that is not among the words of a choice, in one line.
    """
    check_values(type(config), {field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def check_values(kind: type, values: Mapping[str, Any]) -> None:
    """Checks values for fields of a dataclass, before there is an instance; raises as `check`."""
    inside, hints, marked = groups(kind), get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for field in (field for field in dataclasses.fields(kind) if field.name in values):
        value, hint = values[field.name], hints[field.name]
        if value is tyro.MISSING or _is_a(value, hint):
            if field.name in inside:
                check(value)
            continue
        got, instead = f"{value!r:.80}", ""
        if callable(value) and not isinstance(value, type):
            got, instead = f"the function {getattr(value, '__name__', value)}", f"; {BY_NAME}"
        elif isinstance(value, Mapping) and JSON in getattr(marked[field.name], "__metadata__", ()):
            instead = f"; write {json.dumps(value)!r}"
        elif isinstance(value, str) and get_origin(hint) is tuple:
            instead = f"; write ({value!r},)"
        elif isinstance(value, Mapping) and get_origin(hint) is tuple:
            instead = f"; write {tuple(f'{key}={part}' for key, part in value.items())}"
        name = field.name.replace("_", "-")
        raise ValueError(f"--{name} must be {_described(hint)}, got {got}{instead}")


def _is_a(value: Any, hint: Any) -> bool:
    if kinds := dataclasses_of(hint):
        return isinstance(value, kinds)
    if get_origin(hint) in (Union, UnionType):
        return any(_is_a(value, kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple | list) and all(isinstance(part, get_args(hint)[0]) for part in value)
    return isinstance(value, KINDS[hint][1]) if hint in KINDS else True


def _described(hint: Any) -> str:
    if kinds := dataclasses_of(hint):
        return f"of type {' or '.join(kind.__name__ for kind in kinds)}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_described, get_args(hint)))
    if get_origin(hint) is Literal and len(get_args(hint)) == 1:
        return repr(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return f"a tuple of {KINDS[get_args(hint)[0]][0][2:]}s" if get_origin(hint) is tuple else KINDS[hint][0]
