"""The nnx module equals the functional model, and nnx transformations see its weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from areax import models
from areax.adapters import flax as adapter

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


@pytest.mark.parametrize(
    "family, more", [("qwen2", {}), ("qwen3", {}), ("qwen3", SEGMENTS), ("qwen3", SEGMENTS | POSITIONS)]
)
def test_outputs_equal_those_of_the_functions(family, more):
    config, params = made(family)
    got = nnx.jit(lambda m, more: m(TOKENS, **more))(adapter.Model(config, params), more)
    wanted = jax.jit(lambda p, more: models.forward(p, TOKENS, config=config, **more))(params, more)
    assert np.array_equal(got, wanted)


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
