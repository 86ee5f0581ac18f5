"""Offloaded training beside `core.step`: the same numbers, with masters and moments in the host's memory."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families

from areax import models
from areax.adapters import orbax
from areax.core import balance, losses, metrics, optim, packing, param, step
from areax.parallel import batches, mesh, offload, rules
from areax.rollout.types import supervised

CONFIG = tiny_families.config("qwen3")
TABLE = models.table(CONFIG)
SPEC = optim.Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
ONE, EIGHT = mesh.Layout(), mesh.Layout(dp=2, fsdp=2, tp=2)


def weights(config=CONFIG):
    return jax.jit(lambda: param.init(jax.random.key(0), models.table(config)))()


def batch(seed, on, count=3, broken=False):
    """Sequences of 11 tokens, in rows of 36, one for each part of a batch on the mesh."""
    rng = np.random.default_rng(seed)
    draw = lambda size: rng.integers(0, 64, size)
    made = [supervised(draw(3), draw(8), sample=i, rollout=i, group=i) for i in range(count)]
    ready = losses.SFT().prepare(batches.batch(packing.pack(made, 36, rows=on.shape["dp"] * on.shape["fsdp"]), on))
    return ready.replace(weight_BT=ready.weight_BT * jnp.inf) if broken else ready


def pair(spec, dtype, layout, config=CONFIG, adjust=lambda params, aux: params):
    """((state, step) on the devices, (state, step) offloaded, mesh)."""
    on, table = mesh.make(layout), models.table(config)
    score = functools.partial(models.score, config=config, run=models.Run(dtype=dtype))
    optimizer = optim.make_optimizer(spec, table)
    shardings = rules.of_state(optimizer, table, on)
    put = lambda: jax.device_put(jax.tree.map(np.asarray, weights(config)), shardings.params)
    with jax.set_mesh(on):
        narrow = optim.narrowed(put(), table, spec.weights)
        plain = step.init(narrow, optimizer, shardings)
        state = offload.init(put(), table, spec, dtype, on)
        one = step.make_step(score, losses.SFT(), optimizer, shardings, adjust=adjust)
        two = offload.make_step(score, losses.SFT(), table, spec, dtype, on, adjust=adjust)
    return (plain, one), (state, two), on


def masters(state, table, spec, dtype):
    """The fp32 weights of an offloaded state, as one tree."""
    tree = jax.tree.map(np.asarray, state.params)
    for part, layers in zip(offload.parts(table, spec, dtype), state.opt_state, strict=True):
        for name in part.mastered:
            tree["stacks"][part.stack][name] = np.stack([np.asarray(held.masters[name]) for held in layers])
    return tree


CASES = [
    ("adamw", "bfloat16", ONE), ("adamw", "float32", ONE),
    pytest.param("adamw", "bfloat16", EIGHT, marks=pytest.mark.mesh),
    pytest.param("muon", "bfloat16", EIGHT, marks=pytest.mark.mesh),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("name, dtype, layout", CASES)
def test_the_numbers_are_those_of_a_step_on_the_device(name, dtype, layout):
    """Bit for bit up to the order of sums: gradients in bf16 differ where XLA leaves out a rounding between two
    products, so the comparison is with the masters' whole change."""
    spec = replace(SPEC, name=name)
    (plain, one), (state, two), on = pair(spec, dtype, layout)
    start = jax.tree.map(np.asarray, plain.params)
    with jax.set_mesh(on):
        for seed in range(3):
            plain, wanted = one(plain, batch(seed, on))
            state, report = two(state, batch(seed, on))
    assert metrics.numbers(report).keys() == metrics.numbers(wanted).keys()
    for key, value in metrics.numbers(wanted).items():
        assert metrics.numbers(report)[key] == pytest.approx(value, rel=1e-5 if dtype == "float32" else 3e-3), key
    tolerance = 1e-5 if dtype == "float32" else 0.1
    got = masters(state, TABLE, spec, dtype)
    for a, b, s in zip(*map(jax.tree.leaves, (got, plain.params, start)), strict=True):
        way = np.sqrt(np.mean(np.square(b - s)))
        assert np.sqrt(np.mean(np.square(a - np.asarray(b)))) <= tolerance * way + 1e-7
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)}
    assert kinds == {offload.HOST} and int(state.step) == 3


@pytest.mark.slow
def test_updates_below_the_weights_precision_add_up_in_the_masters():
    """Changes of a thousandth of bf16's step leave the device's weights as they are; masters move as those of a step on
    the device do."""
    spec = replace(SPEC, lr=1e-7, weight_decay=0.0)
    (plain, one), (state, two), on = pair(spec, "bfloat16", ONE)
    start = jax.tree.map(np.asarray, plain.params)
    with jax.set_mesh(on):
        for seed in range(3):
            plain, _ = one(plain, batch(seed, on))
            state, _ = two(state, batch(seed, on))
    layer, before = state.params["stacks"][0]["up"], start["stacks"][0]["up"]
    same = np.mean(np.asarray(layer) == before.astype(layer.dtype))
    assert layer.dtype == jnp.bfloat16 and same > 0.98
    moved = masters(state, TABLE, spec, "bfloat16")["stacks"][0]["up"] - before
    wanted = np.asarray(plain.params["stacks"][0]["up"]) - before
    assert np.abs(moved).mean() > 1e-7 and np.corrcoef(moved.ravel(), wanted.ravel())[0, 1] > 0.98


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing():
    _, (state, two), on = pair(SPEC, "bfloat16", ONE)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    with jax.set_mesh(on):
        state, report = two(state, batch(0, on, broken=True))
    assert metrics.numbers(report)["skipped"] == 1 and metrics.numbers(report)["update_ratio"] == 0
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state)), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))


@pytest.mark.wide
@pytest.mark.slow
def test_a_routers_bias_moves():
    """It has no gradient and no moments; the loads that move it are those of the step."""
    config = tiny_families.config("glm4_moe")
    (plain, one), (state, two), on = pair(SPEC, "bfloat16", ONE, config, balance.adjust(balance.Balance(bias=0.1)))
    with jax.set_mesh(on):
        plain, _ = one(plain, batch(0, on))
        state, _ = two(state, batch(0, on))
    [got], [wanted] = (
        [np.asarray(x["router_bias"]) for x in s.params["stacks"] if "router_bias" in x] for s in (state, plain)
    )
    assert np.any(got != 0)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
def test_a_state_is_saved_and_restored_to_the_host(tmp_path):
    spec = replace(SPEC, state="float8", weights="bfloat16")
    _, (state, two), on = pair(spec, "bfloat16", ONE)
    with jax.set_mesh(on), orbax.open_store(tmp_path) as store:
        state, _ = two(state, batch(0, on))
        store.save(1, state)
        like = offload.init(weights(), TABLE, spec, "bfloat16", on)
        restored, _ = store.restore(like)
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert a.sharding == b.sharding and a.sharding.memory_kind == b.sharding.memory_kind
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        further, _ = two(restored, batch(1, on))
        state, _ = two(state, batch(1, on))
    for a, b in zip(jax.tree.leaves(further.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_gradients_of_microbatches_add_up_in_bf16():
    """Rounded stochastically, they are those of fp32 sums up to bf16's precision, without drift."""
    on, score = mesh.make(ONE), functools.partial(models.score, config=CONFIG, run=models.Run(dtype="bfloat16"))
    params = optim.narrowed(weights(), TABLE, "bfloat16")
    sums = lambda dtype: optim.sums(TABLE, replace(SPEC, gradients=dtype))
    with jax.set_mesh(on):
        data = batch(0, on, 12)
        assert len(data.token_BT) > 2
        total = lambda dtype: jax.jit(step.whole_gradient(score, losses.SFT(), sums(dtype)))(params, data)[0].params
        wide, narrow = total("float32"), total("bfloat16")
    for leaf, a, b in zip(param.leaf_list(TABLE), *map(jax.tree.leaves, (narrow, wide)), strict=True):
        assert a.dtype == (jnp.bfloat16 if optim.cast(leaf) else jnp.float32) and b.dtype == jnp.float32
        apart = np.asarray(a, np.float32) - np.asarray(b)
        assert np.abs(apart).max() <= 0.02 * np.abs(b).max() and abs(apart.mean()) < 1e-3 * np.abs(b).max()


FAMILIES = [pytest.param(name, marks=[pytest.mark.wide] * (name != "qwen3_moe")) for name in tiny_families.FAMILIES]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_cast_beforehand_score_as_those_cast_in_use(family):
    """Which `optim.cast` and `optim.copied` name: to the bit."""
    config = tiny_families.config(family)
    table, params = models.table(config), weights(config)
    run = models.Run(dtype="bfloat16")
    token_BT = np.random.default_rng(0).integers(0, 60, (2, 24))
    forward = jax.jit(lambda params: models.forward(params, token_BT, config=config, run=run))
    copy = param.tree_map(lambda leaf, x: x.astype("bfloat16") if optim.copied(leaf) else x, table, params)
    wanted = np.asarray(forward(params))
    for narrow in (optim.narrowed(params, table, "bfloat16"), copy):
        assert any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(narrow))
        np.testing.assert_array_equal(np.asarray(forward(narrow)), wanted)
