"""Rules say where every weight lies, and refuse what cannot be split, by name."""

import jax
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from areax import models
from areax.adapters import hf
from areax.core import losses, optim, packing, param, step
from areax.parallel import batches, mesh, rules
from areax.rollout.types import supervised

HF = dict(
    model_type="qwen3", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
)  # fmt: skip
CONFIG = models.config_from_hf(HF)
TABLE = models.table(CONFIG)
OPTIMIZER = optim.make_optimizer(optim.Optimizer(weight_decay=0.1), TABLE)
FSDP8, DP2_TP4 = mesh.Layout(fsdp=8), mesh.Layout(dp=2, tp=4)


def trained(layout):
    """A state after one step on a mesh, so that moments are not zero."""
    on = mesh.make(layout)
    shardings = rules.of_state(OPTIMIZER, TABLE, on)
    with jax.set_mesh(on):
        params = jax.device_put(tiny.weights(TABLE, 0.02), shardings.params)
        update = step.make_step(lambda p, b: models.score(p, b, config=CONFIG), losses.SFT(), OPTIMIZER, shardings)
        rng = np.random.default_rng(0)
        rows = [supervised(rng.integers(0, 64, 4), rng.integers(0, 64, 9), sample=i, rollout=i) for i in range(8)]
        batch = losses.SFT().prepare(batches.batch(packing.pack(rows, 16, rows=8), on))
        start = step.init(params, OPTIMIZER, shardings)
        compiled = update.lower(start, batch).compile()
        return compiled(start, batch)[0], shardings, compiled, batch


def test_weights_are_sharded_by_the_rules():
    on = mesh.make(mesh.Layout(fsdp=2, tp=4))
    params = rules.of_params(TABLE, on)
    assert params["embed"].spec == P("tp", "fsdp") and params["stacks"][0]["q"].spec == P(None, "tp", "fsdp")
    assert params["stacks"][0]["down"].spec == P(None, "fsdp", "tp") and params["norm"].spec == P()
    assert rules.of_params(TABLE, mesh.make())["embed"].spec == P()


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("layout", [FSDP8, DP2_TP4])
def test_moments_are_sharded_like_weights_without_extra_memory(layout):
    trained_state, shardings, compiled, batch = trained(layout)
    for x, sharding in zip(jax.tree.leaves(trained_state), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    wanted = rules.of_params(TABLE, mesh.make(layout))
    adam = next(s for s in jax.tree.leaves(trained_state.opt_state, is_leaf=is_adam) if is_adam(s))
    for moments in (adam.mu, adam.nu):
        for x, sharding in zip(jax.tree.leaves(moments), jax.tree.leaves(wanted), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
    local = lambda x: int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
    used = [x for x in jax.tree.leaves((trained_state, batch))]
    arguments = compiled.memory_analysis().argument_size_in_bytes
    # what a program does not read (behaviour log-probabilities, rewards) is not among its arguments
    assert sum(map(local, jax.tree.leaves(trained_state))) <= arguments <= sum(map(local, used))


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)


def test_a_checkpoint_loads_into_shards_and_leaves_them(tmp_path):
    params = tiny.weights(TABLE, 0.02)
    path = hf.save(tmp_path / "one", CONFIG, params)
    on = mesh.make(mesh.Layout(fsdp=2, cp=2, tp=2))
    config, loaded = hf.load(path, mesh=on)
    for x, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(rules.of_params(TABLE, on)), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    again = hf.save(tmp_path / "two", config, loaded)
    assert (path / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_a_layout_of_fewer_devices_uses_the_first_ones():
    assert list(mesh.make(mesh.Layout(fsdp=3)).devices.flat) == jax.devices()[:3]


def test_impossible_layouts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"mesh: fsdp 9 needs 9 devices, got 8"):
        mesh.make(mesh.Layout(fsdp=9))
    with pytest.raises(ValueError, match=r"mesh: tp must be at least 1, got 0"):
        mesh.Layout(tp=0)
    odd = models.table(models.config_from_hf(HF | {"vocab_size": 61}))
    with pytest.raises(ValueError, match=r"embed: vocab of size 61 cannot be split over tp = 8 devices"):
        rules.of_params(odd, mesh.make(mesh.Layout(tp=8)))
    both = rules.ShardingRules(ffn="fsdp", embed="fsdp")
    with pytest.raises(ValueError, match=r"stacks.0.down: embed and ffn cannot both be split over fsdp"):
        rules.of_params(TABLE, mesh.make(FSDP8), both)
    rows = [supervised([1], [2, 3], sample=0, rollout=0)]
    with pytest.raises(ValueError, match=r"token_BT: .* batch of size 4 cannot be split over dp = 8 devices"):
        batches.batch(packing.pack(rows, 16, rows=4), mesh.make(mesh.Layout(dp=8)))
    with (
        jax.set_mesh(mesh.make(mesh.Layout(tp=8))),
        pytest.raises(ValueError, match="4 query heads cannot be split over 8 devices"),
    ):
        jax.eval_shape(lambda p: models.forward(p, np.zeros((1, 8), np.int32), config=CONFIG), param.abstract(TABLE))


def test_explain_says_what_each_device_holds():
    text = models.explain(CONFIG, mesh.make(mesh.Layout(fsdp=2, tp=4)))
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "vocab/tp, embed/fsdp" in lines["embed"] and lines["embed"].endswith("1,024 bytes/device")
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(param.abstract(TABLE)))
    held = int(lines["all"].split()[1].replace(",", ""))
    assert total / 8 <= held <= total / 8 * 1.1
