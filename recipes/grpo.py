"""Asynchronous policy gradients: prompts -> generation servers -> rewards -> groups -> one update -> weights back.

With `eta` = 0 it is synchronous; with eta > 0 servers generate while the trainer trains, and no group is older than
eta versions when it is trained on. Run it again with the same `out` and it goes on where it stopped.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from areax import models
from areax.adapters import hf, orbax, tokenizer
from areax.adapters.report import chrome_trace
from areax.adapters.runtime import compile_cache
from areax.adapters.tracking import run_dir, sinks
from areax.core import losses
from areax.core.balance import Balance
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.parallel.multihost import lockstep, processes
from areax.recipes.shared import common, describe, learner, probe, publishing
from areax.recipes.shared.trainer import CriticOptions, Trainer, advance, build, restore, saved
from areax.rollout import client, events, loop, object_path, rewards
from areax.rollout.fleet import offload, step_metrics
from areax.rollout.fleet.push import Push
from areax.rollout.scheduling import episodes, executor
from areax.rollout.scheduling.curriculum import Curriculum, ordered
from areax.rollout.servers import local
from areax.rollout.servers.types import Probe
from areax.rollout.types import Sample, Sampling, Workflow
from areax.rollout.workflows import agents, resolve, teacher

log = logging.getLogger(__name__)

TOO_LONG = 16  # rows in a row that do not fit end the run


@dataclass(frozen=True)
class Config:
    """Asynchronous reinforcement learning by the objective named, GRPO if none is.

    Attributes:
      model: Hugging Face directory with weights and tokenizer.
      data: rows with "prompt" or "messages", and what the reward needs: a file, a folder, or a hub name.
      row: `module:function` or `file.py:function` that turns a record of the data into a row, or None to leave it out;
        `areax.adapters.data.formats:auto` reads the usual formats; "" = records are rows.
      limit: records of `data` to read; 0 = all. Of a data set on the hub no more are then fetched.
      reward: `module:function` or `file.py:function`, called as f(text, row) in worker processes.
      out: the run's directory: checkpoint in `model/` (with `optim.ema` the averaged weights), adapters in `adapter/`,
        state, metrics, samples.
      init: "random" starts from new weights; the directory then needs config.json and tokenizer alone.
      curriculum: the order of the rows.
      heldout: rows evaluated greedily, never trained on; "" = none.
      workflow: an episode: `module:function` that takes `generate` and a row, or an agent
        (`rollout.workflows.resolve.bind`).
      workflow_options: a JSON object of further arguments of the workflow.
      agent: how agents are served that talk to the model as to OpenAI or Anthropic.
      servers: addresses of generation servers; none = some are started on this machine.
      stagers: where servers do not see `published`, the addresses of what fetches versions beside each of them
        (docs/servers.md), in their order; none = they see it.
      serve: of the servers started here.
      push: how versions of the weights get to the servers.
      colocated: servers and trainer share devices in turns: servers release their memory while the trainer updates, and
        take it again with the next version. Needs eta 0 (docs/colocated.md).
      published: folder for versions of the weights; "" = a new one, in memory if there is room.
      eta: most versions between the admission of a group and its training; 0 = synchronous.
      steps: batches to train on.
      groups: prompts a batch.
      group_size: completions a prompt.
      minibatches: optimiser steps a batch, over equal parts of its groups.
      epochs: passes over these.
      max_concurrent: most groups in flight.
      oversample: groups begun beyond those of a batch, which takes the first that end; the others are stopped, and run
        again in a batch of their own. With eta 0, so that a batch does not wait for its slowest groups.
      max_prompt: most tokens of a prompt; rows with longer ones are left out, and counted. 0 = no limit.
      length: longest prompt and completion together, and tokens of a packed row.
      rows: packed rows of a microbatch.
      lora: adapters to train in place of all weights; the model without them is the reference. Rank 0 = none.
      teacher: directory of a model that teaches, by `objective.advantage.teacher` or `distill_coef`.
      teachers: instead, addresses of servers that serve teachers: `http://...`, or `name=http://...` where rows name
        theirs in "teacher".
      distill, distill_coef: a divergence from the teacher beside the objective, on the samples; 0 = none.
      critic: of objectives that have one, such as PPO.
      reference_every: batches after which the reference of a KL term moves towards the policy; 0 = it stays.
      reference_mix: how far: 1 = it becomes the policy.
      balance: terms that keep the experts of a mixture evenly used.
      mesh: devices along each axis; all of them together must be the machine's, or one.
      save_every: in batches; 0 = at the end alone.
      evaluate_every: in batches; 0 = before the first and after the last.
      samples_every: in batches, how often a group is written to samples.jsonl.
      track: where else the numbers of metrics.jsonl go: TensorBoard, wandb, Prometheus.
      reward_workers: processes that compute rewards.
      reward_timeout_s: seconds that one may take.
      reward_failed: what a completion scores whose reward raised, hung or crashed twice.
      shuffle_rewards: a control: rewards are permuted among the completions of a batch, so that they teach nothing.
      seed: of new weights, of the order of the prompts and of sampling.
    """

    model: str
    data: str
    reward: str
    out: str = "runs/grpo"
    row: str = ""
    limit: int = 0
    init: Literal["checkpoint", "random"] = "checkpoint"
    curriculum: Curriculum = Curriculum()
    heldout: str = ""
    workflow: str = "areax.rollout.workflows:single_turn"
    workflow_options: str = ""
    agent: agents.Options = agents.Options()
    servers: tuple[str, ...] = ()
    stagers: tuple[str, ...] = ()
    serve: local.Serve = local.Serve()
    push: Push = Push()
    colocated: bool = False
    published: str = ""
    eta: int = 1
    steps: int = 100
    groups: int = 32
    group_size: int = 8
    minibatches: int = 1
    epochs: int = 1
    max_concurrent: int = 128
    oversample: int = 0
    max_prompt: int = 0
    sampling: Sampling = Sampling()
    objective: losses.Policy = losses.GRPO()
    optim: Optimizer = Optimizer(lr=1e-6, warmup=10)
    lora: Lora = Lora()
    teacher: str = ""
    teachers: tuple[str, ...] = ()
    distill: losses.Distill = losses.Distill()
    distill_coef: float = 0.0
    critic: CriticOptions = CriticOptions()
    reference_every: int = 0
    reference_mix: float = 1.0
    balance: Balance = Balance()
    run: models.Run = models.Run()
    mesh: Layout = Layout()
    length: int = 1024
    rows: int = 8
    save_every: int = 0
    evaluate_every: int = 0
    samples_every: int = 10
    track: sinks.Sinks = sinks.Sinks()
    reward_workers: int = 1
    reward_timeout_s: float = 10.0
    reward_failed: Literal["unscorable", "zero"] = "unscorable"
    shuffle_rewards: bool = False
    seed: int = 0

    def __post_init__(self):
        resolve.options(self.workflow_options)
        if self.workflow == resolve.ONLINE and (self.heldout or self.objective.advantage.mean not in ("batch", "none")):
            raise ValueError(
                "--workflow online: users' sessions are no group to be compared, nor can they be evaluated; take "
                f"--objective.advantage.mean batch without --heldout, got {self.objective.advantage.mean} and "
                f"{self.heldout or 'none'}"
            )
        for option, holds, rule in (
            ("minibatches", self.minibatches >= 1, "at least 1"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("oversample", 0 <= self.oversample <= self.groups, f"from 0 to --groups {self.groups}"),
            ("distill_coef", self.distill_coef >= 0, "at least 0"),
            ("reference_every", self.reference_every >= 0, "at least 0"),
            ("reference_every", not self.reference_every or self.objective.needs_reference,
             "0 without a reference, which --objective.kl.coef above 0 has"),
            ("reference_mix", 0 < self.reference_mix <= 1, "above 0 and at most 1"),
        ):  # fmt: skip
            if not holds:
                raise ValueError(f"--{option.replace('_', '-')} must be {rule}, got {getattr(self, option)}")
        if self.colocated and self.eta:
            raise ValueError(
                "--colocated has servers rest while the trainer updates, so that nothing is generated ahead: it needs "
                f"--eta 0, got {self.eta}"
            )
        for option in ("servers", "published") if self.serve.inside else ():
            if getattr(self, option):
                raise ValueError(
                    f"--serve.inside starts a server in this process and hands it versions in memory; leave out "
                    f"--{option}, got {getattr(self, option)}"
                )
        if self.stagers and len(self.stagers) != len(self.servers):
            raise ValueError(
                f"--stagers must be one a server, in the order of --servers, got {len(self.stagers)} for "
                f"{len(self.servers)}"
            )
        if self.push.way == "tensors" and (self.stagers or not self.servers):
            raise ValueError(
                "--push.way tensors is for SGLang servers at --servers, without --stagers, got "
                f"{self.servers or 'none'} and {self.stagers or 'none'}; servers started here read the files"
            )
        if self.critic != CriticOptions() and not self.objective.needs_values:
            raise ValueError(f"{self.objective.name} has no critic, got {self.critic}; take ppo, or leave it out")
        if self.critic.warmup >= self.steps and self.objective.needs_values:
            raise ValueError(
                f"--critic.warmup must be below --steps {self.steps}, for the policy to train at all, got "
                f"{self.critic.warmup}"
            )
        if self.groups % self.minibatches:
            raise ValueError(f"--minibatches must divide --groups {self.groups}, got {self.minibatches}")
        if self.push.lora == "adapter" and not self.lora.rank:
            raise ValueError(
                "--push.lora adapter needs adapters to push, got --lora.rank 0; give a rank, or leave it out"
            )
        if self.lora.rank and self.reference_every:
            raise ValueError(
                f"--reference-every {self.reference_every} would move the weights under the adapters, which stay with "
                f"--lora.rank {self.lora.rank}; leave out one of them"
            )
        taught = self.objective.advantage.teacher or self.distill_coef
        if (len(self.teacher) > 0) + (len(self.teachers) > 0) != (taught != 0):
            raise ValueError(
                "name one of --teacher and --teachers where --objective.advantage.teacher or --distill-coef is not 0, "
                f"and neither elsewhere, got {self.teacher!r} and {self.teachers}"
            )
        if self.teachers and self.objective.advantage.teacher and self.sampling.temperature != 1:
            raise ValueError(
                "--teachers give log-probabilities at temperature 1, got --sampling.temperature "
                f"{self.sampling.temperature:g}; take --teacher, a directory"
            )
        if self.teachers and self.distill_coef and (not self.distill.top_k or self.distill.temperature != 1):
            raise ValueError(
                "--teachers give log-probabilities of --distill.top-k tokens at temperature 1, got "
                f"{self.distill.top_k} and --distill.temperature {self.distill.temperature:g}; or take --teacher"
            )
        if self.eta and not self.objective.corrects:
            raise ValueError(
                f"--eta {self.eta} lets samples be older than the weights, which {self.objective.name} with proximal "
                '"behaviour" does not correct for; take --objective.correction.proximal recompute, or --eta 0'
            )


def main(config: Config) -> dict:
    """Trains, writes `out`/model, and returns the summary that `out`/summary.json holds.

    Of several processes the first runs everything but the devices, which all of them move together, each with its part
    of every batch: `work`. The others return {}.
    """
    began = time.monotonic()
    common.keep_memory()
    compile_cache.keep()
    if config.colocated and not config.serve.inside:
        common.share_devices()
    with processes.job() as index:
        if config.serve.inside and jax.process_count() > 1:
            raise ValueError(f"--serve.inside needs a trainer of one process, got {jax.process_count()}")
        tokens = tokenizer.load(config.model)
        if index == 0:
            sinks.check(config.track)
        inputs = read(config, tokens) if index == 0 else ()
        out = common.out_directory(config.out)
        processes.same("options", config)
        trainer = build(config)
        with orbax.open_store(out / "state") as store:
            cursor = restore(trainer, store)
            start, policy = trainer.version, trainer.policy
            work: dict[str, Callable] = {
                "advance": functools.partial(advance, trainer),
                "save": lambda v, at: store.save(v, saved(trainer), {"rollout": at, "control": dict(trainer.control)}),
                "host_copy": lambda adapters: publishing.host_copy(policy, adapters),
                "probe": probe.make(policy, config.run, trainer.mesh),
                "publish": lambda root, v: hf.write_published(
                    root, v, policy.settings, learner.weights(policy), tokenizer=tokens
                ),
                "publish_base": lambda root: publishing.publish_base(policy, root, tokens),
                "export": lambda: learner.export(policy, out, tokenizer=tokens, base=config.model),
            }
            if index > 0:
                lockstep.follow(work)
                return {}
            with lockstep.lead(work) as do:
                summary = asyncio.run(train(config, trainer, do, start, cursor, tokens, *inputs))
                summary["seconds"] = time.monotonic() - began
                run_dir.write_json(out / run_dir.SUMMARY, summary)
                return summary


def read(config: Config, tokens) -> tuple:
    """(prompts, held-out rows), and sees that there are a reward and a workflow."""
    object_path.resolve(config.reward)
    resolve.find(config.workflow)
    rows = common.read_rows(config.data, config.row, config.limit)
    heldout = common.read_rows(config.heldout, config.row) if config.heldout else []
    rows, heldout = (common.keep_short(some, tokens, config.max_prompt) for some in (rows, heldout))
    return ordered(rows, config.curriculum, seed=config.seed), heldout


async def train(config: Config, trainer: Trainer, do: Callable, start: int, cursor, tokens, prompts, heldout):
    """The loop, from version `start` on, and its summary; `do(name, ...)` does a piece of `work` in all processes."""
    out = Path(config.out)
    async with contextlib.AsyncExitStack() as stack:
        enter, enter_async = stack.enter_context, stack.enter_async_context
        keep = {kind: start for kind in ("grpo", "eval")}
        run = enter(run_dir.open_run(out, config=config, keep=keep))
        track = enter(sinks.following(out, config.track))
        enter(events.writing(out / chrome_trace.JOURNAL))
        tick = enter(run_dir.progress("grpo", config.steps, start=start))
        way = await enter_async(publishing.opened(config, trainer.policy, do, tokens, start))
        fleet = await enter_async(
            common.fleet(
                config.servers, way.path, config.serve, log=out / "server.log",
                concurrency=config.max_concurrent * config.group_size, stagers=config.stagers,
                handover=way.handover, first=way.first,
            )
        )  # fmt: skip
        reward = await enter_async(
            rewards.pool(
                config.reward, workers=config.reward_workers, timeout_s=config.reward_timeout_s,
                failed=config.reward_failed,
            )
        )  # fmt: skip
        play = functools.partial(
            resolve.bind, config.workflow, tokenizer=tokens, reward=reward, agent=config.agent,
            options=resolve.options(config.workflow_options),
        )  # fmt: skip
        episode = fitting(await enter_async(play(sampling=config.sampling)), config)
        plain = replace(config.sampling, temperature=0.0, routed_experts=False)
        asked = heldout or config.objective.advantage.mean == "greedy"
        greedy = await enter_async(play(sampling=plain)) if asked else episode
        if config.teachers:
            fleets = {
                name: await enter_async(client.connect(own)) for name, own in teacher.named(config.teachers).items()
            }
            top_k = config.distill.top_k if config.distill_coef else 0
            vocabulary = trainer.policy.settings.vocab
            say = functools.partial(teacher.annotate, teachers=fleets, top_k=top_k, vocabulary=vocabulary)
            episode = functools.partial(teacher.taught, episode, say)
        rollout = await enter_async(
            executor.Executor(
                episode, fleet.generate, prompts,
                group_size=config.group_size, groups_per_batch=config.groups, eta=config.eta,
                max_concurrent=config.max_concurrent, oversample=config.oversample,
                seed=config.seed if fleet.seeded else None,
                accept=varied if config.objective.shaping.dynamic_sampling else None,
                baseline=greedy if config.objective.advantage.mean == "greedy" else None,
                batches=config.steps, cursor=cursor,
            )
        )  # fmt: skip
        accuracy: dict[int, float] = {}
        rested: list[float] = []
        counted = lambda: {
            **{name: rollout.counts[name] for name in ("rejected", "refused", "failed", "stopped", "lost", "retries")},
            "reward_retries": reward.counts["retried"],
        }
        watched = step_metrics.Figures(fleet, counted)
        enter(events.watching(watched.see))
        track.live = watched.live

        ids = probe.prompt(tokens, prompts.rows, config.length) if config.push.tolerance else ()

        def hand_out(v: int) -> loop.Push:
            host = do("host_copy", way.adapters)
            known = Probe(ids, tuple(do("probe", ids)), config.push.tolerance) if ids else None
            return functools.partial(publishing.push, way, fleet, v, host, known)

        async def evaluate(v: int):
            with events.about(of="evaluation"):
                groups = await executor.rollouts(greedy, fleet.generate, heldout, max_concurrent=config.max_concurrent)
            values = np.array([episodes.outcome(s) for group in groups for s in episodes.one_a_rollout(group)])
            accuracy[v] = float(np.nanmean(values))
            run.log("eval", v, accuracy=accuracy[v], rows=len(values), server_version=fleet.version)

        async def batch(v: int):
            groups = await rollout.batch(v)
            if config.colocated:
                rested.append(await offload.offload(fleet))
            return groups

        def on_step(v: int, report: dict, seconds: dict[str, float]):
            groups = report.pop("groups")
            report |= watched.step(seconds) | {"tokens_per_second": report["tokens"] / seconds["step_s"]}
            report |= rollout.lengths() | {"limit": min(fleet.room(server) for server in fleet.servers)}
            report |= {"rest_s": rested[-1]} if rested else {}
            beside = {name: seconds.pop(name) for name in loop.BESIDE}
            run.log("grpo", v, **report, **{f"time_{k[:-2]}": x for k, x in seconds.items()}, **beside)
            tick(v, tokens=report["tokens"], reward=report["reward"], accuracy=accuracy.get(max(accuracy, default=-1)))
            if config.samples_every and v % config.samples_every == 0:
                describe.show(run, tokens, v, groups[0])

        seconds = await interruptible(
            loop.run(
                batch, functools.partial(do, "advance"), hand_out, functools.partial(do, "save"),
                evaluate if heldout else None, eta=config.eta, steps=config.steps, start=start, admit=rollout.admit,
                cursor=rollout.cursor, save_every=config.save_every,
                evaluate_every=config.evaluate_every or config.steps, on_step=on_step,
            )
        )  # fmt: skip
        done = trainer.version
        served = sorted({server.label for server in fleet.healthy})
        counts = {**rollout.counts, **fleet.counts, "rewards": reward.counts}
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


def fitting(episode: Workflow, config: Config) -> Workflow:
    """The episode without rows that are longer than a packed one, which are told of; at the run's temperature.

    The workflow raises ValueError where TOO_LONG rows in a row did not fit, or the temperature is another one.
    """
    long: list[int] = []

    async def fits(generate, row):
        samples = await episode(generate, row)
        samples = samples if isinstance(samples, list) else [samples] if samples else []
        kept = [s for s in samples if len(s.tokens) <= config.length]
        for n in (len(s.tokens) for s in samples if len(s.tokens) > config.length):
            long.append(n)
            events.note("left_out", tokens=n)
            log.warning("a row of %d tokens is left out: longer than --length; %s", n, object_path.row(row))
        if kept:
            long.clear()
        if len(long) >= TOO_LONG:
            raise ValueError(
                f"what is sampled must fit in a row of {config.length} tokens, got {TOO_LONG} in a row that do not, of "
                f"up to {max(long)}; raise --length, or lower --sampling.max-new-tokens or --max-prompt"
            )
        for s in kept:
            if s.temperature != config.sampling.temperature:
                raise ValueError(
                    f"--workflow {config.workflow}: must sample at --sampling.temperature "
                    f"{config.sampling.temperature:g}, at which the trainer computes, got {s.temperature:g}"
                )
        return kept or None

    return fits


def varied(samples: list[Sample]) -> bool:
    """Whether the rewards of a group differ, unscorable ones apart: else it teaches nothing."""
    rewards = np.array([episodes.outcome(s) for s in episodes.one_a_rollout(samples)], np.float32)
    return len(set(rewards[~np.isnan(rewards)].tolist())) > 1


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
