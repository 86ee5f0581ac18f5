"""Objectives against float64 loops written from the papers, and the properties every objective must have."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import losses, metrics, packing
from areax.rollout.types import Sample


def samples(seed=0, groups=5, size=4, nan=()):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(groups * size):
        n, m = int(rng.integers(4, 20)), 3
        out.append(
            Sample(
                tokens=rng.integers(0, 50, n).astype(np.int32),
                mask=np.arange(n) >= m,
                logp=np.where(np.arange(n) >= m, rng.normal(-1, 0.5, n), 0).astype(np.float32),
                version=np.where(np.arange(n) >= m, 3, -1).astype(np.int32),
                turn=np.zeros(n, np.int32),
                rewards=((n - 1, np.nan if i in nan else float(rng.integers(0, 3))),),
                group=i // size,
                sample=i,
                rollout=i,
            )
        )
    return out


def scores_like(batch, seed=1, spread=0.3):
    """Random 'current' log-probabilities near the behaviour's."""
    rng = np.random.default_rng(seed)
    logp = batch.logp_BT + rng.normal(0, spread, batch.logp_BT.shape).astype(np.float32)
    return types.SimpleNamespace(logp_BT=jnp.asarray(logp), entropy_BT=jnp.asarray(np.abs(logp)))


def grpo_reference(spec, rows, prox, now, ref=None):
    """The objective one token at a time; prox, now, ref: lists of arrays at each sample's own indices."""
    learnt = sum(int(s.mask.sum()) for s in rows if not np.isnan(s.reward))
    total = 0.0
    for i, s in enumerate(rows):
        if np.isnan(s.reward):
            continue
        peers = np.array([r.reward for r in rows if r.group == s.group and not np.isnan(r.reward)], np.float64)
        deviation = peers.std(ddof=1) if len(peers) > 1 else 0.0
        adv = (s.reward - peers.mean()) / (deviation + 1e-6) if len(set(peers)) > 1 else 0.0
        for t in np.flatnonzero(s.mask):
            weight = np.exp(float(prox[i][t]) - float(s.logp[t]))
            weight = weight if weight <= spec.weight_cap else 0.0
            r = np.exp(float(now[i][t]) - float(prox[i][t]))
            gain = min(r * adv, min(max(r, 1 - spec.clip_low), 1 + spec.clip_high) * adv)
            total -= weight * gain / learnt
            if spec.kl_coef:
                gap = float(ref[i][t]) - float(now[i][t])
                total += spec.kl_coef * (np.exp(gap) - 1 - gap) / learnt
    return total


@pytest.mark.parametrize("cap", [5.0, 1.1])
@pytest.mark.parametrize("nan", [(), (1, 6)])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_grpo_matches_the_formula(cap, nan, kl):
    rows = samples(nan=nan)
    batch = packing.pack(rows, 32, rows=2)
    prox, now, ref = scores_like(batch, 1), scores_like(batch, 2), scores_like(batch, 3)
    spec = losses.GRPO(weight_cap=cap, kl_coef=kl)
    ready = spec.prepare(batch.replace(ref_BT=ref.logp_BT), prox)
    got, _ = spec.loss(now, ready)
    own = lambda out: packing.unpack(out.logp_BT, batch, rows)
    want = grpo_reference(spec, rows, own(prox), own(now), own(ref))
    np.testing.assert_allclose(float(got), want, rtol=2e-5, atol=1e-6)


def test_sft_is_the_token_mean():
    rows = samples()
    batch = packing.pack(rows, 32, rows=2)
    now = scores_like(batch)
    got, report = losses.SFT().loss(now, losses.SFT().prepare(batch))
    own = packing.unpack(now.logp_BT, batch, rows)
    want = -np.mean(np.concatenate([x[s.mask].astype(np.float64) for x, s in zip(own, rows, strict=True)]))
    np.testing.assert_allclose(float(got), want, rtol=1e-5)
    np.testing.assert_allclose(metrics.to_dict(report)["nll"], want, rtol=1e-5)


OBJECTIVES = [
    losses.SFT(),
    losses.GRPO(),
    losses.GRPO(proximal="behaviour", std="none", leave_one_out=True),
    losses.GRPO(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01),
]


@pytest.mark.parametrize("spec", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_masked_tokens_do_not_matter(spec):
    batch = packing.pack(samples(nan=(2,)), 32, rows=2)
    prox, now = scores_like(batch, 1), scores_like(batch, 2)
    batch = batch.replace(ref_BT=prox.logp_BT)
    junk = jnp.where(batch.mask_BT, 0, jnp.nan)

    def gradient(extra):
        dirty = types.SimpleNamespace(logp_BT=prox.logp_BT + extra, entropy_BT=prox.entropy_BT)
        ready = spec.prepare(batch.replace(logp_BT=batch.logp_BT + extra), dirty)
        out = lambda x: types.SimpleNamespace(logp_BT=x, entropy_BT=now.entropy_BT + extra)
        return jax.value_and_grad(lambda x: spec.loss(out(x), ready)[0])(now.logp_BT + extra)

    for a, b in zip(gradient(0 * batch.logp_BT), gradient(junk), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", OBJECTIVES, ids=range(len(OBJECTIVES)))
def test_microbatches_add_up(spec):
    rows = samples(groups=9)
    batch = packing.pack(rows, 32, rows=2)
    prox, now = scores_like(batch, 1), scores_like(batch, 2)
    ready = spec.prepare(batch.replace(ref_BT=prox.logp_BT), prox)
    whole, report = spec.loss(now, ready)
    parts = []
    for m in range(batch.token_BT.shape[0]):
        micro, out = (jax.tree.map(lambda x, m=m: x[m], x) for x in (ready, vars(now)))
        parts.append(spec.loss(types.SimpleNamespace(**out), micro))
    np.testing.assert_allclose(sum(float(p[0]) for p in parts), float(whole), rtol=1e-5)
    merged = parts[0][1]
    for _, p in parts[1:]:
        merged = metrics.merge_trees(merged, p)
    for name, want in metrics.to_dict(report).items():
        got = metrics.to_dict(merged)[name]
        if isinstance(want, dict):
            assert got == want
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_on_policy_gradient_is_reinforce():
    rows = samples()
    batch = packing.pack(rows, 32, rows=2)
    now = types.SimpleNamespace(logp_BT=jnp.asarray(batch.logp_BT), entropy_BT=jnp.zeros(batch.logp_BT.shape))
    spec = losses.GRPO()
    ready = spec.prepare(batch, now)
    loss = lambda x: spec.loss(types.SimpleNamespace(logp_BT=x, entropy_BT=now.entropy_BT), ready)[0]
    want = -np.where(batch.mask_BT, ready.adv_BT, 0) / batch.mask_BT.sum()
    np.testing.assert_allclose(jax.grad(loss)(now.logp_BT), want, atol=1e-7)


def test_bad_settings_are_told():
    with pytest.raises(ValueError, match="clip_low must be between 0 and 1, got 2"):
        losses.GRPO(clip_low=2.0)
    with pytest.raises(ValueError, match="needs scores"):
        losses.GRPO().prepare(packing.pack(samples(), 32))
    with pytest.raises(ValueError, match="needs ref_BT"):
        losses.GRPO(kl_coef=0.1, proximal="behaviour").prepare(packing.pack(samples(), 32))
    assert "clip(r_t, 0.8, 1.28)" in str(losses.GRPO())
