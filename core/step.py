"""The training step: a loop over microbatches of one shape, a global denominator, one optimiser update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import balance, metrics, packing
from .batch import Batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What training carries: fp32 master weights, the optimiser's state, and the number of updates tried."""

    params: Any
    opt_state: Any
    step: Any


def init(params, optimizer: optax.GradientTransformation, shardings: State | None = None) -> State:
    """The state at step 0; on a mesh `shardings` says where its parts lie."""
    zero = lambda: jnp.zeros((), jnp.int32)
    if shardings is None:
        return State(params, optimizer.init(params), zero())
    moments = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return State(params, moments, jax.jit(zero, out_shardings=shardings.step)())


def make_step(
    score: Callable,
    objective,
    optimizer: optax.GradientTransformation,
    shardings: State | None = None,
    adjust: Callable = lambda params, aux: params,
) -> Callable:
    """Returns jitted `step(state, batch, *frozen) -> (state, metrics)` for a prepared Batch [M, B, T].

    `score(params, microbatch, *frozen) -> out` is differentiated through `objective.loss`, in params alone: `frozen`
    are weights that take part but do not learn (those under an adapter, a teacher's), of which no gradient is held.
    Gradients are summed in the masters' dtype over the microbatches in use, whose number is read from the batch, so
    that it never recompiles. A step whose gradient is not finite leaves weights and moments as they were and counts in
    `skipped`. The state is donated; on a mesh it stays where `shardings` says, and every device has the metrics.

    Args:
      adjust: f(params, aux) -> params, applied after the optimiser, outside of any gradient; `aux` is `out.aux` summed
        over the batch. `balance.update_biases` is one.

    Metrics: those of the objective, `loss`, `grad_norm` (before clipping), `update_ratio` (length of the update over
    that of the weights), `skipped`, with experts `balance.report`.
    """

    def one(params, batch, *frozen):
        out = score(params, batch, *frozen)
        loss, report = objective.loss(out, batch)
        return loss, (report, out.aux)

    def step(state: State, batch: Batch, *frozen):
        micro = lambda i: jax.tree.map(lambda x: x[i], batch)
        _, (shapes, sums) = jax.eval_shape(one, state.params, micro(0), *frozen)
        zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
        plus = lambda a, b: jax.tree.map(jnp.add, a, b)

        def add(i, carry):
            grads, loss, report, aux = carry
            (value, (new, more)), grad = jax.value_and_grad(one, has_aux=True)(state.params, micro(i), *frozen)
            return plus(grads, grad), loss + value, metrics.merge_trees(report, new), plus(aux, more)

        start = zeros(state.params), jnp.zeros((), jnp.float32), metrics.empty_like(shapes), zeros(sums)
        if batch.token_BT.shape[0] == 1:  # nothing to add up
            grads, loss, report, aux = add(0, start)
        else:
            grads, loss, report, aux = jax.lax.fori_loop(0, packing.used(batch), add, start)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        params = keep(adjust(optax.apply_updates(state.params, updates), aux), state.params)
        moved = jnp.where(finite, optax.tree.norm(updates), 0) / jnp.maximum(optax.tree.norm(state.params), 1e-30)
        report |= balance.report(aux) | {
            "loss": metrics.of(loss),
            "grad_norm": metrics.of(norm),
            "update_ratio": metrics.of(moved),
            "skipped": metrics.of(~finite),
        }
        return State(params, keep(opt_state, state.opt_state), state.step + 1), report

    out = None if shardings is None else (shardings, shardings.step)
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def make_loss(score: Callable, objective) -> Callable:
    """Returns jitted `loss(params, batch, *frozen) -> metrics` for a prepared Batch [M, B, T], without gradients."""

    def total(params, batch: Batch, *frozen):
        micro = lambda i: jax.tree.map(lambda x: x[i], batch)
        one = lambda i: objective.loss(score(params, micro(i), *frozen), micro(i))[1]
        add = lambda i, report: metrics.merge_trees(report, one(i))
        return jax.lax.fori_loop(0, packing.used(batch), add, metrics.empty_like(jax.eval_shape(one, 0)))

    return jax.jit(total)


def make_scores(score: Callable) -> Callable:
    """Returns jitted `scores(params, batch, *frozen) -> out` over a Batch [M, B, T], without gradients."""

    def scores(params, batch: Batch, *frozen):
        micro = lambda i: jax.tree.map(lambda x: x[i], batch)
        shapes = jax.eval_shape(score, params, micro(0), *frozen)
        M = batch.token_BT.shape[0]
        start = jax.tree.map(lambda s: jnp.zeros((M, *s.shape), s.dtype), shapes)

        def put(i, out):
            return jax.tree.map(lambda all_, new: all_.at[i].set(new), out, score(params, micro(i), *frozen))

        return jax.lax.fori_loop(0, packing.used(batch), put, start)

    return jax.jit(scores)
