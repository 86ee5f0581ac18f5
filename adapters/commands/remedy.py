"""Options with which a step fits that a chip's compiler made too large, tried by compiling them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any

from ...parallel.planner import plan as plans
from ...parallel.planner import remedies
from ...parallel.planner.chips import Chip
from ...parallel.planner.figures import USABLE
from ..tracking import progress
from . import compiled, jobs, programs

MOST = 3  # that are compiled


def tried(
    config: Any, made: jobs.Planned, chip: Chip, name: str, known: dict, asked: dict[str, programs.Program],
    found: dict[str, dict],
) -> list[dict]:  # fmt: skip
    """Compiles the largest step that does not fit with options that save memory until one fits.

    Args:
      config, made: of the run; `known` as `jobs.made` takes it.
      name: of the chip.
      asked, found: its programs, and what became of them.

    Returns:
      [{"option", "problem", "needed_bytes"}], the last of which fits if any does; [] if all programs fit.
    """
    usable = USABLE * chip.memory
    own = {program: one for program, one in found.items() if not asked[program].engine and not one["problem"]}
    worst = max(own, key=lambda program: own[program]["needed_bytes"], default="")
    if not worst or own[worst]["needed_bytes"] <= usable:
        return []
    beside = jobs.beside(made, chip)
    scale = own[worst]["needed_bytes"] / plans.device_bytes(made.job, *beside)
    results = []
    for option in itertools.islice(_promising(made, chip, beside, usable / scale), MOST):
        changed = with_option(config, option)
        program = programs.programs(changed, jobs.made(changed, chip, **known), chip)[worst]
        with progress.phase(f"compiling for {name} with {option}: {worst}"):
            one = compiled.check(program, name)
        needed = program.beside + one.peak_bytes
        results.append({"option": option, "problem": one.problem, "needed_bytes": needed})
        if not one.problem and needed <= usable:
            break
    return results


def _promising(made: jobs.Planned, chip: Chip, beside: tuple, least: float) -> Iterator[str]:
    """Options whose plan needs at most so many bytes: fewer rows, those that save memory, all of these, more devices.

    The compiler needed more than was planned; the limit is lowered by the same ratio.
    """
    job, fits = made.job, lambda job: plans.device_bytes(job, *beside) <= least
    unit = job.size("dp", "fsdp", "ep")
    rows = job.rows // 2 // unit * unit
    while rows:
        if fits(replace(job, rows=rows)):
            yield f"--rows {rows}"
            break
        rows = rows // 2 // unit * unit
    options: list[str] = []
    change: Callable
    for option, change in remedies.cheaper(job):
        if fits(change(job)):
            yield option
    for option, change in remedies.cheaper(job):
        options, job = remedies.added(options, option), change(job)
    if len(options) > 1 and fits(job):
        yield " ".join(options)
    for wider in remedies.wider(made.job):
        if fits(wider):
            yield f"--mesh.fsdp {wider.layout.fsdp}" + f" --rows {wider.rows}" * (wider.rows != made.job.rows)
            break


def with_option(config: Any, words: str) -> Any:
    """A copy of a Config, as `options.flat` gives it, with options such as "--run.remat full --optim.offload"."""
    config = copy.copy(config)
    for word in words.removeprefix("--").split(" --"):
        name, _, value = word.partition(" ")
        first, *rest = name.replace("-", "_").split(".")
        setattr(config, first, _changed(getattr(config, first), rest, value))
    return config


def _changed(old: Any, path: list[str], value: str) -> Any:
    if path:
        assert is_dataclass(old) and not isinstance(old, type)
        return replace(old, **{path[0]: _changed(getattr(old, path[0]), path[1:], value)})
    return (value or True) if isinstance(old, bool | str) or not value else type(old)(value)
