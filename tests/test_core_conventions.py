"""Choices on which implementations differ, as docs/algorithms.md states them, by hand in 64 bits."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import advantages, losses, optim, packing
from areax.rollout.types import Sample


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


REWARDS, GROUPS = np.array([1.0, 0.0, 4.0, 2.0, 2.5]), np.array([0, 0, 1, 1, 1])


def compared(**how):
    group, rollout = jnp.asarray(GROUPS[None]), jnp.arange(5)[None]
    return np.asarray(advantages.group(jnp.asarray(REWARDS[None]), group, rollout, eps=0.0, **how))[0]


def test_the_deviation_of_the_batch_is_about_the_batchs_mean():
    means = np.array([REWARDS[GROUPS == g].mean() for g in GROUPS])
    np.testing.assert_allclose(compared(std="batch"), (REWARDS - means) / REWARDS.std(ddof=1))


@pytest.mark.parametrize("std", ["group", "batch"])
def test_leave_one_out_leaves_one_out_of_the_mean_only(std):
    others = [np.delete(REWARDS, i)[np.delete(GROUPS, i) == GROUPS[i]].mean() for i in range(5)]
    among = [REWARDS[GROUPS == g] if std == "group" else REWARDS for g in GROUPS]
    wanted = (REWARDS - others) / [x.std(ddof=1) for x in among]
    np.testing.assert_allclose(compared(std=std, leave_one_out=True), wanted)


LOG_W = [[0.1, -0.2], [0.3, 0.05, -0.1, 0.2]]  # log (proximal / behaviour)
LOG_R = [[0.5, -0.1], [-0.6, 0.2, 0.1, 0.0]]  # log (policy / proximal)
ADV = [2.0, -1.5]


def objective(spec):
    """(loss, its gradient for log pi, weights) of the two sequences, [samples][tokens] the latter two."""
    samples = []
    for i, log_w in enumerate(LOG_W):
        n = len(log_w) + 1
        samples.append(
            Sample(
                tokens=np.arange(n, dtype=np.int32), mask=np.arange(n) >= 1, logp=np.full(n, -1.0, np.float32),
                version=np.zeros(n, np.int32), turn=np.zeros(n, np.int32), rewards=((n - 1, ADV[i]),), group=i,
                prompt=i, sample=i, rollout=i,
                arrays={"w": ("target", np.array([0, *log_w])), "r": ("target", np.array([0, *LOG_R[i]]))},
            )
        )  # fmt: skip
    wide = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    batch = jax.tree.map(wide, packing.pack(samples, 16, rows=1))
    prox = batch.logp_BT + batch.target["w"]
    ready = spec.prepare(batch, types.SimpleNamespace(logp_BT=prox, entropy_BT=-prox, aux={}))
    one = jax.tree.map(lambda x: x[0], ready)
    loss = lambda logp: spec.loss(types.SimpleNamespace(logp_BT=logp, entropy_BT=-logp, aux={}), one)[0]
    value, slope = jax.value_and_grad(loss)((prox + batch.target["r"])[0])
    own = lambda x: [y[1:] for y in packing.unpack(x, batch, samples)]
    return float(value), own(slope[None]), own(ready.weight_BT)


RAW = dict(mean="none", std="none")  # rewards are the advantages


@pytest.mark.slow
def test_normalised_weights_of_sequences_count_once_per_token():
    how = dict(level="sequence", cap=float("inf"), normalise=True)
    spec = losses.REINFORCE(advantage=RAW, correction=how)
    _, _, weight = objective(spec)
    w = [np.exp(np.sum(x)) for x in LOG_W]
    mean = (2 * w[0] + 4 * w[1]) / 6
    for got, one in zip(weight, w, strict=True):
        np.testing.assert_allclose(got, one / mean / 2, rtol=1e-6)  # 2 sequences


@pytest.mark.slow
def test_normalised_weights_count_as_0_where_they_are_out_of_bounds():
    how = dict(low=0.9, cap=1.2, normalise=True)
    _, _, weight = objective(losses.REINFORCE(advantage=RAW, correction=how))
    w = np.exp(np.concatenate(LOG_W))
    w = np.where((0.9 <= w) & (w <= 1.2), w, 0)
    assert 0 < (w == 0).sum() < 6
    np.testing.assert_allclose(np.concatenate(weight), w / w.mean() / 2, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_the_weights_of_gmpo_are_outside_its_geometric_mean(masked):
    """GMPO's formula for each sequence, times the mean of its tokens' w; a masked token stays in the geometric mean."""
    how = dict(mask="k1", mask_low=0.85, mask_high=2.0) if masked else {}
    value, slopes, _ = objective(losses.GMPO(advantage=RAW, correction=how))
    kept = [[w >= np.log(0.85) if masked else True for w in x] for x in LOG_W]
    gains = []
    for log_r, adv in zip(LOG_R, ADV, strict=True):
        bounded = [min(r, 0.4) if adv > 0 else max(r, -0.4) for r in log_r]
        gains.append(adv * np.exp(np.mean(bounded)))
    w = [np.mean(np.exp(x) * k) for x, k in zip(LOG_W, kept, strict=True)]
    np.testing.assert_allclose(value, -np.mean(np.array(gains) * w), rtol=1e-6)
    for slope, log_r, adv, gain, mean_w in zip(slopes, LOG_R, ADV, gains, w, strict=True):
        inside = [r <= 0.4 if adv > 0 else r >= -0.4 for r in log_r]
        np.testing.assert_allclose(slope, np.where(inside, -gain * mean_w / len(log_r) / 2, 0), rtol=1e-6)
    assert not masked or not all(map(all, kept))


@pytest.mark.slow
def test_m2po_may_leave_no_token():
    """Where the smallest squared log ratio, 0.05^2, is above the bound; with all tokens left the gradient is not 0."""
    at = lambda bound: objective(losses.M2PO(advantage=RAW, correction=dict(second_moment=bound)))
    value, slopes, weight = at(0.002)
    assert value == 0 and not np.any(np.concatenate(slopes)) and not np.any(np.concatenate(weight))
    _, slopes, weight = at(0.003)
    [left] = np.flatnonzero(np.concatenate(weight))
    np.testing.assert_allclose(np.concatenate(weight)[left], np.exp(0.05) / 6, rtol=1e-6)  # 6 tokens in the mean
    assert np.flatnonzero(np.concatenate(slopes)).tolist() == [left] == [3]


def test_warm_up_begins_above_0_and_its_end_has_the_whole_learning_rate():
    rate = optim.schedule(optim.Optimizer(lr=0.3, warmup=5))
    wanted = [0.3 * (1 / 5 + (1 - 1 / 5) * step / 5) for step in range(5)] + [0.3, 0.3]
    np.testing.assert_allclose([rate(step) for step in range(7)], wanted, rtol=1e-6)
