"""The fastest ways to run a recipe on a number of devices: mesh, rows and what saves memory; for RL also the split
between trainer and servers, and eta.

The planner chooses layouts. For RL the simulator runs the best splits, with the planner's rates: it knows what formulas
do not, that a batch waits for its longest answers.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...core import losses, packing
from ...parallel.mesh import AXES, Layout
from ...parallel.planner import generation as generations
from ...parallel.planner import search
from ...parallel.planner.chips import CHIPS, Chip
from ...parallel.planner.figures import USABLE
from ...rollout.simulation import simulate
from ...rollout.simulation.server import Rates
from ..command_line import options as grouped
from ..tracking import progress
from . import jobs
from .plan import human

SHOWN = 3  # suggestions
SPLITS = 3  # that are simulated: those that the planner finds fastest
ETAS = 0, 1, 2, 4
QUIET_S = 2.0  # until progress is shown
BETTER = 0.98  # a suggestion with a larger eta takes at most this part of the time with a smaller one
STEPS = 9  # simulated for each
PROMPT, NEW = 64, 512  # most tokens of a prompt, and of a mean completion, that are simulated one by one
SERVER = "http://127.0.0.1:1"  # stands for servers, of which a plan reads no address


@dataclass(frozen=True)
class Suggestion:
    """A way to run a recipe.

    Attributes:
      found: the trainer's layout and step.
      servers, server_devices: servers beside it, and the devices of each.
      batch_s: seconds per batch, of which RL takes several optimiser steps.
      tokens_per_s: tokens trained on; of RL the generated ones.
      eta, staleness: of RL, and the mean age of groups in versions.
    """

    found: search.Found
    batch_s: float
    tokens_per_s: float
    servers: int = 0
    server_devices: int = 0
    eta: int | None = None
    staleness: float = 0.0


def suggest(config: Any, options: Any) -> dict:
    """Finds how to run a recipe's Config on `options.devices` devices.

    Returns:
      {"model", "chip", "devices", "fits", "usable_bytes", "suggestions": [{"options", "trainers", "servers",
      "server_devices", "step_s", "tokens_per_s", "eta", "staleness", "peak_bytes"}, ...], "launch"}, the best first;
      "launch" is the command that starts the best with its servers; a key that does not apply is None.

    Raises:
      ValueError: as `plan.plan`; servers are to share the trainer's devices.
    """
    config, chip = grouped.flat(config), CHIPS[options.chip]
    jobs.check(config)
    generates = jobs.generates(config)
    if generates and (config.colocated or config.serve.inside):
        raise ValueError(
            "plan: --suggest divides the devices between trainer and servers, got --colocated or --serve.inside; leave "
            "them out, or plan meshes of your own without --suggest"
        )
    own = generates and not config.servers
    if own and config.serve.mesh.devices == 1:
        config.servers = (SERVER,)  # of any kind, on as many chips as they need
    given, config.mesh, config.rows = config.mesh, Layout(), 1  # the search chooses both
    made = jobs.made(config, chip, sample_tokens=options.sample_tokens, image_tokens=options.image_tokens)
    server, usable = jobs.beside(made, chip)[0], USABLE * chip.memory
    if server > usable:
        raise ValueError(
            f"plan: a server on {config.serve.mesh} must fit {human('bytes', usable)} of a {options.chip}, got "
            f"{human('bytes', server)}; raise --serve.mesh.tp, or leave --serve.mesh out"
        )
    tries = made.job.tries
    rows = tries.rows if tries else math.ceil(jobs.samples(config) / (config.length // int(made.job.sequence)))
    if generates:
        assert made.generation is not None
        least = 1 + generations.rates(made.job, chip, made.generation).devices
        if options.devices < least:
            raise ValueError(
                f"plan: --suggest needs at least {least} --devices, {least - 1} of them for a server, got "
                f"{options.devices}; trainer and server share devices with --colocated --eta 0, without --suggest"
            )
        found = _with_servers(config, made, chip, options.devices, rows)
    else:
        with _progress("layouts", len(list(search.layouts(options.devices)))) as tick:
            layouts = search.fastest(made.job, chip, options.devices, rows, SHOWN, tick=tick)
        found = [Suggestion(each, each.step_s, rows * config.length / each.step_s) for each in layouts]
    return {
        "model": str(config.model), "chip": options.chip, "devices": options.devices, "fits": bool(found),
        "usable_bytes": USABLE * chip.memory, "suggestions": [_row(each, given, made.job.remat) for each in found],
        "launch": _launch(found[0], chip) if found and own else None,
    }  # fmt: skip


def _row(one: Suggestion, mesh: Layout, remat: Any) -> dict:
    """A suggestion as `--json` has it, with the options that differ from those given."""
    job = one.found.job
    options = [
        f"--mesh.{axis} {getattr(job.layout, axis)}"
        for axis in AXES
        if getattr(job.layout, axis) != getattr(mesh, axis)
    ]
    options += [f"--rows {job.rows}", *([f"--run.remat {job.remat}"] if job.remat != remat else []), *one.found.options]
    options += [] if one.eta is None else [f"--eta {one.eta}"]
    return {
        "options": " ".join(options), "trainers": job.layout.devices, "servers": one.servers or None,
        "server_devices": one.server_devices or None, "step_s": one.batch_s, "tokens_per_s": one.tokens_per_s,
        "eta": one.eta, "staleness": None if one.eta is None else one.staleness, "peak_bytes": one.found.peak,
    }  # fmt: skip


def _launch(one: Suggestion, chip: Chip) -> str:
    """The command that divides the devices like this, without the recipe and its options."""
    devices, each = one.found.job.layout.devices, one.server_devices
    processes = next(n for n in range(-(-devices // chip.near), devices + 1) if devices % n == 0)  # of equal size
    words = [f"--processes {processes}"] if processes > 1 else []
    words += [f"--devices {devices // processes}", f"--servers {one.servers}"]
    words += [f"--server.mesh.tp {each}"] if each > 1 else []
    return f"areax launch {' '.join(words)} -- train ..."


def show(report: dict) -> str:
    """The suggestions, one a line."""
    on, usable = f"{report['devices']} x {report['chip']}", human("bytes", report["usable_bytes"])
    if not report["fits"]:
        return (
            f"{report['model']} does not fit on {on} with any mesh, rows or option that saves memory: {usable} are "
            "usable on each; raise --devices, lower --length, or train adapters with --lora.rank"
        )
    lines = [f"{report['model']} on {on}, fastest first; {usable} usable on each"]
    for one in report["suggestions"]:
        facts = [
            f"{human('s', one['step_s'])} a {'batch' if one['servers'] else 'step'}",
            f"{human('tokens', one['tokens_per_s'])} tokens/s",
            *([f"staleness {one['staleness']:.2f}"] if one["servers"] else []),
            f"{human('bytes', one['peak_bytes'])} of memory",
        ]
        if one["servers"]:
            facts.insert(0, f"{one['trainers']} devices train, {one['servers']} servers of {one['server_devices']}")
        lines.append(f"  {one['options']}: {', '.join(facts)}")
    if report["launch"]:
        lines.append(f"start the first by {report['launch']} with its options (docs/launch.md)")
    return "\n".join(lines)


def _with_servers(config, made: jobs.Planned, chip: Chip, devices: int, rows: int) -> list[Suggestion]:
    """Splits of the devices and values of eta: those that the formulas find fastest, as the simulator ranks them."""
    g = made.generation
    assert g is not None
    each = generations.rates(made.job, chip, g).devices
    etas = [eta for eta in ETAS if eta == 0 or _corrects(config)]
    split: list[tuple[float, int, search.Found]] = []
    whole: dict = {}
    counts = [n for n in range(1, (devices - 1) // each + 1) if _even(devices - n * each)]
    with _progress("splits", len(counts)) as tick:
        for done, servers in enumerate(counts, 1):
            best = search.fastest(made.job, chip, devices - servers * each, rows, 1, whole)
            tick(done)
            if best:
                train_s = g.steps * best[0].step_s
                generate_s = generations.batch_s(made.job, chip, replace(g, ahead=max(etas)), servers)
                split.append((max(train_s, generate_s), servers, best[0]))
    split = sorted(split, key=lambda one: (one[0], one[1]))[:SPLITS]
    found = []
    with _progress("simulations", len(split) * len(etas)) as tick:
        for i, (_, servers, trainer) in enumerate(split):
            found.append(_least_eta(config, chip, g, trainer, servers, etas))
            tick((i + 1) * len(etas))
    return sorted(found, key=lambda one: one.batch_s)[:SHOWN]


def _even(devices: int) -> bool:
    """Whether meshes of so many devices divide most models: 2^k or 3 * 2^k."""
    return packing.bucket(devices) == devices


def _least_eta(
    config, chip: Chip, g: generations.Generation, found: search.Found, servers: int, etas: list[int]
) -> Suggestion:
    """A split with the least eta of which a larger one is not faster, by the simulator, or could not be: a batch takes
    as long as the trainer trains and publishes."""
    speed, best = generations.rates(found.job, chip, g), None
    for eta in etas:
        if best and g.steps * found.step_s + speed.publish_s > BETTER * best.batch_s:
            break
        run, unit = _simulated(config, chip, replace(g, ahead=eta), found, servers)
        out = simulate.simulate(run, eta)
        if best and out.step_s > BETTER * best.batch_s:
            break
        best = Suggestion(found, out.step_s, unit * out.tokens_s, servers, speed.devices, eta, out.mean_staleness)
    assert best is not None  # there is eta 0
    return best


def _simulated(
    config, chip: Chip, g: generations.Generation, found: search.Found, servers: int
) -> tuple[simulate.Config, float]:
    """(the run for the simulator, with the planner's rates; tokens for which each of its own stands, since it takes
    longer the more there are). Completions vary in length if their mean is below the longest."""
    speed = generations.rates(found.job, chip, g, g.samples * (g.ahead + 1) / servers)
    unit, longest = max(1.0, g.prompt / PROMPT, g.new / NEW), config.sampling.max_new_tokens
    rates = Rates(
        slots=max(1, int(speed.slots)), step_s=speed.step_s * unit, request_s=speed.request_s * unit,
        read_tokens_s=speed.read_tokens_s / unit, load_s=speed.load_s, memory=int(speed.cache_tokens / unit),
    )  # fmt: skip
    train_tokens_s = g.samples * (g.prompt + g.new) / (g.steps * found.step_s)
    run = simulate.Config(
        servers=servers, server=rates, trainers=1, train_tokens_s=train_tokens_s / unit, publish_s=speed.publish_s,
        groups=config.groups, group_size=g.samples // config.groups, max_concurrent=config.max_concurrent,
        prompt=max(1, round(g.prompt / unit)), new=g.new / unit, longest=max(1, round(longest / unit)),
        cv=float(g.new < longest), steps=STEPS,
    )  # fmt: skip
    return run, unit


def _corrects(config) -> bool:
    """Whether the objective may train on samples of older weights."""
    objective = getattr(config, "objective", None)
    return not isinstance(objective, losses.Policy) or objective.corrects


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields tick(done): a bar on a terminal, once the work takes a while; elsewhere lines, as `progress.phase`."""
    began, shown = time.monotonic(), None
    with contextlib.ExitStack() as stack:
        if total and not sys.stderr.isatty():
            stack.enter_context(progress.phase(f"plan: at most {total} {what}"))

        def tick(done: int) -> None:
            nonlocal shown
            if shown is None and sys.stderr.isatty() and time.monotonic() - began > QUIET_S:
                shown = stack.enter_context(progress.steps(what, total, start=done))
            if shown:
                shown(done)

        yield tick
