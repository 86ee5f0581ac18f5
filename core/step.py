"""The training step: gradient accumulation over equally shaped microbatches, then one optimiser update."""

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
    """Training state: fp32 master weights, the optimiser's state, and the number of steps, skipped ones included."""

    params: Any
    opt_state: Any
    step: Any


def init(params, optimizer: optax.GradientTransformation, shardings: State | None = None) -> State:
    """Creates the state at step 0, on a mesh with the given shardings."""
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

    `score(params, microbatch, *frozen) -> out` is differentiated through `objective.loss` with respect to params only:
    `frozen` are weights that get no gradient (those under an adapter, a teacher's). Gradients are accumulated in the
    master weights' dtype over the nonempty microbatches; their number is a traced value, so it never triggers
    recompilation. If gradient or loss is not finite, weights and optimiser state are kept and `skipped` is 1. The state
    is donated; on a mesh it keeps `shardings`, and the metrics are replicated.

    Args:
      adjust: f(params, aux) -> params, applied after the optimiser, outside of any gradient, such as
        `balance.update_biases`; `aux` is `out.aux` summed over the batch.

    Metrics: those of the objective, `loss`, `grad_norm` (before clipping), `update_ratio` (norm of the update over that
    of the weights), `skipped`, with experts `balance.report`.
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
