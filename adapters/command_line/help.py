"""Help texts of recipes: a first screen of the options that most runs need, and all options by group."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from .options import JSON, dataclasses_of, default_of, groups

WIDTH = 80
FOOTER = "--help-all: every option, by group   --config FILE: options from YAML or JSON"


@dataclass(frozen=True)
class Option:
    """One option: its name without dashes, its values (`INT`), what it means, and its default as text or None."""

    name: str
    values: str
    text: str
    default: str | None


@dataclass(frozen=True)
class Group:
    """A heading and the options below it."""

    name: str
    text: str
    options: list[Option]


def first_screen(config: type, names: Sequence[str], prog: str, given: Any = None) -> str:
    """The named options, a line each, on one screen of 24 lines.

    Args:
      names: of fields, dotted: "sampling.max_new_tokens".
      given: an instance whose values are the defaults.
    """
    known = {option.name: option for group in by_group(config, given) for option in group.options}
    chosen = [known[name.replace("_", "-")] for name in names]
    required = " ".join(f"--{option.name} {option.values}" for option in known.values() if option.default is None)
    heads = [f"--{option.name} {option.default or option.values}" for option in chosen]
    column = max(map(len, heads)) + 3
    short = lambda text, width: textwrap.shorten(_clause(text), width, placeholder=" ...")
    lines = [
        f" {head:{column}}{short(option.text, WIDTH - column - 1)}" for head, option in zip(heads, chosen, strict=True)
    ]
    usage = textwrap.wrap(f"usage: {prog} {required} [--OPTION VALUE ...]", WIDTH)
    return "\n".join([*usage, short(_documented(config)[0], WIDTH), "", *lines, "", FOOTER])


def names(config: type, given: Any = None) -> set[str]:
    """The names of all options, without dashes in front."""
    return {option.name for group in by_group(config, given) for option in group.options}


def all_options(config: type, prog: str, given: Any = None) -> str:
    """Every option with its meaning and default, by group."""
    wrapped = lambda text, indent: textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * max(indent, 4), break_on_hyphens=False
    )
    blocks = [f"usage: {prog} [--OPTION VALUE ...]", "\n".join(wrapped(_documented(config)[0], 0))]
    for group in by_group(config, given):
        lines = wrapped(f"{group.name}: {group.text}", 0) if group.name else []
        for option in group.options:
            default = "required" if option.default is None else f"default: {option.default or 'none'}"
            values = option.values.replace(",", ", ")
            lines += wrapped(f"--{option.name} {values}" if values else f"--{option.name}, --no-...", 2)
            lines += wrapped(f"{option.text} ({default})", 8)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def by_group(config: type, given: Any = None) -> Iterator[Group]:
    """All options by group, in the order of `all_options`."""
    return _groups(config, given)


def _groups(config: type, given: Any, name: str = "", text: str = "", prefix: str = "") -> Iterator[Group]:
    hints, sections = get_type_hints(config), groups(config)
    marked = get_type_hints(config, include_extras=True)
    texts = _documented(config)[1]
    plain, below = [], []
    for field in dataclasses.fields(config):
        default = getattr(given, field.name) if given is not None else default_of(field)
        if kinds := dataclasses_of(hints[field.name]):
            kind = type(default) if default is not tyro.MISSING else kinds[0]
            inside = prefix if field.name in sections else f"{prefix}{_dashed(field.name)}."
            about = texts.get(field.name) or _documented(kind)[0]
            below.append((kind, default, inside.rstrip(".") or field.name, about, inside))
        else:
            json = JSON in getattr(marked[field.name], "__metadata__", ())
            values = "JSON" if json else _values(hints[field.name])
            option = Option(prefix + _dashed(field.name), values, texts.get(field.name, ""), _shown(default))
            plain.append(option)
    if plain:
        yield Group(name, text, plain)
    for part in below:
        yield from _groups(*part)


def _shown(value: Any) -> str | None:
    """A value as it is written on the command line; None = there is none."""
    if value is tyro.MISSING:
        return None
    if isinstance(value, tuple):
        return " ".join(str(_shown(part)) for part in value)
    if isinstance(value, str) and not value.isprintable():
        return f"$'{value.encode('unicode_escape').decode()}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(hint: Any) -> str:
    """What an option takes, as in `INT` or `{a,b}`."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        parts = [_values(part) for part in get_args(hint) if part is not Ellipsis]
        return f"{parts[0]} ..." if Ellipsis in get_args(hint) else " ".join(parts)
    if get_args(hint):
        return "|".join("None" if part is type(None) else _values(part) for part in get_args(hint))
    return "" if hint is bool else getattr(hint, "__name__", str(hint)).upper()


def _documented(config: type) -> tuple[str, dict[str, str]]:
    """(first paragraph of a dataclass's docstring, {field: text} of its own and its bases' fields)."""
    texts: dict[str, str] = {}
    for kind in (k for k in reversed(config.__mro__) if dataclasses.is_dataclass(k)):
        for parameter in docstring_parser.parse(kind.__doc__ or "").params:
            text = " ".join((parameter.description or "").split())
            texts |= {name.strip(): text for name in parameter.arg_name.split(",")}
    summary, _, _ = inspect.cleandoc(config.__doc__ or "").partition("\n\n")
    return " ".join(summary.split()), texts


def _dashed(name: str) -> str:
    return name.rstrip("_").replace("_", "-")  # from_: a word of Python's


def _clause(text: str) -> str:
    """A text's first clause: up to a full stop, semicolon or colon outside parentheses."""
    found = re.match(r"(?:\([^)]*\)|[^.;:(]|[.;:](?!\s|$))*", text)
    return found.group() if found else text
