"""Samples the next token of each slot: pure functions with fixed shapes, independent per row.

Rows never mix, and options that no row uses are skipped with `lax.cond` without changing a bit of other rows, so one
compiled program serves greedy, sampled and filtered requests together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ....core.shapes import shaped
from ..request import TOP


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Controls:
    """Sampling parameters per slot, as in `request.Sampling`: temperature 0 is greedy; top_k < 1, top_p 1 and min_p 0
    disable the filters.

    Attributes:
      seed_S2: u32, high and low half of each request's seed.
    """

    seed_S2: Any
    temperature_S: Any
    top_k_S: Any
    top_p_S: Any
    min_p_S: Any


LARGE = 1 << 14  # vocabulary for which a CPU computes noise by some rows at a time, to leave out others

Change = tuple[Any, Callable[[Any], Any]]  # (whether any row needs it, a function of logits_SV that keeps other rows)


@shaped
def choose(
    logits_SV, index_S, banned_SE, controls: Controls, top_S, change: Change | None = None, active_S=None
):  # fmt: skip
    """Draws one token per row from softmax(logits / temperature) after the filters top-k, top-p, min-p, in this order.

    A filter keeps ties with the last token it admits, and top-p counts the mass that top-k leaves. Noise is drawn with
    fold_in(key(seed), index): it depends only on the request's seed and the token's position.

    Args:
      logits_SV: f32.
      index_S: absolute position in its sequence of the token to draw.
      banned_SE: token ids that may not be drawn; V and above stand for none.
      top_S: number of likeliest tokens each row reports, at most TOP.
      change: applied to the logits to draw from, before bans and filters, if it is needed.
      active_S: rows whose results count; None = all.

    Returns:
      token_S; logp_S (nats, of softmax(logits / temperature) before change, bans and filters; temperature 1 if greedy);
      top_logp_SK and top_id_SK, K = min(TOP, V), undefined if no row requests them.
    """
    S, V = logits_SV.shape
    greedy_S = controls.temperature_S == 0
    drawn_S = ~greedy_S if active_S is None else ~greedy_S & active_S
    temperature_S1 = jnp.where(greedy_S, 1, controls.temperature_S)[:, None]
    scaled_SV = logits_SV / temperature_S1
    lse_S = jax.nn.logsumexp(scaled_SV, -1)

    def ban(x_SV):
        return x_SV.at[jnp.arange(S)[:, None], banned_SE].set(-jnp.inf, mode="drop")

    open_SV = scaled_SV
    if change is not None:
        needed, changed = change
        open_SV = jax.lax.cond(needed, lambda x_SV: changed(logits_SV) / temperature_S1, lambda x_SV: x_SV, open_SV)
    open_SV = jax.lax.cond(jnp.any(banned_SE < V), ban, lambda x_SV: x_SV, open_SV)
    filters = (controls.top_k_S > 0) | (controls.top_p_S < 1) | (controls.min_p_S > 0)
    open_SV = jax.lax.cond(
        jnp.any(filters & drawn_S), lambda x_SV: filtered(x_SV, controls), lambda x_SV: x_SV, open_SV
    )

    def draw(x_SV):
        return argmax(jnp.where(greedy_S[:, None], x_SV, x_SV + noise(controls.seed_S2, index_S, V, drawn_S)))

    token_S = jax.lax.cond(jnp.any(drawn_S), draw, argmax, open_SV)
    logp_S = jnp.take_along_axis(scaled_SV, token_S[:, None], -1)[:, 0] - lse_S
    K = min(TOP, V)

    def top(x_SV):
        value_SK, id_SK = jax.lax.top_k(x_SV, K)
        return value_SK - lse_S[:, None], id_SK

    def none(_):
        return jnp.zeros((S, K), logits_SV.dtype), jnp.zeros((S, K), jnp.int32)

    top_logp_SK, top_id_SK = jax.lax.cond(jnp.any(top_S > 0), top, none, scaled_SV)
    return token_S, logp_S, top_logp_SK, top_id_SK


def noise(seed_S2, index_S, V: int, needed_S=None):
    """Standard Gumbel noise f32[S, V] (argmax of logits + noise draws from their softmax); where it is not `needed`, it
    may be 0."""

    def row(seed, index):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), (V,), jnp.float32)

    if needed_S is None or V < LARGE or jax.default_backend() != "cpu":
        return jax.vmap(row)(seed_S2, index_S)
    S = len(index_S)
    R = math.gcd(S, 4)  # rows at a time

    def add(i, noise_SV):
        some = lambda x_S: jax.lax.dynamic_slice_in_dim(x_S, i * R, R)
        made = lambda x_SV: jax.lax.dynamic_update_slice_in_dim(
            x_SV, jax.vmap(row)(some(seed_S2), some(index_S)), i * R, 0
        )
        return jax.lax.cond(jnp.any(some(needed_S)), made, lambda x_SV: x_SV, noise_SV)

    return jax.lax.fori_loop(0, S // R, add, jnp.zeros((S, V), jnp.float32))


def argmax(x_SV):
    """Index of the first maximum, i32[S]: two plain reductions, which vectorise where a paired one does not."""
    at_SV = jnp.arange(x_SV.shape[1], dtype=jnp.int32)[None]
    largest_S1 = jnp.max(x_SV, -1, keepdims=True)
    return jnp.min(jnp.where(x_SV == largest_S1, at_SV, x_SV.shape[1] - 1), -1)


def filtered(x_SV, controls: Controls):
    """Scaled logits with -inf for the tokens that top-k, top-p and min-p exclude."""
    order_SV = ordered(x_SV)

    def top_k(x_SV):
        k_S1 = controls.top_k_S[:, None]
        least_S1 = threshold(lambda t_S1: jnp.sum(order_SV >= t_S1, -1, keepdims=True) >= k_S1, len(x_SV))
        return jnp.where((order_SV >= least_S1) | (k_S1 < 1), x_SV, -jnp.inf)

    def top_p(x_SV):
        mass_SV = jnp.exp(x_SV - jnp.max(x_SV, -1, keepdims=True))
        p_S1 = controls.top_p_S[:, None]
        need_S1 = p_S1 * jnp.sum(mass_SV, -1, keepdims=True)

        def enough(t_S1):
            return jnp.sum(jnp.where(order_SV >= t_S1, mass_SV, 0), -1, keepdims=True) >= need_S1

        least_S1 = threshold(enough, len(x_SV))
        return jnp.where((order_SV >= least_S1) | (p_S1 >= 1), x_SV, -jnp.inf)

    same = lambda x_SV: x_SV
    x_SV = jax.lax.cond(jnp.any(controls.top_k_S > 0), top_k, same, x_SV)
    x_SV = jax.lax.cond(jnp.any(controls.top_p_S < 1), top_p, same, x_SV)
    least_S1 = jnp.max(x_SV, -1, keepdims=True) + jnp.log(controls.min_p_S)[:, None]
    return jnp.where(x_SV >= least_S1, x_SV, -jnp.inf)


def ordered(x):
    """Maps f32 to u32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def threshold(enough, rows: int):
    """The largest u32 t[rows, 1] with enough(t), which must hold at 0 and be monotone: once false, false above.

    A binary search, one bit per pass from the top: 32 passes over the values find an exact threshold, while sorting a
    vocabulary costs many times more.
    """

    def bit(i, t_S1):
        higher_S1 = t_S1 | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(higher_S1), higher_S1, t_S1)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros((rows, 1), jnp.uint32))
