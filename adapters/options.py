"""Grouped options of a recipe: nested dataclasses in Python and in config.json, flat names on the command line."""

import dataclasses
from types import SimpleNamespace
from typing import Any, TypeVar, get_type_hints

import tyro

Config = TypeVar("Config")

UNPREFIXED = tyro.conf.arg(name="")
"""Marks a field of a Config as a group: `rollout: Annotated[Rollout, UNPREFIXED]` gives the option `--groups`; other
fields prefix their options, as in `--sampling.temperature`."""


def groups(config: type) -> dict[str, type]:
    """{field: dataclass} of a Config's groups, in order."""
    hints = get_type_hints(config, include_extras=True)
    return {
        field.name: hints[field.name].__origin__
        for field in dataclasses.fields(config)
        if UNPREFIXED in getattr(hints[field.name], "__metadata__", ())
    }


def flat(config: Any) -> SimpleNamespace:
    """All options by their command-line names, those of groups included."""
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for group in groups(type(config)):
        options |= vars(flat(options.pop(group)))
    return SimpleNamespace(**options)


def replaced(config: Config, **values: Any) -> Config:
    """A copy of the Config with options replaced, by their command-line names.

    Raises:
      TypeError: unknown option.
    """
    fields = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    changes = {name: values.pop(name) for name in fields & set(values)}
    for group in groups(type(config)):
        part = getattr(config, group)
        inside = {f.name for f in dataclasses.fields(part)} & set(values)
        if inside:
            changes[group] = dataclasses.replace(part, **{name: values.pop(name) for name in inside})
    if values:
        raise TypeError(f"{type(config).__name__}: unknown option {', '.join(sorted(values))}")
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]
