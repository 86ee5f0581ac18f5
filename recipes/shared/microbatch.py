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
PLAIN = 8, 2, 2048  # most and fewest rows on a CPU, and positions in them: more need memory, and save no time
LIKE = "h100"  # what a device of a kind that no plan knows is taken for, with its own memory


@dataclass
class Limit:
    """The most that a microbatch of a run has: `rows` of `length` tokens, or as many positions in other rows.

    Attributes:
      rows: fewer once a step does not fit the devices (`fits`).
      positions, adds_up: of the steps that are known to fit: the most of a microbatch, and whether one had several.
    """

    rows: int
    positions: int = 0
    adds_up: bool = False


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
        most, least, positions = PLAIN
        return -(-min(max(positions // flat.length, least), most) // unit) * unit
    jobs.check(flat)
    chosen = processes.least(jobs.rows(flat, chip, sample_tokens=sequence))
    if jax.process_index() == 0:
        progress.say(f"--rows auto: {chosen} rows of {flat.length} tokens per microbatch, by the plan")
    return chosen


def fits(config: Any, own: Learner, batch, limit: Limit) -> bool:
    """Whether the devices hold a step on a prepared batch [M, B, T]; if not, `limit.rows` are half as many, which it
    says. What is no larger than steps before fits. All processes of a job call it, and get the same.

    Raises:
      ValueError: no fewer rows are possible.
    """
    flat = options.flat(config)
    M, B, T = (batch.token_BT if batch.trie is None else batch.trie.first_BT).shape
    if flat.rows != "auto" or (B * T <= limit.positions and (M > 1) <= limit.adds_up):
        return True
    found = room(own, batch)
    if not processes.anyone(found is not None and found.needed > found.left)[0]:
        limit.positions, limit.adds_up = max(limit.positions, B * T), limit.adds_up or M > 1
        return True
    unit, now = _unit(flat), min(limit.rows, -(-B * T // flat.length))
    got = f"needs {found.needed / 1e9:.2f} GB, {found.left / 1e9:.2f} GB are left" if found else "is too large"
    if now <= unit:
        raise ValueError(
            f"--rows auto: a step of {B} rows of {T} tokens {got}; `areax plan` with the same options says which of "
            "them save memory"
        )
    limit.rows = max(now // 2 // unit, 1) * unit
    if jax.process_index() == 0:
        progress.say(f"--rows auto: a step of {B} rows of {T} tokens {got}; going on with {limit.rows}")
    return False


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
