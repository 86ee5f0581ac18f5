"""The training step: gradient accumulation over equally shaped microbatches, then one optimiser update.

`make_step` is both in one program. `make_accumulate` (or `make_forward_backward`, a microbatch at a time) and
`make_apply` are the two halves, for loops that decide between them: how many batches to add up, and with which learning
rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import balance, hardware, metrics, optim, packing, rounding
from .batch import Batch

LARGE = 2**29  # bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Training state: weights, the optimiser's state, and the number of steps, skipped ones included.

    Weights are fp32 master weights; with `Optimizer.weights` bfloat16, and with `offload`, matrices of layers are
    narrower.
    """

    params: Any
    opt_state: Any
    step: Any


def init(params, optimizer: optax.GradientTransformation, shardings: State | None = None) -> State:
    """Creates the state at step 0. A step donates it, `params` included: copy weights that are needed afterwards.

    Args:
      optimizer: an optax transformation, such as that of `optim.make_optimizer`.
      shardings: those of the state on a mesh (`parallel.rules.of_state`); None = one device.
    """
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
    sums: Any = None,
    average: bool = False,
) -> Callable:
    """Returns jitted `step(state, batch, *frozen) -> (state, metrics)` for a prepared Batch [M, B, T].

    `score(params, microbatch, *frozen) -> out` is differentiated through `objective.loss` with respect to params only:
    `frozen` are weights that get no gradient (those under an adapter, a teacher's). Gradients of several microbatches
    are accumulated in fp32, or the weights' wider dtype, over the nonempty ones; their number is a traced value, so it
    never triggers recompilation. Weights in bf16 are rounded stochastically. If gradient or loss is not finite, weights
    and optimiser state are kept and `skipped` is 1. The state is donated; on a mesh it keeps `shardings`, and the
    metrics are replicated.

    Args:
      adjust: f(params, aux) -> params, applied after the optimiser, outside of any gradient, such as
        `balance.update_biases`; `aux` is `out.aux` summed over the batch.
      sums: as `no_gradient`.
      average: `score` gets one more argument behind `frozen`: the average of the weights before the step that the
        optimiser keeps (`optim.averaged`), for a teacher that follows its student.

    Metrics: those of the objective, `loss`, `grad_norm` (before clipping), `update_ratio` (norm of the update over that
    of the weights), `skipped`, with experts `balance.report`.
    """

    gradient_of = whole_gradient(score, objective, sums)

    def step(state: State, batch: Batch, *frozen):
        if average:
            frozen = (*frozen, optim.averaged(state.params, state.opt_state))
        gradient, report, aux = gradient_of(state.params, batch, *frozen)
        state, moved = _update(optimizer, state, gradient, shardings, lambda params: adjust(params, aux))
        return state, report | moved

    out = None if shardings is None else (shardings, shardings.step)
    return _compiled(step, donate_argnums=0, out_shardings=out)


def whole_gradient(score: Callable, objective, sums: Any = None) -> Callable:
    """Returns `gradient(params, batch, *frozen) -> (Gradient, metrics, aux)` for a prepared Batch, not compiled: the
    part of `make_step` before the update. `aux` is `out.aux` summed over the batch; `sums` as `no_gradient`."""
    one = _loss(score, objective)

    def gradient(params, batch: Batch, *frozen):
        start = None if batch.token_BT.shape[0] == 1 else no_gradient(params, sums)
        total, report, aux = _add(one, params, start, batch, frozen)
        return total, report | balance.report(aux) | {"loss": metrics.of(total.loss)}, aux

    return gradient


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gradient:
    """The sum of the gradients of microbatches, in the dtypes of `no_gradient`, and of their losses; of a single one it
    is in the dtypes of the weights."""

    params: Any
    loss: Any


def no_gradient(params, sums: Any = None) -> Gradient:
    """A sum of nothing; on a mesh with the shardings of the weights.

    Args:
      sums: a dtype for each weight's sum, as of `optim.sums`: fp32 or bf16, to which sums are rounded stochastically;
        None = fp32, or the weight's wider dtype, for all.
    """
    sums = jax.tree.map(_wide, params) if sums is None else sums
    return Gradient(jax.tree.map(jnp.zeros_like, params, sums), jnp.zeros((), jnp.float32))


def make_accumulate(score: Callable, objective, shardings: State | None = None) -> Callable:
    """Returns jitted `accumulate(params, gradient, batch, *frozen) -> (gradient, metrics)` for a prepared Batch.

    Adds the batch's gradient to `gradient`, which is donated; `no_gradient` is the first. Arguments as `make_step`.
    Objectives that are sums, such as `losses.PerToken(reduce="sum")`, add up over calls as within one; a mean is each
    batch's own.

    Metrics: those of the objective and `loss`, of this batch; with experts `balance.report`.
    """
    one = _loss(score, objective)

    def accumulate(params, gradient: Gradient, batch: Batch, *frozen):
        total, report, aux = _add(one, params, Gradient(gradient.params, jnp.zeros_like(gradient.loss)), batch, frozen)
        report |= balance.report(aux) | {"loss": metrics.of(total.loss)}
        return Gradient(total.params, gradient.loss + total.loss), report

    out = None if shardings is None else (Gradient(shardings.params, shardings.step), shardings.step)
    return _compiled(accumulate, donate_argnums=1, out_shardings=out)


def make_forward_backward(score: Callable, objective, seen: Callable) -> Callable:
    """Returns jitted `forward_backward(params, gradient, batch, *frozen) -> (gradient, loss, shown)` for one prepared
    microbatch [B, T]: `make_accumulate`, with what `seen(out, batch)` takes of the scores that the gradient is of.

    `gradient` is donated; None = none is computed, and None is returned.
    """

    def one(params, batch: Batch, *frozen):
        out = score(params, batch, *frozen)
        return objective.loss(out, batch)[0], jax.lax.stop_gradient(seen(out, batch))

    def run(params, gradient: Gradient | None, batch: Batch, *frozen):
        if gradient is None:
            return None, *one(params, batch, *frozen)
        (loss, shown), grad = jax.value_and_grad(one, has_aux=True)(params, batch, *frozen)
        return _plus(gradient, Gradient(grad, loss), 0), loss, shown

    return _compiled(run, donate_argnums=1)


def make_apply(optimizer: Callable[[Any], optax.GradientTransformation], shardings: State | None = None) -> Callable:
    """Returns jitted `apply(state, gradient, hyper) -> (state, metrics)`: one update by an accumulated gradient.

    The state is donated. `hyper` are numbers for this update, traced: changing them compiles nothing. A gradient that
    is not finite changes nothing, as in `make_step`.

    Args:
      optimizer: f(hyper) -> optax transformation, such as `functools.partial(optim.adamw, table)` of an `optim.AdamW`;
        `init` takes the one of any hyper.

    Metrics: `grad_norm` (before clipping), `update_ratio`, `skipped`.
    """

    def apply(state: State, gradient: Gradient, hyper):
        return _update(optimizer(hyper), state, gradient, shardings)

    out = None if shardings is None else (shardings, shardings.step)
    return _compiled(apply, donate_argnums=0, out_shardings=out)


def _compiled(f: Callable, **options) -> Callable:
    """`jax.jit`; on a CPU, for arguments of more than LARGE bytes, with XLA's scheduler for little memory. The default
    there looks for operations that can run at the same time, and so holds the updates of all weights at once; steps of
    small models take a tenth less time with it."""
    plain = jax.jit(f, **options)
    if hardware.platform() != "cpu":
        return plain
    memory = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    frugal = jax.jit(f, **options, compiler_options=memory)

    def chosen(arguments: tuple) -> Any:
        arrays = [x for x in jax.tree.leaves(arguments) if hasattr(x, "shape")]  # no learning rate
        sizes = (math.prod(x.shape) * x.dtype.itemsize for x in arrays)
        return frugal if sum(sizes) > LARGE else plain

    def compiled(*arguments):
        return chosen(arguments)(*arguments)

    compiled.lower = lambda *arguments: chosen(arguments).lower(*arguments)  # type: ignore[attr-defined]
    compiled._cache_size = lambda: plain._cache_size() + frugal._cache_size()  # type: ignore[attr-defined]
    return compiled


def _loss(score: Callable, objective) -> Callable:
    """f(params, microbatch, *frozen) -> (loss, (metrics, aux))."""

    def one(params, batch, *frozen):
        out = score(params, batch, *frozen)
        loss, report = objective.loss(out, batch)
        return loss, (report, out.aux)

    return one


def _zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _add(one: Callable, params, start: Gradient | None, batch: Batch, frozen: tuple):
    """(`start` plus the batch's gradient and loss, metrics of the objective, `out.aux` summed)."""
    micro = lambda i: jax.tree.map(lambda x: x[i], batch)
    plus = lambda a, b: jax.tree.map(jnp.add, a, b)
    loss, (shapes, sums) = jax.eval_shape(one, params, micro(0), *frozen)
    if start is not None:
        start = Gradient(start.params, start.loss.astype(loss.dtype))  # float64 if the weights are

    def add(i, carry):
        total, report, aux = carry
        (value, (new, more)), grad = jax.value_and_grad(one, has_aux=True)(params, micro(i), *frozen)
        found = Gradient(grad, value)
        return found if total is None else _plus(total, found, i), metrics.merge_trees(report, new), plus(aux, more)

    first = start, metrics.empty_like(shapes), _zeros(sums)
    if batch.token_BT.shape[0] == 1:  # nothing to add up
        return add(0, first)
    return jax.lax.fori_loop(0, packing.used(batch), add, first)


def _plus(total: Gradient, new: Gradient, place) -> Gradient:
    """The sum; where it is in bf16, rounded stochastically."""
    seed = jax.lax.bitcast_convert_type(new.loss.astype(jnp.float32), jnp.uint32) + jnp.uint32(place)
    sums, tree = jax.tree.flatten(total.params)
    pairs = zip(sums, jax.tree.leaves(new.params), strict=True)
    added = [rounding.add(a, b, seed + jnp.uint32(i)) for i, (a, b) in enumerate(pairs)]
    return Gradient(jax.tree.unflatten(tree, added), total.loss + new.loss)


def _update(optimizer, state: State, gradient: Gradient, shardings, adjust: Callable = lambda params: params):
    """(state after one update, metrics); the same state, one step on, if gradient or loss is not finite."""
    wide = jax.tree.map(lambda x: x.astype(_wide(x)), gradient.params)
    norm = optax.tree.norm(wide)
    finite = jnp.isfinite(norm) & jnp.isfinite(gradient.loss)
    size = jnp.maximum(optax.tree.norm(state.params), 1e-30)

    def moved():
        """(weights, optimiser state, norm of the updates over that of the weights)."""
        updates, opt_state = optimizer.update(wide, state.opt_state, state.params)
        params = adjust(rounding.apply_updates(state.params, updates, state.step))
        return params, opt_state, optax.tree.norm(updates) / size

    same = state.params, state.opt_state, jnp.zeros_like(size)
    # Choosing afterwards keeps both states, a quarter of a CPU's temporaries. A TPU's branch copies more than that, and
    # on a mesh the collectives of a branch would meet others in any order.
    choose = lambda: jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved(), same)
    if any(len(sharding.device_set) > 1 for sharding in jax.tree.leaves(shardings)):
        params, opt_state, ratio = choose()
    else:
        branch = lambda: jax.lax.cond(finite, moved, lambda: same)
        params, opt_state, ratio = jax.lax.platform_dependent(cpu=branch, default=choose)
    report = {
        "grad_norm": metrics.of(norm),
        "update_ratio": metrics.of(ratio),
        "skipped": metrics.of(~finite),
    }
    return State(params, opt_state, state.step + 1), report


def make_loss(score: Callable, objective) -> Callable:
    """Returns jitted `loss(params, batch, *frozen) -> metrics` for a prepared Batch [M, B, T], without gradients."""

    def total(params, batch: Batch, *frozen):
        micro = lambda i: jax.tree.map(lambda x: x[i], batch)
        one = lambda i: objective.loss(score(params, micro(i), *frozen), micro(i))[1]
        add = lambda i, report: metrics.merge_trees(report, one(i))
        return jax.lax.fori_loop(0, packing.used(batch), add, metrics.empty_like(jax.eval_shape(one, 0)))

    return jax.jit(total)


def make_scores(score: Callable) -> Callable:
    """Returns jitted `scores(params, batch, *frozen) -> out` over a Batch [M, B, T], without gradients.

    The arrays of `out` have axes [M, B, T]; as `scores` they are what `prepare` of an objective compares with.
    """

    def scores(params, batch: Batch, *frozen):
        micro = lambda i: jax.tree.map(lambda x: x[i], batch)
        shapes = jax.eval_shape(score, params, micro(0), *frozen)
        M = batch.token_BT.shape[0]
        start = jax.tree.map(lambda s: jnp.zeros((M, *s.shape), s.dtype), shapes)

        def put(i, out):
            return jax.tree.map(lambda all_, new: all_.at[i].set(new), out, score(params, micro(i), *frozen))

        return jax.lax.fori_loop(0, packing.used(batch), put, start)

    return jax.jit(scores)
