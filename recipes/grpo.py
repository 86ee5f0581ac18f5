"""Asynchronous reinforcement learning: prompts -> generation servers -> rewards -> update -> new weights to servers.

`eta` = 0 is synchronous. With eta > 0 the servers generate while the trainer trains, and no group of completions is
more than eta versions old when it is trained on. Running it again with the same `out` resumes the run.

From top to bottom: `Config`, the options in groups; `main`, what runs on the devices; `train`, the loop.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax

from areax.adapters import hf, orbax
from areax.adapters.command_line import typed
from areax.adapters.command_line.options import JSON, UNPREFIXED, flat, json_object
from areax.adapters.data import images
from areax.adapters.launch import devices
from areax.adapters.runtime import blas, compile_cache, compile_time, hub
from areax.adapters.tracking import sinks
from areax.models import paging
from areax.parallel import turns
from areax.parallel.multihost import agreement, lockstep, processes
from areax.recipes.shared import (
    common,
    contents,
    describe,
    ending,
    environments,
    evaluation,
    in_parts,
    journals,
    learner,
    many_rows,
    microbatch,
    notebook,
    probe,
    profiling,
    publishing,
    resume,
    rl_log,
    rollouts,
    rows,
    sources,
    teachers,
    vision,
)
from areax.recipes.shared.giving_up import GivingUp, models
from areax.recipes.shared.rl_options import Evaluation, Prompts, Rewards, Rollout, Saving, Serving, Training, conflicts
from areax.recipes.shared.stop_on import StopOn
from areax.recipes.shared.trainer import Trainer, build, position, restore, saved, train_on_batch, train_packed
from areax.rollout import loop, rewards
from areax.rollout.fleet import canary, offload
from areax.rollout.processes import garbage
from areax.rollout.scheduling.mixture import Mixture
from areax.rollout.scheduling.resumed import Resumed
from areax.rollout.weights import object_store
from areax.rollout.weights import store as versions
from areax.rollout.workflows import resolve

FIRST_OPTIONS = (
    "model", "data", "reward", "env", "out", "heldout", "servers", "steps", "groups", "group_size", "eta",
    "sampling.max_new_tokens", "length", "rows", "optim.lr", "objective.kl.coef", "run.dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Asynchronous reinforcement learning; the objective is GRPO unless another is chosen.

    Attributes:
      model: Hugging Face directory, GGUF file or hub name: weights, config.json and tokenizer.
      data: rows with "prompt" or "messages": a file, a folder, or a data set on the hub; or NAME=ROWS:WEIGHT,NAME=...
      reward: `module:function` or `file.py:function`: called as f(text, row) -> number.
      out: the run's directory: checkpoint in `model/` (with `optim.ema` the averaged weights), adapters in `adapter/`,
        state, metrics, samples.
      init: "random" starts from new weights; the directory then needs only config.json and tokenizer.
      steps: batches to train on.
      stop_on: ends the run in order once a metric says so: "METRIC>VALUE", also >=, < and <=, and with @N for N lines
        in a row that have it; or at the first `alarm` (docs/metrics.md). Quotes keep the shell from it.
      seed: random seed of new weights, prompt order and sampling.
      env: environment in place of data and reward: `reasoning_gym:NAME`, `textarena:NAME`, `aviary:NAME`,
        `gymnasium:NAME`, `verifiers:NAME`, `openenv:ADDRESS`, `nemo_gym:ADDRESS`, or a class of yours, `file.py:CLASS`;
        or a mixture, `NAME=ENV:WEIGHT,...` (docs/train-on-an-environment.md).
      env_options: options of the environment, and `turns`, `step_timeout_s` and `style` of its episodes, a JSON object.
    """

    INSTEAD_OF: ClassVar = environments.INSTEAD_OF
    model: str
    data: str
    reward: str
    out: str = "runs/grpo"
    init: Literal["checkpoint", "random"] = "checkpoint"
    steps: int = 100
    stop_on: tuple[str, ...] = ()
    seed: int = 0
    env: str = ""
    env_options: Annotated[str, JSON] = ""
    prompts: Annotated[Prompts, UNPREFIXED] = Prompts()
    rollout: Annotated[Rollout, UNPREFIXED] = Rollout()
    rewards: Annotated[Rewards, UNPREFIXED] = Rewards()
    training: Annotated[Training, UNPREFIXED] = Training()
    serving: Annotated[Serving, UNPREFIXED] = Serving()
    evaluation: Annotated[Evaluation, UNPREFIXED] = Evaluation()
    saving: Annotated[Saving, UNPREFIXED] = Saving()

    def __post_init__(self):
        typed.check(self)
        json_object("--env-options", self.env_options)
        json_object("--workflow-options", self.rollout.workflow_options)
        json_object("--chat-template-kwargs", self.prompts.chat_template_kwargs)
        profiling.chosen(self.saving.profile, self.steps)
        for reason in (*environments.conflicts(self), *conflicts(self)):
            raise ValueError(reason)


def main(config: Config, rows: Any = None) -> dict:
    """Trains, writes `out`/model, and returns the content of `out`/summary.json.

    In a job of several processes, process 0 runs rollouts, rewards and the loop. All processes together run what needs
    the devices (`collective`), each on its part of every batch. Processes other than 0 return {}.

    Args:
      rows: what to train on instead of `config.data`, as `sources.opened`.
    """
    notebook.refuse_running_loop(config)
    config = environments.expanded(config)
    began = time.monotonic()
    common.keep_memory()
    blas.one_thread()
    compile_cache.keep()
    compile_time.measure()
    serve, inside = config.serving.serve, config.serving.serve.inside
    wanted = config.training.mesh.devices + serve.count * serve.mesh.devices
    if config.serving.colocated and not inside:
        common.share_devices()
    elif config.serving.servers or inside or wanted <= len(devices.visible_gpus()):  # no server of its own on these
        common.take_devices()
    with processes.job() as index, ending.stop_signal() as stop:
        if inside and jax.process_count() > 1:
            raise ValueError(f"--serve.inside needs a trainer of one process, got {jax.process_count()}")
        agreement.same("options", **vars(flat(config)))
        tokens = common.open_tokenizer(config.model, config.prompts.chat_template_kwargs)
        if index == 0:
            sinks.check(config.saving.track)
        processor = images.of_model(config.model)
        prompts, heldout, seen = read(config, tokens, processor, rows) if index == 0 else (None, {}, False)
        data = prompts, heldout
        config = with_vision(config, processes.anyone(seen and processor is not None)[0])
        if (summary := resume.finished("grpo", config, data[0])) is not None:
            return summary
        out = Path(config.out)
        with (
            common.run_directory(config.out, config.serving.published) as run,
            orbax.open_store(out / "state") as store,
            contextlib.ExitStack() as stack,
        ):
            own = config.training
            frozen = bool(own.lora.rank) or own.objective.needs_reference or own.vision == "frozen"
            known = contents.same(config, tokens, frozen=frozen, quiet=index > 0)
            trainer = build_trainer(config)
            with resume.restoring(config):
                cursor = restore(trainer, store)
            work = collective(config, trainer, store, tokens, stack)
            if index > 0:
                lockstep.worker_loop(work)
                return {}
            with lockstep.leader(work) as run_on_all:
                reads = processor if trainer.reading else None
                summary = ending.run(train(config, trainer, run_on_all, tokens, reads, run, data, cursor, stop, known))
                summary["seconds"] = time.monotonic() - began
                store.wait()  # a summary must not say complete if the state does not fit on the disk
                ending.finish(config.out, summary)
                return summary


async def run(config: Config, rows: Any = None) -> dict:
    """`main` where an event loop is running, as in a notebook; cancelled, it stops as after Ctrl-C."""
    return await notebook.run_in_thread(functools.partial(main, rows=rows), config)


def with_vision(config: Config, seen: bool) -> Config:
    """The Config with `--vision` as rows with images, or without any, decide."""
    return replace(config, training=replace(config.training, vision=vision.decided(config.training.vision, seen)))


def read(config: Config, tokens, processor: images.Processor | None = None, given: Any = None) -> tuple:
    """Reads (prompts, {name: held-out rows}, whether any have images).

    Raises ValueError if reward or workflow do not exist, or a key is refused.
    """
    rollouts.check_keys(config.serving, config.training)
    common.check_directory("--out", config.out)
    for model in filter(None, (config.model, config.training.critic.model, config.training.teacher)):
        common.check_microbatch(model, config.training.rows, config.training.length)
    common.check_balance(config.model, config.training.balance)
    if not config.serving.servers:
        common.check_own_servers(config.serving.serve, config.training.mesh.devices, config.serving.colocated)
    if config.serving.published:
        common.check_directory("--published", config.serving.published)
        versions.check_owner(Path(config.serving.published), common.run_id(config.out))
    if config.serving.push.bucket:
        asyncio.run(object_store.check_owner(config.serving.push.bucket, common.run_id(config.out)))
    rewards.check(config.reward)
    workflow_options = json_object("--workflow-options", config.rollout.workflow_options)
    resolve.check(config.rollout.workflow, workflow_options, config.rollout.agent)
    options, heldout, serving = config.prompts, evaluation.named(config.evaluation.heldout), config.serving
    length = config.training.length
    model, workflow = hf.read_config(hub.folder(config.model)), config.rollout.workflow
    context = 0 if serving.servers else min(serving.serve.context, model.context)  # 0: it follows `length`
    rollouts.check_reported(config.rollout.sampling, model.vocab, own=not serving.servers)
    if not serving.servers:
        paging.check_draft("--serve.draft", serving.serve.draft, context or length)
        common.check_own_engine(config.model, serving.serve.sized(length))
    common.note_rope(model, min(length, context or length))
    check = vision.NotingImages(
        rows.prompts(
            tokens, workflow, processor and processor.as_given(), most=options.max_prompt,
            room=min(length, context or length), vocabulary=model.vocab, context=context,
            new=config.rollout.sampling.max_new_tokens, taught=length if config.training.taught else 0,
            pair=teachers.pair(config.training, tokens, say=True) if config.training.taught else None,
        )
    )  # fmt: skip
    asks = rows.asks(workflow)
    checked = rows.valued(check) if config.training.objective.advantage.mean == "optimal_value" else check
    open_one = functools.partial(
        sources.opened, row=options.row, limit=options.limit, check=checked, bad=options.bad_rows, recognise=asks,
        spec=options.curriculum,
    )  # fmt: skip
    if config.env and given is None and not config.data:
        of_one = lambda own, seed: open_one("", own, seed=seed)
        prompts = environments.opened(config.env, config.env_options, of_one, config.seed)
    else:
        prompts = open_one(config.data, given, seed=config.seed)
    read = functools.partial(many_rows.every, row=options.row, check=check, bad=options.bad_rows, recognise=asks)
    if config.env:
        asyncio.run(environments.check(config.env, config.env_options, dict(prompts[0]), tokens, length))
    held: dict[str, Sequence[dict]] = {}
    for name, source in heldout.items():
        own = environments.heldout(config.env, config.env_options, config.data, name, source)
        held.update(own if own else {name: read(source)})
    common.say_added_ends(config.model, model, tokens)
    return prompts, held, check.images


def build_trainer(config: Config) -> Trainer:
    """Builds the trainer: models, optimisers and compiled functions."""
    return build(
        config.training, rows=microbatch.rows(config), model=config.model, init=config.init, seed=config.seed,
        steps=config.steps, temperature=config.rollout.sampling.temperature,
        shuffle_rewards=config.rewards.shuffle_rewards,
    )  # fmt: skip


def collective(
    config: Config, trainer: Trainer, store: orbax.Store, tokens, stack: contextlib.ExitStack
) -> dict[str, Callable]:
    """{name: function} of what all processes of the job call together, because it moves data between devices. An engine
    in this process waits meanwhile, if both have several.

    Args:
      stack: as `in_parts.work`.
    """
    policy, out = trainer.policy, Path(config.out)
    dtype = publishing.dtype(config.serving, config.training.run)
    work: dict[str, Callable] = {
        "update": functools.partial(train_packed, trainer),
        "save": lambda v, at: store.save(v, saved(trainer), position(trainer, at)),
        "host_copy": lambda adapters: publishing.host_copy(policy, adapters, dtype),
        "probe": probe.make(policy, config.training.run, trainer.mesh),
        "publish": lambda root, v: hf.write_published(
            root, v, policy.written, learner.weights(policy), dtype, tokenizer=tokens
        ),
        "publish_base": lambda root: publishing.publish_base(policy, root, tokens),
        "export": lambda: learner.export(policy, out, tokenizer=tokens, base=config.model),
        **in_parts.work(policy, config.serving.stagers, dtype, stack),
    }
    return {name: turns.during(trainer.mesh, fn) for name, fn in work.items()}


async def train(
    config: Config, trainer: Trainer, run_on_all: Callable, tokens, processor: images.Processor | None, run: str,
    data: tuple, cursor, stop, known: dict[str, str],
) -> dict:  # fmt: skip
    """Runs the training loop from the trainer's version on; returns the summary.

    Args:
      run_on_all: `run_on_all(name, ...)` calls a function of `collective` in all processes.
      processor: of a model that reads images; None = text alone.
      run: id of the run.
      data: (prompts, held-out rows), as `read` returns them.
      cursor: the position in the prompts where a former run stopped; None = the beginning.
      stop: the `ending.Stop` that ends the run in order once it trains.
      known: `contents.of` what the run is made of, kept with its state.
    """
    start, objective, eta = trainer.version, config.training.objective, config.rollout.eta
    steps, complete = max(config.steps, start), common.complete(config, start)
    prompts, heldout = data
    if cursor is not None:
        sources.check_same(prompts, cursor["data"], config.data)
    identity, ends = sources.identity(prompts), hf.with_ends(trainer.policy.settings, tokens).eos
    async with contextlib.AsyncExitStack() as stack:
        enter, enter_async = stack.enter_context, stack.enter_async_context
        await enter_async(garbage.spared())

        # Servers hold version `start`, episodes know workflow and reward, the executor runs them.
        sync = await enter_async(
            publishing.opened(
                config.model, config.serving, trainer.policy, run_on_all, tokens, run, start,
                dtype=publishing.dtype(config.serving, config.training.run),
            )
        )  # fmt: skip
        stop_on = StopOn(config.stop_on, stop.ask, start, steps)
        log = enter(rl_log.opened(config, config.saving, tokens, start, stop_on))
        serve = config.serving.serve.sized(config.training.length)
        compared = tokens, prompts.rows if config.serving.push.tolerance else [], config.training.length
        probe_ids, canaries = probe.prompt(*compared), probe.NO_CANARIES
        if config.serving.push.canary_every:
            canaries = probe.canaries(*compared, publishing.rounding(sync, trainer.policy, config.training.run))
        async with probe.ahead(functools.partial(run_on_all, "probe"), probe_ids, *canaries.prompts):
            fleet = await enter_async(
                common.fleet(
                    config.serving.servers, sync.path, serve,
                    log=Path(config.out) / "server.log", longest=config.training.length,
                    concurrency=config.rollout.max_concurrent * config.rollout.group_size,
                    stagers=config.serving.stagers, source=sync.bucket or sync.parts, handover=sync.handover,
                    first=sync.first, timeout_s=config.serving.completion_timeout_s,
                    lost_s=config.serving.server_timeout_s,
                    experts_per_token=getattr(trainer.policy.settings, "top_k", 0),
                    image_token=processor.token if processor else None,
                    ends=ends, vocabulary=trainer.policy.settings.vocab,
                    environs=common.own_environs(serve, config.training.mesh.devices, config.serving.colocated),
                )
            )  # fmt: skip
        variables = json_object("--chat-template-kwargs", config.prompts.chat_template_kwargs)
        await probe.compare_templates(fleet.servers, tokens, variables)
        episodes = await enter_async(
            rollouts.opened(
                config.reward, config.rewards, config.rollout, config.training, tokens, processor,
                vocabulary=trainer.policy.settings.vocab, sampled=config.evaluation.heldout_samples > 1,
                greedy=bool(heldout) or objective.advantage.mean == "greedy",
            )
        )  # fmt: skip
        journal = await enter_async(journals.opened(config, run, start, known, identity))
        executor = await enter_async(
            rollouts.scheduler(
                episodes, fleet.generate, prompts, config.rollout, objective, steps=steps, cursor=cursor,
                seed=config.seed if fleet.seeded else None, vocabulary=trainer.policy.settings.vocab,
                experts=getattr(trainer.policy.settings, "experts", None),
                check_images=vision.image_check(trainer.reading), journal=journal,
            )
        )  # fmt: skip
        if not complete:
            resume.write_options(config, start, tokens)
        enter(log.watching(fleet, executor, episodes.rewards))
        traced = enter(profiling.steps("grpo", config.saving.profile, config.out, steps, start=start))
        push_of = functools.partial(publishing.prepare_push, sync, fleet, probe_ids, canaries=canaries)
        prepare_push = turns.during(trainer.mesh, push_of)
        giving_up, named = GivingUp.restored(cursor), models(config.training)
        batches = Resumed(journal, executor, cursor) if journal else executor
        online = config.rollout.workflow == "online"  # whose users may give no feedback

        async def rollout(v: int) -> list:  # the groups of the batch that makes version v + 1
            giving_up.check_numbers(named)
            groups = await batches.batch(v)
            if not online:
                giving_up.check_rewards(groups)
            if config.serving.colocated:
                log.offload_s = await offload.offload(fleet)
            return groups

        def update(groups: list) -> dict:  # log-probabilities, advantages, loss and optimiser steps; returns metrics
            with log.terminal.step(), traced(trainer.version + 1):
                report = train_on_batch(trainer, groups, functools.partial(run_on_all, "update"))
            giving_up.see(report)
            if origin := report.pop("not_finite", None):
                log.terminal.say_not_finite(trainer.version, origin[0].said(origin[1], tokens))
            report["unstopped"] = describe.unstopped([s for group in groups for s in group], ends)
            return report | (describe.by_source(groups, prompts.source) if isinstance(prompts, Mixture) else {})

        def publish(v: int):
            batches.recorded()  # what made version v, before anything is made of it
            return prepare_push(v)

        def save(v: int, position) -> None:
            run_on_all("save", v, position | {"data": identity, "contents": known} | giving_up.kept)
            if journal and config.saving.journal == "prune" and (kept := orbax.versions(Path(config.out) / "state")):
                journal.prune(kept[0], eta)

        async def evaluate(v: int) -> None:
            with log.terminal.counting(f"evaluating version {v}") as count:
                sets, groups = await rollouts.evaluate(
                    episodes.sampled, fleet.generate, heldout, samples=config.evaluation.heldout_samples,
                    max_concurrent=config.rollout.max_concurrent, seed=config.seed if fleet.seeded else None,
                    on_group=count, regroup=episodes.regroup,
                )  # fmt: skip
            log.evaluation(v, sets, groups)

        seconds = await ending.interruptible(
            loop.run(
                rollout, update, publish, save, evaluate if heldout else None, on_step=log.step, admit=batches.admit,
                cursor=batches.cursor, check=functools.partial(canary.check, fleet), eta=eta, start=start, steps=steps,
                save_every=config.saving.save_every, save_seconds=60 * config.saving.save_minutes,
                evaluate_every=config.evaluation.evaluate_every or steps,
            ),
            stop,
        )  # fmt: skip
        done = trainer.version
        if not stop_on.summary:
            giving_up.check_numbers(named, done)
        if seconds is not None and not online:
            giving_up.check_end(done)
        served = sorted({server.label for server in fleet.healthy})
        counts = {**executor.counts, **fleet.counts, "rewards": episodes.rewards.counts}
    checkpoint = run_on_all("export")
    return {
        "checkpoint": str(checkpoint),
        "steps": done,
        "complete": seconds is not None,  # all steps, the last version pushed, evaluated and exported
        "accuracy": log.evaluations.get(done, {}).get("accuracy"),
        "accuracies": {str(v): x.get("accuracy") for v, x in sorted(log.evaluations.items())},
        "evaluation": log.evaluations.get(done),
        "heldout_rows": sum(map(len, heldout.values())),
        "server_version": served,
        "time": seconds,
        "counts": counts,
        **log.largest,
        **stop_on.summary,
    }
