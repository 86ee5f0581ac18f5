"""Mergeable metrics {sum, count, min, max, histogram}, and moments of pairs: exact over microbatches, devices and
processes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metric:
    """Statistics of a set of numbers; `edges` are fixed bin edges (empty = no histogram).

    Values below the first edge count in the first bin, values at or above the last edge in the last bin.
    """

    sum: Any
    count: Any
    min: Any
    max: Any
    bins: Any
    edges: tuple[float, ...] = field(default=(), metadata={"static": True})


def of(x, mask=None, *, edges: tuple[float, ...] = ()) -> Metric:
    """The metric of the x whose mask is not 0; no gradient flows."""
    return _of(jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)), mask, edges)


@partial(jax.jit, static_argnums=2)  # traced once for the many metrics of a step
def _of(x, mask, edges) -> Metric:
    keep = jnp.ones_like(x, bool) if mask is None else jnp.asarray(mask) != 0
    bins = jnp.zeros((max(len(edges) - 1, 0),), jnp.float32)
    if edges:
        where = jnp.clip(jnp.searchsorted(jnp.asarray(edges), x, side="right") - 1, 0, len(bins) - 1)
        bins = bins.at[where.reshape(-1)].add(keep.reshape(-1).astype(jnp.float32))
    return Metric(
        sum=jnp.sum(jnp.where(keep, x, 0)),
        count=jnp.sum(keep.astype(jnp.float32)),
        min=jnp.min(jnp.where(keep, x, jnp.inf), initial=jnp.inf),
        max=jnp.max(jnp.where(keep, x, -jnp.inf), initial=-jnp.inf),
        bins=bins,
        edges=edges,
    )


def of_sum(total, count) -> Metric:
    """The metric of `count` numbers with only their sum known; min and max are those of the merged parts' means."""
    total, count = (jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)) for x in (total, count))
    mean = of(total / jnp.where(count > 0, count, 1), count > 0)
    return Metric(total, count, mean.min, mean.max, mean.bins)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments:
    """Number, means, and sums of squares and products about the means, of pairs (x, y).

    Means of squares minus squares of means would cancel in fp32 where a spread is small beside its mean.
    """

    count: Any
    x: Any
    y: Any
    xx: Any
    yy: Any
    xy: Any


def moments(x, y, mask) -> Moments:
    """The moments of the pairs whose mask is not 0; no gradient flows."""
    x, y = (jax.lax.stop_gradient(jnp.asarray(values, jnp.float32)) for values in (x, y))
    return _moments(x, y, jnp.asarray(mask) != 0)


@jax.jit
def _moments(x, y, keep) -> Moments:
    total = lambda values: jnp.sum(jnp.where(keep, values, 0))
    count = total(jnp.ones_like(x))
    mean_x, mean_y = (total(values) / jnp.maximum(count, 1) for values in (x, y))
    dx, dy = x - mean_x, y - mean_y
    return Moments(count, mean_x, mean_y, total(dx * dx), total(dy * dy), total(dx * dy))


@jax.jit
def merge(a, b):
    """The metric, or the moments, of the union of both sets."""
    if isinstance(a, Moments):
        return _merge_moments(a, b)
    return Metric(
        a.sum + b.sum,
        a.count + b.count,
        jnp.minimum(a.min, b.min),
        jnp.maximum(a.max, b.max),
        a.bins + b.bins,
        a.edges,
    )


def _merge_moments(a: Moments, b: Moments) -> Moments:
    """The pairwise update of T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae" (1979)."""
    count = a.count + b.count
    share = b.count / jnp.maximum(count, 1)
    dx, dy, n = b.x - a.x, b.y - a.y, a.count * share
    return Moments(
        count, a.x + share * dx, a.y + share * dy,
        a.xx + b.xx + n * dx * dx, a.yy + b.yy + n * dy * dy, a.xy + b.xy + n * dx * dy,
    )  # fmt: skip


def empty_like(abstract):
    """Metrics of the empty set, the identity of `merge`, for a tree of (abstract) metrics."""
    zero = jnp.zeros((), jnp.float32)

    def empty(m):
        if isinstance(m, Moments):
            return Moments(zero, zero, zero, zero, zero, zero)
        bins = jnp.zeros((max(len(m.edges) - 1, 0),), jnp.float32)
        return Metric(zero, zero, zero + jnp.inf, zero - jnp.inf, bins, m.edges)

    return jax.tree.map(empty, abstract, is_leaf=_whole)


def merge_trees(a, b):
    """Merges two trees of metrics leaf by leaf, each as `merge` does."""
    return jax.tree.map(merge, a, b, is_leaf=_whole)


def _whole(x) -> bool:
    return isinstance(x, Metric | Moments)


def to_dict(tree: dict[str, Any]) -> dict:
    """Host values for the log: `name` = mean, `name_max`, and `name_hist` = {edges, counts} if there are bins.

    Metrics with count 0, and moments, are omitted.
    """
    out: dict = {}
    for name, m in tree.items():
        count = float(m.count)
        if count == 0 or isinstance(m, Moments):
            continue
        out[name], out[f"{name}_max"] = float(m.sum) / count, float(m.max)
        if m.edges:
            out[f"{name}_hist"] = {"edges": list(m.edges), "counts": np.asarray(m.bins).tolist()}
    return out


def numbers(tree: dict[str, Metric]) -> dict[str, float]:
    """Plain numbers of a step's metrics: `name` = mean and `name_max`, without histograms.

    Waits for the device. Metrics with count 0 are omitted, and so are the `moment_` sums, which only
    `signals.finalize_metrics` combines.
    """
    values = to_dict({name: m for name, m in tree.items() if not name.startswith("moment_")})
    return {name: value for name, value in values.items() if isinstance(value, float)}
