"""Supervised fine-tuning against float64, and what objectives say when something is missing."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import losses, metrics, packing
from areax.rollout.types import Sample


def samples(seed=0, groups=5, size=4):
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
                rewards=((n - 1, float(rng.integers(0, 3))),),
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


def test_sft_is_the_token_mean():
    rows = samples()
    batch = packing.pack(rows, 32, rows=2)
    now = scores_like(batch)
    got, report = losses.SFT().loss(now, losses.SFT().prepare(batch))
    own = packing.unpack(now.logp_BT, batch, rows)
    want = -np.mean(np.concatenate([x[s.mask].astype(np.float64) for x, s in zip(own, rows, strict=True)]))
    np.testing.assert_allclose(float(got), want, rtol=1e-5)
    np.testing.assert_allclose(metrics.to_dict(report)["nll"], want, rtol=1e-5)


def test_masked_tokens_do_not_matter_to_sft():
    batch = packing.pack(samples(), 32, rows=2)
    now, spec = scores_like(batch), losses.SFT()
    junk = jnp.where(batch.mask_BT, 0, jnp.nan)

    def gradient(extra):
        out = lambda x: types.SimpleNamespace(logp_BT=x, entropy_BT=now.entropy_BT + extra)
        return jax.value_and_grad(lambda x: spec.loss(out(x), spec.prepare(batch))[0])(now.logp_BT + extra)

    for a, b in zip(gradient(0 * batch.logp_BT), gradient(junk), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_objective_lists_the_fields_it_needs():
    with pytest.raises(ValueError, match="needs scores"):
        losses.GRPO().prepare(packing.pack(samples(), 32))
    with pytest.raises(ValueError, match="needs ref_BT"):
        losses.GRPO(kl=dict(coef=0.1), correction=dict(proximal="behaviour")).prepare(packing.pack(samples(), 32))
    assert "clip(r, 1 - 0.2, 1 + 0.28)" in str(losses.GRPO())
