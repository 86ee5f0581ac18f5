"""Conversion from and to torch state dicts."""

import jax
import numpy as np
import pytest
import torch
import transformers

from areax import models
from areax.adapters import torch as adapter
from areax.core import param

CONFIG = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, initializer_range=0.3,
)  # fmt: skip


def module(tied, dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG, tie_word_embeddings=tied)).to(dtype)


def made(tied, dtype="float32"):
    config = models.config_from_hf(module(tied).config.to_dict())
    return config, param.init(jax.random.key(0), models.table(config), dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_modules_and_parameters_give_the_same_logits(tied):
    token_BT = np.random.default_rng(0).integers(0, 32, (2, 19))
    theirs = module(tied).eval()
    config, params = adapter.from_state_dict(models.config_from_hf(theirs.config.to_dict()), theirs.state_dict())
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(token_BT), use_cache=False).logits.numpy()
    got = jax.jit(models.forward, static_argnames="config")(params, token_BT, config=config)
    assert np.abs(got - wanted).max() <= 1e-4

    config, params = made(tied)
    theirs.load_state_dict(adapter.to_state_dict(config, params))
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(token_BT), use_cache=False).logits.numpy()
    got = jax.jit(models.forward, static_argnames="config")(params, token_BT, config=config)
    assert np.abs(got - wanted).max() <= 1e-4


@pytest.mark.sweep
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_round_trip(tied, dtype):
    config, params = made(tied, dtype)
    state = adapter.to_state_dict(config, params)
    assert {str(x.dtype) for x in state.values()} == {f"torch.{dtype}"}
    assert state.keys() == module(tied).state_dict().keys()
    again, same = adapter.from_state_dict(config, state, dtype)
    assert again == config and jax.tree.all(jax.tree.map(np.array_equal, params, same))


@pytest.mark.slow
def test_parameters_on_the_cpu_are_not_copied():
    config, params = made(False, "bfloat16")
    state = adapter.to_state_dict(config, params)
    assert state["model.norm.weight"].data_ptr() == params["norm"].unsafe_buffer_pointer()
    start = params["stacks"][0]["up"].unsafe_buffer_pointer()
    assert state["model.layers.1.mlp.up_proj.weight"].data_ptr() == start + 24 * 16 * 2


def test_tensors_sharing_memory_survive_donation():
    config, params = made(False)
    state = adapter.to_state_dict(config, params)
    before = {name: x.clone() for name, x in state.items()}
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(params))
    assert all(torch.equal(state[name], before[name]) for name in state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicated_and_numpy_parameters_are_copied(dtype):
    config, params = made(False, dtype)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    wanted = adapter.to_state_dict(config, params)
    for other in (spread, jax.tree.map(np.asarray, params)):
        got = adapter.to_state_dict(config, other)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_state_dict_is_read_strictly():
    state = module(False).state_dict()
    config = models.config_from_hf(module(False).config.to_dict())
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match="from_state_dict: missing model.norm.weight"):
        adapter.from_state_dict(config, state)
    tied = module(True).state_dict() | {"lm_head.weight": torch.zeros(32, 16)}
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        adapter.from_state_dict(models.config_from_hf(module(True).config.to_dict()), tied)
