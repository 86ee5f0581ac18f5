"""Training states are restored exactly, or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areax import models
from areax.adapters import orbax
from areax.core import optim, param, step
from areax.parallel import mesh, rules


def fresh(dtype="float32", width=4):
    params = {"w": jnp.arange(2 * width, dtype=dtype).reshape(2, width), "b": jnp.ones(width, dtype)}
    return step.init(params, optax.adamw(1e-3))


def test_a_round_trip_keeps_dtypes_and_values(tmp_path):
    before = fresh()
    with orbax.open_store(tmp_path / "state") as store:
        assert store.latest is None
        store.save(3, before, {"next": 7, "open": [1, 2]})
    with orbax.open_store(tmp_path / "state") as store:
        assert store.latest == 3
        after, cursor = store.restore(fresh())
    assert cursor == {"next": 7, "open": [1, 2]}
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_newest_two_states_are_kept(tmp_path):
    with orbax.open_store(tmp_path) as store:
        for v in range(4):
            store.save(v, fresh())
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 3]


def test_a_state_of_another_structure_is_refused(tmp_path):
    with orbax.open_store(tmp_path) as store:
        with pytest.raises(ValueError, match="needed, got none"):
            store.restore(fresh())
        store.save(0, fresh())
        with pytest.raises(RuntimeError, match="already exists"):
            store.save(0, fresh())
        with pytest.raises(ValueError, match=r"float32\[4\] and .*bfloat16\[4\]; resume"):
            store.restore(fresh("bfloat16"))
        with pytest.raises(ValueError, match=r"\[4\] and .*\[5\]"):
            store.restore(fresh(width=5))


def test_a_state_saved_on_one_mesh_is_the_same_on_any_other(tmp_path):
    """Weights, moments and counters, bit for bit, after a step that changed them all."""
    hf = dict(
        model_type="qwen3", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    )  # fmt: skip
    table = models.table(models.config_from_hf(hf))
    optimizer = optim.make_optimizer(optim.Optimizer(lr=1e-2), table)

    def on(layout):
        shardings = rules.of_state(optimizer, table, mesh.make(layout))
        draw = jax.jit(lambda key: param.init(key, table), out_shardings=shardings.params)
        return shardings, step.init(draw(jax.random.key(0)), optimizer, shardings)

    @jax.jit
    def moved(current):
        grads = jax.tree.map(jnp.sin, current.params)
        updates, opt_state = optimizer.update(grads, current.opt_state, current.params)
        return step.State(optax.apply_updates(current.params, updates), opt_state, current.step + 1)

    shardings, start = on(mesh.Layout(fsdp=8))
    saved = jax.device_put(moved(start), shardings)
    with orbax.open_store(tmp_path) as store:
        store.save(1, saved, {"row": 7})
    for layout in (mesh.Layout(dp=2, tp=4), mesh.Layout()):
        shardings, like = on(layout)
        with orbax.open_store(tmp_path) as store:
            got, cursor = store.restore(like)
        assert cursor == {"row": 7} and jax.tree.structure(got) == jax.tree.structure(saved)
        for x, wanted, other, sharding in zip(*map(jax.tree.leaves, (got, saved, start, shardings)), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
            np.testing.assert_array_equal(x, wanted)
            assert x.dtype == wanted.dtype and (np.asarray(x) != np.asarray(other)).any()
