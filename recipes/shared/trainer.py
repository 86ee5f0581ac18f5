"""The half of reinforcement learning that runs on the devices: groups of samples in, optimiser steps, metrics out."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters import orbax as stores
from areax.core import packing, signals, step
from areax.core.critic import Critic
from areax.core.distill import Taught
from areax.core.optim import Optimizer
from areax.models import frozen as teachers
from areax.parallel import batches as place
from areax.parallel import rules
from areax.recipes.shared import common, describe, learner
from areax.recipes.shared.learner import Learner
from areax.rollout.types import Sample


@dataclass(frozen=True)
class CriticOptions:
    """Of the critic, which objectives with credit "gae" have.

    Attributes:
      model: directory of the weights it starts from, a reward model for one; "" = the policy's, with a new head.
      warmup: first batches, in which it learns alone.
    """

    model: str = ""
    warmup: int = 0
    objective: Critic = Critic()
    optim: Optimizer = Optimizer(lr=1e-5, warmup=10)


@dataclass(frozen=True)
class Frozen:
    """A model that does not learn, and the function that scores by it: scores(params, batch)."""

    settings: models.dense.Config
    params: Any
    scores: Callable


@dataclass
class Trainer:
    """What `advance` closes over.

    Attributes:
      version: batches consumed.
      reference, teacher: models that the policy is held to, or taught by, where the objective asks for them.
      control: coefficients that move from batch to batch.
      report: extremes of the whole run, for its summary.
    """

    config: Any
    mesh: jax.sharding.Mesh
    policy: Learner
    critic: Learner | None = None
    reference: Frozen | None = None
    teacher: Frozen | None = None
    version: int = 0
    control: dict[str, float] = field(default_factory=dict)
    report: dict = field(default_factory=dict)


def build(config) -> Trainer:
    """Models, optimisers and compiled functions for a `grpo.Config`."""
    mesh = common.open_mesh(config.mesh, rows=config.rows, length=config.length)
    load = lambda dtype: common.open_model(config.model, config.init, config.seed, mesh, dtype)
    settings, params = load(learner.dtype(config.lora))
    run = learner.computed(config.run)
    score = functools.partial(models.score, config=settings, run=run, temperature=config.sampling.temperature)
    a_batch = config.minibatches * config.epochs
    critic, alone = None, 0
    if config.objective.needs_values:
        critic = _critic(config, settings, params, run, mesh, config.steps * a_batch)
        alone = config.critic.warmup
    taught = _teacher(config, run, mesh) if config.teacher else None
    objective, learnt = config.objective, score
    frozen = (taught.params,) if taught and config.distill_coef else ()
    if config.distill_coef:
        objective = Taught(objective, config.distill, config.distill_coef)
        learnt = functools.partial(
            teachers.score, objective=config.distill, config=settings, teacher_config=taught and taught.settings,
            run=run, temperature=config.sampling.temperature,
        )  # fmt: skip
    policy = learner.make(
        settings, params, learnt, objective, config.optim, mesh, updates=(config.steps - alone) * a_batch,
        balance=config.balance,
        adapters=config.lora, frozen=frozen, plain=lambda params, batch, *_: score(params, batch), seed=config.seed,
    )  # fmt: skip
    trainer = Trainer(config, mesh, policy, critic, teacher=taught if config.objective.advantage.teacher else None)
    if config.objective.needs_reference and policy.adapters:  # the model without its adapters
        trainer.reference = Frozen(settings, policy.frozen[0], step.make_scores(score))
    elif config.objective.needs_reference:
        trainer.reference = Frozen(settings, load("float32")[1], policy.scores)
    if config.objective.kl.target:
        trainer.control["kl_coef"] = config.objective.kl.coef
    return trainer


def _critic(config, settings, params, run: models.Run, mesh, updates: int) -> Learner:
    """A model of values: the weights without their output head, and a scalar one, which if new says 0 everywhere."""
    options = config.critic
    if options.model:
        vocab = settings.vocab
        settings, params = hf.load(options.model, mesh=mesh, init_missing=("head",))
        if settings.vocab != vocab:
            raise ValueError(
                f"--critic.model {options.model}: needs the policy's vocabulary of {vocab}, got {settings.vocab}"
            )
    settings = replace(settings, tied=True, value_head=True)
    shardings = rules.of_params(models.table(settings), mesh)
    own = {name: jax.tree.map(_own, x) for name, x in params.items() if name != "head"}
    if "score" not in own:
        own["score"] = jax.jit(lambda: jnp.zeros((1, settings.embed)), out_shardings=shardings["score"])()
    # What the batch brings of experts is the policy's choice.
    value = lambda params, batch: models.value(params, batch.replace(input={}), config=settings, run=run)
    return learner.make(settings, own, value, options.objective, options.optim, mesh, updates=updates)


def _own(x):
    """A copy, as an fp32 master."""
    return jnp.array(x, jnp.float32, copy=True)


def _teacher(config, run: models.Run, mesh) -> Frozen:
    other, params = common.open_teacher(config.teacher, tokenizer.load(config.model), run, mesh)
    score = functools.partial(models.score, config=other, run=run, temperature=config.sampling.temperature)
    return Frozen(other, params, step.make_scores(lambda params, batch: score(params, batch.replace(input={}))))


def saved(trainer: Trainer) -> dict:
    """What a checkpoint of the run holds."""
    parts = {"policy": trainer.policy.state}
    if trainer.critic:
        parts["critic"] = trainer.critic.state
    if trainer.reference and trainer.config.reference_every:
        parts["reference"] = trainer.reference.params
    return parts


def restore(trainer: Trainer, store: stores.Store):
    """Takes up the newest saved state, if there is one; returns the cursor that was saved with it."""
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
    return cursor["rollout"]


def advance(trainer: Trainer, groups: list[list[Sample]]) -> dict:
    """One batch: scores at the weights before it, then the optimiser steps. Returns what to log."""
    config, version = trainer.config, trainer.version
    if config.shuffle_rewards:
        groups = describe.shuffled(groups, seed=(config.seed, version))
    size = len(groups) // config.minibatches
    samples = [[s for g in groups[i : i + size] for s in g] for i in range(0, len(groups), size)]
    needs = config.objective.advantage.needs
    batches = [packing.pack(part, config.length, rows=config.rows, components=needs) for part in samples]
    if told := trainer.control | (
        {"version": version} if config.objective.correction.proximal == "interpolate" else {}
    ):
        batches = [batch.tell(**told) for batch in batches]
    with jax.set_mesh(trainer.mesh):
        report, scored = learn(trainer, [place.batch(b, trainer.mesh) for b in batches])
        trainer.version += 1
        refresh(trainer)
    flat = [s for part in samples for s in part]
    values = {**signals.told(report), **describe.batch(flat, version), **trainer.control}
    if "effective_fraction" in report:  # each pass over the batch counts its sequences anew
        values["effective_samples"] = float(report["effective_fraction"].sum) / config.epochs
    logps: list = [None] * len(flat)
    if scored:
        own = [packing.unpack(x_MBT, b, part) for x_MBT, b, part in zip(scored, batches, samples, strict=True)]
        logps = [x for part in own for x in part]
        agreement = describe.agreement(flat, logps, version)
        for name, value in agreement.items():  # of the whole run, for the summary
            trainer.report[name] = max(trainer.report.get(name, 0.0), value)
        values |= agreement
    if "kl_coef" in trainer.control and "kl" in values:
        trainer.control["kl_coef"] = config.objective.kl.adapt(trainer.control["kl_coef"], values["kl"])
    traced = list(zip(flat, logps, strict=True))[: len(groups[0])]
    return {**values, "groups": [traced]}


def learn(trainer: Trainer, batches: list) -> tuple[dict, list]:
    """The optimiser steps of a batch, in `epochs` passes over its minibatches.

    Returns:
      Merged metrics, a critic's under "critic_..." where the policy has the same; log-probabilities of each minibatch
      before the first step, none where the objective needs no scores.
    """
    policy, critic, config = trainer.policy, trainer.critic, trainer.config
    # One at a time: gloo, which connects processes on the CPU, hangs when many computations wait.
    ask = lambda scores, params, batch: jax.block_until_ready(scores(params, batch))
    if critic:
        batches = [b.replace(value_BT=learner.scored(critic, b).value_BT) for b in batches]
    if it := trainer.reference:
        batches = [b.replace(ref_BT=ask(it.scores, it.params, b).logp_BT) for b in batches]
    if it := trainer.teacher:
        say = lambda batch, it: {**batch.target, "teacher": ask(it.scores, it.params, batch).logp_BT}
        batches = [b.replace(target=say(b, it)) for b in batches]
    scores = [learner.scored(policy, b) if policy.needs_scores else None for b in batches]
    ready = [policy.prepare(b, score) for b, score in zip(batches, scores, strict=True)]
    report: dict = {}
    for batch in ready * config.epochs:
        new: dict = {}
        if not critic or trainer.version >= config.critic.warmup:
            policy.state, new = policy.step(policy.state, batch, *policy.frozen)
        if critic:
            critic.state, its = critic.step(critic.state, critic.prepare(batch))
            new = new | {
                name if name.startswith(("value", "return", "moment")) else f"critic_{name}": x
                for name, x in its.items()
            }
        report = jax.block_until_ready(common.merge(report, new) if report else new)
    return report, [place.host(score.logp_BT) for score in scores if score is not None]


def refresh(trainer: Trainer) -> None:
    """The reference moves towards the policy every `reference_every` batches (TR-DPO, arXiv:2404.09656)."""
    every, mix = trainer.config.reference_every, trainer.config.reference_mix
    if trainer.reference and every and trainer.version % every == 0:
        moved = _mixed(trainer.reference.params, trainer.policy.state.params, mix)
        trainer.reference = replace(trainer.reference, params=moved)


@functools.partial(jax.jit, donate_argnums=0)
def _mixed(reference, params, mix):
    return jax.tree.map(lambda old, new: old + mix * (new - old), reference, params)
