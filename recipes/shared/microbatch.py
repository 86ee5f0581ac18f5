"""How many packed rows a microbatch has: `--rows auto` asks the plan, and the devices once the step is compiled."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from areax.adapters.command_line import options
from areax.adapters.commands import jobs
from areax.adapters.tracking import progress
from areax.parallel import mesh
from areax.parallel.multihost import processes
from areax.parallel.planner.chips import CHIPS, Chip, named
from areax.recipes.shared import common
from areax.recipes.shared.learner import Learner

Rows = int | Literal["auto"]
PLAIN = 8  # rows on a CPU
LIKE = "h100"  # what a device of a kind that no plan knows is taken for, with its own memory


@dataclass(frozen=True)
class Room:
    """What a step allocates on a device, and what is left there, in bytes."""

    needed: int
    left: float


def rows(config: Any, sequence: int = 0) -> int:
    """The rows of a microbatch: `config.rows`, or if that is "auto" what `jobs.rows` chooses for the devices that are
    there. All processes of a job call it, and get the same.

    Args:
      sequence: mean tokens per sample; 0 = `length`, the upper bound.
    """
    flat = options.flat(config)
    if flat.rows != "auto":
        return flat.rows
    chip, unit = here(jax.local_devices()[0]), _unit(flat)
    if chip is None:
        return -(-PLAIN // unit) * unit
    jobs.check(flat)
    chosen = processes.least(jobs.rows(flat, chip, sample_tokens=sequence))
    if jax.process_index() == 0:
        progress.say(f"--rows auto: {chosen} rows of {flat.length} tokens per microbatch, by the plan")
    return chosen


def fewer(config: Any, own: Learner, batch, now: int) -> int:
    """The rows to go on with before the first step: `now`, or half of them, which it says, if a step on the prepared
    batch does not fit the devices although the plan said so. All processes of a job call it, and get the same.

    Raises:
      ValueError: no fewer rows are possible.
    """
    flat = options.flat(config)
    found = room(own, batch) if flat.rows == "auto" else None
    lacks = found is not None and found.needed > found.left
    if not processes.anyone(lacks)[0]:
        return now
    unit = _unit(flat)
    got = f"needs {found.needed / 1e9:.2f} GB, {found.left / 1e9:.2f} GB are left" if found else "is too large"
    if now == unit:
        raise ValueError(
            f"--rows auto: a step of {now} rows of {flat.length} tokens {got}; `areax plan` with the same options says "
            "which of them save memory"
        )
    half = now // 2 // unit * unit
    if jax.process_index() == 0:
        progress.say(f"--rows auto: a step of {now} rows {got}; going on with {half}")
    return half


def _unit(flat) -> int:
    return math.prod(getattr(flat.mesh, axis) for axis in mesh.BATCH)


def here(device: jax.Device) -> Chip | None:
    """What plans know of a device, with memory of which JAX takes `common.SHARE`; None for a CPU."""
    if device.platform == "cpu":
        return None
    chip = CHIPS[named(device.device_kind) or LIKE]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return replace(chip, memory=limit / float(common.SHARE)) if limit else chip


def room(own: Learner, batch) -> Room | None:
    """What a step on a prepared batch allocates by the compiler, and what is left on the fullest device of this
    process; None if devices do not say."""
    stats = _memory_stats()
    if not all("bytes_limit" in each for each in stats):
        return None
    found = own.step.lower(own.state, batch, *own.frozen).compile().memory_analysis()
    needed = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return Room(needed, min(each["bytes_limit"] - each["bytes_in_use"] for each in stats))


def _memory_stats() -> list[dict]:
    return [device.memory_stats() or {} for device in jax.local_devices()]
