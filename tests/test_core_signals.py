"""What is watched of an update, from merged parts, beside numpy over all tokens at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import metrics, signals


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


def test_explained_variance():
    rng = np.random.default_rng(0)
    value, returns = jax.device_put(rng.normal(size=(2, 50))), rng.normal(1, 2, (2, 50))
    report = {
        "return": metrics.of(returns), "moment_return2": metrics.of(returns**2),
        "value_error": metrics.of((value - returns) ** 2),
    }  # fmt: skip
    wanted = 1 - np.mean((np.asarray(value) - returns) ** 2) / returns.var()
    np.testing.assert_allclose(signals.finalize_metrics(report)["explained_variance"], wanted, rtol=1e-4)
