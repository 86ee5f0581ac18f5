"""Statistics of experts, the terms that balance them, and the bias that does without a gradient."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixture import CONFIG, HF, PARAMS, SCORE, SCORES, TABLE, E, K, L
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from areax import models
from areax.adapters import hf
from areax.core import balance, losses, metrics, optim, packing, param, step
from areax.models.layers import moe
from areax.rollout.types import supervised

BOTH = balance.Balance(load=0.3, z=0.02)
SGD = optax.sgd(1.0)  # the change of the weights is the gradient
# The layers with experts alone, which are one stack: it compiles in half the time.
ALONE = models.config_from_hf(HF | dict(num_hidden_layers=L, mlp_only_layers=[]))
STACK = tiny.weights(models.table(ALONE), 0.4, seed=1)
OF_STACK = partial(models.score, config=ALONE)
SCORES_OF_STACK = step.make_scores(OF_STACK)


def rows(n=20, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda k: rng.integers(0, 61, k)
    return [
        supervised(draw(4), draw(int(k)), sample=i, rollout=i, group=i) for i, k in enumerate(rng.choice([2, 7, 11], n))
    ]


def prepared(objective, B, data):
    batch = packing.pack(data, 32, rows=B)
    scores = SCORES_OF_STACK(STACK, batch)
    return jax.jit(objective.prepare)(batch, scores), scores


@functools.cache
def update(objective):
    return step.make_step(OF_STACK, objective, SGD)


def updated(objective, batch):
    return update(objective)(step.init(jax.tree.map(jnp.copy, STACK), SGD), batch)


def by_transformers(logits_AE, top_k=K):
    return float(load_balancing_loss_func((torch.from_numpy(np.array(logits_AE)),), E, top_k))


@pytest.mark.parametrize("kept", [1.0, 0.6])
def test_routing_statistics_ignore_padding(kept):
    """In float64 from the definitions; the loss built of them is transformers'."""
    rng = np.random.default_rng(1)
    logits_BTE = rng.normal(size=(2, 9, E)).astype(np.float32) * 3
    real_BT = rng.random((2, 9)) < kept
    prob_BTE = jax.nn.softmax(logits_BTE)
    index_BTK = moe.choose(prob_BTE, moe.Router(K))
    got = jax.jit(moe.statistics)(logits_BTE, prob_BTE, index_BTK, real_BT)
    logits_AE = logits_BTE[real_BT].astype(np.float64)
    chosen_AK = np.argsort(-logits_AE, -1)[:, :K]
    power_AE = np.exp(logits_AE)
    np.testing.assert_array_equal(got["load"], np.bincount(chosen_AK.reshape(-1), minlength=E))
    np.testing.assert_allclose(got["prob"], (power_AE / power_AE.sum(-1, keepdims=True)).sum(0), rtol=1e-5)
    np.testing.assert_allclose(got["lse2"], (np.log(power_AE.sum(-1)) ** 2).sum(), rtol=1e-5)
    assert got["tokens"] == real_BT.sum()
    ours = E * float(jnp.sum(got["load"] * got["prob"])) / int(got["tokens"]) ** 2
    np.testing.assert_allclose(ours, by_transformers(logits_BTE[real_BT]), rtol=1e-5)


def test_the_load_balancing_loss_of_uniform_routing_is_top_k():
    everyone = np.eye(E, dtype=np.float32) * 4 + np.roll(np.eye(E, dtype=np.float32), 1, 1) * 3
    np.testing.assert_allclose(by_transformers(everyone), K, rtol=1e-5)


@pytest.mark.slow
def test_the_auxiliary_losses_match_the_papers():
    """Term by term against float64 sums over what the router of each layer saw."""
    data = rows()
    objective = balance.wrap(losses.SFT(), BOTH)
    batch, scores = prepared(objective, 2, data)
    sums = jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), scores.aux)
    tokens = sum(len(s.tokens) for s in data)
    assert sums["load"].shape == sums["prob"].shape == (L, E)
    np.testing.assert_array_equal(sums["tokens"], [tokens] * L)
    np.testing.assert_array_equal(sums["load"].sum(-1), [K * tokens] * L)
    np.testing.assert_allclose(sums["prob"].sum(-1), [tokens] * L, rtol=1e-5)
    told = metrics.to_dict(updated(objective, batch)[1])
    load = np.mean([E * np.sum(f * p) / tokens**2 for f, p in zip(sums["load"], sums["prob"], strict=True)])
    np.testing.assert_allclose(told["balance_load"], load, rtol=1e-5)
    np.testing.assert_allclose(told["balance_z"], sums["lse2"].mean() / tokens, rtol=1e-5)
    total = told["nll"] + BOTH.load * load + BOTH.z * sums["lse2"].mean() / tokens
    np.testing.assert_allclose(told["loss"], total, rtol=1e-5)
    worst = sums["load"].max(-1) / sums["load"].mean(-1)
    np.testing.assert_allclose([told["expert_load"], told["expert_load_max"]], [worst.mean(), worst.max()], rtol=1e-6)
    idle = (sums["load"] == 0).mean(-1)
    np.testing.assert_allclose([told["expert_idle"], told["expert_idle_max"]], [idle.mean(), idle.max()], atol=1e-7)


@pytest.mark.slow
def test_the_auxiliary_losses_do_not_depend_on_the_microbatching():
    """One microbatch or several: the same loss, metrics and gradients."""
    data, out = rows(), []
    objective = balance.wrap(losses.SFT(), BOTH)
    whole, parts = (prepared(objective, B, data)[0] for B in (16, 2))
    plain = whole.replace(scalars={**whole.scalars, "tokens": whole.scalars["tokens"] * jnp.inf})  # both terms become 0
    for batch in (whole, plain, parts):
        state, report = updated(objective, batch)
        change = jax.tree.map(lambda a, b: np.asarray(a - b), state.params, STACK)
        out.append((change, metrics.to_dict(report), batch.token_BT.shape[0]))
    (one, told, M), (without, bare, _), (several, told_again, more) = out
    assert M == 1 and more >= 4
    np.testing.assert_allclose(bare["loss"], bare["nll"], rtol=1e-6)
    for name in ("loss", "balance_load", "balance_z", "expert_load", "expert_load_max", "expert_idle"):
        np.testing.assert_allclose(told_again[name], told[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(several), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 2e-7)
    router = lambda tree: tree["stacks"][0]["router"]
    assert np.abs(router(one) - router(without)).max() > 0.01 * np.abs(router(without)).max()  # it does pull


def test_needs():
    assert balance.wrap(losses.SFT(), balance.Balance()) == losses.SFT()
    assert not balance.wrap(losses.SFT(), balance.Balance(z=1.0)).needs_scores
    objective = balance.wrap(losses.SFT(), BOTH)
    assert "0.3 E sum_e" in str(objective) and "0.02 logsumexp" in str(objective)
    with pytest.raises(ValueError, match="load needs scores of a model with experts, got none"):
        objective.prepare(packing.pack(rows(4), 32, rows=2))
    with pytest.raises(ValueError, match="z must be at least 0 and finite, got -1"):
        balance.Balance(z=-1.0)
    dense = models.config_from_hf(HF | dict(model_type="qwen3"))
    score, params = partial(models.score, config=dense), param.abstract(models.table(dense))
    batch = packing.pack(rows(4), 32, rows=2)
    with pytest.raises(ValueError, match="needs scores of a model with experts, got those of a model without"):
        objective.prepare(batch, jax.eval_shape(step.make_scores(score), params, batch))
    alone = balance.wrap(losses.SFT(), balance.Balance(z=1.0))
    with pytest.raises(ValueError, match="needs a model with experts, got one without"):
        jax.eval_shape(step.make_loss(score, alone), params, alone.prepare(batch))


@pytest.mark.slow
def test_the_router_bias_affects_only_which_experts_are_chosen():
    rng = np.random.default_rng(0)
    prob_BTE = jax.nn.softmax(jnp.asarray(rng.normal(size=(2, 7, E)), jnp.float32))
    bias_E = jnp.asarray([0, 0, 2.0, 0, 0, 0])
    router = moe.Router(K)
    index_BTK = moe.choose(prob_BTE, router, bias_E)
    assert (np.asarray(index_BTK) == 2).any(-1).all()
    weight_BTK = moe.weigh(prob_BTE, index_BTK, router)
    np.testing.assert_array_equal(weight_BTK, np.take_along_axis(np.asarray(prob_BTE), np.asarray(index_BTK), -1))
    np.testing.assert_allclose(
        balance.update_bias(jnp.asarray([[0.1, 0.2, 0.3]]), jnp.asarray([[7.0, 4.0, 1.0]]), 0.01), [[0.09, 0.2, 0.31]],
        rtol=1e-6,
    )  # fmt: skip


@pytest.mark.slow
@given(st.sampled_from([2, 5, 12]).flatmap(lambda n: st.lists(st.integers(0, 1 << 20), min_size=n, max_size=n)))
def test_the_sign_of_the_bias_update_is_exact(load):
    """That of float64, also where an expert has the mean load."""
    load_LE = np.array([load, [*load[1:], load[0]]], np.float64)
    bias_LE = np.random.default_rng(0).normal(size=load_LE.shape).astype(np.float32)
    got = balance.update_bias(jnp.asarray(bias_LE), jnp.asarray(load_LE, jnp.float32), 0.5)
    sums = [sum(load)] * len(load)
    signs = [np.sign([all_ - len(load) * int(one) for all_, one in zip(sums, row, strict=True)]) for row in load_LE]
    np.testing.assert_allclose(got, bias_LE.astype(np.float64) + 0.5 * np.array(signs), atol=1e-6)


def with_bias(params):
    biased = lambda stack: stack | {"router_bias": jnp.zeros(stack["router"].shape[:2])} if "router" in stack else stack
    return params | {"stacks": [biased(stack) for stack in params["stacks"]]}


BIASED = with_bias(PARAMS)
REST = optax.sgd(0.0)
BALANCED = step.make_step(SCORE, losses.SFT(), REST, adjust=balance.adjust(balance.Balance(bias=0.01)))


def moved(state):
    return [np.asarray(stack["router_bias"]) for stack in state.params["stacks"] if "router" in stack]


@pytest.mark.long
def test_the_bias_moves_by_the_load_of_a_whole_batch():
    """However it is split into microbatches and padded: by the choices of each sequence alone. Not with 0, and not by a
    step that is skipped."""
    data, objective, start = rows(40), losses.SFT(), lambda: step.init(jax.tree.map(jnp.copy, BIASED), REST)
    count_LE = np.zeros((L, E))
    for sample in data:
        one = packing.pack([sample], 32, rows=1)
        count_LE += np.asarray(SCORES(BIASED, one).aux["load"], np.float64).sum(0)
    wanted_LE = 0.01 * np.sign(count_LE.mean(-1, keepdims=True) - count_LE)
    assert count_LE.sum() == L * K * sum(len(sample.tokens) for sample in data) and (wanted_LE != 0).any()
    for B in (16, 2):
        batch = objective.prepare(packing.pack(data, 32, rows=B))
        assert int(jnp.sum(batch.segment_BT == 0)) > 0 and (len(batch.token_BT) > 1) == (B == 2)
        state, _ = BALANCED(start(), batch)
        for got_E, wanted_E in zip(np.concatenate(moved(state)), wanted_LE, strict=True):
            np.testing.assert_allclose(got_E, wanted_E, atol=1e-7)
    broken = batch.replace(weight_BT=batch.weight_BT * jnp.inf)
    state, report = BALANCED(start(), broken)
    assert metrics.to_dict(report)["skipped"] == 1 and not np.any(moved(state))
    assert balance.adjust(balance.Balance(load=1.0))(PARAMS, {}) is PARAMS


@pytest.mark.slow
def test_router_bias_updates_balance_the_load():
    """Weights at rest and a bias that moves: the load becomes even; the optimiser and the gradient leave it alone."""
    state = step.init(jax.tree.map(jnp.copy, BIASED), REST)
    batch, told = losses.SFT().prepare(packing.pack(rows(40), 32, rows=16)), []  # the test above compiles this shape
    for _ in range(60):
        state, report = BALANCED(state, batch)
        told.append(metrics.to_dict(report)["expert_load_max"])
    assert told[0] > 1.4 and told[-1] < 1.15, (told[0], told[-1])
    assert all(np.abs(b).max() > 0 for b in moved(state))
    with pytest.raises(ValueError, match="needs a layer with router_bias, got none"):
        balance.update_biases(PARAMS, {"load": jnp.zeros((L, E))}, 0.1)


@pytest.mark.wide
@pytest.mark.slow
def test_a_router_bias_in_a_table():
    """As a family declares it: fp32 in a model of any dtype and in its files, without moments, moved by the load
    alone."""
    key = "{prefix}layers.{layer}.mlp.gate.e_score_correction_bias"
    bias = param.Param("router", (key,), jax.nn.initializers.zeros, "float32", trainable=False)
    more = lambda stack: {**stack.params, "router_bias": bias} if "router" in stack.params else stack.params
    table = dataclasses.replace(TABLE, stacks=tuple(param.Stack(s.layers, more(s)) for s in TABLE.stacks))
    optimizer, objective = (
        optim.make_optimizer(optim.Optimizer(lr=0.1, warmup=0, weight_decay=0.5), table),
        losses.SFT(),
    )
    params = tiny.weights(table, 0.4)
    before = jax.tree.map(np.asarray, params)
    state = step.init(params, optimizer)
    named = lambda tree: {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    assert any("router'" in name for name in named(state.opt_state))
    assert not any("router_bias" in name for name in named(state.opt_state))
    batch = objective.prepare(packing.pack(rows(40), 32, rows=8))
    adjust = balance.adjust(balance.Balance(bias=0.01))
    state, _ = step.make_step(SCORE, objective, optimizer, adjust=adjust)(state, batch)
    for name, x in named(state.params).items():
        change = np.abs(np.asarray(x) - named(before)[name])
        assert (change > 0).any(), name
        if "router_bias" in name:
            assert np.all((np.abs(change - 0.01) < 1e-6) | (change == 0)), name
    specs, tensors = hf.tensors_of(table, CONFIG.prefix, state.params, "bfloat16")
    for (name, spec), x in zip(specs.items(), tensors, strict=True):
        assert spec.dtype == x.dtype == ("float32" if "bias" in name else "bfloat16"), name
