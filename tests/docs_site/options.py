"""Writes the site's pages of options from the command line's own parsers: `python options.py FOLDER`.

Runs where areax is installed; mkdocs, which has an environment of its own, takes the pages from the folder.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from areax.adapters import cli, launch
from areax.adapters.command_line import help, parse
from areax.adapters.commands import plan
from areax.core import losses
from areax.recipes import demo, distill, eval, grpo, preference, prm, replay, sft
from areax.rollout.simulation import simulate

RECIPES = {"sft": sft, "grpo": grpo, "preference": preference, "distill": distill, "prm": prm}
CONFIGS = {
    "plan": plan.Options,
    "demo": demo.Config,
    "eval": eval.Config,
    "replay": replay.Options,
    "simulate": simulate.Config,
    "launch": launch.Config,
}
ALGORITHMS = {"grpo": losses.POLICIES, "preference": losses.PREFERENCES}


def pages() -> dict[str, str]:
    """{file name: page} of the overview, of each command and of each recipe."""
    made = {"index.md": _overview()}
    for recipe, module in RECIPES.items():
        about = f"See [recipes](../recipes.md#{recipe})."
        groups = help.by_group(module.Config)
        made[f"train-{recipe}.md"] = _page(f"areax train {recipe}", about, groups) + _algorithms(recipe, module.Config)
    for name, command in cli.COMMANDS.items():
        if name == "train":
            continue
        config = CONFIGS.get(name) or _parameters(command)
        about = _summary(command)
        if name == "plan":
            about += "\n\nAll options of the recipe, and these:"
        if name == "replay":
            about += "\n\nAll options of [training](train-grpo.md), and these:"
        made[f"{name}.md"] = _page(f"areax {name}", about, help.by_group(config), _positional(command))
    return made


def _parameters(command: Callable) -> type:
    """The parameters of a command as a dataclass."""
    hints = get_type_hints(command, include_extras=True)
    fields = [
        (name.removesuffix("_"), hints[name], *([] if parameter.default is parameter.empty else [parameter.default]))
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    made = [(name, hint, *(dataclasses.field(default=value) for value in default)) for name, hint, *default in fields]
    about = re.sub(r"^( +\w+)_:", r"\1:", command.__doc__ or "", flags=re.M)
    return dataclasses.make_dataclass("Parameters", made, namespace={"__doc__": about})


def _positional(command: Callable) -> set[str]:
    """The parameters that are given by their place."""
    hints = get_type_hints(command, include_extras=True)
    return {name for name, hint in hints.items() if tyro.conf.Positional in getattr(hint, "__metadata__", ())}


def _summary(command: Callable) -> str:
    return _plain(" ".join((command.__doc__ or "").split("\n\n")[0].split()))


def _overview() -> str:
    rows = [f"| [`areax {name}`]({_of(name)}) | {_summary(command)} |" for name, command in cli.COMMANDS.items()]
    recipes = [
        f"| [`areax train {recipe}`](train-{recipe}.md) | {_summary(module.Config)} |"
        for recipe, module in RECIPES.items()
    ]
    head = (
        "# All commands and options\n\nThese pages list what `--help-all` prints, with all defaults; "
        "[the command line](../command-line.md) explains it.\n\n"
    )
    return head + _table(("command", ""), rows) + "\n\n" + _table(("recipe", ""), recipes) + "\n"


def _of(name: str) -> str:
    return "train-grpo.md" if name == "train" else f"{name}.md"


def _table(columns: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows])


def _page(title: str, about: str, groups: Iterable[help.Group], positional: Iterable[str] = ()) -> str:
    parts = [f"# `{title}`", about]
    for group in groups:
        if group.name:
            parts.append(f"## {group.name}\n\n{_plain(group.text)}")
        rows = [
            f"| {_name(option, option.name in positional)}<br>{_default(option)} | {_plain(option.text)} |"
            for option in group.options
        ]
        parts.append(_table(("option", ""), rows))
    return "\n\n".join(parts) + "\n"


def _name(option: help.Option, positional: bool) -> str:
    values = option.values.replace("|", " or ").replace(",", ", ")
    name = option.name.upper() if positional else f"--{option.name}"
    return f"`{name}`" + (f" `{values}`" if values else "")


def _default(option: help.Option) -> str:
    if option.default is None:
        return "required"
    return f"default: `{option.default}`" if option.default else "default: none"


def _plain(text: str) -> str:
    """Text for a cell of a table, with pages as links."""
    parts = text.split("`")  # those at odd places are code
    for i, part in enumerate(parts):
        part = part.replace("|", "\\|")
        if i % 2 == 0:
            part = part.replace("<", "&lt;").replace("*", "\\*")
            part = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", part)
        parts[i] = part
    joined = "`".join(parts)
    return joined[:1].upper() + joined[1:]


def _algorithms(recipe: str, config: type) -> str:
    """The defaults of the algorithms that are this recipe with another objective."""
    if recipe not in ALGORITHMS:
        return ""
    plain = _defaults(config, None)
    rows = []
    for name, preset in ALGORITHMS[recipe].items():
        own = _defaults(config, parse.instance(config, {"objective": preset()}))
        changed = [f"`--{option} {value or 'none'}`" for option, value in own.items() if plain.get(option) != value]
        rows.append(f"| `areax train {name.lower()}` | {' '.join(changed)} |")
    head = "\n## Algorithms\n\nEach has the options above, with these defaults, and is a page of its own in --help-all."
    return f"{head}\n\n{_table(('command', 'other defaults'), rows)}\n"


def _defaults(config: type, given: Any) -> dict[str, str]:
    found = {option.name: option.default for group in help.by_group(config, given) for option in group.options}
    hidden = ("objective.name", "objective.note")
    return {name: value for name, value in found.items() if value is not None and name not in hidden}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()  # before the old ones go
    for old in folder.glob("*.md"):
        old.unlink()
    for name, page in made.items():
        (folder / name).write_text(page)
