"""Asynchronous GRPO: prompts -> generation servers -> rewards -> groups -> one update -> weights back to the servers.

With `eta` = 0 it is synchronous; with eta > 0 servers generate while the trainer trains, and no group is older than
eta versions when it is trained on. Run it again with the same `out` and it goes on where it stopped.
"""

import asyncio
import contextlib
import functools
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from areax import models
from areax.adapters import hf, state, tokenizer, tracker
from areax.core import losses, metrics, packing, step
from areax.core.balance import Balance, wrap
from areax.core.optim import AdamW, adamw
from areax.parallel import follow, place, processes, rules
from areax.parallel.mesh import Layout
from areax.recipes import common
from areax.rollout import client, executor, local, loop, names, publish, rewards
from areax.rollout.types import Sample
from areax.rollout.workflows import Sampling

LENGTH_BINS = 32


@dataclass(frozen=True)
class Config:
    """Asynchronous GRPO.

    Attributes:
      model: Hugging Face directory with weights and tokenizer.
      data: rows with "prompt" or "messages", and what the reward needs: a file, a folder, or a hub name.
      row: `module:function` or `file.py:function` that turns a record of the data into a row; "" = records are rows.
      reward: `module:function` or `file.py:function`, called as f(text, row) in worker processes.
      out: the run's directory: checkpoint in `model/`, state, metrics, samples.
      init: "random" starts from new weights; the directory then needs config.json and tokenizer alone.
      heldout: rows evaluated greedily, never trained on; "" = none.
      workflow: `module:function`, called as f(generate, row, tokenizer=, reward=, sampling=).
      servers: addresses of generation servers that can read `published`; none = one is started on this machine.
      serve: of the server started here.
      published: folder for versions of the weights; "" = a new one, in memory if there is room.
      eta: most versions between the admission of a group and its training; 0 = synchronous.
      steps: batches to train on.
      groups: prompts a batch.
      group_size: completions a prompt.
      minibatches: optimiser steps a batch, over equal parts of its groups.
      max_concurrent: most groups in flight.
      length: longest prompt and completion together, and tokens of a packed row.
      rows: packed rows of a microbatch.
      balance: terms that keep the experts of a mixture evenly used.
      mesh: devices along each axis; all of them together must be the machine's, or one.
      save_every: in batches; 0 = at the end alone.
      evaluate_every: in batches; 0 = before the first and after the last.
      samples_every: in batches, how often a group is written to samples.jsonl.
      reward_workers: processes that compute rewards.
      reward_timeout_s: seconds that one may take; the completion then counts as unscorable.
      shuffle_rewards: a control: rewards are permuted among the completions of a batch, so that they teach nothing.
      seed: of new weights, of the order of the prompts and of sampling.
    """

    model: str
    data: str
    reward: str
    out: str = "runs/grpo"
    row: str = ""
    init: Literal["checkpoint", "random"] = "checkpoint"
    heldout: str = ""
    workflow: str = "areax.rollout.workflows:single_turn"
    servers: tuple[str, ...] = ()
    serve: local.Serve = local.Serve()
    published: str = ""
    eta: int = 1
    steps: int = 100
    groups: int = 32
    group_size: int = 8
    minibatches: int = 1
    max_concurrent: int = 128
    sampling: Sampling = Sampling()
    objective: losses.Policy = losses.GRPO()
    optim: AdamW = AdamW(lr=1e-6, warmup=10)
    balance: Balance = Balance()
    run: models.Run = models.Run()
    mesh: Layout = Layout()
    length: int = 1024
    rows: int = 8
    save_every: int = 0
    evaluate_every: int = 0
    samples_every: int = 10
    reward_workers: int = 1
    reward_timeout_s: float = 10.0
    shuffle_rewards: bool = False
    seed: int = 0

    def __post_init__(self):
        if self.groups % self.minibatches:
            raise ValueError(f"--minibatches must divide --groups {self.groups}, got {self.minibatches}")
        if self.eta and not self.objective.corrects:
            raise ValueError(
                f"--eta {self.eta} lets samples be older than the weights, which {self.objective.name} with proximal "
                '"behaviour" does not correct for; take --objective.proximal recompute, or --eta 0'
            )


@dataclass
class Trainer:
    """The state in hand and the compiled functions that move it: what `update` closes over."""

    config: Config
    settings: models.dense.Config
    mesh: jax.sharding.Mesh
    state: step.State
    scores: Callable
    prepare: Callable
    step: Callable
    reference: Any = None
    report: dict = field(default_factory=dict)


def main(config: Config) -> dict:
    """Trains, writes `out`/model, and returns the summary that `out`/summary.json holds.

    Of several processes the first runs everything but the devices, which all of them move together, each with its part
    of every batch: `work`. The others return {}.
    """
    began = time.monotonic()
    common.keep_memory()
    with processes.job() as index:
        inputs = read(config) if index == 0 else ()
        out, tokens = common.out_directory(config.out), tokenizer.load(config.model)
        processes.same("options", config)
        trainer = build(config)
        with state.open_store(out / "state") as store:
            start, cursor = store.latest or 0, None
            if start:
                trainer.state, cursor = store.restore(trainer.state)
            params = lambda: (trainer.settings, trainer.state.params)
            work: dict[str, Callable] = {
                "advance": functools.partial(advance, trainer),
                "save": lambda v, at: store.save(v, trainer.state, at),
                "host_copy": lambda: hf.host_copy(*params()),
                "publish": lambda root, v: hf.write_published(root, v, *params(), tokenizer=tokens),
                "export": lambda: hf.save(out / "model", *params(), tokenizer=tokens),
            }
            if index > 0:
                follow.follow(work)
                return {}
            with follow.lead(work) as do:
                summary = asyncio.run(train(config, trainer, do, start, cursor, tokens, *inputs))
                summary["seconds"] = time.monotonic() - began
                tracker.write_json(out / tracker.SUMMARY, summary)
                return summary


def read(config: Config) -> tuple:
    """(rows, held-out rows, workflow), and sees that there is a reward."""
    names.resolve(config.reward)
    rows = common.read_rows(config.data, config.row)
    heldout = common.read_rows(config.heldout, config.row) if config.heldout else []
    return rows, heldout, names.resolve(config.workflow)


async def train(config: Config, trainer: Trainer, do: Callable, start: int, cursor, tokens, rows, heldout, workflow):
    """The loop, from version `start` on, and its summary; `do(name, ...)` does a piece of `work` in all processes."""
    out = Path(config.out)
    async with contextlib.AsyncExitStack() as stack:
        enter, enter_async = stack.enter_context, stack.enter_async_context
        keep = {kind: start for kind in ("grpo", "eval")}
        run = enter(tracker.open_run(out, config=config, keep=keep))
        tick = enter(tracker.progress("grpo", config.steps, start=start))
        root = enter(published_root(config, trainer))
        write = functools.partial(hf.write_published, root, config=trainer.settings, tokenizer=tokens)
        do("publish", root, start)
        urls = config.servers or [await enter_async(local.server(root / str(start), config.serve, out / "server.log"))]
        fleet = await enter_async(client.connect(urls, concurrency=config.max_concurrent * config.group_size))
        reward = await enter_async(
            rewards.pool(config.reward, workers=config.reward_workers, timeout_s=config.reward_timeout_s)
        )
        episode = functools.partial(workflow, tokenizer=tokens, reward=reward, sampling=config.sampling)
        greedy = functools.partial(
            workflow,
            tokenizer=tokens,
            reward=reward,
            sampling=replace(config.sampling, temperature=0.0, routed_experts=False),
        )
        rollout = await enter_async(
            executor.Executor(
                episode, fleet.generate, executor.Prompts(rows, seed=config.seed),
                group_size=config.group_size, groups_per_batch=config.groups, eta=config.eta,
                max_concurrent=config.max_concurrent, seed=config.seed if fleet.seeded else None,
                batches=config.steps, cursor=cursor,
            )
        )  # fmt: skip
        accuracy: dict[int, float] = {}
        pushes: list[publish.PushReport] = []

        def hand_out(v: int) -> loop.Push:
            host = do("host_copy")

            async def push():
                directory = root / str(v)
                if not directory.exists():
                    await asyncio.to_thread(write, v, params=host)
                pushes.append(await publish.push(fleet, directory, publish.version_string(directory / "manifest.json")))
                await asyncio.to_thread(publish.prune, root, 2, fleet.labels)

            return push

        async def evaluate(v: int):
            groups = await executor.rollouts(greedy, fleet.generate, heldout, max_concurrent=config.max_concurrent)
            values = np.array([sample.reward for group in groups for sample in group])
            accuracy[v] = float(np.nanmean(values))
            run.log("eval", v, accuracy=accuracy[v], rows=len(values), server_version=fleet.version)

        def on_step(v: int, report: dict, seconds: dict[str, float]):
            groups = report.pop("groups")
            pushed = {"push_pause_s": pushes[-1].pause_s, "push_load_s": pushes[-1].load_s} if pushes else {}
            beside = {name: seconds.pop(name) for name in loop.BESIDE}
            run.log("grpo", v, **report, **{f"time_{k[:-2]}": x for k, x in seconds.items()}, **beside, **pushed)
            tick(v, tokens=report["tokens"], reward=report["reward"], accuracy=accuracy.get(max(accuracy, default=-1)))
            if config.samples_every and v % config.samples_every == 0:
                show(run, tokens, v, groups[0])

        seconds = await interruptible(
            loop.run(
                rollout.batch, functools.partial(do, "advance"), hand_out, functools.partial(do, "save"),
                evaluate if heldout else None, eta=config.eta, steps=config.steps, start=start, admit=rollout.admit,
                cursor=rollout.cursor, save_every=config.save_every,
                evaluate_every=config.evaluate_every or config.steps, on_step=on_step,
            )
        )  # fmt: skip
        done = int(trainer.state.step) // config.minibatches
        served = sorted({server.label for server in fleet.usable})
        counts = {**rollout.counts, **fleet.counts}
    checkpoint = do("export")
    return {
        "checkpoint": str(checkpoint),
        "steps": done,
        "complete": done == config.steps,
        "accuracy": accuracy.get(done),
        "accuracies": {str(v): a for v, a in sorted(accuracy.items())},
        "heldout_rows": len(heldout),
        "server_version": served,
        "time": seconds,
        "counts": counts,
        **trainer.report,
    }


def build(config: Config) -> Trainer:
    """Model, optimiser and compiled functions."""
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    settings, params = common.open_model(config.model, config.init, config.seed, mesh)
    score = functools.partial(models.score, config=settings, run=config.run, temperature=config.sampling.temperature)
    spec = replace(config.optim, steps=config.optim.steps or config.steps * config.minibatches)
    optimizer = adamw(spec, models.table(settings))
    shardings = rules.of_state(optimizer, models.table(settings), mesh)
    objective = wrap(config.objective, config.balance)
    trainer = Trainer(
        config, settings, mesh, step.init(params, optimizer, shardings), step.make_scores(score),
        jax.jit(objective.prepare), step.make_step(score, objective, optimizer, shardings),
    )  # fmt: skip
    if config.objective.kl_coef:
        trainer.reference = common.open_model(config.model, config.init, config.seed, mesh)[1]
    return trainer


def advance(trainer: Trainer, groups: list[list[Sample]]) -> dict:
    """One batch: scores at the weights before it, then an optimiser step a minibatch. Returns what to log."""
    config, version = trainer.config, int(trainer.state.step) // trainer.config.minibatches
    if config.shuffle_rewards:
        groups = shuffled(groups, seed=(config.seed, version))
    size = len(groups) // config.minibatches
    samples = [[s for g in groups[i : i + size] for s in g] for i in range(0, len(groups), size)]
    batches = [packing.pack(part, config.length, rows=config.rows) for part in samples]
    with jax.set_mesh(trainer.mesh):
        report, logp = learn(trainer, [place.batch(b, trainer.mesh) for b in batches])
    own = [packing.unpack(x_MBT, b, part) for x_MBT, b, part in zip(logp, batches, samples, strict=True)]
    flat, logps = [s for part in samples for s in part], [x for part in own for x in part]
    agreement = agree(flat, logps, version)
    for name, value in agreement.items():  # of the whole run, for the summary
        trainer.report[name] = max(trainer.report.get(name, 0.0), value)
    traced = list(zip(flat, logps, strict=True))[: len(groups[0])]
    return {**metrics.to_dict(report), **describe(flat, version), **agreement, "groups": [traced]}


def learn(trainer: Trainer, batches: list) -> tuple[dict, list]:
    """An optimiser step a batch; returns merged metrics, and the log-probabilities of each before the first step."""
    # One at a time: gloo, which connects processes on the CPU, hangs when many computations wait.
    scores = [jax.block_until_ready(trainer.scores(trainer.state.params, b)) for b in batches]
    if trainer.reference is not None:
        refs = [jax.block_until_ready(trainer.scores(trainer.reference, b).logp_BT) for b in batches]
        batches = [b.replace(ref_BT=ref) for b, ref in zip(batches, refs, strict=True)]
    report: dict = {}
    for batch, score in zip(batches, scores, strict=True):
        trainer.state, new = trainer.step(trainer.state, trainer.prepare(batch, score))
        report = jax.block_until_ready(common.merge(report, new) if report else new)
    return report, [place.host(score.logp_BT) for score in scores]


def shuffled(groups: list[list[Sample]], seed) -> list[list[Sample]]:
    """The same samples, each with the rewards of another one drawn at random from the batch."""
    flat = [s for group in groups for s in group]
    order = np.random.default_rng(seed).permutation(len(flat))
    take = lambda s, other: s.replace(rewards=tuple((len(s.tokens) - 1, value) for _, value in other.rewards))
    mixed = iter([take(s, flat[i]) for s, i in zip(flat, order, strict=True)])
    return [[next(mixed) for _ in group] for group in groups]


def agree(samples: list[Sample], logps: list[np.ndarray], version: int) -> dict[str, float]:
    """How far trainer and sampler differ on tokens that the current version sampled: max |d logp| and mean k3, float64.

    k3 = exp(d) - 1 - d with d = trainer - sampler estimates KL(sampler || trainer).
    """
    now = [s.version == version for s in samples]
    gap = np.concatenate(
        [(x.astype(np.float64) - s.logp)[here] for x, s, here in zip(logps, samples, now, strict=True)]
    )
    if not len(gap):
        return {}
    return {"max_logp_diff": float(np.abs(gap).max()), "mismatch_k3_now": float(np.mean(np.expm1(gap) - gap))}


def describe(samples: list[Sample], version: int) -> dict:
    """Rewards, lengths and ages of a batch."""
    reward = np.array([s.reward for s in samples])
    length = np.array([int(s.mask.sum()) for s in samples])
    age = np.concatenate([version - s.version[s.mask] for s in samples])
    by_group: dict[int, list[float]] = {}
    for s in samples:
        by_group.setdefault(s.group, []).append(s.reward)
    values = [np.array(r) for r in by_group.values()]
    edges = np.unique(np.linspace(0, max(1, length.max()) + 1, LENGTH_BINS + 1).astype(int))
    return {
        "reward": float(np.nanmean(reward)) if not np.isnan(reward).all() else None,
        "reward_std": float(np.nanstd(reward)) if not np.isnan(reward).all() else None,
        "solved_all": float(np.mean([(v == v[0]).all() and v[0] > 0 for v in values])),
        "solved_none": float(np.mean([(v == v[0]).all() and v[0] <= 0 for v in values])),
        "length": float(length.mean()),
        "truncated": float(np.mean([s.finish == "length" for s in samples])),
        "staleness": float(age.mean()),
        "staleness_max": float(age.max()),
        "samples": len(samples),
        "tokens": int(sum(len(s.tokens) for s in samples)),
        "version": version,
        "length_hist": {"edges": edges.tolist(), "counts": np.histogram(length, edges)[0].tolist()},
        "staleness_hist": {
            "edges": list(range(int(max(age.max(), 0)) + 2)),
            "counts": np.bincount(np.maximum(age, 0)).tolist(),
        },
    }


def show(run: tracker.Run, tokens, v: int, traced: list[tuple[Sample, np.ndarray]]) -> None:
    """Writes a group to samples.jsonl, token by token."""
    for sample, logp in traced:
        new = sample.mask
        run.sample(
            v, version=v - 1, prompt=sample.info.get("prompt", ""), text=sample.info.get("text", ""),
            reward=sample.reward, finish=sample.finish, tokens=[tokens.decode([t]) for t in sample.tokens[new]],
            logp=sample.logp[new].tolist(), version_of_token=sample.version[new].tolist(),
            trainer_logp=logp[new].tolist(),
        )  # fmt: skip


@contextlib.contextmanager
def published_root(config: Config, trainer: Trainer):
    """The folder for published versions; one made here is removed at the end."""
    if config.published:
        root = Path(config.published)
        root.mkdir(parents=True, exist_ok=True)
        yield root
        return
    size = sum(x.nbytes for x in jax.tree.leaves(trainer.state.params))
    root = local.folder(publish.choose_root(size), "weights")
    try:
        yield root
    finally:
        shutil.rmtree(root)


async def interruptible(coroutine):
    """Its result, or None if SIGINT or SIGTERM stopped it, which first lets it save what it has."""
    task = asyncio.ensure_future(coroutine)
    asked: list[int] = []

    def stop(number: int) -> None:
        asked.append(number)
        task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not asked:
            raise
        return None
    finally:
        for number in numbers:
            asyncio.get_running_loop().remove_signal_handler(number)
