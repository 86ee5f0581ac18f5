"""Samples the next token of each slot: pure functions with fixed shapes, independent per row.

Rows never mix, and options that no row uses are skipped with `lax.cond` without changing a bit of other rows, so one
compiled program serves greedy, sampled and filtered requests together.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ....core import hardware
from ....core.shapes import shaped
from ....models.layers import native
from ....parallel import mesh
from ..request import KEPT, TOP


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


Change = tuple[Any, Callable[[Any], Any]]  # (whether any row needs it, a function of logits_SV that keeps other rows)


@shaped
def choose(
    logits_SV, index_S, banned_SE, controls: Controls, top_S, change: Change | None = None, active_S=None, masked_S=None
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
      masked_S: rows that report the tokens they could have drawn, and whose top-k leaves out ties beyond the k-th, the
        last ones; None = none are reported.

    Returns:
      token_S; logp_S (nats, of softmax(logits / temperature) before change, bans and filters; temperature 1 if greedy);
      top_logp_SK and top_id_SK, K = min(TOP, V), undefined if no row requests them; with `masked_S` also kept_SK, K =
      min(KEPT, V), of its rows the ids of the tokens that could be drawn, in ascending order, then -1, and kept_logp_S,
      the log-probability of softmax(logits / temperature) over these.
    """
    S, V = logits_SV.shape
    active_S = jnp.ones(S, bool) if active_S is None else active_S
    needed, changed = change or (False, None)
    banned = jnp.any(banned_SE < V)

    def changed_and_banned(logits_SV):
        open_SV = jax.lax.cond(needed, changed, lambda x_SV: x_SV, logits_SV) if changed else logits_SV
        return open_SV.at[jnp.arange(S)[:, None], banned_SE].set(-jnp.inf, mode="drop")

    draw = _by_call if native.ready() and mesh.one_device() else _by_xla
    rest = index_S, active_S

    def drawn(logits_SV):
        return jax.lax.cond(
            needed | banned,
            lambda logits_SV: draw(logits_SV, changed_and_banned(logits_SV), controls, *rest),
            lambda logits_SV: draw(logits_SV, logits_SV, controls, *rest),
            logits_SV,
        )

    def drawn_from_kept(logits_SV):
        open_SV = changed_and_banned(logits_SV)
        scaled_SV = open_SV / _temperature(controls)[:, None]
        kept_SV = kept(scaled_SV, controls)
        open_SV = jnp.where(kept_SV | ~masked_S[:, None], open_SV, -jnp.inf)
        made = draw(logits_SV, open_SV, unfiltered(controls, masked_S), *rest)
        lse_S = jax.nn.logsumexp(jnp.where(kept_SV, scaled_SV, -jnp.inf), -1)
        kept_logp_S = jnp.take_along_axis(scaled_SV, made[0][:, None], -1)[:, 0] - lse_S
        return *made, ids(kept_SV & masked_S[:, None], min(KEPT, V)), jnp.where(masked_S, kept_logp_S, 0)

    def drawn_alone(logits_SV):
        return *drawn(logits_SV), jnp.full((S, min(KEPT, V)), -1), jnp.zeros(S, logits_SV.dtype)

    if masked_S is None:
        (token_S, logp_S, lse_S), reported = drawn(logits_SV), ()
    else:
        masked_S &= active_S
        token_S, logp_S, lse_S, *reported = jax.lax.cond(jnp.any(masked_S), drawn_from_kept, drawn_alone, logits_SV)
    K = min(TOP, V)

    def top(logits_SV):
        value_SK, id_SK = likeliest(logits_SV / _temperature(controls)[:, None], K, jnp.max(top_S))
        return value_SK - lse_S[:, None], id_SK

    def none(_):
        return jnp.zeros((S, K), logits_SV.dtype), jnp.zeros((S, K), jnp.int32)

    top_logp_SK, top_id_SK = jax.lax.cond(jnp.any(top_S > 0), top, none, logits_SV)
    return token_S, logp_S, top_logp_SK, top_id_SK, *reported


def _temperature(controls: Controls):
    return jnp.where(controls.temperature_S == 0, 1, controls.temperature_S)


def _by_call(logits_SV, open_SV, controls: Controls, index_S, active_S):
    """(token_S drawn from `open`, logp_S by `logits`, lse_S of them), each row by itself; 0 where it is not active."""
    row = lambda dtype: jax.ShapeDtypeStruct((len(logits_SV),), dtype)
    of_rows = controls.temperature_S, controls.top_p_S, controls.min_p_S, controls.top_k_S, index_S.astype(jnp.int32)
    call = jax.ffi.ffi_call("areax_draw", [row(jnp.int32), row(jnp.float32), row(jnp.float32)])
    return call(logits_SV, open_SV, *of_rows, controls.seed_S2, active_S)


def _by_xla(logits_SV, open_SV, controls: Controls, index_S, active_S):
    temperature_S1, greedy_S = _temperature(controls)[:, None], controls.temperature_S == 0
    drawn_S = ~greedy_S & active_S
    scaled_SV, open_SV = logits_SV / temperature_S1, open_SV / temperature_S1
    lse_S = jax.nn.logsumexp(scaled_SV, -1)
    filters = (controls.top_k_S > 0) | (controls.top_p_S < 1) | (controls.min_p_S > 0)

    def draw(x_SV):
        noise_SV = noise(controls.seed_S2, index_S, x_SV.shape[1])
        return argmax(jnp.where(greedy_S[:, None], x_SV, x_SV + noise_SV))

    # No branch returns what it is given: accelerators would copy all logits.
    how = jnp.any(drawn_S).astype(jnp.int32) + jnp.any(filters & drawn_S)
    token_S = jax.lax.switch(how, [argmax, draw, lambda x_SV: draw(filtered(x_SV, controls))], open_SV)
    return token_S, jnp.take_along_axis(scaled_SV, token_S[:, None], -1)[:, 0] - lse_S, lse_S


def noise(seed_S2, index_S, V: int):
    """Standard Gumbel noise f32[S, V]: argmax of logits + noise draws from their softmax."""

    def row(seed, index):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), (V,), jnp.float32)

    return jax.vmap(row)(seed_S2, index_S)


def argmax(x_SV):
    """Index of the first maximum, i32[S]: two plain reductions, which vectorise where a paired one does not."""
    at_SV = jnp.arange(x_SV.shape[1], dtype=jnp.int32)[None]
    largest_S1 = jnp.max(x_SV, -1, keepdims=True)
    return jnp.min(jnp.where(x_SV == largest_S1, at_SV, x_SV.shape[1] - 1), -1)


def likeliest(x_SV, K: int, count=None):
    """(values [S, K], ids i32[S, K]) of the K largest of each row, of equal ones the first; those behind the first
    `count` may be anything. For `jax.lax.top_k` a TPU's compiler takes half a minute."""
    return by_turns(x_SV, K, count) if hardware.platform() == "tpu" else jax.lax.top_k(x_SV, K)


def by_turns(x_SV, K: int, count=None):
    """`likeliest`, one after the other: a pass over the values for each."""
    S, V = x_SV.shape
    at_SV = jnp.arange(V, dtype=jnp.int32)[None]

    def turn(k, found):
        value_SK, id_SK = found
        last = jnp.maximum(k - 1, 0)
        value_S1, id_S1 = (jax.lax.dynamic_slice_in_dim(x, last, 1, 1) for x in found)
        left_SV = (k == 0) | (x_SV < value_S1) | ((x_SV == value_S1) & (at_SV > id_S1))
        value_S1 = jnp.max(jnp.where(left_SV, x_SV, -jnp.inf), -1, keepdims=True)
        id_S1 = jnp.min(jnp.where(left_SV & (x_SV == value_S1), at_SV, V - 1), -1, keepdims=True)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=k, axis=1)
        return put(value_SK, value_S1), put(id_SK, id_S1)

    turns = K if count is None else jnp.minimum(count, K)
    return jax.lax.fori_loop(0, turns, turn, (jnp.zeros((S, K), x_SV.dtype), jnp.zeros((S, K), jnp.int32)))


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


def kept(x_SV, controls: Controls):
    """Which tokens the filters keep, bool[S, V], and of those that tie with the k-th only as many as make k."""
    kept_SV = filtered(x_SV, controls) > -jnp.inf
    least_S1 = jnp.min(jnp.where(kept_SV, x_SV, jnp.inf), -1, keepdims=True)
    tied_SV = kept_SV & (x_SV == least_S1)
    above_S1 = jnp.sum(kept_SV & ~tied_SV, -1, keepdims=True)
    most_S1 = jnp.where(controls.top_k_S < 1, x_SV.shape[1], controls.top_k_S)[:, None]
    return kept_SV & (~tied_SV | (above_S1 + jnp.cumsum(tied_SV, -1) <= most_S1))


def unfiltered(controls: Controls, masked_S):
    """Controls without filters in these rows."""
    return dataclasses.replace(
        controls,
        top_k_S=jnp.where(masked_S, -1, controls.top_k_S),
        top_p_S=jnp.where(masked_S, 1, controls.top_p_S),
        min_p_S=jnp.where(masked_S, 0, controls.min_p_S),
    )


def ids(kept_SV, K: int):
    """The first K columns that are true in each row, in ascending order, then -1, i32[S, K]."""
    rank_SV = jnp.cumsum(kept_SV, -1)
    column_SK = jax.vmap(lambda rank_V: jnp.searchsorted(rank_V, jnp.arange(1, K + 1)))(rank_SV)
    return jnp.where(column_SK < kept_SV.shape[1], column_SK, -1).astype(jnp.int32)


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
