"""A recipe's options in groups: nested dataclasses in Python and in config.json, flat names on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, TypeVar, get_args, get_type_hints

import tyro

Config = TypeVar("Config")

UNPREFIXED = tyro.conf.arg(name="")
"""Marks a dataclass field as a group: with `rollout: Annotated[Rollout, UNPREFIXED]` the option of `Rollout.groups` is
`--groups`. The options of any other dataclass field begin with its name: `--sampling.temperature`."""

JSON = tyro.conf.arg(metavar="JSON")
"""Marks a text option that holds a JSON object (`json_object`); a file of options may also have a mapping there."""


def groups(config: Any) -> dict[str, type]:
    """{field: dataclass} of the groups of a Config, in order; of a command, of those of its parameters."""
    return {
        name: get_args(hint)[0]
        for name, hint in get_type_hints(config, include_extras=True).items()
        if UNPREFIXED in getattr(hint, "__metadata__", ())
    }


def json_object(option: str, text: str) -> dict[str, Any]:
    """The value of an option marked JSON; "" is an empty object.

    Raises:
      ValueError: it is not a JSON object.
    """
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"{option} must be a JSON object, such as '{{\"name\": 4}}', got {text!r:.80}")
    return given


def default_of(field: dataclasses.Field) -> Any:
    """A field's default; tyro.MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


def flat(config: Any) -> SimpleNamespace:
    """The values of all options by their names on the command line: those of groups beside the Config's own."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for group in groups(type(config)):
        values |= vars(flat(values.pop(group)))
    return SimpleNamespace(**values)


def by_option(values: Mapping[str, Any], config: type | None = None, prefix: str = "") -> dict[str, Any]:
    """{name on the command line: value} of nested values, as config.json has them.

    Args:
      config: the dataclass that they are of, if it has groups.
    """
    inside = groups(config) if config else {}
    found: dict[str, Any] = {}
    for name, value in values.items():
        dashed = prefix + name.replace("_", "-")
        if isinstance(value, Mapping):
            found |= by_option(value, inside.get(name), prefix if name in inside else f"{dashed}.")
        else:
            found[dashed] = value
    return found


def replaced(config: Config, **values: Any) -> Config:
    """`dataclasses.replace` by option names, whichever group an option is in.

    Raises:
      TypeError: there is no such option.
    """
    own = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    changes = {name: values.pop(name) for name in own & set(values)}
    for group in groups(type(config)):
        part = getattr(config, group)
        inside = {field.name for field in dataclasses.fields(part)} & set(values)
        if inside:
            changes[group] = dataclasses.replace(part, **{name: values.pop(name) for name in inside})
    if values:
        raise TypeError(f"{type(config).__name__}: there is no option {', '.join(sorted(values))}")
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def dataclasses_of(hint: Any) -> tuple[type, ...]:
    """The dataclasses of a field's type: one, the members of a union of them, or none."""
    return tuple(t for t in (hint, *get_args(hint)) if isinstance(t, type) and dataclasses.is_dataclass(t))
