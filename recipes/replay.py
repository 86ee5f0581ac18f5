"""Recomputes a run of `grpo` from its journal: every batch as it was trained on, without servers or rewards.

From top to bottom: `Options`; `main`, the command; `replay`, the loop; `Step`, what a recomputed step is beside the
run's.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from areax.adapters import hf, orbax
from areax.adapters.command_line import parse
from areax.adapters.command_line.options import UNPREFIXED
from areax.adapters.runtime import blas, compile_cache, hub
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.recipes import grpo
from areax.recipes.shared import common, contents, counterfactual, learner, publishing, recorded
from areax.recipes.shared.rl_options import Training
from areax.recipes.shared.terminal import Terminal
from areax.recipes.shared.trainer import Trainer, restore, saved, train_on_batch
from areax.rollout.journal import reading

FIRST_OPTIONS = (
    "from", "to", "base", "out", "json", "objective.advantage.std", "objective.clip_high", "objective.kl.coef",
    "optim.lr", "mesh.fsdp", "run.dtype",
)  # fmt: skip
ROUNDING = "run", "mesh", "rows", "trie", "offload_reference"  # training options that change the rounding alone
PRESET = "--objective.name"
SHOWN = 3  # metrics in a line
WIDTH = 12  # of a column
HEADS = {"gradient_norm": "|g|", "update_norm": "|u|", "clip_fraction": "clip", "effective_fraction": "teach"}
LEGEND = (
    "own: the run's options, other: those given; cos: cosine, 1 = the same direction; |g|, |u|: norms of gradient and "
    "update; ess: effective sample size; clip: share of tokens clipped; teach: share of samples that teach; "
    "kl: divergence from the reference (docs/replay.md)"
)


@dataclass(frozen=True)
class Options:
    """Recomputes a run's updates from its journal, and compares them.

    Parameters, metrics and states must be the run's, bit for bit. With other training options than the run's, such as
    --objective.name gspo, it says what these would have made of the same samples at the same weights (docs/replay.md).
    --run.*, --mesh.*, --rows and --trie only say how to compute.

    Attributes:
      from_: step after which to begin: at the newest state up to it that is kept; 0 = with the model that the run
        started from.
      to: last step; 0 = the last that was logged.
      base: where the model that the run started from is now; "" = where its options say.
      out: folder for replay.jsonl, a line per step, which `areax report` shows; "" = none.
      json: print the summary as JSON, and nothing else.
    """

    from_: Annotated[int, tyro.conf.arg(name="from")] = 0
    to: int = 0
    base: str = ""
    out: str = ""
    json: bool = False

    def __post_init__(self):
        for option, value in (("from", self.from_), ("to", self.to)):
            if value < 0:
                raise ValueError(f"--{option} must be at least 0, got {value}")


@dataclass(frozen=True)
class Distance:
    """How far a recomputed state is from the saved one.

    Attributes:
      equal: whether all its arrays are equal, bit for bit: weights, moments and what else it has.
      most, relative: of the policy's weights: the largest absolute difference, and its norm over theirs.
    """

    equal: bool
    most: float
    relative: float


@dataclass(frozen=True)
class Step:
    """A recomputed step beside the run's.

    Attributes:
      label, pushed: of the weights after it, as recomputed and as servers got them; None = not known.
      compared: how many metrics the run logged of it that are recomputed.
      differ: {name: (recomputed, logged)} of those that are not equal.
      state: None = none is kept.
    """

    step: int
    label: str | None
    pushed: str | None
    compared: int
    differ: Mapping[str, tuple]
    state: Distance | None

    @property
    def equal(self) -> bool:
        return self.label == self.pushed and not self.differ and (self.state is None or self.state.equal)

    def __str__(self) -> str:
        if self.equal:
            kinds = self.label or "", f"{self.compared} metrics", "the saved state" if self.state else ""
            return f"step {self.step}  equal  {', '.join(filter(None, kinds))}"
        parts = [f"weights {self.label}, pushed were {self.pushed}"] if self.label != self.pushed else []
        if self.state and not self.state.equal:
            parts.append(f"saved weights are {self.state.most:.3g} away, {self.state.relative:.3g} of their norm")
        if self.differ:
            first = [f"{name} {_short(a)}, logged {_short(b)}" for name, (a, b) in [*self.differ.items()][:SHOWN]]
            parts.append(f"{len(self.differ)} of {self.compared} metrics: {'; '.join(first)}")
        return f"step {self.step}  differs  {'; '.join(parts)}"


def main(folder: str, arguments: Sequence[str]) -> int:
    """The command. Returns 0 if the recomputed steps are the run's, bit for bit, else 1.

    Raises ValueError if the options, or what there is of the run, do not allow it, before anything is computed.
    """
    options, _, _ = parsed(folder, arguments, Training())
    run = recorded.read(Path(folder))
    with reading.opened(run.path) as journal:
        start, end = stretch(run, journal, options)
        config = recorded_config(run, start, end)
        options, training, asked = parsed(folder, arguments, config.training)
        config = replace(config, model=options.base or config.model)
        how = {name: getattr(training, name) for name in ROUNDING}
        other = replace(config, training=training) if asked else None
        if other:
            counterfactual.check(config.training, training)
        if options.out:
            common.check_directory("--out", options.out)
        check_start(run, config)
        steps: list[Step] = []
        begun = f"the state of step {start}" if start else config.model
        say = functools.partial(print, flush=True, file=sys.stderr if options.json else sys.stdout)
        say(f"{folder}: steps {start + 1} to {end}, from {begun}")
        with lines(options.out) as write:
            for step, figures in replay(run, journal, config, start, end, how, other):
                if figures and not steps:
                    say(LEGEND)
                    say(_heads(figures))
                say(_row(step, figures) if figures else step)
                write(step, figures)
                steps.append(step)
    found = summary(folder, start, steps)
    print(json.dumps(found, indent=2)) if options.json else print(said(found, steps))
    return 0 if found["equal"] else 1


def parsed(folder: str, arguments: Sequence[str], training: Training) -> tuple[Options, Training, bool]:
    """(options, training options, whether any of these is given that does more than change the rounding).

    Args:
      training: the run's, the defaults.
    """
    prog, words, named = f"areax replay {folder}", [], False
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == PRESET:
            named = True
            training = replace(training, objective=_preset(value if equals else next(rest, "")))
        else:
            words.append(word)
    fields = [
        (name, Annotated[type(default), UNPREFIXED], dataclasses.field(default=default))
        for name, default in (("options", Options()), ("training", training))
    ]
    both = dataclasses.make_dataclass("Replay", fields, namespace={"__doc__": Options.__doc__})
    chosen = parse.parse(both, words, prog, first=FIRST_OPTIONS)
    given = {word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in words if word.startswith("--")}
    own = {"from", *(field.name for field in dataclasses.fields(Options)), *(x.replace("_", "-") for x in ROUNDING)}
    return chosen.options, chosen.training, named or any(name.partition(".")[0] not in own for name in given)


def _preset(name: str) -> losses.Policy:
    presets = {preset.lower(): make for preset, make in losses.POLICIES.items()}
    if name.lower() in presets:
        return presets[name.lower()]()
    near = difflib.get_close_matches(name.lower(), presets, 1)
    raise ValueError(
        f"{PRESET} must be one of {', '.join(presets)}, got {name!r}" + (f"; did you mean {near[0]}?" if near else "")
    )


def stretch(run: recorded.Run, journal: reading.Reader, options: Options) -> tuple[int, int]:
    """(step to begin after, last step). Raises ValueError if the run, its states or its journal do not have them."""
    last = max(run.metrics)
    start = max((version for version in run.kept if version <= options.from_), default=0)
    end = options.to or last
    if not options.from_ < end <= last:
        raise ValueError(
            f"{run.path}: steps up to {last}, the last that was logged, can be replayed, got --from {options.from_} "
            f"--to {end}"
        )
    missing = sorted({*range(start, end)} - {*journal.versions})
    if missing:
        there = [version for version in run.kept if version < end and {*range(version, end)} <= {*journal.versions}]
        raise ValueError(
            f"{journal.path}: has no batch of step {missing[0] + 1}, which --journal prune or a fault has removed; "
            + (
                f"begin after a state that is kept, with --from {there[0]}"
                if there
                else "it cannot be replayed to there"
            )
        )
    return start, end


def recorded_config(run: recorded.Run, start: int, end: int) -> grpo.Config:
    """The options with which the run made these steps. Raises ValueError if what numbers depend on changed between."""
    config: Any = None
    for begin, file in recorded.options(run, start, end):
        former, config = config, parse.parse(grpo.Config, ["--config", str(file)], f"areax replay {run.path}")
        if former and shaping(former) != shaping(config):
            raise ValueError(
                f"{run.path}: went on from step {begin} with other options, in {file.name}: replay one part of it, "
                f"--to {begin} or --from {begin}"
            )
    return config


def shaping(config: grpo.Config) -> tuple:
    """What the numbers of a step, and its label, depend on besides its batch."""
    training = config.training
    scheduled = {training.optim.schedule, training.critic.optim.schedule} != {"constant"}
    return (
        training, config.model, config.init, config.seed, config.rollout.sampling.temperature,
        config.rewards.shuffle_rewards, config.steps if scheduled else None,
        publishing.dtype(config.serving, training.run),
    )  # fmt: skip


def check_start(run: recorded.Run, config: grpo.Config) -> None:
    """Raises ValueError if the model that the run started from is gone, or another, as far as a saved state tells."""
    newest = orbax.newest(run.states)
    known = newest and newest[1]["rollout"].get("contents")
    try:
        place = Path(hub.folder(config.model, weights=config.init != "random"))
        hf.read_config(place)
        tokens = common.open_tokenizer(config.model, config.prompts.chat_template_kwargs)
    except ValueError as error:
        raise ValueError(
            f"{run.path}: needs the model that it started from ({error}); if it has moved, name its place with --base"
        ) from error
    if known:
        contents.check_start(known, place, tokens, weights=config.init != "random", where=str(run.path))


def replay(
    run: recorded.Run, journal: reading.Reader, config: grpo.Config, start: int, end: int, how: Mapping[str, Any],
    other: grpo.Config | None = None,
) -> Iterator[tuple[Step, dict]]:  # fmt: skip
    """Recomputes steps `start` + 1 to `end`; yields each beside the run's, with figures of `other` options.

    Args:
      how: training options of the computation, in place of the run's.
      other: options whose gradients and updates are compared with the run's own (`counterfactual`).
    """
    common.keep_memory()
    common.take_devices()
    blas.one_thread()
    compile_cache.keep()
    trainer = grpo.build_trainer(replace(config, training=replace(config.training, **how)))
    if start:
        with contextlib.closing(orbax.Store(run.states.absolute(), 1, orbax.verified(run.states, start))) as store:
            restore(trainer, store)
    both = counterfactual.sides(trainer, grpo.build_trainer(other)) if other else None
    terminal = Terminal("replay")
    for version in range(start, end):
        groups = journal.read(version).groups
        with terminal.step():
            report, figures = counterfactual.train(both, groups) if both else (train_on_batch(trainer, groups), {})
        del report["groups"]  # samples
        yield beside(run, config, trainer, report), figures


def beside(run: recorded.Run, config: grpo.Config, trainer: Trainer, report: Mapping[str, Any]) -> Step:
    """What the trainer has just computed beside what the run recorded of this step."""
    step, policy, push = trainer.version, trainer.policy, config.serving.push
    label, pushed = None, run.pushed.get(step)
    by_name = policy.adapters and push.lora != "merged" and not config.serving.serve.inside
    if pushed and not by_name:  # the label of adapters by name depends on the folder that they were in
        dtype = publishing.dtype(config.serving, config.training.run)
        label, _ = publishing.in_memory(policy.written, step, learner.weights(policy), dtype)
    logged = run.metrics.get(step, {})  # a line may be lost
    own = {name: run_dir.plain(report[name]) for name in report.keys() & logged.keys()}
    differ = {name: (own[name], logged[name]) for name in sorted(own) if own[name] != logged[name]}
    state = distance(trainer, run.states, step) if step in run.kept else None
    return Step(step, label, pushed if label else None, len(own), differ, state)


def distance(trainer: Trainer, states: Path, version: int) -> Distance:
    """How far a trainer is from a saved state, which is read one array at a time."""
    equal, most, squares, whole = True, 0.0, 0.0, 0.0
    with orbax.opened(states, orbax.verified(states, version)) as (arrays, _):
        for name, x in orbax.leaves(saved(trainer)).items():
            now, then = np.asarray(x), np.asarray(arrays[name].read())
            equal = equal and now.dtype == then.dtype and now.tobytes() == then.tobytes()
            if name.startswith("policy.params."):
                gap, then = now.astype(np.float64) - then.astype(np.float64), then.astype(np.float64)
                most = max(most, float(np.abs(gap).max(initial=0)))
                squares, whole = squares + float(np.sum(gap**2)), whole + float(np.sum(then**2))
    return Distance(equal, most, (squares / whole) ** 0.5 if whole else 0.0)


def summary(folder: str, start: int, steps: Sequence[Step]) -> dict:
    """What the steps came to."""
    first = next((step for step in steps if not step.equal), None)
    states = {step.step: dataclasses.asdict(step.state) for step in steps if step.state}
    return {
        "run": folder,
        "from": start,
        "to": steps[-1].step,
        "equal": first is None,
        "first_difference": first and first.step,
        "steps_that_differ": sum(not step.equal for step in steps),
        "versions": sum(step.label is not None for step in steps),
        "metrics": sum(step.compared for step in steps),
        "states": states,
    }


def said(found: Mapping[str, Any], steps: Sequence[Step]) -> str:
    """The summary as a line."""
    if found["equal"]:
        kinds = f"{found['versions']:,} versions that were pushed", f"{found['metrics']:,} metrics"
        return (
            f"steps {found['from'] + 1} to {found['to']} are the run's, bit for bit: {', '.join(kinds)}, "
            f"{len(found['states'])} saved states"
        )
    first = next(step for step in steps if not step.equal)
    line = f"{found['steps_that_differ']} of {len(steps)} steps differ, the first: {first}"
    if found["states"]:
        version, last = [*found["states"].items()][-1]
        line += (
            f"\nthe state of step {version}: weights are at most {last['most']:.3g} away from those saved, "
            f"{last['relative']:.3g} of their norm"
        )
    return line


@contextlib.contextmanager
def lines(out: str) -> Iterator[Any]:
    """Yields f(step, figures), which writes a line to `out`/replay.jsonl, if there is an `out`."""
    if not out:
        yield lambda step, figures: None
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    with open(Path(out) / run_dir.REPLAY, "w", encoding="utf-8", buffering=1) as file:

        def write(step: Step, figures: Mapping[str, Any]) -> None:
            values = {**dataclasses.asdict(step), "kind": "replay", "equal": step.equal, **figures}
            del values["compared"]
            file.write(json.dumps(run_dir.plain(values)) + "\n")

        yield write


def _heads(figures: Mapping[str, Any]) -> str:
    """The head of the table of figures; a column of the other options stands behind that of the run's own."""
    return "  ".join(["step", *(f"{_head(name):>{WIDTH}}" for name in figures), "replay"])


def _head(name: str) -> str:
    who, _, what = name.partition("_")
    return "other" if who == "other" else f"own {HEADS.get(what, what)}" if who == "own" else f"{who} cos"


def _row(step: Step, figures: Mapping[str, Any]) -> str:
    values = [f"{'none' if value is None else f'{value:.4g}':>{WIDTH}}" for value in figures.values()]
    return "  ".join([f"{step.step:4}", *values, "equal" if step.equal else str(step)])


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
