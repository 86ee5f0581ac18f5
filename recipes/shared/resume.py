"""How a run goes on: from its saved state, with the same or with other options."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areax.adapters.command_line.options import by_option
from areax.adapters.tracking import progress, run_dir

# Options that the form of a state depends on: the weights, the optimisers' states, and a critic or a moving reference.
SHAPING = "model", "critic.model", "objective.advantage.credit", "reference-mix", "lora.rank", "lora.targets"
OPTIMISERS = "optim", "critic.optim"
OPTIMISERS_SHAPING = "name", "state", "weights", "offload"
PRESENCE = "ema", "momentum", "reference-every"  # by being 0 or not


def changes(config: Any) -> list[str]:
    """The options that differ from those in `config.out`/config.json, as "--steps 2 -> 4"; none without such a file.

    `out` does not count: a run may be moved. Nor does another path to the same file or folder.
    """
    return [f"--{name} {_shown(then)} -> {_shown(now)}" for name, then, now in _changes(config)]


def _changes(config: Any) -> list[tuple[str, Any, Any]]:
    """(option, former value, value) of `changes`."""
    try:
        former = json.loads((Path(config.out) / run_dir.CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if not isinstance(former, dict):
        return []
    then, now = by_option(former, type(config)), _options(config)
    differs = lambda k, v: k != "out" and not _same(then.get(k, v), v)
    return [(k, then[k], v) for k, v in now.items() if differs(k, v)]


def _options(config: Any) -> dict[str, Any]:
    return by_option(run_dir.plain(config), type(config))


def _shapes(name: str, then: Any, now: Any, options: dict[str, Any]) -> bool:
    """Whether the form of a state depends on a change of an option."""
    group, _, last = name.rpartition(".")
    if name == "run.dtype":
        return _dtype_shapes(options)
    if last == "momentum" and options[f"{group}.name"] != "sgd":
        return False
    if last in PRESENCE:
        return bool(then) != bool(now)
    return last in OPTIMISERS_SHAPING if group in OPTIMISERS else name in SHAPING


def _dtype_shapes(options: dict[str, Any]) -> bool:
    """Whether a state has arrays in the dtype of the computation: weights under `offload`, a moving reference."""
    offloads = any(options.get(f"{x}.offload") and options[f"{x}.weights"] == "float32" for x in OPTIMISERS)
    return offloads or bool(options.get("reference-every"))


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
        options = _options(config)
        shaping = [(name, then, now) for name, then, now in _changes(config) if _shapes(name, then, now, options)]
        if shaping:
            changed = ", ".join(f"--{name} {_shown(then)} -> {_shown(now)}" for name, then, now in shaping)
            reason = (
                f"its run was started with other options, {changed}, which its state does not fit; give the former "
                "ones, or name another directory"
            )
        elif _dtype_shapes(options) and not options["run.dtype"]:
            reason = (
                "its state depends on --run.dtype, by default bfloat16 on accelerators and float32 on a CPU; if it was "
                "saved on the other kind of device, name its dtype"
            )
        else:
            raise
        raise ValueError(f"--out {config.out}: {reason} ({error})") from error
