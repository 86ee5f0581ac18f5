"""Narrow moments: the optimiser in fp32 up to their rounding, whose expectation is zero; vectors stay in fp32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areax.core import moments, optim, param
from areax.parallel import mesh, rules

weight = lambda axes: param.Param(axes, ("w.weight",), jax.nn.initializers.normal())
DIMS = dict(embed=256, heads=64, vocab=32, head=24)
LAYER = {"norm1": weight("embed"), "q": weight("heads embed"), "small": weight("embed head")}
TABLE = param.Table({"embed": weight("vocab embed")}, (param.Stack((0, 1), LAYER),), DIMS)


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return param.tree_map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * scale, jnp.float32), TABLE)


@functools.cache
def steps(state: str, name: str = "adamw", count: int = 30):
    """Weights after some steps of one gradient plus noise."""
    spec = optim.Optimizer(name, lr=1e-2, clip=0, state=state)
    optimizer = optim.make_optimizer(spec, TABLE)

    @jax.jit
    def one(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, mean = draw(0), draw(1, 0.3)
    opt_state = optimizer.init(params)
    for seed in range(count):
        params, opt_state = one(params, opt_state, jax.tree.map(jnp.add, mean, draw(2 + seed)))
    return params, opt_state


TOLERANCES = {"bfloat16": 0.01, "float8": 0.12}
BOTH = "adamw", "muon"  # and of the others one, of which each keeps one moment


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name, state", [
    pytest.param(name, state, marks=[pytest.mark.wide] * (name not in BOTH and state == "bfloat16"))
    for name in ("adamw", "muon", "lion", "sgd")
    for state in TOLERANCES
])  # fmt: skip
def test_weights_follow_those_of_fp32_moments(name, state):
    """After 30 steps they are apart by a small part of the way that they went; lion's signs, of moments near zero too,
    flip more often."""
    wanted, got = steps("float32", name)[0], steps(state, name)[0]
    for a, b, start in zip(*map(jax.tree.leaves, (got, wanted, draw(0))), strict=True):
        apart, way = (float(jnp.sqrt(jnp.mean(jnp.square(x)))) for x in (a - b, b - start))
        assert apart < (3 if name == "lion" else 1) * TOLERANCES[state] * way
        assert abs(float(jnp.mean(a - b))) < 0.01 * way  # no drift


@pytest.mark.slow
def test_8_bits_are_a_code_in_the_weights_shape_and_a_scale_per_128_entries():
    held = steps("float8")[1]
    [adam] = [x for x in jax.tree.leaves(held, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(x, "nu")]
    for tree in (adam.mu, adam.nu):
        layer = tree["stacks"][0]
        assert layer["q"].code.dtype == jnp.float8_e4m3fn and layer["q"].code.shape == (2, 64, 256)
        assert layer["q"].scale.dtype == jnp.float32 and layer["q"].scale.shape == (2, 64, 2)
        assert layer["norm1"].dtype == jnp.float32  # a vector
        assert layer["small"].dtype == jnp.float32  # blocks of 8 would be mostly scales
    size = sum(x.nbytes for x in jax.tree.leaves((adam.mu["embed"], adam.nu["embed"])))
    assert size == 2 * (32 * 256 + 32 * 2 * 4)


def test_encoding_is_right_on_average_and_never_zero_where_a_step_divides_by_it():
    """Beside float64: of the first moment the mean of many roundings; second moments of far smaller entries stay above
    zero, by which Adam's step stays bounded."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 256)).astype(np.float32) * 10.0 ** rng.uniform(-3, 0, (4, 256)).astype(np.float32)
    again = lambda x, second: jax.jit(
        jax.vmap(lambda seed: moments.decode(moments.encode(jnp.asarray(x), "float8", second, seed), second))
    )(jnp.arange(500))
    mean = np.asarray(again(x, False), np.float64).mean(0)
    blocks = np.abs(x).reshape(4, 2, 128).max(-1).repeat(128, -1)
    assert np.abs(mean - x).max() / blocks.max() < 0.01
    squares = np.square(x) * 10.0 ** rng.uniform(-12, 0, (4, 256)).astype(np.float32)
    squares[0, 0] = 0
    got = np.asarray(again(squares, True))
    assert np.all(got[:, 0, 0] == 0) and np.all(got[:, squares > 0] > 0)


@pytest.mark.slow
def test_a_mesh_rounds_as_one_device_does():
    """Scales are split like their weights, where the devices divide their number."""
    optimizer = optim.make_optimizer(optim.Optimizer(lr=1e-2, clip=0, state="float8"), TABLE)
    update = jax.jit(optimizer.update)
    params, grads = draw(0), draw(1)
    wanted = update(grads, optimizer.init(params), params)
    on = mesh.make(mesh.Layout(dp=2, fsdp=2, tp=2))
    shardings = rules.of_state(optimizer, TABLE, on)
    with jax.set_mesh(on):
        there = jax.device_put((params, grads), (shardings.params, shardings.params))
        opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(there[0])
        got = jax.jit(optimizer.update, out_shardings=(shardings.params, shardings.opt_state))(
            there[1], opt_state, there[0]
        )
    [adam] = [x for x in jax.tree.leaves(got, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(x, "nu")]
    assert adam.mu["stacks"][0]["q"].scale.sharding.shard_shape((2, 64, 2)) == (2, 32, 1)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6, atol=1e-7 * float(np.abs(b).max())
        )
