"""`areax new`: templates for a workflow, a reward, a data set or a recipe, each with a test."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"
PLACEHOLDER = "NAME"
TAKEN = {*sys.stdlib_module_names, "areax"}  # a file of that name would shadow the module
USES = {  # kind -> a command that uses such a file
    "workflow": "areax eval --model MODEL --data ROWS --reward areax.rollout.tasks.gsm8k:reward --workflow FILE:NAME",
    "reward": "areax eval --model MODEL --data ROWS --reward FILE:NAME",
    "dataset": "areax eval --model MODEL --data RECORDS --row FILE:row --reward areax.rollout.rewards.choice:reward",
    "recipe": "areax train FILE --model MODEL --data ROWS",
}


def new(kind: str, name: str, out: str | Path = ".") -> tuple[list[Path], list[str]]:
    """Writes `out`/NAME.py and `out`/test_NAME.py, a working example and its test.

    Args:
      kind: one of USES.
      out: a folder, created if missing.

    Returns:
      The files, and commands to try them.

    Raises:
      ValueError: unknown kind, a name that cannot be imported, or one of the files already exists.
    """
    if kind not in USES:
        raise ValueError(f"areax new: kind must be one of {', '.join(USES)}, got {kind!r}")
    if not name.isidentifier() or keyword.iskeyword(name) or name in TAKEN:
        raise ValueError(
            f"areax new: name must be letters, digits and _, not a keyword or standard module of Python, got {name!r}; "
            f"use my_{kind}, for example"
        )
    folder = Path(out)
    files = {stem: folder / f"{stem.replace(kind, name)}.py" for stem in (kind, f"test_{kind}")}
    for file in files.values():
        if file.exists():
            raise ValueError(f"areax new: {file} already exists; use another name or folder")
    folder.mkdir(parents=True, exist_ok=True)
    for stem, file in files.items():
        template = (TEMPLATES / f"{stem}.py.txt").read_text(encoding="utf-8")
        file.write_text(template.replace(PLACEHOLDER, name), encoding="utf-8")
    example, test = files.values()
    use = USES[kind].replace("FILE", str(example)).replace(PLACEHOLDER, name)
    return [example, test], [f"python -m pytest {test}  # pip install pytest", use]
