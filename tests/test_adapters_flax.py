"""The nnx module equals the functional model, and nnx transformations see its weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx
from flax.errors import ScopeParamShapeError

from areax import models
from areax.adapters import flax as adapter
from areax.core import losses, metrics, optim, packing, step
from areax.rollout.types import supervised

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12))


@functools.cache
def made(family="qwen3"):
    config = models.config_from_hf(
        dict(
            model_type=family, vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.3,
        )
    )  # fmt: skip
    return config, tiny.weights(models.table(config), 0.3)


@nnx.jit
def loss(model):
    return jnp.sum(jnp.sin(model(TOKENS)))


gradient = nnx.jit(nnx.grad(loss))
SEGMENTS = {"segment_BT": np.tile(np.repeat(np.int32([1, 2]), 6), (2, 1))}
POSITIONS = {"position_BT": np.tile(np.arange(12), (2, 1))}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "family, more", [("qwen2", {}), ("qwen3", {}), ("qwen3", SEGMENTS), ("qwen3", SEGMENTS | POSITIONS)]
)
def test_outputs_equal_those_of_the_functions(family, more):
    config, params = made(family)
    got = nnx.jit(lambda m, more: m(TOKENS, **more))(adapter.Model(config, params), more)
    wanted = jax.jit(lambda p, more: models.forward(p, TOKENS, config=config, **more))(params, more)
    assert np.array_equal(got, wanted)


@pytest.mark.slow
def test_gradients_equal_those_of_the_functions():
    config, params = made()
    got = gradient(adapter.Model(config, params))
    wanted = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(models.forward(p, TOKENS, config=config)))))(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_parameters_round_trip(family):
    config, params = made(family)
    model = adapter.Model(config, params)
    out = adapter.params(model)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(params), strict=True))
    graph, state = nnx.split(model, nnx.Param)
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(params))
    halved = nnx.merge(graph, jax.tree.map(lambda x: x / 2, state))
    assert np.array_equal(adapter.params(halved)["norm"], params["norm"] / 2)


def test_an_nnx_optimiser_trains_it():
    config, params = made()
    model = adapter.Model(config, params)
    start = jax.tree.map(np.array, params)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-4), wrt=nnx.Param)
    before = loss(model)
    optimizer.update(model, gradient(model))
    assert loss(model) < before
    assert jax.tree.all(jax.tree.map(np.array_equal, params, start))  # our own arrays are unchanged


@pytest.mark.slow
def test_steps_of_an_nnx_optimiser_equal_those_of_areax():
    """Three steps of AdamW with clipping, on packed samples: the same optax chain, the same losses and weights."""
    config, params = made()
    objective = losses.SFT()
    rng = np.random.default_rng(1)
    samples = [supervised(rng.integers(0, 32, 3), rng.integers(0, 32, n)) for n in (4, 5, 2)]
    batch = objective.prepare(packing.pack(samples, 12, rows=2))
    chain = optim.make_optimizer(optim.Optimizer(lr=1e-2, weight_decay=0.1), models.table(config))
    score = functools.partial(models.score, config=config)
    update, state = step.make_step(score, objective, chain), step.init(jax.tree.map(jnp.copy, params), chain)

    model = adapter.Model(config, params)
    optimizer = adapter.optimizer(model, chain)
    rows = jax.tree.map(lambda x: x.squeeze(0), batch)

    def loss(model):
        return objective.loss(score(adapter.params(model), rows), rows)[0]

    @nnx.jit
    def train_step(model, optimizer):
        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    for _ in range(3):
        state, report = update(state, batch)
        np.testing.assert_allclose(train_step(model, optimizer), metrics.numbers(report)["loss"], rtol=1e-5)
    ours, theirs = jax.tree.leaves(adapter.params(model)), jax.tree.leaves(state.params)
    for got, wanted, start in zip(ours, theirs, jax.tree.leaves(params), strict=True):
        assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted - start).max()


@pytest.mark.parametrize("more", [{}, SEGMENTS | POSITIONS], ids=["plain", "packed"])
def test_linen_gives_the_same_bits(more):
    config, params = made()
    module = adapter.LinenModel(config)
    got = jax.jit(lambda p: module.apply({"params": p}, TOKENS, **more))(params)
    wanted = jax.jit(lambda p: models.forward(p, TOKENS, config=config, **more))(params)
    assert np.array_equal(got, wanted)


@pytest.mark.slow
def test_linen_draws_parameters_and_refuses_others():
    config, params = made()
    module = adapter.LinenModel(config)
    drawn = module.init(jax.random.key(0), TOKENS)["params"]
    assert jax.tree.structure(drawn) == jax.tree.structure(params)
    for new, old in zip(jax.tree.leaves(drawn), jax.tree.leaves(params), strict=True):
        assert new.shape == old.shape
    assert np.std(drawn["embed"]) == pytest.approx(0.3, rel=0.1)
    with pytest.raises(ScopeParamShapeError):
        module.apply({"params": params | {"norm": params["norm"][1:]}}, TOKENS)
