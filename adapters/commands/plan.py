"""Memory, FLOPs, traffic and time of a run without devices: from a recipe's options and a model's config.json."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...parallel.planner import memory, remedies
from ...parallel.planner import plan as plans
from ...parallel.planner.chips import CHIPS, Chip
from ...parallel.planner.figures import USABLE, Figure
from ..command_line import options as grouped
from ..tracking import progress
from . import aot, compiled, jobs, programs, remedy

FIRST_OPTIONS = (
    "model", "chip", "suggest", "devices", "rollout-chips", "sample-tokens", "compile", "json", "length",
    "rows", "mesh.dp", "mesh.fsdp", "mesh.tp", "mesh.cp", "mesh.ep", "run.dtype", "run.remat",
)  # fmt: skip
SLOW = 1.5  # times as long as training: generation is what a run waits for
SCALE = ("", "k", "M", "G", "T", "P", "E", "Z")


@dataclass(frozen=True)
class Options:
    """Options of the plan, in addition to the recipe's.

    Attributes:
      chip: accelerator of the mesh and of the generation servers: a100, h100, h200, b200, b300, mi300, v4, v5e, v5p,
        v6e, or another that you add to parallel/planner/chips.py.
      rollout_chips: devices reserved for generation; 0 = as many as needed to keep up with training.
      sample_tokens: mean tokens per sample, prompt plus completion; 0 = `length`, the upper bound.
      image_tokens: mean tokens of a sample that stand for images, with --vision frozen or trained; 0 = all of a row
        may, the upper bound.
      suggest: find the fastest mesh and options on `devices`; where the recipe generates also the split between
        trainer and servers, and eta, which are simulated. The mesh and rows given are not planned.
      devices: with `suggest`, how many of `chip` there are.
      compile: also compile the run's programs with the chip's compiler; it says how much memory each needs, and takes
        some minutes the first time. Needs areax[cuda] or areax[tpu], but no chip.
      check: also compile the real step on virtual CPUs; compares its argument bytes, takes a minute or two.
      json: print the plan as JSON.
    """

    chip: str = "h100"
    rollout_chips: int = 0
    sample_tokens: int = 0
    image_tokens: int = 0
    suggest: bool = False
    devices: int = 0
    compile: bool = False
    check: bool = False
    json: bool = False

    def __post_init__(self):
        if self.chip not in CHIPS:
            known = ", ".join(CHIPS)
            raise ValueError(f"--chip must be one of {known}, got {self.chip!r}; add it to parallel/planner/chips.py")
        if self.suggest != (self.devices > 0):
            raise ValueError(
                f"--suggest and --devices go together: add --devices N to find a mesh for N {self.chip}, or "
                f"--suggest; to plan a mesh of yours, name it, such as --mesh.fsdp N; got --devices {self.devices}"
            )
        if self.suggest and (self.compile or self.check):
            raise ValueError(
                "--suggest compiles nothing: plan what it suggests with --compile or --check, and leave them out here"
            )


def plan(config: Any, options: Options = Options()) -> dict:
    """Computes the plan of a recipe's Config.

    Returns:
      {"model", "mesh", "chip", "fits", "suggested", "server_split", "shared", "figures": {name: {"value", "kind",
      "section", "text"}}}; kind is "exact" or "estimate", a name ends in its unit; "suggested" are options, each of
      which makes the trainer fit, or faster if it does; "server_split" is the option that makes the recipe's own server
      fit, or ""; "shared" says what `--trie auto` does, "" if it is off.
      With `check` also "agrees": whether argument bytes equal XLA's. With `compile` also "compiled": {name: program}
      as the chip's compiler made it (`compiled.Compiled`), with the bytes that the device needs; "fits" says that they
      fit, too; and "tried", options that were compiled where a step does not (`remedy.tried`).

    Raises:
      ValueError: the layout does not divide the model; as `hf.read_config`; the Config lacks an option.
    """
    config, chip = grouped.flat(config), CHIPS[options.chip]
    jobs.check(config)
    known = dict(
        sample_tokens=options.sample_tokens, image_tokens=options.image_tokens, rollout_chips=options.rollout_chips
    )
    if auto := config.rows == "auto":
        config.rows = jobs.rows(config, chip, **known)
    made = jobs.made(config, chip, **known)
    job, generation, (step, *critics) = made.job, made.generation, made.steps
    planned = plans.plan(job, chip, generation=generation, push_itemsize=made.itemsize)
    figures, beside = list(planned.figures), jobs.beside(made, chip)
    checked: dict[str, Any] = {}
    trains = plans.device_bytes(job, *beside) <= USABLE * chip.memory
    suggested = remedies.fitting(job, chip, *beside)
    if trains:
        suggested = [] if auto else remedies.faster(job, chip, *beside)
        suggested = _sharing(config, made, chip, known) + suggested
    split = _split(config, made, chip, known)
    if split and not trains and beside[1] != "no":
        suggested.append(split)
    if options.check:
        m = memory.memory(job)
        agrees = True
        for one, formula, prefix in ((step, m, ""), *((critic, m.critic, "critic_") for critic in critics)):
            # Kernels of other platforms cannot be compiled here; they do not change the arguments.
            found = aot.check(replace(one, run=replace(one.run, attention="auto", expert_kernel="auto")))
            figures += _compiled(found, prefix)
            agrees &= formula is not None and found["argument_bytes"] == formula.arguments
        checked = {"agrees": agrees}
    fits = planned.fits
    if options.compile:
        asked = programs.programs(config, made, chip)
        by_compiler = made_by_compiler(asked, options.chip)
        fits &= all(not one["problem"] and one["needed_bytes"] <= USABLE * chip.memory for one in by_compiler.values())
        tried = remedy.tried(config, made, chip, options.chip, known, asked, by_compiler)
        checked |= {"compiled": by_compiler, "tried": tried}
    return {
        "model": str(config.model), "family": made.settings.family, "mesh": str(config.mesh),
        "devices": config.mesh.devices, "chip": options.chip, "rows": config.rows, "length": config.length,
        "microbatches": job.used, "fits": fits, "suggested": suggested, "server_split": split,
        "shared": made.shared,
        **checked, "figures": {f.name: {"value": f.value, "kind": f.kind, "section": f.section, "text": f.text}
                               for f in figures},
    }  # fmt: skip


def made_by_compiler(asked: dict[str, programs.Program], chip: str) -> dict[str, dict]:
    """{name: fields of `compiled.Compiled`, and "needed_bytes": what the device holds while the program runs}."""
    with progress.phase(f"compiling {len(asked)} programs for {chip}"):
        found = compiled.check_all(asked, chip, say=progress.say)
    of_server = max((found[name].argument_bytes for name in asked if asked[name].engine), default=0)

    def needed(name: str) -> int:
        own = found[name]
        kept = of_server - own.argument_bytes if asked[name].engine else 0
        return asked[name].beside + kept + own.peak_bytes

    return {name: asdict(one) | {"needed_bytes": needed(name)} for name, one in found.items()}


def _sharing(config: Any, made: jobs.Planned, chip: Chip, known: dict) -> list[str]:
    """The option with which groups compute their prompts once, if that makes a step of this Config faster, and fits."""
    if made.generation is None or getattr(config, "trie", "") != "off":
        return []
    config = copy.copy(config)
    config.trie = "auto"
    job = jobs.made(config, chip, **known).job
    fits = job.tries and plans.device_bytes(job, *jobs.beside(made, chip)) <= USABLE * chip.memory
    faster = fits and plans.time(job, chip)[0] < remedies.WORTH * plans.time(made.job, chip)[0]
    return ["--trie auto"] if faster else []


def _split(config: Any, made: jobs.Planned, chip: Chip, known: dict) -> str:
    """The option that splits the recipe's own server over as few chips as make it fit, where it does not; or ""."""
    fits = lambda one: (
        (server := jobs.beside(one, chip))[0] <= USABLE * chip.memory
        and (server[1] == "no" or plans.device_bytes(one.job, *server) <= USABLE * chip.memory)
    )
    if made.generation is None or not made.generation.embedded or fits(made):
        return ""
    shares = made.generation.shares != "no"
    most = config.mesh.devices if shares else chip.near
    tp = 2 * config.serve.mesh.tp
    while tp <= most:
        wider = copy.copy(config)
        wider.serve = replace(config.serve, mesh=replace(config.serve.mesh, tp=tp))
        try:
            if fits(jobs.made(wider, chip, **known)):
                return f"--serve.mesh.tp {tp}"
        except ValueError:  # it does not divide the model
            break
        tp *= 2
    return ""


def _compiled(found: dict, prefix: str = "") -> list[Figure]:
    whose = f"the {prefix[:-1]}'s step" if prefix else "the compiled step"
    of = lambda name, value, kind, text: Figure("check", prefix + name, value, kind, text)
    return [
        of("compiled_argument_bytes", found["argument_bytes"], "exact", f"arguments of {whose}, by XLA"),
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
        split = f"split it with {report['server_split']}, " if report["server_split"] else ""
        verdict = (
            f"the server does not fit; {split}lower --serve.slots or --serve.context, or name larger ones by --servers"
        )
    lines += [
        "",
        *([f"--trie auto: {report['shared']}"] if report["shared"] else []),
        *_generating(report),
        f"{verdict}: {human('bytes', peak)} of {human('bytes', usable)} usable on one {report['chip']}",
    ]
    suggested = report["suggested"]
    if peak > usable and peak != bytes_of.get("server_bytes"):
        lines.append("fits with " + (", or with ".join(suggested) or "none of the options that save memory"))
    elif suggested:
        lines.append(f"faster with {', or with '.join(suggested)}, which fits")
    if "agrees" in report:
        lines.append("argument bytes: " + ("equal to XLA's" if report["agrees"] else "NOT equal to XLA's"))
    if "compiled" in report:
        lines += ["", *_by_compiler(report, usable)]
    return "\n".join(lines)


def _by_compiler(report: dict, usable: float) -> list[str]:
    """A table of the programs that a chip's compiler made, or refused, and a verdict."""
    programs, chip = report["compiled"], report["chip"]
    size = lambda one, name: human("bytes", one[f"{name}_bytes"])
    times = lambda counts: ", ".join(f"{name} x {count}" for name, count in counts.items())
    lines = [f"{'compiled for ' + chip:<22}{'device':>11}{'arguments':>12}{'temporaries':>13}  kernels; collectives"]
    for name, one in programs.items():
        if one["problem"]:
            lines.append(f"  {name:<20} refused: {one['problem']}")
            continue
        made = "; ".join(filter(None, (times(one["kernels"]), times(one["collectives"]))))
        sizes = f"{size(one, 'needed'):>11}{size(one, 'argument'):>12}{size(one, 'temporary'):>13}"
        lines.append(f"  {name:<20}{sizes}  {made}".rstrip())
    refused = [name for name, one in programs.items() if one["problem"]]
    large = [name for name, one in programs.items() if one["needed_bytes"] > usable]
    if refused:
        lines.append(f"{chip}'s compiler refuses {', '.join(refused)}")
    elif large:
        lines.append(f"does NOT fit, as compiled for {chip}: {', '.join(large)}")
        for one in programs[large[0]]["buffers"]:
            lines.append(
                f"  {human('bytes', one['bytes']):>10}  {one['meaning']}: {one['shape']} {one['operation'][-60:]}"
            )
        lines += [_of_remedy(one, usable) for one in report["tried"]]
    else:
        most = max(programs.values(), key=lambda one: one["needed_bytes"])
        lines.append(f"fits, as compiled for {chip}: {size(most, 'needed')} at most")
    return lines


def _of_remedy(one: dict, usable: float) -> str:
    if one["problem"]:
        return f"with {one['option']} it is refused: {one['problem']}"
    verdict = "fits" if one["needed_bytes"] <= usable else "does not fit either"
    return f"with {one['option']} it {verdict}, compiled: {human('bytes', one['needed_bytes'])}"


def _generating(report: dict) -> list[str]:
    """Lines for a recipe that generates: how many devices it needs in all, and whether generation is the bottleneck."""
    if "rollout_devices" not in report["figures"]:
        return []
    value = lambda name: round(report["figures"][name]["value"])
    trainers, own, each = report["devices"], value("rollout_devices"), value("server_devices")
    embedded, shared = value("chip_weights_bytes"), "shared_bytes" in report["figures"]
    lines, more = [], f"--serve.mesh.dp {trainers // each}, or more --serve.slots"
    if not shared:
        lines = [f"{trainers + own} x {report['chip']} in all: {trainers} to train, {own} to generate"]
        lines[0] += f", {_where(trainers + own, CHIPS[report['chip']])}" if embedded else ""
        more = "more servers, or more --serve.slots" if embedded else "more --rollout-chips"
    seconds = {name: report["figures"][f"{name}_batch_s"]["value"] for name in ("generate", "train")}
    if seconds["generate"] > SLOW * seconds["train"] and (own < trainers or not shared):
        takes = f"{human('s', seconds['generate'])} to generate and {human('s', seconds['train'])} to train"
        better = "; --suggest --devices N finds the split" if not shared else ""
        lines.append(f"a batch takes {takes}: it needs {more}{better}")
    return lines


def _where(devices: int, chip: Chip) -> str:
    """How the run's own servers get devices of their own: behind the trainer's on one host (`of_own_servers`)."""
    one_host = chip.platform == "gpu" and devices <= chip.near
    return "those behind the trainer's" if one_host else "each its own by areax launch (docs/launch.md)"


def human(name: str, value: float) -> str:
    """Formats a number with the unit that its name ends in."""
    unit = {"bytes": "B", "flops": "FLOP", "s": "s"}.get(name.rpartition("_")[2], "")
    if name.endswith("bytes_per_token"):
        unit = "B"
    if name in ("mfu", "hardware_utilisation"):
        return f"{value:.1%}"
    if unit == "s" and not name.endswith("per_s"):
        return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"
    if name.endswith("_ratio"):
        return f"{value:.2f}"
    if value < 10000 and not unit:
        return f"{value:,.0f}"
    power = min(len(SCALE) - 1, max(0, int(math.log10(max(value, 1)) // 3)))
    shown = f"{value / 1000**power:.2f}" if power else f"{value:.0f}"
    return f"{shown} {SCALE[power]}{unit if not name.endswith('per_s') else ''}".rstrip()
