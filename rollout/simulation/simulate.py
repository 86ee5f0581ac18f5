"""Predicts the speed and staleness of a run by running the real controller on a virtual clock.

Routing, admission, batches, pushes and the training loop are the code of a real run. The servers are simulated
(server.py models their latency), and so is the trainer, which only spends the time its tokens would take.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .. import client, loop
from ..fleet.push import Mode, push_weights
from ..scheduling.executor import Executor, Prompts
from ..servers.server import Server
from ..servers.sglang import SGLang
from ..types import Generate, Sample, sampled
from . import clock
from .server import Rates
from .server import Server as Simulated

MOST_SETTINGS, MOST_SERVERS, MOST_TOKENS = 10_000, 100_000, 1 << 30  # each setting takes about a second
BEST = 0.02  # of step times within this share of the fastest, the one with the least eta is best


@dataclass(frozen=True)
class Config:
    """A run to simulate.

    Attributes:
      servers: number of servers.
      server: the speed of each.
      trainers: training devices; they split a batch with perfect scaling.
      train_tokens_s: training throughput of one device in tokens per second, prompts included.
      devices: try every split of this many devices between servers (`server_devices` each) and trainers, instead of
        `servers` and `trainers`; 0 = only those.
      server_devices: devices per server.
      publish_s: seconds to copy and write a version, during which the trainer waits.
      eta: values to try.
      push: what a push does to running requests: `retract` and `abort` interrupt them, `drain` waits for them to end.
      oversample: values to try: additional groups; a batch takes the first to finish.
      groups: prompts per batch.
      group_size: episodes per prompt.
      max_concurrent: most groups that run at a time.
      prompt, new: mean number of prompt tokens and of generated tokens.
      cv: coefficient of variation of the generated lengths, which are lognormal.
      longest: most generated tokens.
      steps: training steps; the first third is not counted.
      seed: seed of the lengths.
      json: print JSON instead of a table.
    """

    servers: int = 2
    server: Rates = Rates()
    trainers: int = 1
    train_tokens_s: float = 5000.0
    devices: int = 0
    server_devices: int = 1
    publish_s: float = 0.5
    eta: tuple[int, ...] = (0, 1, 2, 4, 8)
    push: Mode = "retract"
    oversample: tuple[int, ...] = (0,)
    groups: int = 32
    group_size: int = 8
    max_concurrent: int = 128
    prompt: int = 200
    new: float = 500.0
    cv: float = 1.0
    longest: int = 16384
    steps: int = 24
    seed: int = 0
    json: bool = False

    def __post_init__(self):
        for name, least in (
            ("servers", 1), ("trainers", 1), ("devices", 0), ("server_devices", 1), ("publish_s", 0), ("groups", 1),
            ("group_size", 1), ("max_concurrent", 1), ("prompt", 1), ("new", 1), ("cv", 0), ("longest", 1),
            ("steps", 3),
        ):  # fmt: skip
            if not getattr(self, name) >= least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not self.train_tokens_s > 0:
            raise ValueError(f"--train-tokens-s must be above 0, got {self.train_tokens_s}")
        if not self.eta or min(self.eta) < 0:
            raise ValueError(f"--eta must name one or more numbers from 0 on, got {self.eta}")
        if not self.oversample or not 0 <= min(self.oversample) <= max(self.oversample) <= self.groups:
            raise ValueError(
                f"--oversample must name one or more numbers from 0 to --groups {self.groups}, got {self.oversample}"
            )
        splits = (self.devices - 1) // self.server_devices if self.devices else 1
        rows = (self.steps + max(self.eta) + 2) * self.groups + 2 * max(self.oversample)
        for options, what, count, most in (
            (f"--servers {self.servers}", "servers", self.servers, MOST_SERVERS),
            (f"--devices {self.devices}", "splits times --eta times --oversample",
             splits * len(self.eta) * len(self.oversample), MOST_SETTINGS),
            (f"--steps {self.steps} of --groups {self.groups}", "episodes and tokens of prompts",
             rows * (self.group_size + self.prompt), MOST_TOKENS),
        ):  # fmt: skip
            if count > most:
                raise ValueError(f"{options} must be at most {most} {what}, got {count}; use fewer")
        if self.devices and self.devices <= self.server_devices:
            raise ValueError(
                f"--devices must be more than --server-devices {self.server_devices}, because a trainer needs one "
                f"too, got {self.devices}"
            )


@dataclass(frozen=True)
class Outcome:
    """The result of one setting, over the steps that count.

    Attributes:
      servers, trainers, eta, oversample: the setting.
      step_s: seconds per step.
      idle: share of the time in which the trainer neither trains nor publishes.
      busy: mean share of the servers' slots that are decoding.
      tokens_s: generated tokens trained on per second.
      staleness: number of groups by versions between admission and batch.
      spanning: share of the answers with tokens of several versions.
      stopped: groups stopped per step.
      length_bias: relative excess in length of trained over started groups, over the last batches.
    """

    servers: int
    trainers: int
    eta: int
    oversample: int
    step_s: float
    idle: float
    busy: float
    tokens_s: float
    staleness: dict[int, int]
    spanning: float
    stopped: float
    length_bias: float

    @property
    def mean_staleness(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / sum(self.staleness.values())


def lengths(config: Config, episodes: int) -> np.ndarray:
    """Tokens generated by each episode, i64[episodes]: lognormal with mean `new` and coefficient of variation `cv`."""
    sigma = np.sqrt(np.log1p(config.cv**2))
    drawn = np.random.default_rng(config.seed).lognormal(np.log(config.new) - sigma**2 / 2, sigma, episodes)
    return np.clip(np.rint(drawn), 1, config.longest).astype(np.int64)


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome with the least eta among those within 2 % of the fastest."""
    outcomes = list(outcomes)
    fastest = min(one.step_s for one in outcomes)
    return min((one for one in outcomes if one.step_s <= (1 + BEST) * fastest), key=lambda one: (one.eta, one.step_s))


def settings(config: Config) -> list[tuple[Config, int, int]]:
    """All combinations of split, eta and oversampling, as arguments of `simulate`."""
    splits = [(config.servers, config.trainers)]
    if config.devices:
        most = (config.devices - 1) // config.server_devices
        splits = [(n, config.devices - n * config.server_devices) for n in range(1, most + 1)]
    return [
        (replace(config, servers=n, trainers=m), eta, more)
        for n, m in splits
        for eta in config.eta
        for more in config.oversample
    ]


def simulate(config: Config, eta: int, oversample: int = 0) -> Outcome:
    """Simulates one setting on a virtual clock."""
    return clock.run(_simulate(config, eta, oversample))


async def _simulate(config: Config, eta: int, oversample: int) -> Outcome:
    network = clock.Network({f"http://{i}": Simulated(config.server) for i in range(config.servers)})
    servers = [Server(SGLang(url, network), ["default"]) for url in network.servers]  # type: ignore[arg-type]
    fleet = client.assemble(servers, concurrency=config.max_concurrent * config.group_size, timeout_s=float("inf"))
    busy = lambda: [server.busy() for server in network.servers.values()]
    try:
        return await play(config, eta, fleet, clock.spend, busy, oversample=oversample)
    finally:
        await fleet.close()


async def play(
    config: Config,
    eta: int,
    fleet: client.Fleet,
    spend: Callable[[float], Any],
    busy: Callable[[], list[float]],
    *,
    oversample: int = 0,
) -> Outcome:
    """Runs the training loop over `fleet` with a trainer that `spend`s seconds instead of computing.

    Args:
      spend: `clock.spend` on a virtual clock, `time.sleep` on the real one.
      busy: returns for each server the integral over time of its share of decoding slots.
    """
    size = config.group_size
    most = (config.steps + eta + 2) * config.groups + 2 * oversample  # that the gate admits, deferred ones included
    tokens = lengths(config, most * size)
    ages: Counter[int] = Counter()
    steps: list[dict[str, float]] = []
    trained = [0]
    spans: list[bool] = []
    begun = config.steps // 3
    marks: list[tuple[float, list[float]]] = []
    now = asyncio.get_running_loop().time
    label = lambda v: f"{v}-{v:08x}"

    # Of each prompt; a stopped group has the same lengths when it is rerun.
    left = [itertools.cycle(group) for group in tokens.reshape(-1, size).tolist()]

    async def workflow(generate: Generate, row: Mapping[str, Any]) -> Sample:
        prompt, n = row["prompt"], int(next(left[row["prompt"][0]]))
        return sampled(prompt, await generate(prompt, max_new_tokens=n), temperature=1.0, reward=float(n))

    def update(groups: list[list[Sample]]) -> list[list[Sample]]:
        read = sum(len(s.tokens) for samples in groups for s in samples)
        spend(float(read / (config.train_tokens_s * config.trainers)))
        return groups

    def prepare_push(v: int) -> loop.Push:
        spend(config.publish_s)
        return functools.partial(push_weights, fleet, folder, label(v), mode=config.push)

    def on_step(v: int, groups: list[list[Sample]], seconds: dict[str, float]) -> None:
        if v in (begun, config.steps):
            marks.append((now(), busy()))
        if v > begun:
            steps.append(seconds)
            ages.update(v - 1 - samples[0].info["admitted"] for samples in groups)
            trained[0] += sum(int(s.mask.sum()) for samples in groups for s in samples)
            spans.extend(np.ptp(s.version[s.mask]) > 0 for samples in groups for s in samples)

    rows = [{"prompt": [i] * config.prompt} for i in range(len(left))]
    with tempfile.TemporaryDirectory() as folder:  # contains no weights
        async with Executor(
            workflow, fleet.generate, Prompts(rows, shuffle=False), group_size=size, groups_per_batch=config.groups,
            eta=eta, max_concurrent=config.max_concurrent, oversample=oversample, seed=None,
        ) as rollout:  # fmt: skip
            await loop.run(
                rollout.batch, update, prepare_push, eta=eta, steps=config.steps, admit=rollout.admit, on_step=on_step
            )
            stopped, bias = rollout.counts["stopped"], rollout.lengths()["length_bias"]
    total = sum(step["step_s"] for step in steps)
    work = sum(step["update_s"] + step["publish_s"] for step in steps)
    (then, before), (last, after) = marks
    shares = [(b - a) / (last - then) for a, b in zip(before, after, strict=True)]
    return Outcome(
        servers=config.servers, trainers=config.trainers, eta=eta, oversample=oversample,
        step_s=total / len(steps), idle=1 - work / total, busy=statistics.mean(shares),
        tokens_s=trained[0] / total, staleness=dict(sorted(ages.items())), spanning=statistics.mean(map(float, spans)),
        stopped=stopped / config.steps, length_bias=bias,
    )  # fmt: skip


def report(outcomes: list[Outcome]) -> dict[str, Any]:
    """The outcomes as `areax simulate --json` prints them."""
    row = lambda one: asdict(one) | {"mean_staleness": one.mean_staleness}
    return {"outcomes": [row(one) for one in outcomes], "best": row(best(outcomes))}


def show(config: Config, outcomes: list[Outcome]) -> str:
    """Formats the outcomes as a table."""
    chosen = best(outcomes)
    over = any(config.oversample)
    title = "servers  trainers  eta   s a step  trainer idle  servers busy  tokens/s trained  staleness  most  spanning"
    lines = [title + "  oversample  stopped a step  length bias" * over]
    for one in outcomes:
        more = f"  {one.oversample:10}  {one.stopped:14.2f}  {one.length_bias:11.1%}" if over else ""
        lines.append(
            f"{one.servers:7}  {one.trainers:8}  {one.eta:3}  {one.step_s:9.2f}  {one.idle:12.1%}  {one.busy:12.1%}  "
            f"{one.tokens_s:16,.0f}  {one.mean_staleness:9.2f}  {max(one.staleness):4}  {one.spanning:8.1%}{more}"
            f"{'  <- best' if one == chosen else ''}"
        )
    lines.append(
        f"best: the least eta within {BEST:.0%} of the fastest. Simulated: {config.steps} steps of "
        f"{config.groups} x {config.group_size} episodes, {config.new:g} tokens each (cv {config.cv:g})."
    )
    return "\n".join(lines)
