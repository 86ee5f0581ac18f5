"""A model in training: its state, and the compiled functions that score it and update its weights or adapters."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from areax import models
from areax.adapters import hf, peft
from areax.adapters.runtime import hub, malloc
from areax.core import hardware, optim, param, step
from areax.core.balance import Balance, adjust, wrap
from areax.models import lora, remat, vision
from areax.models.lora import Lora
from areax.parallel import offload, rules
from areax.recipes.shared import common, terminal


@dataclass
class Learner:
    """A model, its training state and its compiled functions, as `make` returns them.

    Attributes:
      settings: the model's Config.
      written: that of what is written of it, `written(settings)`.
      objective: the objective without load-balancing terms, which `prepare` and `step` include.
      state: training state of the trainable weights: all of them, or the adapters.
      tower: the weights of a frozen vision tower; () without one.
      frozen: further arguments of `score`, `scores` and `step`: the base weights first if adapters train, then `tower`.
      score: `score(params, microbatch, *frozen)`, not compiled; `scores`, `prepare` and `step` are, and `step` can be
        lowered.
      needs_scores: whether `prepare` needs scores of the current weights.
      average: `score` gets the average of the weights that the optimiser keeps behind `frozen`.
      ran: the program that ran last, by its name and the shape of its batch.
    """

    settings: Any
    written: Any
    objective: Any
    adapters: Lora | None
    state: step.State
    tower: tuple
    frozen: tuple
    score: Callable
    scores: Callable
    prepare: Callable
    step: Any
    needs_scores: bool
    average: bool = False
    ran: tuple = ()

    @property
    def beside(self) -> tuple:
        """What `score` gets behind the batch: `frozen`, and the average if it is taught by that."""
        return (*self.frozen, averaged(self).params) if self.average else self.frozen


def make(
    settings, params, score: Callable, objective, spec: optim.Optimizer, mesh: jax.sharding.Mesh, *, updates: int,
    dtype: str | None = None, balance: Balance | None = None, adapters: Lora | None = None, frozen: tuple = (),
    plain: Callable | None = None, average: bool = False, seed: int = 0,
) -> Learner:  # fmt: skip
    """Builds a learner for an objective.

    Args:
      score: `score(params, microbatch, *frozen)`.
      updates: optimiser steps of the run; the length of the schedule if `spec` gives none.
      dtype: of the computation, as `computed` gives it; None = float32.
      adapters: with rank > 0 these train and `params` are frozen; a router's bias cannot move then.
      frozen: weights that are used but not trained, such as a teacher's.
      plain: replaces `score` in `scores`, without what only the loss needs.
      average: `score` gets the weights' average, which `spec.ema` keeps, behind `frozen`; whole, as its first argument.
      seed: random seed of new adapters.

    Raises:
      ValueError: PEFT's format has no adapters of these targets.
    """
    adapters = adapters if adapters and adapters.rank else None
    kept, (params, tower) = written(settings), _apart(settings, params)
    table, frozen = models.table(kept), (*tower, *frozen)
    whole_of = lambda params, batch, *_: params
    if tower:
        score, whole_of = vision.over_frozen(score), vision.over_frozen(whole_of)
        plain = vision.over_frozen(plain) if plain else None
    if adapters:
        peft.modules(settings, adapters)  # refuses what could not be exported once it is trained
        params = _quantised(params, table, adapters, mesh)
        table, frozen = lora.table(table, adapters), (params, *frozen)
        score, whole_of = lora.over_base(score, adapters), lora.over_base(whole_of, adapters)
        base, params = params, common.draw(table, seed, mesh)
        if adapters.dora:
            start = functools.partial(lora.with_magnitudes, spec=adapters)
            params = jax.jit(start, out_shardings=rules.of_params(table, mesh))(params, base)
        plain = lora.over_base(plain, adapters) if plain else None
    if average:
        score = _beside_average(score, whole_of)
    spec = replace(spec, steps=spec.steps or updates)
    balance = balance or Balance()
    whole = wrap(objective, balance)
    state: step.State
    update: Any
    if spec.offload:
        state = offload.init(params, table, spec, dtype or "float32", mesh)
        update = offload.make_step(score, whole, table, spec, dtype or "float32", mesh, adjust=adjust(balance))
    else:
        optimizer = optim.make_optimizer(spec, table)
        shardings = rules.of_state(optimizer, table, mesh)
        state = step.init(optim.narrowed(params, table, spec.weights), optimizer, shardings)
        update = step.make_step(
            score, whole, optimizer, shardings, adjust=adjust(balance), sums=optim.sums(table, spec), average=average
        )
    return Learner(
        settings, kept, objective, adapters, state, tower, frozen, score, step.make_scores(plain or score),
        jax.jit(whole.prepare), update, whole.needs_scores, average,
    )  # fmt: skip


def _beside_average(score: Callable, whole: Callable) -> Callable:
    """`score` whose last argument is completed by `whole(params, batch, *frozen)`, as adapters by the weights under
    them."""

    def beside(params, batch, *given):
        *frozen, average = given
        return score(params, batch, *frozen, whole(average, batch, *frozen))

    return beside


def written(settings):
    """The Config of what a run writes of a model: without a frozen vision tower, which exports copy bit by bit from the
    checkpoint that the Config was loaded from."""
    if settings.vision is None or settings.vision.trained:
        return settings
    return replace(settings, vision=None, rest=settings.rest and hf.loaded_config(settings.rest.folder).rest)


def _apart(settings, params) -> tuple[dict, tuple]:
    """(weights, tower): a frozen tower apart from the weights of `written`."""
    if settings.vision is None or settings.vision.trained:
        return params, ()
    return {name: x for name, x in params.items() if name != "vision"}, (params["vision"],)


def _quantised(params, table: param.Table, adapters: Lora, mesh):
    """The base's weights as they are kept under adapters."""
    if adapters.base == "stored":
        return params
    narrow = functools.partial(lora.frozen, base=table, spec=adapters)
    return jax.jit(narrow, out_shardings=rules.of_quantised(jax.eval_shape(narrow, params), table, mesh))(params)


def reference(own: Learner, params, score: Callable, dtype: str | None) -> tuple[Any, Callable]:
    """(weights, scores(weights, batch)) of the model before it is trained: the one under adapters, or a copy with the
    matrices that all families cast in the given dtype, or their own, which scores as they do.

    Args:
      params: the weights that `make` got.
      score: `score(params, microbatch)` of the whole model.
    """
    if own.adapters:
        base = step.make_scores(vision.over_frozen(score) if own.tower else score)
        return own.frozen[0], lambda weights, batch: base(weights, batch, *own.tower)
    narrow = lambda leaf, x: jnp.array(x, dtype or x.dtype if optim.copied(leaf) else x.dtype, copy=True)
    copied = param.tree_map(narrow, models.table(own.written), _apart(own.settings, params)[0])
    return copied, lambda weights, batch: own.scores(weights, batch, *own.frozen)


def dtype(adapters: Lora) -> str | None:
    """The dtype to load weights in: fp32 for master weights; None, as stored, for base weights under adapters."""
    return None if adapters.rank else "float32"


def computed(run: models.Run) -> models.Run:
    """`run` with the platform's dtype if it names none, whatever the dtype of frozen weights, and its remat."""
    platform = hardware.platform()
    return replace(run, dtype=run.dtype or models.default_dtype(platform), remat=remat.chosen(run.remat, platform))


def scored(own: Learner, batch, params=None):
    """The scores of a batch [M, B, T] at the current weights, or at others of the same shapes."""
    _room_for(own, "scores", batch)
    # One computation at a time: gloo, which connects processes on the CPU, hangs if many are queued.
    return jax.block_until_ready(own.scores(own.state.params if params is None else params, batch, *own.frozen))


def _room_for(own: Learner, name: str, batch) -> None:
    """Gives the memory of another program that ran last back to the system: this one's may not fit into it."""
    if own.ran != (now := (name, batch.token_BT.shape)):
        malloc.return_memory()
        own.ran = now


def prepared(own: Learner, batch):
    """A batch [M, B, T] with what the objective reads, at the current weights."""
    return own.prepare(batch, scored(own, batch) if own.needs_scores else None)


def train_step(own: Learner, batch):
    """Takes one optimiser step on a prepared batch [M, B, T], updating the state; returns the metrics."""
    _room_for(own, "step", batch)
    own.state, report = own.step(own.state, batch, *own.frozen)
    return report


def weights(own: Learner, state: step.State | None = None):
    """The weights of `own.written` as `adapters.hf` expects them; adapters are joined with their base weights."""
    params = (state or own.state).params
    return lora.join(own.frozen[0], params, own.adapters) if own.adapters else params


def whole(own: Learner):
    """The weights of `own.settings`, with the tower, frozen or not."""
    return {**weights(own), **({"vision": own.tower[0]} if own.tower else {})}


def export(own: Learner, out, *, tokenizer, base: str):
    """Writes the model to `out`/model (the averaged weights if `ema` is set), and adapters to `out`/adapter.

    Args:
      base: path or hub name of the model that the run started from, whose generation settings the export has.

    Returns:
      The model's path.
    """
    with terminal.phase(f"writing {out / 'model'}"):
        return _export(own, out, tokenizer, base)


def averaged(own: Learner) -> step.State:
    """The state with the average of the weights in their place, if the optimiser keeps one."""
    return replace(own.state, params=optim.averaged(own.state.params, own.state.opt_state))


def _export(own: Learner, out, tokenizer, base: str):
    state = averaged(own)
    if own.adapters:
        peft.save(out / "adapter", own.settings, state.params, own.adapters, base=base)
    start = Path(hub.folder(base))  # which a run that has read it can do without
    return hf.save(
        out / "model", own.written, weights(own, state), base=start if start.is_dir() else None, tokenizer=tokenizer
    )
