"""Saved states come back as they were, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areax.adapters import state
from areax.core import step


def fresh(dtype="float32", width=4):
    params = {"w": jnp.arange(2 * width, dtype=dtype).reshape(2, width), "b": jnp.ones(width, dtype)}
    return step.init(params, optax.adamw(1e-3))


def test_round_trip_keeps_types_and_values(tmp_path):
    before = fresh()
    with state.open_store(tmp_path / "state") as store:
        assert store.latest is None
        store.save(3, before, {"next": 7, "open": [1, 2]})
    with state.open_store(tmp_path / "state") as store:
        assert store.latest == 3
        after, cursor = store.restore(fresh())
    assert cursor == {"next": 7, "open": [1, 2]}
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_newest_two_stay(tmp_path):
    with state.open_store(tmp_path) as store:
        for v in range(4):
            store.save(v, fresh())
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 3]


def test_what_does_not_fit_is_refused(tmp_path):
    with state.open_store(tmp_path) as store:
        with pytest.raises(ValueError, match="needed, got none"):
            store.restore(fresh())
        store.save(0, fresh())
        with pytest.raises(RuntimeError, match="there already"):
            store.save(0, fresh())
        with pytest.raises(ValueError, match=r"float32\[4\] and .*bfloat16\[4\]; resume"):
            store.restore(fresh("bfloat16"))
        with pytest.raises(ValueError, match=r"\[4\] and .*\[5\]"):
            store.restore(fresh(width=5))
