"""What is watched of an update, from merged parts, beside numpy over all tokens at once."""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core import metrics, signals
from areax.core.critic import Critic


@pytest.fixture
def tokens():
    """Two microbatches of rows with two segments: log-probabilities of trainer and sampler, and what is learnt."""
    rng = np.random.default_rng(0)
    sampler, gap = rng.normal(-1.5, 0.6, (2, 3, 12)), rng.normal(0, 0.2, (2, 3, 12))
    mask = rng.random((2, 3, 12)) < 0.7
    segment = np.where(np.arange(12) < 5, 1, np.where(np.arange(12) < 11, 2, 0)) * np.ones((2, 3, 1), int)
    f32 = lambda x: jnp.asarray(x, jnp.float32)
    return f32(sampler + gap), f32(sampler), jnp.asarray(mask & (segment > 0)), jnp.asarray(segment)


def merged(parts):
    first, second = parts
    return signals.finalize_metrics(metrics.merge_trees(first, second))


@pytest.mark.slow
def test_agreement(tokens):
    told = merged([signals.agreement(*(x[m] for x in tokens), 2) for m in range(2)])
    prox, sampler, mask, segment = (np.asarray(x, np.float64 if x.dtype == jnp.float32 else None) for x in tokens)
    d, p, q = (prox - sampler)[mask], np.exp(prox[mask]), np.exp(sampler[mask])
    whole = [own.sum() for m in range(2) for b in range(3) for j in (1, 2)
             if (own := (prox - sampler)[m, b][mask[m, b] & (segment[m, b] == j)]).size]  # fmt: skip
    for name, wanted in {
        "mismatch_k3": np.mean(np.exp(d) - 1 - d), "logp_diff": np.abs(d).mean(), "logp_diff_max": np.abs(d).max(),
        "prob_diff": np.abs(p - q).mean(), "prob_error": np.exp(np.abs(d)).mean(),
        "chi2_token": np.mean(np.exp(d) ** 2) - 1,
        "chi2_sequence": np.mean(np.exp(whole) ** 2) - 1, "prob_pearson": np.corrcoef(p, q)[0, 1],
        "perplexity_ratio": np.exp(d.mean()),
    }.items():  # fmt: skip
        np.testing.assert_allclose(told[name], wanted, rtol=1e-4, err_msg=name)
    assert not any(name.startswith("moment") for name in told)


def test_weights(tokens):
    prox, sampler, mask, segment = tokens
    ratio = jnp.exp(prox - sampler)
    weight, kept = jnp.where(ratio < 1.3, ratio, 0), mask & (segment == 1)
    told = merged([signals.weights(ratio[m], weight[m], kept[m], mask[m], segment[m], 2) for m in range(2)])
    r, w, k = (np.asarray(x)[np.asarray(mask)] for x in (ratio, weight, kept))
    np.testing.assert_allclose(told["ess"], w[k].sum() ** 2 / (k.sum() * (w[k] ** 2).sum()), rtol=1e-5)
    np.testing.assert_allclose(told["bounded_fraction"], np.mean(r >= 1.3), rtol=1e-5)
    np.testing.assert_allclose(told["dropped_fraction"], np.mean(~k | (w == 0)), rtol=1e-5)
    assert told["dropped_sequences"] >= 0.5  # all second ones


def test_effective_sequences(tokens):
    """Those that a token teaches which is learnt, weighs something and has an advantage."""
    _, _, mask, segment = tokens
    rng = np.random.default_rng(1)
    adv, weight = (jnp.asarray((rng.random(mask.shape) < 0.25) * rng.normal(size=mask.shape)) for _ in range(2))
    told = merged([{"share": signals.effective(adv[m], weight[m], mask[m], segment[m], 2)} for m in range(2)])
    moves, segment = np.asarray(adv * weight), np.asarray(segment)
    learnt = [(m, b, np.asarray(mask)[m, b] & (segment[m, b] == j)) for m in range(2) for b in range(3) for j in (1, 2)]
    found = [bool(moves[m, b][own].any()) for m, b, own in learnt if own.any()]
    assert 0 < sum(found) < len(found)
    np.testing.assert_allclose(told["share"], np.mean(found), rtol=1e-6)


@pytest.mark.parametrize("logp", [-3e4, float(np.finfo(np.float32).min)])
def test_one_very_low_log_probability_ends_no_step(logp):
    gap = np.float32(-logp)
    told = signals.finalize_metrics({"moment_log": metrics.Metric(gap, 4.0, 0.0, gap, np.zeros(0))})
    np.testing.assert_allclose(told["perplexity_ratio"], np.exp(20))


@pytest.mark.slow
def test_entropy_is_split_by_advantage_and_has_quantiles():
    entropy = jnp.asarray(np.random.default_rng(0).uniform(0.1, 3, (4, 200)), jnp.float32)
    adv = jnp.where(entropy > 1, 1.0, -1.0)
    zero, mask = jnp.zeros_like(entropy), jnp.ones(entropy.shape, bool)
    told = signals.finalize_metrics(signals.movement(zero + 1, zero, entropy > 2, adv, entropy, mask))
    x = np.asarray(entropy).ravel()
    np.testing.assert_allclose(told["entropy_positive"], x[x > 1].mean(), rtol=1e-5)
    np.testing.assert_allclose(told["entropy_negative"], x[x <= 1].mean(), rtol=1e-5)
    for share in (10, 90):  # within a bin, which is 20 % wide
        np.testing.assert_allclose(told[f"entropy_p{share}"], np.percentile(x, share), rtol=0.1)
    assert told["clip_fraction"] == told["clip_high_fraction"] > 0 == told["clip_low_fraction"]
    assert told["ratio_min"] == told["ratio_max"] == 1


@pytest.mark.slow
def test_explained_variance():
    """Also of returns that differ little beside their mean, where squares would cancel; merged over microbatches."""
    rng = np.random.default_rng(0)
    for mean in (1, 1000):
        returns = rng.normal(mean, 0.1, (2, 50)).astype(np.float32)
        value = (returns + rng.normal(0, 0.05, (2, 50))).astype(np.float32)
        batch = lambda m, value=value, returns=returns: types.SimpleNamespace(
            mask_BT=jnp.ones((1, 50), bool), value_BT=value[m : m + 1], return_BT=returns[m : m + 1], weight_BT=1.0
        )  # fmt: skip
        parts = [
            Critic().loss(types.SimpleNamespace(value_BT=jnp.asarray(value[m : m + 1])), batch(m))[1] for m in (0, 1)
        ]
        v, r = np.float64(value), np.float64(returns)
        wanted = 1 - np.mean((v - r) ** 2) / r.var()
        np.testing.assert_allclose(merged(parts)["explained_variance"], wanted, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mean, spread", [(-1.5, 0.6), (-0.7, 1e-3), (-2e-3, 1e-4), (-12.0, 0.5)])
def test_the_correlation_of_probabilities_does_not_cancel(mean, spread):
    """Against 64 bits, over three microbatches of unequal sizes: where all tokens are equally sure, and where rare."""
    rng = np.random.default_rng(0)
    sampler = rng.normal(mean, spread, 900)
    prox, sampler = (x.astype(np.float32) for x in (sampler + rng.normal(0, spread / 10, 900), sampler))
    parts = []
    for some in np.split(np.arange(900), [17, 300]):
        p, q = (jnp.asarray(x[some][None]) for x in (prox, sampler))
        parts.append(signals.agreement(p, q, jnp.ones(p.shape, bool), jnp.ones(p.shape, int), 1))
    told = signals.finalize_metrics(functools.reduce(metrics.merge_trees, parts, metrics.empty_like(parts[0])))
    wanted = np.corrcoef(np.exp(np.float64(prox)), np.exp(np.float64(sampler)))[0, 1]
    np.testing.assert_allclose(told["prob_pearson"], wanted, atol=1e-4)


@pytest.mark.slow
def test_a_constant_has_no_correlation():
    same = jnp.full((1, 37), -0.3)
    report = signals.agreement(same, same, jnp.ones(same.shape, bool), jnp.ones(same.shape, int), 1)
    assert "prob_pearson" not in signals.finalize_metrics(report)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 29]), st.floats(-1e3, 1e3), st.booleans())
def test_merged_moments_equal_those_of_the_whole(seed, cut, mean, masked):
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(mean, 1, 30).astype(np.float32) for _ in range(2))
    mask = rng.random(30) < 0.5 if masked else np.ones(30, bool)
    whole, first, second = (metrics.moments(x[at], y[at], mask[at]) for at in (slice(30), slice(cut), slice(cut, 30)))
    both = metrics.merge(first, second)
    a, b = np.float64(x[mask]), np.float64(y[mask])
    wanted = [len(a), a.mean(), b.mean(), a.var() * len(a), b.var() * len(a), ((a - a.mean()) * (b - b.mean())).sum()]
    for got in (whole, both):
        np.testing.assert_allclose(
            [float(v) for v in vars(got).values()], wanted if len(a) else [0.0] * 6, rtol=1e-3, atol=1e-2
        )
