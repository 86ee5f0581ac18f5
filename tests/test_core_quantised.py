"""Quantised frozen weights: the nearest numbers of their code, and adapters over them as over the plain ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from scipy import stats

from areax import models
from areax.adapters import hf
from areax.core import losses, packing, param, quantised, step
from areax.models import lora
from areax.parallel import batches, mesh, rules
from areax.rollout.types import supervised

CONFIG = tiny_families.config("qwen3_moe", mlp_only_layers=[])
TABLE = models.table(CONFIG)
SPECS = {kind: lora.Lora(rank=4, base=kind) for kind in ("int8", "nf4")}


def weights():
    rng = np.random.default_rng(0)
    return param.tree_map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.2, jnp.float32), TABLE)


def adapters(spec):
    rng = np.random.default_rng(1)
    table = lora.table(TABLE, spec)
    return param.tree_map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, jnp.float32), table)


def test_the_levels_of_nf4_are_those_of_the_paper():
    """Quantiles of a normal distribution, eight of each sign and zero, scaled to [-1, 1]: QLoRA, appendix E."""
    offset = 0.9677083
    negative = stats.norm.ppf(np.linspace(1 - offset, 0.5, 8)[:-1])
    positive = stats.norm.ppf(np.linspace(0.5, offset, 9)[1:])
    levels = np.concatenate([negative, [0], positive]) / positive.max()
    np.testing.assert_allclose(quantised.NF4, levels, atol=2e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", SPECS)
def test_each_entry_becomes_the_nearest_number_of_its_block(kind):
    """Beside brute force over all codes, in float64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 192)).astype(np.float32)
    x[0, 0] = 0
    made = quantised.quantise(jnp.asarray(x, jnp.bfloat16), kind)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    levels = quantised.NF4.astype(np.float64) if kind == "nf4" else np.arange(-127, 128) / 127
    scale = np.abs(x).reshape(3, 5, 3, 64).max(-1)
    every = levels * scale.repeat(64, -1)[..., None]
    best = np.take_along_axis(every, np.abs(every - x[..., None]).argmin(-1)[..., None], -1)[..., 0]
    got = np.asarray(quantised.dequantise(made, "float32"), np.float64)
    np.testing.assert_allclose(np.abs(got - x), np.abs(best - x), atol=1e-6)
    assert made.shape == (3, 5, 192) and made.dtype == jnp.bfloat16
    held = made.code.nbytes + made.scale.nbytes
    assert held == x.size * (0.5 if kind == "nf4" else 1) + x.size / 64 * 4


def test_short_rows_stay_as_they_are():
    x = jnp.ones((4, 40))
    assert quantised.quantise(x, "nf4") is x and quantised.block(48) == 16


def batch(on):
    rng = np.random.default_rng(0)
    draw = lambda size: rng.integers(0, 64, size)
    made = [supervised(draw(3), draw(8), sample=i, rollout=i, group=i) for i in range(12)]
    return losses.SFT().prepare(batches.batch(packing.pack(made, 36, rows=4), on))


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.mesh)])
def test_adapters_over_a_quantised_base_score_as_over_the_numbers_it_stands_for(kind):
    """The score, and the gradient of the adapters."""
    spec, score = SPECS[kind], functools.partial(models.score, config=CONFIG)
    on = mesh.make(mesh.Layout())
    narrow = lora.frozen(weights(), TABLE, spec)
    assert isinstance(narrow["stacks"][0]["q"], quantised.QuantisedWeight)
    wide = jax.tree.map(param.plain, narrow, is_leaf=param.composite)
    gradient = jax.jit(step.whole_gradient(lora.over_base(score, spec), losses.SFT()))
    with jax.set_mesh(on):
        got, wanted = (gradient(adapters(spec), batch(on), base)[0] for base in (narrow, wide))
    np.testing.assert_allclose(got.loss, wanted.loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(wanted.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("kind", SPECS)
def test_a_mesh_gathers_codes(kind):
    spec, score = SPECS[kind], functools.partial(models.score, config=CONFIG)
    one, many = mesh.make(mesh.Layout()), mesh.make(mesh.Layout(fsdp=2, ep=2, tp=2))
    narrow = lora.frozen(weights(), TABLE, spec)
    scores = jax.jit(lora.over_base(score, spec))
    first = lambda made: jax.tree.map(lambda x: x[0], made)
    with jax.set_mesh(one):
        wanted = scores(adapters(spec), first(batch(one)), narrow).logp_BT
    placed = jax.device_put(jax.tree.map(np.asarray, narrow), rules.of_quantised(narrow, TABLE, many))
    pairs = jax.device_put(
        jax.tree.map(np.asarray, adapters(spec)), rules.of_params(lora.table(TABLE, spec), many)
    )  # fmt: skip
    with jax.set_mesh(many):
        got = scores(pairs, first(batch(many)), placed).logp_BT
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), atol=2e-5)


@pytest.mark.slow
def test_an_export_has_the_numbers_that_were_trained_over(tmp_path):
    """Merged with its adapters, a model scores as in training; alone, the base is what its codes stand for."""
    spec = SPECS["nf4"]
    narrow, pairs = lora.frozen(weights(), TABLE, spec), adapters(spec)
    whole = jax.tree.map(param.plain, lora.join(narrow, pairs, spec), is_leaf=param.composite)
    for name, tree, wanted in (
        ("merged", lora.join(narrow, pairs, spec), whole),
        ("base", narrow, jax.tree.map(param.plain, narrow, is_leaf=param.composite)),
    ):
        config, got = hf.load(hf.save(tmp_path / name, CONFIG, tree, "float32"))
        assert config.family == CONFIG.family
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(jax.tree.leaves(hf.host_copy(CONFIG, tree, "float32")), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
