"""Memory, FLOPs, traffic and time of a run without devices: from a recipe's options and a model's config.json."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

from ... import models
from ...core import losses, packing, param
from ...core.optim import Optimizer
from ...models import layer, lora
from ...models.attention.segments import segments
from ...models.layers import recurrence
from ...parallel import mesh as meshes
from ...parallel.planner import memory, remedies
from ...parallel.planner import plan as plans
from ...parallel.planner.chips import CHIPS, Chip
from ...parallel.planner.job import Job
from .. import hf
from ..command_line import options as grouped
from ..runtime import hub
from . import aot

NEEDS = ("model", "mesh", "rows", "length", "run")  # options that a recipe's Config must have
RL = ("group_size", "groups", "minibatches", "sampling", "eta", "servers", "serve", "colocated")  # and if it generates
FIRST_OPTIONS = (
    "model", "chip", "rollout-chips", "sample-tokens", "check", "json", "length", "rows", "mesh.dp", "mesh.fsdp",
    "mesh.tp", "mesh.cp", "mesh.ep", "run.dtype", "run.remat",
)  # fmt: skip
SCALE = ("", "k", "M", "G", "T", "P", "E", "Z")


@dataclass(frozen=True)
class Options:
    """Options of the plan, in addition to the recipe's.

    Attributes:
      chip: accelerator of the mesh and of the generation servers: a100, h100, h200, b200, b300, mi300, v4, v5e, v5p,
        v6e, or another that you add to parallel/planner/chips.py.
      rollout_chips: devices reserved for generation; 0 = as many as needed to keep up with training.
      sample_tokens: mean tokens per sample, prompt plus completion; 0 = `length`, the upper bound.
      check: also compile the real step on virtual CPUs; compares its argument bytes, takes a minute or two.
      json: print the plan as JSON.
    """

    chip: str = "h100"
    rollout_chips: int = 0
    sample_tokens: int = 0
    check: bool = False
    json: bool = False

    def __post_init__(self):
        if self.chip not in CHIPS:
            known = ", ".join(CHIPS)
            raise ValueError(f"--chip must be one of {known}, got {self.chip!r}; add it to parallel/planner/chips.py")


def plan(config: Any, options: Options = Options()) -> dict:
    """Computes the plan of a recipe's Config.

    Returns:
      {"model", "mesh", "chip", "fits", "suggested", "figures": {name: {"value", "kind", "section", "text"}}}; kind is
      "exact" or "estimate", a name ends in its unit; "suggested" are options, each of which makes the trainer fit, or
      faster if it does. With `check` also "agrees": whether argument bytes equal XLA's.

    Raises:
      ValueError: the layout does not divide the model; as `hf.read_config`; the Config lacks an option.
    """
    config, chip = grouped.flat(config), CHIPS[options.chip]
    if auto := getattr(config, "rows", 0) == "auto":
        config.rows = _rows(config, chip, options)
    planned = _planned(config, chip, options)
    job, step, generation = planned.job, planned.step, planned.generation
    made = plans.plan(job, chip, generation=generation, push_itemsize=planned.itemsize)
    figures, checked, beside = list(made.figures), {}, planned.beside
    trains = plans.device_bytes(job, *beside) <= plans.USABLE * chip.memory
    suggested = remedies.fitting(job, chip, *beside)
    if trains:
        suggested = [] if auto else remedies.faster(job, chip, *beside)
    if options.check:
        # Kernels of other platforms cannot be compiled here; they do not change the arguments.
        found = aot.check(replace(step, run=replace(step.run, attention="auto", expert_kernel="auto")))
        figures += _compiled(found)
        checked = {"agrees": found["argument_bytes"] == memory.memory(job).arguments}
    return {
        "model": str(config.model), "family": step.config.family, "mesh": str(config.mesh),
        "devices": config.mesh.devices, "chip": options.chip, "rows": config.rows, "length": config.length,
        "microbatches": job.used, "fits": made.fits, "suggested": suggested, **checked,
        "figures": {f.name: {"value": f.value, "kind": f.kind, "section": f.section, "text": f.text}
                    for f in figures},
    }  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """What a plan is made of.

    Attributes:
      job, generation: the planner's input.
      step: the same step, to compile.
      itemsize: bytes of a weight in an exported checkpoint.
      beside: a server's bytes, and whether it is on the trainer's first device, as `plans.memory_figures` takes them.
    """

    job: Job
    generation: plans.Generation | None
    step: aot.Step
    itemsize: int
    beside: tuple[float, plans.Shares]


def rows(config: Any, chip: Chip, options: Options = Options()) -> int:
    """The rows per microbatch that `--rows auto` chooses on such a chip: `remedies.paying`.

    Args:
      config: a recipe's Config, whose own `rows` are not read.

    Raises:
      ValueError: as `plan`.
    """
    return _rows(grouped.flat(config), chip, options)


def _rows(config: Any, chip: Chip, options: Options) -> int:
    config = copy.copy(config)
    config.rows = math.prod(getattr(config.mesh, axis) for axis in meshes.BATCH)
    planned = _planned(config, chip, options)
    return remedies.paying(planned.job, chip, *planned.beside) or config.rows


def _planned(config: Any, chip: Chip, options: Options) -> Planned:
    needs = NEEDS + (RL if _generates(config) else ("batch",))
    missing = [name for name in needs if not hasattr(config, name)]
    if missing:
        raise ValueError(f"plan: a recipe's Config needs {', '.join(needs)}, got no {missing[0]}")
    settings = hf.read_config(hub.folder(config.model))
    if config.length > settings.context:
        raise ValueError(
            f"plan: --length must be at most {settings.context}, the context of {config.model}, got {config.length}"
        )
    _refuse(config)
    table = models.table(settings)
    sequence = options.sample_tokens or config.length
    if not 0 < sequence <= config.length:
        raise ValueError(f"plan: --sample-tokens must be from 1 to --length {config.length}, got {sequence}")
    samples, a_row = _samples(config), config.length // sequence
    used = max(1, math.ceil(samples / a_row / config.rows))
    adapters = getattr(config, "lora", lora.Lora())
    run = replace(config.run, dtype=config.run.dtype or models.default_dtype(chip.platform))
    step = aot.Step(
        settings, _objective(config), _optim(config), run, config.mesh, config.rows, config.length,
        microbatches=packing.bucket(used), slots=1 << (a_row - 1).bit_length(), lora=adapters,
    )  # fmt: skip
    reference = getattr(step.objective, "needs_reference", False)
    where: Literal["", "device", "host"] = "device" if reference else ""
    if reference and getattr(config, "offload_reference", False):
        where = "host"
    router = getattr(settings, "router", None)
    job = Job(
        table, settings.records, config.mesh, config.rows, config.length, step.microbatches, used, sequence,
        dtype=run.dtype, remat=run.remat, cp=run.cp, head_chunk=run.head_chunk, top_k=getattr(settings, "top_k", 0),
        router_fp32=router is not None and router.fp32, activation=settings.activation.kind,
        chunks=recurrence.CPU if chip.platform == "cpu" else recurrence.ELSEWHERE, slots=step.slots,
        reads=aot.reads(step), scores=getattr(step.objective, "needs_scores", False) + bool(where), reference=where,
        platform=chip.platform, optim=step.optim, adapters=lora.table(table, adapters) if adapters.rank else None,
        frozen=step.frozen if adapters.rank else "float32", frozen_shapes=aot.frozen(step) if adapters.rank else None,
    )  # fmt: skip
    itemsize = hf.save_dtype(settings, param.abstract(table)).itemsize
    generation = _generation(config, options, sequence, itemsize, settings, chip.platform)
    shares: plans.Shares = generation.shares if generation else "no"
    beside = plans.server_bytes(job, chip, generation) if generation else 0.0, shares
    return Planned(job, generation, step, itemsize, beside)


def _refuse(config) -> None:
    """Raises ValueError for options that the formulas do not cover."""
    balance = getattr(config, "balance", None)
    objective = _objective(config)
    policy = isinstance(objective, losses.Policy)
    for known, what in (
        (not isinstance(objective, losses.KTO | losses.RewardModel), f"the objective {type(objective).__name__}"),
        (config.run.dispatch == "gather", f"--run.dispatch {config.run.dispatch}"),
        (not getattr(getattr(config, "sampling", None), "routed_experts", False), "--sampling.routed-experts"),
        (not (balance and (balance.load or balance.z)), f"{balance}"),
        (not getattr(objective, "needs_values", False), "a critic"),
        (not (policy and objective.advantage.needs), "reward components"),
        (
            not isinstance(objective, losses.Distill) and not (policy and objective.advantage.teacher),
            "the weights and work of a teacher",
        ),
        (not getattr(config, "distill_coef", 0), "the weights and work of a teacher"),
        (getattr(config, "epochs", 1) == 1, f"--epochs {getattr(config, 'epochs', 1)}"),
        (
            not (policy and objective.correction.proximal == "interpolate"),
            "--objective.correction.proximal interpolate",
        ),
    ):
        if not known:
            raise ValueError(f"plan: {what} cannot be planned; plan the run without it")


def _samples(config) -> int:
    """Samples per optimiser step."""
    if _generates(config):
        return config.groups * config.group_size // config.minibatches
    return config.batch * (2 if isinstance(_objective(config), losses.Preference) else 1)


def _generates(config) -> bool:
    return hasattr(config, "group_size")


def _objective(config):
    return getattr(config, "objective", losses.SFT())


def _optim(config) -> Optimizer:
    """The optimiser with some valid schedule length: it does not change the state."""
    spec = getattr(config, "optim", Optimizer())
    return replace(spec, steps=spec.steps or spec.warmup + 1)


def _generation(
    config, options: Options, sequence: float, itemsize: int, settings, platform: str
) -> plans.Generation | None:
    if not _generates(config):
        return None
    new = min(config.sampling.max_new_tokens, sequence)
    engine = None if config.servers else config.serve  # the embedded engine, started by the recipe
    if engine and options.rollout_chips:
        raise ValueError(
            f"plan: without --servers the recipe starts one server on one chip, got --rollout-chips "
            f"{options.rollout_chips}; set --servers, or leave it out"
        )
    size = itemsize
    if engine:
        size = jnp.dtype(models.default_dtype(platform) if engine.dtype == "auto" else engine.dtype).itemsize
    cache, state = layer.cached_bytes(settings.records, size, twice=engine is not None)
    shares: plans.Shares = "turns" if config.colocated else "always" if config.serve.inside else "no"
    return plans.Generation(
        samples=config.groups * config.group_size, prompt=sequence - new, new=new,
        slots=engine.slots if engine else None,
        itemsize=size, cache=cache, state=state, devices=options.rollout_chips,
        steps=config.minibatches, ahead=config.eta, embedded=engine is not None, shares=shares,
        context=segments(min(config.serve.context, settings.context))[-1].stop,
    )  # fmt: skip


def _compiled(found: dict) -> list[plans.Figure]:
    of = lambda name, value, kind, text: plans.Figure("check", name, value, kind, text)
    return [
        of("compiled_argument_bytes", found["argument_bytes"], "exact", "arguments of the compiled step, by XLA"),
        of("cpu_temporary_bytes", found["temporary_bytes"], "exact", "XLA CPU temporaries, not a GPU's"),
        of("check_s", found["seconds"], "exact", "the check took"),
        of("check_host_bytes", found["host_bytes"], "exact", "peak memory of the check"),
    ]


# -- text ----------------------------------------------------------------------------------------


def show(report: dict) -> str:
    """The plan as a table."""
    figures = report["figures"]
    lines = [
        f"{report['model']} ({report['family']}) on {report['mesh']}: {report['devices']} x {report['chip']}, "
        f"{report['microbatches']} microbatches of {report['rows']} x {report['length']} tokens"
    ]
    titles = {
        "memory": "memory per device", "work": "work per optimiser step, all devices",
        "traffic": "sent per device and step", "time": "time", "push": "weight push",
        "generation": "generation", "check": "check: the real step, compiled",
    }  # fmt: skip
    for section, title in titles.items():
        shown = {name: f for name, f in figures.items() if f["section"] == section and f["value"]}
        if shown:
            lines += ["", title]
            row = lambda name, f: f"  {name:<26}{human(name, f['value']):>13}  {f['kind']:<9} {f['text']}"
            lines += [row(name, f) for name, f in shown.items()]
    bytes_of = {name: figures[name]["value"] for name in figures if name.endswith("bytes")}
    peak, usable = bytes_of.get("shared_bytes", bytes_of["peak_bytes"]), bytes_of["usable_bytes"]
    verdict = "fits" if report["fits"] else f"does not fit with --rows {report['rows']}"
    if peak <= usable < bytes_of.get("server_bytes", 0):
        peak = bytes_of["server_bytes"]
        verdict = "the server does not fit; lower --serve.slots or --serve.context, or name larger ones by --servers"
    lines += ["", f"{verdict}: {human('bytes', peak)} of {human('bytes', usable)} usable on one {report['chip']}"]
    suggested = report["suggested"]
    if peak > usable and peak != bytes_of.get("server_bytes"):
        lines.append("fits with " + (", or with ".join(suggested) or "none of the options that save memory"))
    elif suggested:
        lines.append(f"faster with {suggested[0]}, which fits")
    if "agrees" in report:
        lines.append("argument bytes: " + ("equal to XLA's" if report["agrees"] else "NOT equal to XLA's"))
    return "\n".join(lines)


def human(name: str, value: float) -> str:
    """Formats a number with the unit that its name ends in."""
    unit = {"bytes": "B", "flops": "FLOP", "s": "s"}.get(name.rpartition("_")[2], "")
    if name.endswith("bytes_per_token"):
        unit = "B"
    if name in ("mfu", "hardware_utilisation"):
        return f"{value:.1%}"
    if unit == "s" and not name.endswith("per_s"):
        return f"{value:.3g} s"
    if value < 10000 and not unit:
        return f"{value:,.0f}"
    power = min(len(SCALE) - 1, max(0, int(math.log10(max(value, 1)) // 3)))
    shown = f"{value / 1000**power:.2f}" if power else f"{value:.0f}"
    return f"{shown} {SCALE[power]}{unit if not name.endswith('per_s') else ''}".rstrip()
