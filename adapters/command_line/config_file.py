"""Options from a YAML or JSON file, as arguments that a command line can follow and override."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from .options import dataclasses_of, groups


def read(path: str | Path, config: type) -> tuple[list[str], dict[str, Any]]:
    """The options in a file, such as a run's config.json.

    Sections are groups or nested dataclasses, as a run writes them; names may also be those of the command line, such
    as `group-size` or `sampling.temperature`.

    Args:
      config: the dataclass whose options they are.

    Returns:
      (arguments, choices): arguments for the parser, and {field: instance} for fields that may be one of several
      dataclasses, such as the objective of `preference`: the one that has the options named.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is neither YAML nor JSON, not a mapping, or names an option that does not exist.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"--config {path}: must be YAML or JSON, got: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"--config {path}: must hold options by name, got {type(values).__name__}")
    choices: dict[str, Any] = {}
    try:
        return [word for words in _arguments(values, config, "", choices) for word in words], choices
    except _Wrong as error:
        raise ValueError(f"--config {path}: {error}") from None
    except RecursionError:
        raise ValueError(f"--config {path}: must not contain itself, as YAML's anchors allow") from None


class _Wrong(Exception):
    """An option that does not exist, or has a value of another kind."""


def _arguments(values: Mapping, config: type, prefix: str, choices: dict[str, Any]) -> Iterator[list[str]]:
    hints, sections = get_type_hints(config), groups(config)
    for key, value in values.items():
        name, _, rest = str(key).replace("-", "_").partition(".")
        if rest:
            value = {rest: value}
        if name not in hints:
            group = next((g for g in sections.values() if name in get_type_hints(g)), None)
            if group is None:
                raise _Wrong(_unknown(prefix + name, [prefix + n for n in _names(config)]))
            yield from _arguments({name: value}, group, prefix, choices)
        elif kinds := dataclasses_of(hints[name]):
            if not isinstance(value, Mapping):
                raise _Wrong(f"{prefix}{name} must hold options by name, got {value!r}")
            kind = _having(kinds, value)
            if len(kinds) > 1:
                choices[name] = kind()
            yield from _arguments(value, kind, prefix if name in sections else f"{prefix}{name}.", choices)
        else:
            yield _words(prefix, name, value, hints[name])


def _words(prefix: str, name: str, value: Any, hint: Any) -> list[str]:
    """The arguments that give one option its value."""
    option = (prefix + name).replace("_", "-")
    if isinstance(value, Mapping):
        raise _Wrong(f"{option} must be one value, got {dict(value)}")
    if hint is bool:
        if not isinstance(value, bool):
            raise _Wrong(f"{option} must be true or false, got {value!r}")
        return [f"--{option}" if value else f"--{prefix.replace('_', '-')}no-{name.replace('_', '-')}"]
    if isinstance(value, list):
        return [f"--{option}", *map(str, _flattened(value))]
    return [f"--{option}={value}"]


def _flattened(values: list) -> Iterator:
    for value in values:
        yield from _flattened(value) if isinstance(value, list) else [value]


def _having(kinds: tuple[type, ...], values: Mapping) -> type:
    """The dataclass that has these fields; the first if none has all."""
    names = {str(key).replace("-", "_").partition(".")[0] for key in values}
    return next((k for k in kinds if names <= {f.name for f in dataclasses.fields(k)}), kinds[0])


def _names(config: type) -> list[str]:
    names = [field.name for field in dataclasses.fields(config)]
    return names + [name for group in groups(config).values() for name in _names(group)]


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "")
