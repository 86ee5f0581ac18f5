"""Options of a recipe in groups: typed parts in Python and in config.json, flat names on the command line."""

import dataclasses
from types import SimpleNamespace
from typing import Any, TypeVar, get_type_hints

import tyro

Config = TypeVar("Config")

UNPREFIXED = tyro.conf.arg(name="")
"""Marks a field of a Config as a group: `rollout: Annotated[Rollout, UNPREFIXED]` has the option `--groups`, where a
field without it has its own name in front, as in `--sampling.temperature`."""


def groups(config: type) -> dict[str, type]:
    """{field: dataclass} of the groups of a Config, in order."""
    hints = get_type_hints(config, include_extras=True)
    return {
        field.name: hints[field.name].__origin__
        for field in dataclasses.fields(config)
        if UNPREFIXED in getattr(hints[field.name], "__metadata__", ())
    }


def flat(config: Any) -> SimpleNamespace:
    """Every option by its name on the command line, those of groups beside the Config's own."""
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for group in groups(type(config)):
        own |= vars(flat(own.pop(group)))
    return SimpleNamespace(**own)


def replaced(config: Config, **values: Any) -> Config:
    """The Config with other values of its options, by their names on the command line.

    Raises:
      TypeError: there is no such option.
    """
    own = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    changes = {name: values.pop(name) for name in own & set(values)}
    for group in groups(type(config)):
        part = getattr(config, group)
        inside = {f.name for f in dataclasses.fields(part)} & set(values)
        if inside:
            changes[group] = dataclasses.replace(part, **{name: values.pop(name) for name in inside})
    if values:
        raise TypeError(f"{type(config).__name__}: there is no option {', '.join(sorted(values))}")
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]
