"""What other options, such as another objective, make of the batches of a run at the run's weights.

The gradient of a step is that of its first minibatch at the weights before the step, before it is clipped: what an
objective decides. The update of a step is what all its minibatches and epochs change in the weights. Both sides begin
each step at the same weights, of policy, critic and moving reference, which follow the run's own options. Each
optimiser keeps moments of its own, of the gradients that it has seen; so does an adaptive KL coefficient.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from areax.adapters.command_line.options import by_option
from areax.adapters.tracking import run_dir
from areax.core import step
from areax.core.balance import wrap
from areax.recipes.shared.rl_options import Training
from areax.recipes.shared.trainer import Trainer, placed, prepared, train_on_batch, train_packed
from areax.rollout.types import Sample

RUN_S = (
    "critic.model", "lora.", "reference-every", "reference-mix", "vision", "mtp.", "optim.offload",
    "critic.optim.offload",
)  # fmt: skip
METRICS = "ess", "clip_fraction", "kl", "effective_fraction"


@dataclass(frozen=True)
class Side:
    """A trainer, and its compiled gradient(params, batch, *frozen)."""

    trainer: Trainer
    gradient: Callable


def check(own: Training, other: Training) -> None:
    """Raises ValueError if the other options cannot be compared with the run's own at the same weights."""
    then, now = (by_option(run_dir.plain(x)) for x in (own, other))
    for name in (name for name in now if name.startswith(RUN_S) and now[name] != then[name]):
        raise ValueError(f"--{name} must be the run's, {then[name]}, whose weights are compared, got {now[name]}")
    if own.optim.offload or own.critic.optim.offload:
        raise ValueError("other options cannot be compared with a run's that has --optim.offload; replay it alone")
    if other.objective.needs_values and not own.objective.needs_values:
        raise ValueError(f"--objective.*: {other.objective.name} needs a critic, and the run has trained none")


def sides(own: Trainer, other: Trainer) -> tuple[Side, Side]:
    """Both sides. The other's optimisers go on from the run's moments where theirs have the same form."""
    other.control = {name: own.control.get(name, value) for name, value in other.control.items()}
    other.averages = {**own.averages}
    for mine, theirs in _models(own, other):
        if _form(mine.state.opt_state) == _form(theirs.state.opt_state):
            theirs.state = replace(theirs.state, opt_state=_copied(mine.state.opt_state))
    return Side(own, _gradient(own)), Side(other, _gradient(other))


def train(both: tuple[Side, Side], groups: list[list[Sample]]) -> tuple[dict, dict[str, float | None]]:
    """Trains both sides on a batch, from the run's own weights.

    Returns:
      (the run's own report, figures): cosines, norms and METRICS of both, by name; None where there is none.
    """
    own, other = (side.trainer for side in both)
    _follow(own, other)
    before = _copied(own.policy.state.params)
    reports, gradients, updates = [], [], []
    for side in both:
        found: list = []
        reports.append(train_on_batch(side.trainer, groups, functools.partial(_observed, side, found)))
        gradients += found
        updates.append(_minus(side.trainer.policy.state.params, before))
    figures: dict[str, Any] = {}
    for what, pair in (("gradient", gradients), ("update", updates)):
        product, *norms = map(float, _products(*pair))
        one, two = map(math.sqrt, norms)
        figures[f"{what}_cosine"] = product / one / two if one * two > 0 else None
        figures |= {f"own_{what}_norm": one, f"other_{what}_norm": two}
    for name in METRICS:
        if any(name in report for report in reports):
            figures |= {
                f"{who}_{name}": report.get(name) for who, report in zip(("own", "other"), reports, strict=True)
            }
    return reports[0], figures


def _observed(side: Side, found: list, batches, scalars, seen) -> tuple | None:
    """`train_packed`, after the gradient of the first minibatch is put into `found`."""
    trainer = side.trainer
    with jax.set_mesh(trainer.mesh):
        ready, _ = prepared(trainer, placed(trainer, batches[:1], scalars, seen[:1]))
        found[:] = [side.gradient(trainer.policy.state.params, ready[0], *trainer.policy.beside)]
    return train_packed(trainer, batches, scalars, seen)


def _gradient(trainer: Trainer) -> Callable:
    policy = trainer.policy
    whole = step.whole_gradient(policy.score, wrap(policy.objective, trainer.options.balance))
    shardings = jax.tree.map(lambda x: x.sharding, policy.state.params)
    return jax.jit(lambda *arguments: whole(*arguments)[0].params, out_shardings=shardings)


def _follow(own: Trainer, other: Trainer) -> None:
    """Puts the other side where the run is."""
    for mine, theirs in _models(own, other):
        params = jax.tree.map(
            lambda x, like: jnp.array(x, like.dtype, copy=True), mine.state.params, theirs.state.params
        )
        theirs.state = replace(theirs.state, params=params, step=_copied(mine.state.step))
    if own.reference and other.reference and own.options.reference_every:
        other.reference = replace(other.reference, params=_copied(own.reference.params))
    other.version = own.version


def _models(own: Trainer, other: Trainer) -> list[tuple]:
    """(learner, the other side's) of the policy, and of a critic that both have."""
    pairs = (own.policy, other.policy), (own.critic, other.critic)
    return [pair for pair in pairs if None not in pair]


def _form(tree) -> tuple:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def _copied(tree):
    """A copy: a training step takes the arrays that it gets."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


@jax.jit
def _minus(tree, other):
    return jax.tree.map(lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), tree, other)


@jax.jit
def _products(one, other) -> list:
    """(inner product, squared norms) of two trees."""
    wide = lambda tree: [x.astype(jnp.float32).ravel() for x in jax.tree.leaves(tree)]
    one, other = wide(one), wide(other)
    return [
        sum(jnp.vdot(x, y) for x, y in zip(*pair, strict=True)) for pair in ((one, other), (one,) * 2, (other,) * 2)
    ]
