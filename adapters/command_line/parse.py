"""Options by tyro, with its complaints as one line that names the nearest option, and `--config FILE` before them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_type_hints

import tyro

from . import config_file, help, options, other_names

NARROWEST = 40  # columns of help: tyro needs some, and loops for ever in one


def parse(target, arguments: Sequence[str], prog: str, given: Any = None, first: Sequence[str] = ()):
    """`target`, a dataclass or a function, called with the arguments.

    `--config FILE` stands for the options in a file; those of the command line win.

    Args:
      given: an instance of a dataclass `target` whose values are the defaults.
      first: options that `--help` shows, by their fields (`sampling.max_new_tokens`); `--help-all` then shows all.

    Raises:
      ValueError: the arguments are wrong, in one line.
    """
    values = parsed(target, arguments, prog, given, first)
    return values() if callable(values) else values


def parsed(target, arguments: Sequence[str], prog: str, given: Any = None, first: Sequence[str] = ()):
    """Like `parse`, but returns the call of a function without making it."""
    arguments = list(arguments)
    if first and (wanted := {"-h", "--help", "--help-all"} & set(arguments)):
        everything = "--help-all" in wanted
        print(help.all_options(target, prog, given) if everything else help.first_screen(target, first, prog, given))
        raise SystemExit(0)
    own, known = arguments, help.names(target, given) if isinstance(target, type) else set()
    if isinstance(target, type) and "config" not in {field.name for field in dataclasses.fields(target)}:
        arguments, given = _with_files(target, arguments, prog, given)
        given = _without(target, arguments, given)
    arguments = [_renamed(word, known) for word in arguments]
    captured = io.StringIO()
    try:
        with _captured(captured, width=100_000):
            values = _quietly(target, arguments, prog, given)
    except SystemExit as exit:
        if not exit.code:
            with _columns(max(shutil.get_terminal_size().columns, NARROWEST)):
                _quietly(target, arguments, prog, given)  # help: again, now for the terminal
        sentence = _unnamed(own, known) if isinstance(target, type) else ""
        sentence = sentence or _one_line(captured.getvalue(), arguments, _help(target, prog, given), known)
        sentence = _with_options(sentence.removeprefix(f"{prog}: "), target)
        raise ValueError(f"{prog}: {sentence}; see {prog} --help{'-all' if first else ''}") from None
    for name in () if callable(values) else _nan(values):
        raise ValueError(f"{prog}: --{name} must be a number, got nan")
    return values


def check_names(target: type, arguments: Sequence[str], prog: str, given: Any = None) -> None:
    """Raises ValueError if arguments name an option that `target` lacks. Values and missing options are not checked: a
    `--config` file on another machine may have them."""
    known = help.names(target, given)
    own = [word for word in arguments if word.partition("=")[0] not in ("--config", "--help", "--help-all")]
    if unknown := _unknown([_renamed(word, known) for word in own], _help(target, prog, given), known):
        raise ValueError(f"{prog}: {unknown}; see {prog} --help-all")


def config_files(arguments: Sequence[str]) -> list[str]:
    """The files of `--config` among arguments."""
    after = zip(arguments, [*arguments[1:], ""], strict=True)
    return [word.partition("=")[2] or following for word, following in after if word.partition("=")[0] == "--config"]


def _renamed(word: str, known: set[str]) -> str:
    """An argument with its option's name here, if that was an alias."""
    name, equals, value = word.removeprefix("--").partition("=")
    return f"--{other_names.renamed(name, known)}{equals}{value}" if word.startswith("--") else word


def _unnamed(arguments: Sequence[str], known: set[str]) -> str:
    """What is wrong with values that no option takes, as other programs have them; "" if there are none."""
    for word in arguments:
        name, equals, value = word.partition("=")
        if not equals or word.startswith("-") or value[:1] in ("=", "<", ">"):  # a comparison, as of --stop-on
            continue
        if (here := other_names.renamed(name, known).replace("_", "-")) in known:
            return f"write --{here} {value}, got {word}"
        if advice := other_names.hint(name, known):
            return f"there is no {word}; {advice}"
    if arguments and not arguments[0].startswith("-"):
        example = f", as in --model {arguments[0]}" if "model" in known and "=" not in arguments[0] else ""
        return f"values need the name of their option{example}, got {arguments[0]}"
    return ""


def _nan(config: Any, prefix: str = "") -> Iterator[str]:
    """The options of a Config that are not a number, which no option means and every comparison lets through."""
    inside = options.groups(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _nan(value, prefix if field.name in inside else f"{name}.")
        elif value != value or isinstance(value, tuple) and any(part != part for part in value):
            yield name


def _with_options(sentence: str, config: Any) -> str:
    """A dataclass's complaint about its fields, behind tyro's path of it, with the options' names instead.

    "training.optim: Optimizer: lr must be ..." becomes "--optim.lr must be ...".
    """
    path, colon, words = sentence.partition(": ")
    kinds: tuple = options.dataclasses_of(config) or (config,)  # a command has parameters instead of fields
    prefix = ""
    for part in path.split("."):
        fields = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        if not (inside := options.dataclasses_of(fields.get(part))):
            return sentence
        if not any(part in options.groups(kind) for kind in kinds):
            prefix += f"{part.replace('_', '-')}."
        kinds = inside
    if words.startswith("--") or not prefix:
        return words
    words = re.sub(r"^\w+: ", "", words)  # the dataclass's own name
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    option = lambda found: f"--{prefix}{found[0].replace('_', '-')}" if found[0] in names else found[0]
    words = re.sub(r"^\w+|\b[a-z0-9]+_\w+", option, words)
    return words if words.startswith("--") else f"--{prefix}*: {words}"


def instance(config: type, values: dict[str, Any], required: Callable = lambda field: tyro.MISSING) -> Any:
    """A Config with these values of its options; fields without a default are what `required(field)` says."""
    fields = [f for f in dataclasses.fields(config) if f.default is f.default_factory is dataclasses.MISSING]
    return options.replaced(config(**{f.name: required(f) for f in fields}), **values)


def _with_files(target: type, arguments: list[str], prog: str, given: Any) -> tuple[list[str], Any]:
    """(arguments with those of `--config` files in front, defaults)."""
    words: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        name, equals, path = word.partition("=")
        if name != "--config":
            rest.append(word)
            continue
        path = path if equals else next(remaining, "")
        if not path or path.startswith("--"):
            raise ValueError(f"{prog}: --config needs a YAML or JSON file, got {path or 'nothing'}")
        more, choices = config_file.read(path, target, given)
        words += more
        if choices:
            given = instance(target, choices) if given is None else options.replaced(given, **choices)
    return words + rest, given


def _without(target: type, arguments: Sequence[str], given: Any) -> Any:
    """The defaults, "" for required options that another among the arguments stands for, by `target.INSTEAD_OF`."""
    words = {word.partition("=")[0].removeprefix("--") for word in arguments}
    for option, others in getattr(target, "INSTEAD_OF", {}).items():
        if option in words:
            given = instance(target, {}) if given is None else given
            given = options.replaced(given, **dict.fromkeys(others, ""))
    return given


def _quietly(target, arguments, prog, given=None):
    """The parsed Config, or for a command a call that is yet to be made (so that its own output is not caught)."""
    if isinstance(target, type):
        # Of a choice of dataclasses the default says which it is.
        plain = {"config": (tyro.conf.AvoidSubcommands,), **({} if given is None else {"default": given})}
        return tyro.cli(target, args=list(arguments), prog=prog, **plain)
    call: dict = {}

    def keep(**kwargs):
        call.update(kwargs)

    keep.__doc__, keep.__annotations__ = target.__doc__, target.__annotations__
    setattr(keep, "__signature__", inspect.signature(target))  # noqa: B010 - functions have it without declaring it
    tyro.cli(keep, args=list(arguments), prog=prog)
    return lambda: target(**call)


def _help(target, prog: str, given=None) -> str:
    text = io.StringIO()
    with _captured(text, width=80), contextlib.suppress(SystemExit):
        _quietly(target, ["--help"], prog, given)
    return text.getvalue()


@contextlib.contextmanager
def _captured(output: io.StringIO, width: int) -> Iterator[None]:
    """Captures what tyro prints, without colours and in this width, whatever the terminal is."""
    # tyro colours errors, too, if standard output is a terminal.
    with _columns(width), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    """Makes tyro print in this width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _unknown(arguments: Sequence[str], help_text: str, options: set[str]) -> str:
    """Options that do not exist, in one line with the nearest that do; "" if there are none."""
    known = sorted(set(re.findall(r"--[a-z][\w.-]*", help_text)))
    unknown = [
        a.split("=")[0] for a in arguments if a.startswith("--") and a.split("=")[0].replace("_", "-") not in known
    ]
    hints = []
    for name in unknown:
        if here := other_names.hint(name.removeprefix("--"), options):
            hints.append(f"; {here}")
        elif near := [k for k in known if k.endswith("." + name[2:])] or difflib.get_close_matches(name, known, 1):
            hints.append(f"; did you mean {near[0]}?")
    return f"unrecognized options: {' '.join(unknown)}{''.join(hints)}" if unknown else ""


def _one_line(message: str, arguments: Sequence[str], help_text: str, options: set[str]) -> str:
    """tyro's complaint in one line: options that do not exist, with the nearest that does, or what else is wrong."""
    if unknown := _unknown(arguments, help_text, options):
        return unknown
    if value := re.search(r"Missing value for argument '(\S+)'", message):
        return f"{value[1]} needs a value"
    if "Missing from" in message:
        missing = re.findall(r"^[│ ] {5}(\S+)", message.partition("For full helptext")[0], re.M)
        return f"needs {', '.join(missing)}"
    lines = [line.strip("─╭╮╰╯│ ") for line in message.splitlines()]
    body = [line for line in lines[1:] if not set(line) <= {"-"}]
    after = re.compile(r"Perhaps|Argument helptext|For full|Got errors")
    cut = next((i for i, line in enumerate(body) if after.match(line)), len(body))
    sentence = " ".join(body[:cut]).rstrip(".")
    for theirs, ours in (
        ("Error parsing ", ""),
        ("Unrecognized options:", "unexpected values:"),
        (": invalid literal for int() with base 10:", " must be a whole number, got"),
        (": could not convert string to float:", " must be a number, got"),
    ):
        sentence = sentence.replace(theirs, ours)
    return sentence.removeprefix("Config: ")
