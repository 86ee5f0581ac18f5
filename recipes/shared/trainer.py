"""The training side of reinforcement learning: groups of samples in, optimiser steps, metrics out."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from areax import models
from areax.adapters import hf, orbax, tokenizer
from areax.adapters.runtime import hub
from areax.core import advantages, mtp, packing, signals, step, teacher_rows
from areax.core.batch import Batch
from areax.core.distill import Taught
from areax.models import frozen as frozen_models
from areax.parallel import batches as placement
from areax.parallel import offload, rules
from areax.recipes.shared import (
    common,
    describe,
    learner,
    microbatch,
    moving,
    not_finite,
    packer,
    score_head,
    teachers,
    terminal,
    vision,
)
from areax.recipes.shared.learner import Learner
from areax.recipes.shared.rl_options import CriticOptions, Training
from areax.rollout.chat.cross_tokenizer import Pair
from areax.rollout.types import Sample


@dataclass(frozen=True)
class FrozenModel:
    """A model that is not trained, and its compiled scoring function: scores(params, batch)."""

    settings: models.dense.Config
    params: Any
    scores: Callable


@dataclass
class Trainer:
    """Training state: models, optimisers, and the number of batches consumed.

    Attributes:
      version: batches consumed.
      limit: of a microbatch.
      pack: f(samples, rows, components), of `packer.make`.
      reading: of images, for a model with a vision tower.
      shuffle_seed: if set, permutes the rewards of every batch (a control experiment).
      reference, teacher: frozen models for the objective's KL and distillation terms, if it has those.
      control: coefficients that adapt from batch to batch.
      averages: moving average of the rewards of each seat, for an advantage with mean "moving".
      traced: whether a number that is not finite was looked for, which is done once.
    """

    options: Training
    mesh: jax.sharding.Mesh
    policy: Learner
    limit: microbatch.Limit
    pack: Callable
    reading: vision.Reader | None = None
    critic: Learner | None = None
    shuffle_seed: int | None = None
    reference: FrozenModel | None = None
    teacher: FrozenModel | None = None
    version: int = 0
    control: dict[str, float] = field(default_factory=dict)
    averages: dict[int, float] = field(default_factory=dict)
    traced: bool = False


def build(
    options: Training, *, rows: int, model: str, steps: int, init: Literal["checkpoint", "random"] = "checkpoint",
    seed: int = 0, temperature: float = 1.0, shuffle_rewards: bool = False,
) -> Trainer:  # fmt: skip
    """Builds a trainer: models, optimisers and compiled functions.

    Args:
      rows: rows per microbatch: those of `options`, if it says how many.
      model: Hugging Face directory of the policy.
      steps: batches of the whole run, for the learning rate schedule.
      init: "random" = new weights from `seed`.
      temperature: sampling temperature, at which log-probabilities are computed.
      shuffle_rewards: see `rl_options.Rewards`.
    """
    mesh = common.open_mesh(options.mesh, rows=rows, length=options.length)
    drafts = options.mtp.trunk if options.mtp.coef else None
    settings, params = common.open_model(
        model, init, seed, mesh, learner.dtype(options.lora), options.vision, drafts is not None
    )
    run = learner.computed(options.run)
    score = functools.partial(models.score, config=settings, run=run, temperature=temperature, learnt_only=True)
    updates_per_batch = options.minibatches * options.epochs
    critic, warmup = None, 0
    if options.objective.needs_values:
        critic = _critic(options.critic, model, settings, params, run, mesh, steps * updates_per_batch)
        warmup = options.critic.warmup
    pair = teachers.pair(options, tokenizer.load(model)) if options.taught else None
    if options.distill.uld_coef and pair is None:
        raise ValueError(
            "--distill.uld-coef compares tokens that only one of two tokenizers has, got a teacher with the policy's; "
            "leave it out"
        )
    if options.teacher:
        common.check_context(options.teacher, options.length)
    teacher = _teacher(options.teacher, pair, settings, run, mesh, temperature) if options.teacher else None
    objective: Any = options.objective
    policy_score, plain = functools.partial(score, drafts=drafts), score
    if options.objective.score_centering:
        policy_score = functools.partial(
            models.score_centred, config=settings, run=run, temperature=temperature, drafts=drafts
        )
    if options.objective.needs_squares:
        plain = functools.partial(score, per_chunk=advantages.squares)
    frozen = (teacher.params,) if teacher and options.distill_coef else ()
    if options.distill_coef:
        objective = Taught(objective, options.distill, options.distill_coef)
        policy_score = functools.partial(
            frozen_models.score, objective=options.distill, config=settings,
            teacher_config=settings if options.self_distillation else teacher and teacher.settings, run=run,
            temperature=temperature, common_2K=pair.common if pair else None, drafts=drafts,
        )  # fmt: skip
    policy = learner.make(
        settings, params, policy_score, mtp.wrap(objective, options.mtp), options.optim, mesh,
        updates=(steps - warmup) * updates_per_batch, dtype=run.dtype, balance=options.balance, adapters=options.lora,
        frozen=frozen, plain=lambda params, batch, *_: plain(params, batch), seed=seed,
        average=options.average_teacher and options.distill_coef > 0,
    )  # fmt: skip
    reading = vision.reader(model, settings, run.dtype, mesh)
    seeing = [each.settings for each in (policy, critic, teacher) if each]
    trainer = Trainer(
        options, mesh, policy, microbatch.Limit(rows), packer.make(options, *seeing), reading, critic,
        shuffle_seed=seed if shuffle_rewards else None,
        teacher=teacher if options.objective.advantage.teacher else None,
    )  # fmt: skip
    if options.objective.needs_reference:
        # Parts of a step towards the policy would be lost in bf16.
        dtype = run.dtype if options.reference_mix == 1 else "float32"
        reference = FrozenModel(settings, *learner.reference(policy, params, score, dtype))
        trainer.reference = reference if policy.adapters else offloaded(trainer, reference)
    if options.objective.kl.target:
        trainer.control["kl_coef"] = options.objective.kl.coef
    return trainer


def _critic(
    options: CriticOptions, model: str, settings, params, run: models.Run, mesh, updates: int
) -> Learner:  # fmt: skip
    """Builds a critic: the backbone with a scalar head in place of the output head; a new head is all zeros. A frozen
    vision tower is the policy's."""
    if options.model and settings.vision:
        raise ValueError(
            f"--critic.model {options.model}: reads no images, as the policy does; leave it out, and the critic starts "
            "as the policy"
        )
    if options.model:
        vocab = settings.vocab
        path = hub.folder(options.model, weights=True)
        common.check_same(path)
        if (Path(path) / "tokenizer.json").exists():  # that of a value model may be missing
            common.check_tokens(f"--critic.model {options.model}", tokenizer.load(path), tokenizer.load(model))
        with terminal.loading(path):
            settings, params = hf.load(path, mesh=mesh)
        if settings.vocab != vocab:
            raise ValueError(
                f"--critic.model {options.model}: needs the policy's vocabulary of {vocab}, got {settings.vocab}"
            )
    settings = score_head.settings(settings, option=f"--critic.model {options.model}" if options.model else "--model")
    settings = replace(settings, mtp=False)
    shardings = rules.of_params(models.table(settings), mesh)
    shared = settings.vision is not None and not settings.vision.trained
    own = {
        name: x if name == "vision" and shared else jax.tree.map(_own, x)
        for name, x in params.items()
        if name not in ("head", "mtp")
    }
    if "score" not in own:
        own["score"] = jax.jit(lambda: jnp.zeros((1, settings.embed)), out_shardings=shardings["score"])()
    # Routed experts recorded in the batch are the policy's, not the critic's.
    value = lambda params, batch: models.value(params, batch.without("routed_experts"), config=settings, run=run)
    return learner.make(
        settings, own, value, options.objective, options.optim, mesh, updates=updates, dtype=run.dtype
    )  # fmt: skip


def _own(x):
    """Copies an array to fp32, as a master weight."""
    return jnp.array(x, jnp.float32, copy=True)


def _teacher(directory: str, pair: Pair | None, student, run: models.Run, mesh, temperature: float) -> FrozenModel:
    settings, params = common.open_teacher(directory, run, mesh, student.vision, ids=len(pair.to_own) if pair else 0)
    score = functools.partial(models.score, config=settings, run=run, temperature=temperature, learnt_only=True)

    def one(params, batch):
        out = score(params, teacher_rows.of(batch))
        return replace(out, logp_BT=teacher_rows.of_spans(out.logp_BT, batch))

    return FrozenModel(settings, params, step.make_scores(one))


def saved(trainer: Trainer) -> dict:
    """The pytrees that a checkpoint stores."""
    parts = {"policy": trainer.policy.state}
    if trainer.critic:
        parts["critic"] = trainer.critic.state
    if trainer.reference and trainer.options.reference_every:
        parts["reference"] = trainer.reference.params
    return parts


def position(trainer: Trainer, rollout: Any) -> dict[str, Any]:
    """What a checkpoint stores beside arrays: the position in the data, and numbers that change from batch to batch."""
    own = {"averages": [*trainer.averages.items()]} if trainer.averages else {}
    return {"rollout": rollout, "control": dict(trainer.control), **own}


def restore(trainer: Trainer, store: orbax.Store):
    """Restores the latest checkpoint, if any; returns the data position saved with it."""
    if store.latest is None:
        return None
    parts, cursor = store.restore(saved(trainer))
    trainer.policy.state = parts["policy"]
    if trainer.critic:
        trainer.critic.state = parts["critic"]
    if trainer.reference and "reference" in parts:
        trainer.reference = replace(trainer.reference, params=parts["reference"])
    trainer.version = store.latest
    trainer.control = {name: cursor["control"].get(name, value) for name, value in trainer.control.items()}
    trainer.averages = {int(seat): value for seat, value in cursor.get("averages", ())}
    return cursor["rollout"]


def train_on_batch(trainer: Trainer, groups: list[list[Sample]], run: Callable | None = None) -> dict:
    """Packs a batch, scores it at the current weights and takes its optimiser steps.

    Returns metrics, "groups" to show, and "not_finite", where a number first was not, after the first such step.

    Args:
      run: calls `train_packed` with the arguments behind the trainer, in all processes of the job. The groups are known
        to process 0 alone.
    """
    options, version = trainer.options, trainer.version
    if trainer.shuffle_seed is not None:
        groups = describe.shuffled(groups, seed=(trainer.shuffle_seed, version))
    if options.objective.advantage.mean == "moving":
        groups = moving.compared(groups, trainer.averages, options.objective.advantage.moving_decay)
    size = len(groups) // options.minibatches
    samples = [[s for g in groups[i : i + size] for s in g] for i in range(0, len(groups), size)]
    cleaned = [vision.without_image_tokens(part, trainer.reading) for part in samples]
    samples, stray = [part for part, _ in cleaned], sum(count for _, count in cleaned)
    needs = options.objective.advantage.needs
    scalars = {**trainer.control}
    if options.objective.correction.proximal == "interpolate":
        scalars["version"] = version
    learnt = None
    while learnt is None:
        batches = [trainer.pack(part, trainer.limit.rows, needs) for part in samples]
        learnt = (run or functools.partial(train_packed, trainer))(batches, scalars, [*map(vision.of, samples)])
    report, scored, origin = learnt
    flat = [s for part in samples for s in part]
    values = {**signals.finalize_metrics(report), **describe.batch(flat, version), **trainer.control}
    values["filled"] = packing.filled(*batches)
    if options.trie != "off":
        values["trie_ratio"] = packing.trie_ratio(*batches)
    if trainer.reading:
        values |= {"images": sum(len(s.images) for s in flat), "image_tokens_sampled": stray}
    if "effective_fraction" in report:  # each pass over the batch counts its sequences anew
        values["effective_samples"] = float(report["effective_fraction"].sum) / options.epochs
    logps: list = [None] * len(flat)
    if scored:
        own = [packing.unpack(x_MBT, b, part) for x_MBT, b, part in zip(scored, batches, samples, strict=True)]
        logps = [x for part in own for x in part]
        values |= describe.agreement(flat, logps, version)
    if "kl_coef" in trainer.control and "kl" in values:
        trainer.control["kl_coef"] = options.objective.kl.adapt(trainer.control["kl_coef"], values["kl"])
    traced = list(zip(flat, logps, strict=True))[: len(groups[0])]
    return {**values, "groups": [traced]} | ({"not_finite": (origin, samples)} if origin else {})


def train_packed(
    trainer: Trainer, batches: list[Batch], scalars: dict[str, float], seen: Sequence[vision.Images] = ()
) -> tuple[dict, list, not_finite.Origin | None] | None:
    """The part of `train_on_batch` that every process of a job runs, with the same arrays; returns as `learn`.

    Args:
      batches: packed minibatches [M, B, T] on the host.
      scalars: values for `Batch.scalars`.
      seen: the images of the samples of each batch; () = none. Each process makes the tower's arrays of them by itself.
    """
    with jax.set_mesh(trainer.mesh):
        result = learn(trainer, placed(trainer, batches, scalars, seen))
        if result is not None:
            trainer.version += 1
            refresh(trainer)
    return result


def placed(
    trainer: Trainer, batches: Sequence[Batch], scalars: dict[str, float], seen: Sequence[vision.Images] = ()
) -> list[Batch]:
    """Minibatches on the devices, with their scalars and images; arguments as of `train_packed`."""
    batches = vision.attach(trainer.reading, batches, seen or [()] * len(batches))
    if scalars:
        batches = [batch.with_scalars(**scalars) for batch in batches]
    return [placement.batch(batch, trainer.mesh) for batch in batches]


def learn(trainer: Trainer, batches: list) -> tuple[dict, list, not_finite.Origin | None] | None:
    """Takes a batch's optimiser steps, in `epochs` passes over its minibatches.

    Returns:
      (metrics, logps, origin): merged metrics, with the critic's prefixed "critic_" if the policy has the same name;
      the log-probabilities of each minibatch before the first step, empty if the objective needs no scores; the first
      number that is not finite, once. None if nothing was done: the first step does not fit the devices, and
      `trainer.limit` is less now.
    """
    policy, critic, options = trainer.policy, trainer.critic, trainer.options
    ready, scores = prepared(trainer, batches)
    if not all(microbatch.fits(options, policy, batch, trainer.limit) for batch in ready):
        return None
    report: dict = {}
    for batch in ready * options.epochs:
        new: dict = {}
        if not critic or trainer.version >= options.critic.warmup:
            new = learner.train_step(policy, batch)
        if critic:
            of_critic = learner.train_step(critic, critic.prepare(batch))
            new = new | {
                name if name.startswith(("value", "return", "moment")) else f"critic_{name}": x
                for name, x in of_critic.items()
            }
        report = jax.block_until_ready(common.merge(report, new) if report else new)
    origin = None
    if not trainer.traced and not_finite.seen(report):
        trainer.traced = True
        origin = not_finite.find(report, policy, batches, ready, critic)
    return report, [placement.host(score.logp_BT) for score in scores if score is not None], origin


def prepared(trainer: Trainer, batches: Sequence[Batch]) -> tuple[list[Batch], list]:
    """(minibatches with what the objective reads, the scores of each or None), all at the current weights."""
    policy, critic = trainer.policy, trainer.critic
    # One at a time: gloo, which connects processes on the CPU, hangs if many computations are queued.
    logp_of = lambda model, batch: jax.block_until_ready(model.scores(model.params, batch)).logp_BT
    if critic:
        batches = [b.replace(value_BT=learner.scored(critic, b).value_BT) for b in batches]
    if trainer.reference:
        reference = on_devices(trainer.reference)
        batches = [b.replace(ref_BT=logp_of(reference, b)) for b in batches]
        del reference  # frees the device's copy, if the host has the weights
    if teacher := trainer.teacher:
        batches = [b.replace(target={**b.target, "teacher": logp_of(teacher, b)}) for b in batches]
    if trainer.options.self_distillation and trainer.options.objective.advantage.teacher:
        now = (learner.averaged(policy) if trainer.options.average_teacher else policy.state).params
        own = lambda b: teacher_rows.aligned(learner.scored(policy, teacher_rows.of(b), now).logp_BT, b)
        batches = [b.replace(target={**b.target, "teacher": own(b)}) for b in batches]
    scores = [learner.scored(policy, b) if policy.needs_scores else None for b in batches]
    return [policy.prepare(b, score) for b, score in zip(batches, scores, strict=True)], scores


def refresh(trainer: Trainer) -> None:
    """Moves the reference towards the policy every `reference_every` batches (TR-DPO, arXiv:2404.09656)."""
    every, mix = trainer.options.reference_every, trainer.options.reference_mix
    if trainer.reference and every and trainer.version % every == 0:
        moved = _mixed(on_devices(trainer.reference).params, trainer.policy.state.params, mix)
        trainer.reference = offloaded(trainer, replace(trainer.reference, params=moved))


def offloaded(trainer: Trainer, model: FrozenModel) -> FrozenModel:
    """The reference where it waits between uses: with `offload_reference` in the memory of the host."""
    return replace(model, params=offload.to_host(model.params)) if trainer.options.offload_reference else model


def on_devices(model: FrozenModel) -> FrozenModel:
    """The reference on the devices."""
    return replace(model, params=offload.to_device(model.params))


@functools.partial(jax.jit, donate_argnums=0)
def _mixed(reference, params, mix):
    return jax.tree.map(lambda old, new: (old + mix * (new - old)).astype(old.dtype), reference, params)
