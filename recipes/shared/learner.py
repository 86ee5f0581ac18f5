"""A model in training: its state, and the compiled functions that move all its weights or adapters beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from areax import models
from areax.adapters import hf, peft
from areax.core import optim, step
from areax.core.balance import Balance, wrap
from areax.models import lora
from areax.models.lora import Lora
from areax.parallel import rules
from areax.recipes.shared import common


@dataclass
class Learner:
    """What `make` made.

    Attributes:
      objective: without terms of balance; `prepare` and `step` have them.
      state: of the weights that train: all of them, or the adapters.
      frozen: further arguments of `score`, `scores` and `step`: the weights under adapters first, if there are any.
      score: `score(params, microbatch, *frozen)`, to be compiled; `scores`, `prepare`, `step` are.
      needs_scores: `prepare` needs scores of the current weights.
    """

    settings: Any
    objective: Any
    adapters: Lora | None
    state: step.State
    frozen: tuple
    score: Callable
    scores: Callable
    prepare: Callable
    step: Callable
    needs_scores: bool


def make(
    settings, params, score: Callable, objective, spec: optim.Optimizer, mesh: jax.sharding.Mesh, *, updates: int,
    balance: Balance | None = None, adapters: Lora | None = None, frozen: tuple = (), plain: Callable | None = None,
    seed: int = 0,
) -> Learner:  # fmt: skip
    """A learner of an objective.

    Args:
      score: `score(params, microbatch, *frozen)`.
      updates: optimiser steps, the length of a schedule that has none of its own.
      adapters: with a rank, these train, and `params` stay.
      frozen: weights that take part, such as a teacher's.
      plain: `score` for `scores`, without what a loss alone needs.
      seed: of new adapters.
    """
    adapters = adapters if adapters and adapters.rank else None
    table = models.table(settings)
    if adapters:
        table, frozen = lora.table(table, adapters), (params, *frozen)
        score, params = lora.over_base(score, adapters), common.draw(table, seed, mesh)
        plain = lora.over_base(plain, adapters) if plain else None
    optimizer = optim.make_optimizer(replace(spec, steps=spec.steps or updates), table)
    shardings = rules.of_state(optimizer, table, mesh)
    whole = wrap(objective, balance or Balance())
    return Learner(
        settings, objective, adapters, step.init(params, optimizer, shardings), frozen, score,
        step.make_scores(plain or score), jax.jit(whole.prepare), step.make_step(score, whole, optimizer, shardings),
        whole.needs_scores,
    )  # fmt: skip


def dtype(adapters: Lora) -> str | None:
    """Of the weights to load: fp32 for masters, as they are stored for those under adapters."""
    return None if adapters.rank else "float32"


def computed(run: models.Run) -> models.Run:
    """In fp32 where no other dtype is asked for, whatever that of weights which do not train."""
    return replace(run, dtype=run.dtype or "float32")


def scored(own: Learner, batch):
    """The scores of a batch [M, B, T] at the current weights."""
    # One computation at a time: gloo, which connects processes on the CPU, hangs when many wait.
    return jax.block_until_ready(own.scores(own.state.params, batch, *own.frozen))


def train_step(own: Learner, batch):
    """One optimiser step on a batch [M, B, T], which changes the state; returns its metrics."""
    seen = scored(own, batch) if own.needs_scores else None
    own.state, report = own.step(own.state, own.prepare(batch, seen), *own.frozen)
    return report


def weights(own: Learner, state: step.State | None = None):
    """The whole model's weights, adapters joined to those under them, as `adapters.hf` takes them."""
    params = (state or own.state).params
    return lora.join(own.frozen[0], params, own.adapters) if own.adapters else params


def export(own: Learner, out, *, tokenizer, base: str):
    """Writes `out`/model, with `ema` of averaged weights, and the adapters if there are any to `out`/adapter.

    Args:
      base: the model that the adapters belong to.

    Returns:
      The path of the model.
    """
    state = replace(own.state, params=optim.averaged(own.state.params, own.state.opt_state))
    if own.adapters:
        peft.save(out / "adapter", own.settings, state.params, own.adapters, base=base)
    return hf.save(out / "model", own.settings, weights(own, state), tokenizer=tokenizer)
