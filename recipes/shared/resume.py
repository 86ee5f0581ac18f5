"""How a run goes on: from its saved state, with the same or with other options."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areax.adapters import hf, orbax, peft
from areax.adapters.command_line.options import by_option
from areax.adapters.tracking import progress, run_dir
from areax.parallel.multihost import processes
from areax.recipes.shared import ending, sources
from areax.rollout import events

# Options that the form of a state depends on: the weights, the optimisers' states, and a critic or a moving reference.
SHAPING = (
    "model", "critic.model", "objective.advantage.credit", "reference-mix", "lora.rank", "lora.targets", "lora.dora",
    "vision",
)  # fmt: skip
OPTIMISERS = "optim", "critic.optim"
OPTIMISERS_SHAPING = "name", "state", "weights", "offload"
PRESENCE = "ema", "momentum", "reference-every", "mtp.coef"  # by being 0 or not
ANEW = "steps", "servers", "stagers"  # may be others when a complete run is started again, as `areax launch` does


def changes(config: Any) -> list[str]:
    """The options that differ from those in `config.out`/config.json, as "--steps 2 -> 4"; none without such a file.

    `out` does not count: a run may be moved. Nor does another path to the same file or folder.
    """
    return [f"--{name} {shown(then)} -> {shown(now)}" for name, then, now in changed(config)]


def changed(config: Any) -> list[tuple[str, Any, Any]]:
    """(option, former value, value) of `changes`."""
    try:
        former = json.loads((Path(config.out) / run_dir.CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if not isinstance(former, dict):
        return []
    then, now = by_option(former, type(config)), options(config)
    differs = lambda k, v: k != "out" and not same(then.get(k, v), v)
    return [(k, then[k], v) for k, v in now.items() if differs(k, v)]


def options(config: Any) -> dict[str, Any]:
    """{name on the command line: value} of a run's options."""
    return by_option(run_dir.plain(config), type(config))


def _shapes(name: str, then: Any, now: Any, options: dict[str, Any]) -> bool:
    """Whether the form of a state depends on a change of an option."""
    group, _, last = name.rpartition(".")
    if name == "run.dtype":
        return _dtype_shapes(options)
    if last == "momentum" and options[f"{group}.name"] != "sgd":
        return False
    if last in PRESENCE or name in PRESENCE:
        return bool(then) != bool(now)
    return last in OPTIMISERS_SHAPING if group in OPTIMISERS else name in SHAPING


def _dtype_shapes(options: dict[str, Any]) -> bool:
    """Whether a state has arrays in the dtype of the computation: weights under `offload`, a moving reference."""
    offloads = any(options.get(f"{x}.offload") and options[f"{x}.weights"] == "float32" for x in OPTIMISERS)
    return offloads or bool(options.get("reference-every"))


def same(one: Any, other: Any) -> bool:
    """Whether two values of an option are the same, or paths to the same file or folder."""
    paths = [x for x in (one, other) if isinstance(x, str) and os.path.exists(x)]
    return one == other or (len(paths) == 2 and os.path.samefile(*paths))


def shown(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, list):
        value = " ".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def finished(kind: str, config: Any, prompts: sources.Order | None) -> dict | None:
    """The summary of a run that has nothing left to do, which it says; None if it has.

    It has not if it is complete, its options are those given, and its model and adapters are what it wrote. All
    processes of a job call it; those that have nothing to do with files give no prompts, and get {} for a summary.

    Args:
      kind: the recipe.
      prompts: the rows to train on.

    Raises:
      ValueError: as `sources.check_same`, of a complete run, too.
    """
    summary = _finished(kind, config, prompts) if prompts is not None else None
    if not processes.anyone(summary is not None)[0]:
        return None
    if summary is not None:
        progress.say(
            f"{config.out}: the run is complete after {summary['steps']} steps, its model is in "
            f"{summary['checkpoint']}; a higher --steps goes on, another --out starts anew"
        )
    return summary or {}


def _finished(kind: str, config: Any, prompts: sources.Order) -> dict | None:
    out = Path(config.out)
    try:
        summary, _ = (hf.read_json(out / name) for name in (run_dir.SUMMARY, run_dir.CONFIG))
    except (FileNotFoundError, ValueError):
        return None
    done = summary.get("steps", 0)
    if not (summary.get("complete") and 0 < config.steps <= done):
        return None
    if any(name not in ANEW for name, _, _ in changed(config)):
        return None
    version, cursor = orbax.newest(out / "state") or (0, {})
    position = cursor.get("rollout", cursor)
    if version != done or kind != ("grpo" if "rollout" in cursor else cursor.get("recipe")) or "data" not in position:
        return None
    sources.check_same(prompts, position["data"], config.data)
    if not (known := summary.get("exports")):  # of a former version, which did not say
        return None
    try:
        hf.read_config(out / "model")
        whole = hf.verify(out / "model") and (not options(config)["lora.rank"] or peft.verify(out / "adapter"))
        found = ending.exports(out)
        for name in (one for one in known if found.get(one) != known[one]):
            raise ValueError(f"{out / name}: must be what the run exported, got another manifest.json")
    except ValueError as error:
        progress.say(f"{error}; it is written again from the state")
        return None
    return summary | {"checkpoint": str(out / "model"), "report": str(out / "report.html")} if whole else None


def write_options(config: Any, start: int, tokens: Any) -> None:
    """Writes config.json and the chat template of `tokens`; call it once nothing can refuse the run any more.

    A run that goes on from step `start` with other options says which changed, and keeps the former file as
    config.1.json, config.2.json and so on. (With another chat template it does not go on: `contents.check`.)
    """
    out = Path(config.out)
    if start and (others := changes(config)):
        kept = _kept(out / run_dir.CONFIG)
        events.emit("options", version=start, former=kept)
        progress.say(
            f"{out}: goes on from step {start} with other options, {', '.join(others)}; the former are in {kept}"
        )
    run_dir.write_config(out, config)
    own = tokens.chat_template or ""
    text = own if isinstance(own, str) else json.dumps(own, indent=1, ensure_ascii=False)
    run_dir.write_text(out / run_dir.TEMPLATE, text)


def _kept(file: Path) -> str:
    """The name under which a copy of a file is kept: config.1.json, config.2.json, ..."""
    number = 1
    while (kept := file.with_name(f"{file.stem}.{number}{file.suffix}")).exists():
        number += 1
    run_dir.write_text(kept, file.read_bytes().decode())
    return kept.name


@contextlib.contextmanager
def restoring(config: Any) -> Iterator[None]:
    """Names the options that changed, such as --model, when the state saved with the former ones does not fit."""
    try:
        yield
    except ValueError as error:
        own = options(config)
        shaping = [(name, then, now) for name, then, now in changed(config) if _shapes(name, then, now, own)]
        if shaping:
            others = ", ".join(f"--{name} {shown(then)} -> {shown(now)}" for name, then, now in shaping)
            reason = (
                f"its run was started with other options, {others}, which its state does not fit; give the former "
                "ones, or name another directory"
            )
        elif _dtype_shapes(own) and not own["run.dtype"]:
            reason = (
                "its state depends on --run.dtype, by default bfloat16 on accelerators and float32 on a CPU; if it was "
                "saved on the other kind of device, name its dtype"
            )
        else:
            raise
        raise ValueError(f"--out {config.out}: {reason} ({error})") from error
