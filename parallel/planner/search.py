"""Searches the layouts of a number of devices for those with which a training step is fastest."""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...core import packing
from ..mesh import AXES, BATCH, Layout
from . import memory, plan, remedies
from .chips import Chip
from .figures import USABLE
from .job import Job

REMATS = "none", "dots", "full"  # the more a policy keeps, the faster is a step
TIE = 0.01  # of two layouts whose steps differ by less, the one with fewer axes is better


@dataclass(frozen=True)
class Found:
    """A layout with which a step fits.

    Attributes:
      job: the step.
      options: what of the recipe's options it changes, beside mesh, rows and remat.
      step_s: seconds per optimiser step.
      peak: bytes on a device.
    """

    job: Job
    options: tuple[str, ...]
    step_s: float
    peak: float


def layouts(devices: int) -> Iterator[Layout]:
    """All layouts of so many devices."""

    def split(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (devices,)
            return
        for first in range(1, devices + 1):
            if devices % first == 0:
                yield from ((first, *rest) for rest in split(devices // first, axes - 1))

    yield from (Layout(*sizes) for sizes in split(devices, len(AXES)))


def possible(job: Job, layout: Layout, chip: Chip) -> Job | None:
    """The job on a layout, with the fewest rows; None if it does not divide the models, or splits layers, experts or
    positions among devices without fast links."""
    if layout.tp * layout.ep * layout.cp > chip.near or (layout.ep > 1 and not job.top_k):
        return None
    try:
        return replace(job, layout=layout, rows=math.prod(getattr(layout, axis) for axis in BATCH))
    except ValueError:
        return None


def fastest(
    job: Job, chip: Chip, devices: int, rows: int, most: int = 3, whole: dict | None = None,
    tick: Callable = lambda done: None,
) -> list[Found]:  # fmt: skip
    """The layouts with which a step is fastest, best first; each with the policy that keeps most activations, as many
    rows as fit, and options that save memory only if nothing fits without them. Empty if nothing fits.

    Args:
      rows: rows of an optimiser step, over all microbatches.
      whole: what is kept for the next search of the same job; None = nothing.
      tick: called with the number of layouts that are done.
    """
    whole, found = {} if whole is None else whole, []
    for done, layout in enumerate(layouts(devices), 1):
        if made := _on(job, chip, layout, rows, whole):
            found.append(made)
        tick(done)
    if not found:
        return []
    axes = lambda each: sum(getattr(each.job.layout, axis) > 1 for axis in AXES)
    least = min(each.step_s for each in found)
    rank = lambda each: (round(each.step_s / least / TIE), len(each.options), axes(each), each.step_s)
    exact = (replace(each, peak=memory.memory(each.job).peak) for each in sorted(found, key=rank))
    return list(itertools.islice((each for each in exact if each.peak <= USABLE * chip.memory), most))


def _on(job: Job, chip: Chip, layout: Layout, rows: int, whole: dict) -> Found | None:
    """The fastest way to take the job's step on a layout."""
    base = possible(job, layout, chip)
    if base is None:
        return None
    fitted = functools.partial(_fitted, chip=chip, rows=rows, whole=whole)
    found = [made for remat in REMATS if (made := fitted(replace(base, remat=remat)))]
    if found:
        return min(found, key=lambda each: each.step_s)
    options, narrow = list[str](), replace(base, remat="full")
    for option, change in remedies.cheaper(narrow):
        options, narrow = remedies.added(options, option), change(narrow)
        if made := fitted(narrow):
            return replace(made, options=tuple(options))
    made = fitted(replace(narrow, remat="offload"))
    return made and replace(made, options=tuple(options))


def _fitted(made: Job, chip: Chip, rows: int, whole: dict) -> Found | None:
    """The job with the fewest microbatches that fit, of equal rows."""
    unit, state = made.rows, _states(made, whole)

    def packed(used: int) -> Job:
        return replace(made, rows=-(-rows // (used * unit)) * unit, used=used, microbatches=packing.bucket(used))

    peak = lambda used: memory.memory(packed(used), state).peak
    counts = range(1, -(-rows // unit) + 1)
    place = bisect.bisect_left(counts, True, key=lambda used: peak(used) <= USABLE * chip.memory)
    if place == len(counts):
        return None
    best = packed(counts[place])
    return Found(best, (), plan.time(best, chip, state)[0], peak(best.used))


def _states(job: Job, whole: dict) -> memory.States:
    """What a device holds of the optimisers, in proportion to its weights: `memory.states` takes long, and depends on
    the layout hardly more than that."""
    key = job.optim, job.critic and job.critic.optim
    alone = replace(job, layout=Layout(), rows=1)
    if key not in whole:
        whole[key] = memory.states(alone)

    def part(state: memory.State | None, here: Job | None, there: Job | None):
        if state is None or here is None or there is None:
            return None
        share = memory.size(here, here.trained) / memory.size(there, there.trained)
        return memory.State(round(share * state.moments), round(share * state.streamed))

    own, critics = whole[key]
    first = part(own, job, alone)
    assert first is not None
    return first, part(critics, job.critics_step, alone.critics_step)
