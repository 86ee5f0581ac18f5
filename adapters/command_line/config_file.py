"""Options from a YAML or JSON file, as arguments that a command line can follow and override."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from . import help, other_names
from .options import JSON, dataclasses_of, default_of, groups

MOST, LARGEST = 100_000, 2**24  # values and characters of a file


def read(path: str | Path, config: type, given: Any = None) -> tuple[list[str], dict[str, Any]]:
    """The options in a file, such as a run's config.json.

    Sections are groups or nested dataclasses, as a run writes them; names may also be those of the command line, such
    as `group-size` or `sampling.temperature`.

    Args:
      config: the dataclass whose options they are.
      given: an instance of it whose values are the defaults.

    Returns:
      (arguments, choices): arguments for the parser, and {field: instance} for fields that may be one of several
      dataclasses, such as the objective of `preference`: one that has the options named; none if the default has them.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is neither YAML nor JSON, not a mapping, or names an option that does not exist, or one twice.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            if len(text := file.read(LARGEST + 1)) > LARGEST:
                raise _Wrong(f"must have at most {LARGEST:,} characters")
        is_json = str(path).endswith(".json")
        values = json.loads(text, object_pairs_hook=_once) if is_json else yaml.load(text, _Loader)
    except _Wrong as error:
        raise ValueError(f"--config {path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"--config {path}: must be YAML or JSON, got: {' '.join(str(error).split()):.300}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"--config {path}: must hold options by name, got {type(values).__name__}")
    if sum(1 for _ in itertools.islice(_parts(values), MOST + 1)) > MOST:
        raise ValueError(f"--config {path}: must have at most {MOST:,} values, also where YAML's anchors repeat them")
    choices: dict[str, Any] = {}
    try:
        found = list(_arguments(values, config, given, choices))
        _once((re.sub(r"^--|(?<=[.-])no-", "", words[0].partition("=")[0]), words) for words in found)
        return [word for words in found for word in words], choices
    except _Wrong as error:
        raise ValueError(f"--config {path}: {error}") from None
    except RecursionError:
        raise ValueError(f"--config {path}: must not be nested this deep") from None


def _parts(value: Any) -> Iterator[None]:
    """One for each value inside a value, as often as anchors repeat it."""
    waiting = [iter([value])]
    while waiting:
        for value in waiting[-1]:
            yield
            if isinstance(value, Mapping):
                waiting.append(itertools.chain.from_iterable(value.items()))
                break
            if isinstance(value, list):
                waiting.append(iter(value))
                break
        else:
            waiting.pop()


class _Wrong(Exception):
    """An option that does not exist, is given twice, or has a value of another kind."""


class _Loader(yaml.SafeLoader):
    """YAML whose mappings name each key once, and in which 1:30 is a text: YAML 1.1 would read it as the number 90."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        _once((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return node

    def flatten_mapping(self, node):
        super().flatten_mapping(node)
        if len(node.value) > MOST:
            raise _Wrong(f"must have at most {MOST:,} values, also where << merges them")


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    if ":" in node.value:
        return node.value
    own = loader.construct_yaml_int if node.tag.endswith(":int") else loader.construct_yaml_float
    return own(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict; raises _Wrong if a key occurs twice, as the last would win without a word."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _Wrong(f"{key} is given twice; leave out one of them")
        made[key] = value
    return made


def _arguments(
    values: Mapping, config: type, given: Any, choices: dict[str, Any], prefix: str = ""
) -> Iterator[list[str]]:
    hints, sections = get_type_hints(config), groups(config)
    defaults = {f.name: default_of(f) if given is None else getattr(given, f.name) for f in dataclasses.fields(config)}
    for key, value in values.items():
        name, _, rest = str(key).replace("-", "_").partition(".")
        if rest:
            value = {rest: value}
        if name not in hints:
            group = next((g for g, kind in sections.items() if name in get_type_hints(kind)), None)
            if group is None:
                known = help.names(config, given)
                if (here := other_names.renamed(name, known)) == name:
                    path = _path(prefix + name, value)
                    if advice := other_names.hint(path, known):
                        raise _Wrong(f"there is no option {path}; {advice}")
                    raise _Wrong(_unknown(prefix + name, [prefix + n for n in _names(config)]))
                yield from _arguments({here: value}, config, given, choices, prefix)
            else:
                yield from _arguments({name: value}, sections[group], defaults[group], choices, prefix)
        elif kinds := dataclasses_of(hints[name]):
            if not isinstance(value, Mapping):
                raise _Wrong(f"{prefix}{name} must hold options by name, got {value!r:.80}")
            chosen = choices.get(name, defaults[name])
            kind = _having(kinds, value, type(chosen))
            if len(kinds) > 1 and not isinstance(chosen, kind):
                chosen = choices[name] = kind()
            inside = prefix if name in sections else f"{prefix}{name}."
            yield from _arguments(value, kind, chosen if isinstance(chosen, kind) else None, choices, inside)
        else:
            marked = get_type_hints(config, include_extras=True)[name]
            if JSON in getattr(marked, "__metadata__", ()) and isinstance(value, Mapping):
                value = json.dumps(value)
            yield _words(prefix, name, value, hints[name])


def _words(prefix: str, name: str, value: Any, hint: Any) -> list[str]:
    """The arguments that give one option its value."""
    option = (prefix + name).replace("_", "-")
    if isinstance(value, Mapping):
        raise _Wrong(f"{option} must be one value, got {dict(value)!r:.80}")
    if hint is bool:
        if not isinstance(value, bool):
            raise _Wrong(f"{option} must be true or false, got {value!r:.80}")
        return [f"--{option}" if value else f"--{prefix.replace('_', '-')}no-{name.replace('_', '-')}"]
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    inside = [part for kind in union if get_origin(kind) is tuple for part in get_args(kind)]
    if not isinstance(value, list):
        return [f"--{option}={_word(option, value, (*union, *inside))}"]
    if not inside:
        raise _Wrong(f"{option} must be one value, got {value!r:.80}")
    words = [_word(option, part, tuple(inside)) for part in _flattened(value)]
    # A parser takes an option's first value as it is after "=", but a later one that begins with - for an option.
    if bad := [word for word in words[1:] if re.match(r"-(?![\d.])", word)]:
        raise _Wrong(f"{option}: no value but the first may begin with -, got {bad[0]!r:.80}")
    return [f"--{option}={words[0]}", *words[1:]] if words else [f"--{option}"]


def _word(option: str, value: Any, kinds: tuple) -> str:
    """A value as on the command line; text must be text, as YAML reads `no` as false and `010` as 8.

    Where "off" is a choice, false means it: YAML reads `off` as that.
    """
    if value is False and any("off" in get_args(kind) for kind in kinds):
        return "off"
    if str in kinds and type(value) not in (str, *kinds):
        raise _Wrong(f"{option} must be text, got {value!r:.80}; write it in quotes")
    return str(value)


def _flattened(values: list) -> Iterator:
    for value in values:
        yield from _flattened(value) if isinstance(value, list) else [value]


def _having(kinds: tuple[type, ...], values: Mapping, default: type) -> type:
    """The dataclass that has just these fields, as a run writes them; else one that has them all, the default first."""
    names = {str(key).replace("-", "_").partition(".")[0] for key in values}
    fields = {kind: {f.name for f in dataclasses.fields(kind)} for kind in kinds}
    first = sorted(kinds, key=lambda kind: kind is not default)
    return next((k for k in first if names == fields[k]), next((k for k in first if names <= fields[k]), first[0]))


def _names(config: type) -> list[str]:
    names = [field.name for field in dataclasses.fields(config)]
    return names + [name for group in groups(config).values() for name in _names(group)]


def _path(name: str, value: Any) -> str:
    """The dotted name of the first value in nested mappings, as other libraries' files have."""
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "")
