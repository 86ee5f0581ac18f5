"""The nnx module computes what the functions compute, and nnx's transformations see its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from areax import models
from areax.adapters import flax as adapter
from areax.core import param

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12))


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def made(request):
    config = models.config_from_hf(
        dict(
            model_type=request.param, vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.3,
        )
    )  # fmt: skip
    return config, param.init(jax.random.key(0), models.table(config))


def loss(model):
    return jnp.sum(jnp.sin(model(TOKENS)))


def test_same_numbers(made):
    config, params = made
    model = adapter.Model(config, params)
    segment_BT = np.tile(np.repeat([1, 2], 6), (2, 1)).astype(np.int32)
    position_BT = np.tile(np.arange(12), (2, 1))
    for more in ({}, {"segment_BT": segment_BT}, {"position_BT": position_BT, "segment_BT": segment_BT}):
        got = nnx.jit(lambda m, more: m(TOKENS, **more))(model, more)
        wanted = jax.jit(lambda p, more: models.forward(p, TOKENS, config=config, **more))(params, more)
        assert np.array_equal(got, wanted)


def test_gradients_are_those_of_the_functions(made):
    config, params = made
    got = nnx.jit(nnx.grad(loss))(adapter.Model(config, params))
    wanted = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(models.forward(p, TOKENS, config=config)))))(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_parameters_go_in_and_out(made):
    config, params = made
    model = adapter.Model(config, params)
    out = adapter.params(model)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(params), strict=True))
    graph, state = nnx.split(model, nnx.Param)
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(params))
    halved = nnx.merge(graph, jax.tree.map(lambda x: x / 2, state))
    assert np.array_equal(adapter.params(halved)["norm"], params["norm"] / 2)


def test_an_optimiser_of_nnx_trains_it(made):
    config, params = made
    model = adapter.Model(config, params)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-4), wrt=nnx.Param)
    before = loss(model)
    optimizer.update(model, nnx.jit(nnx.grad(loss))(model))
    assert loss(model) < before
    assert np.array_equal(params["norm"], np.ones(16))  # ours are as they were
