"""Metrics merge exactly and count what they should."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core import metrics

EDGES = (0.0, 0.5, 1.0, 2.0)
of = jax.jit(partial(metrics.of, edges=EDGES))
merge = jax.jit(metrics.merge)


def floats(n):
    return st.lists(st.floats(-1, 4, width=32), min_size=n, max_size=n)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([0, 1, 4, 30]).flatmap(floats), st.sampled_from([0, 1, 4, 26]))  # few lengths to compile
def test_merged_metrics_equal_those_of_the_whole(values, cut):
    values = np.float32(values)
    whole = metrics.to_dict({"x": of(values)})
    merged = metrics.to_dict({"x": merge(of(values[:cut]), of(values[cut:]))})
    assert whole.keys() == merged.keys()
    for name in whole:
        if name == "x_hist":
            assert whole[name] == merged[name] and sum(whole[name]["counts"]) == len(values)
        else:
            np.testing.assert_allclose(whole[name], merged[name], rtol=1e-5, atol=1e-6)


def test_masked_values_are_ignored_even_if_nan():
    m = metrics.of(jnp.asarray([1.0, jnp.nan, 3.0]), jnp.asarray([True, False, True]), edges=EDGES)
    assert (float(m.sum), float(m.count), float(m.min), float(m.max)) == (4, 2, 1, 3)
    assert m.bins.tolist() == [0, 0, 2]


def test_empty_metrics_are_neutral_and_not_reported():
    like = jax.eval_shape(lambda: {"x": metrics.of(jnp.ones(3), edges=EDGES)})
    empty = metrics.empty_like(like)
    assert metrics.to_dict(empty) == {}
    merged = metrics.merge_trees(empty, {"x": metrics.of(jnp.ones(3), edges=EDGES)})
    assert metrics.to_dict(merged)["x"] == 1.0


def test_numbers_are_plain():
    tree = {"x": of(jnp.asarray([1.0, 3.0])), "moment_x": of(jnp.ones(2)), "none": of(jnp.ones(2), jnp.zeros(2))}
    assert metrics.numbers(tree) == {"x": 2.0, "x_max": 3.0}
    assert {type(value) for value in metrics.numbers(tree).values()} == {float}
