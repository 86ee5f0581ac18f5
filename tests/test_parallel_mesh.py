"""A mesh changes where numbers are, not what they are: loss, metrics and gradients equal those of one device."""

import itertools
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areax import models
from areax.core import losses, metrics, packing, param, step
from areax.parallel import mesh, place, rules
from areax.rollout.types import Sample

COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8, initializer_range=0.2, tie_word_embeddings=True,
)  # fmt: skip
FAMILIES = {
    "qwen3": COMMON | dict(model_type="qwen3", tie_word_embeddings=True),
    "qwen2": COMMON | dict(model_type="qwen2", tie_word_embeddings=False),
    "llama": COMMON | dict(model_type="llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
}
LAYOUTS = {
    "dp8": dict(dp=8), "fsdp8": dict(fsdp=8), "fsdp2 tp4": dict(fsdp=2, tp=4), "dp2 cp2 tp2": dict(dp=2, cp=2, tp=2),
    "cp8": dict(cp=8),
}  # fmt: skip
OBJECTIVES = {"sft": losses.SFT(), "grpo": losses.GRPO(entropy_coef=0.01, std="none")}
ROWS, LENGTH = 8, 48


def samples():
    """Sequences of unequal lengths, several a row, that cross the borders of cp; groups of 4 with rewards."""
    rng = np.random.default_rng(0)
    out = []
    for i, n in enumerate(rng.integers(5, 40, 32)):
        mask = np.arange(n) >= 3
        sampled = lambda x, otherwise=0, mask=mask: np.where(mask, x, otherwise)
        out.append(
            Sample(
                tokens=rng.integers(0, 64, n).astype(np.int32), mask=mask,
                logp=sampled(-rng.random(n) * 4).astype(np.float32),
                version=sampled(0, -1).astype(np.int32), turn=sampled(0, -1).astype(np.int32),
                rewards=((int(n) - 1, float(rng.random())),), group=i // 4, prompt=i // 4, sample=i, rollout=i,
            )
        )  # fmt: skip
    return out


@cache
def model(family):
    config = models.config_from_hf(FAMILIES[family])
    table = models.table(config)
    return config, table, jax.jit(lambda key: param.init(key, table))(jax.random.key(1))


def sgd_steps(family, objective, layout, count):
    """(metrics of each step, parameters after it): SGD of rate 1 makes the change of the weights the gradient."""
    config, table, params = model(family)
    sgd = optax.sgd(1.0 if count == 1 else 0.1)
    on = mesh.make(mesh.Layout(**layout))
    with jax.set_mesh(on):
        shardings = rules.of_state(sgd, table, on)
        score = partial(models.score, config=config)
        batch = place.batch(packing.pack(samples(), LENGTH, rows=ROWS), on)
        scores = step.make_scores(score)
        update = step.make_step(score, objective, sgd, shardings)
        state = step.init(jax.tree.map(jnp.copy, jax.device_put(params, shardings.params)), sgd, shardings)
        out = []
        for _ in range(count):
            ready = jax.jit(objective.prepare)(batch, scores(state.params, batch))
            state, report = update(state, ready)
            out.append((metrics.to_dict(report), jax.tree.map(np.asarray, state.params)))
    return out


@cache
def one_device(family, objective, count):
    return sgd_steps(family, OBJECTIVES[objective], {}, count)


def compare(got, wanted, start):
    """Metrics, and the change of every weight, within 1e-5 of the largest change of its leaf."""
    (report, params), (expected, reference) = got, wanted
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        if np.isscalar(value):
            np.testing.assert_allclose(report[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert report[name]["counts"] == value["counts"], name
    for (path, a), b, x in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(reference), jax.tree.leaves(start), strict=True
    ):
        scale = float(np.abs(b - x).max())
        assert scale > 0, jax.tree_util.keystr(path)
        # a weight of size 1 is rounded to 6e-8 when its change is added to it
        assert float(np.abs(a - b).max()) <= 1e-5 * scale + 2e-7, jax.tree_util.keystr(path)


# One layout with three axes in the everyday suite, the rest by `make test-mesh`.
EVERY = [
    pytest.param(*case, marks=() if case == ("qwen3", "dp2 cp2 tp2", "grpo") else pytest.mark.mesh)
    for case in itertools.product(FAMILIES, LAYOUTS, OBJECTIVES)
]


@pytest.mark.parametrize("family, layout, objective", EVERY)
def test_a_step_equals_that_of_one_device(family, layout, objective):
    [got] = sgd_steps(family, OBJECTIVES[objective], LAYOUTS[layout], 1)
    [wanted] = one_device(family, objective, 1)
    compare(got, wanted, model(family)[2])


@pytest.mark.mesh
@pytest.mark.parametrize("layout", ["fsdp2 tp4", "dp2 cp2 tp2"])
def test_three_steps_equal_those_of_one_device(layout):
    got, wanted = sgd_steps("qwen3", losses.SFT(), LAYOUTS[layout], 3), one_device("qwen3", "sft", 3)
    for a, b in zip(got, wanted, strict=True):
        compare(a, b, model("qwen3")[2])


@pytest.mark.mesh
def test_split_positions_are_gathered_for_keys_and_values_alone():
    """No program for cp gathers the hidden states of whole rows."""
    config, table, params = model("llama")
    on = mesh.make(mesh.Layout(cp=8))
    with jax.set_mesh(on):
        shardings = rules.of_state(optax.sgd(1.0), table, on)
        update = step.make_step(partial(models.score, config=config), losses.SFT(), optax.sgd(1.0), shardings)
        state = step.init(jax.device_put(params, shardings.params), optax.sgd(1.0), shardings)
        batch = jax.jit(losses.SFT().prepare)(place.batch(packing.pack(samples(), LENGTH, rows=ROWS), on))
        text = update.lower(state, batch).compile().as_text()
    gathered = {tuple(map(int, shape.split(","))) for shape in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)}
    keys = {(ROWS, LENGTH, config.kv_heads, config.head_dim)}
    assert gathered and {tuple(n for n in shape if n > 1) for shape in gathered} <= keys
