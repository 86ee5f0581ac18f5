"""How a run goes on: from its saved state, with the same or with other options."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areax.adapters.command_line.options import by_option
from areax.adapters.tracking import progress, run_dir

SHAPING = ("model", "optim.", "lora.", "objective.", "critic.", "reference-every")  # options that a state depends on


def changes(config: Any) -> list[str]:
    """The options that differ from those in `config.out`/config.json, as "--steps 2 -> 4"; none without such a file.

    `out` does not count: a run may be moved. Nor does another path to the same file or folder.
    """
    try:
        former = json.loads((Path(config.out) / run_dir.CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if not isinstance(former, dict):
        return []
    then, now = (by_option(values, type(config)) for values in (former, run_dir.plain(config)))
    differs = lambda k, v: k != "out" and not _same(then.get(k, v), v)
    return [f"--{k} {_shown(then[k])} -> {_shown(v)}" for k, v in now.items() if differs(k, v)]


def _same(one: Any, other: Any) -> bool:
    paths = [x for x in (one, other) if isinstance(x, str) and os.path.exists(x)]
    return one == other or (len(paths) == 2 and os.path.samefile(*paths))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = " ".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def write_options(config: Any, start: int) -> None:
    """Writes config.json; call it once nothing can refuse the run any more.

    A run that goes on from step `start` with other options says which changed, and keeps the former file as
    config.1.json, config.2.json and so on.
    """
    out = Path(config.out)
    if start and (changed := changes(config)):
        number = 1
        while (kept := out / f"config.{number}.json").exists():
            number += 1
        run_dir.write_text(kept, (out / run_dir.CONFIG).read_text(encoding="utf-8"))
        progress.say(
            f"{out}: goes on from step {start} with other options, {', '.join(changed)}; the former are in {kept.name}"
        )
    run_dir.write_config(out, config)


@contextlib.contextmanager
def restoring(config: Any) -> Iterator[None]:
    """Names the options that changed, such as --model, when the state saved with the former ones does not fit."""
    try:
        yield
    except ValueError as error:
        changed = [words for words in changes(config) if words[2:].startswith(SHAPING)]
        if not changed:
            raise
        raise ValueError(
            f"--out {config.out}: its run was started with other options, {', '.join(changed)}, which its state does "
            "not fit; give the former ones, or name another directory"
        ) from error
