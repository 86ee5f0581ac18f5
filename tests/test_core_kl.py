"""KL estimators against their definitions and the exact divergence."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import kl, losses, packing
from areax.rollout.types import Sample


def test_definitions_and_expectations():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(20)), rng.dirichlet(np.ones(20))
    logp, ref = (np.log(x)[None].astype(np.float32) for x in (p, q))
    exact = float((p * np.log(p / q)).sum())
    mean = lambda f: float((p * np.asarray(f(jnp.asarray(logp), jnp.asarray(ref)))[0]).sum())
    np.testing.assert_allclose(mean(kl.k1), exact, rtol=1e-5)
    np.testing.assert_allclose(mean(kl.k3), exact, rtol=1e-5)  # unbiased too, since sum q = 1
    np.testing.assert_allclose(kl.k2(logp, ref)[0], (np.log(p / q) ** 2) / 2, rtol=1e-4)
    assert (np.asarray(kl.k3(logp, ref)) >= 0).all()
    tiny = kl.k3(jnp.zeros((1, 1)), jnp.full((1, 1), 1e-4))
    np.testing.assert_allclose(tiny, 5e-9, rtol=1e-1, atol=1e-9)


PEERS = [  # p, q, KL(p || q), KL(q || p), as the functions dppo_kl of verl and rLLM give them
    (0.5, 0.7, 0.0871767, 0.0822829),
    (0.5, 0.3, 0.0871767, 0.0822829),
    (1e-4, 1e-2, 0.0094888, 0.0362009),
    (0.99, 0.9, 0.0713312, 0.1444793),
    (0.9, 0.999, 0.366592, 0.0996505),
]


@pytest.mark.parametrize("p, q, there, back", PEERS)
def test_what_a_token_shows_of_a_divergence(p, q, there, back):
    got = [float(kl.binary(*(jnp.log(jnp.array([[x]], jnp.float32)) for x in pair))[0, 0]) for pair in ((p, q), (q, p))]
    np.testing.assert_allclose(got, (there, back), rtol=2e-5)


def test_a_divergence_of_certain_and_impossible_tokens_is_finite():
    logp = jnp.array([0.0, 1e-3, -1e-9, -1e-3, -1.0, -1e4, -3.4e38], jnp.float32)
    pairs = kl.binary(*jnp.meshgrid(logp, logp))
    assert np.isfinite(np.asarray(pairs)[np.abs(pairs) < 1e30]).all() and not np.isnan(pairs).any()
    np.testing.assert_array_equal(np.diag(pairs), 0)
    assert (np.asarray(pairs) > -1e-6).all() and np.asarray(pairs)[:3, :3].max() == 0  # all of them are certain


V = 5
MU = np.array([1, 1, 2, 4, 8]) / 16  # what sampled; exact in 32 bits
REF = np.random.default_rng(1).dirichlet(np.ones(V))
AWAY = np.log(np.random.default_rng(2).dirichlet(np.ones(V)))


def expected_gradient(theta, estimator, ratio):
    """Of the penalty with respect to logits, over every token of a vocabulary as often as it is sampled.

    Each token is a sample of its own whose weight is its probability, and its reward is 0.
    """
    samples = [
        Sample(
            tokens=np.array([0, y], np.int32), mask=np.array([False, True]), logp=np.zeros(2, np.float32),
            version=np.zeros(2, np.int32), turn=np.zeros(2, np.int32), rewards=((1, 0.0),), sample=y, rollout=y,
            group=y, weight=MU[y], arrays={"token": ("target", np.array([0, y], np.int32))},
        )
        for y in range(V)
    ]  # fmt: skip
    wide = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    batch = jax.tree.map(wide, packing.pack(samples, 16, rows=1))
    at = lambda logp: jnp.where(batch.mask_BT, jnp.asarray(logp)[batch.target["token"]], 0.0)
    batch = batch.replace(logp_BT=at(np.log(MU)), ref_BT=at(np.log(REF)))
    options = dict(coef=1.0, estimator=estimator, ratio=ratio)
    spec = losses.REINFORCE(kl=options, denominator="token", correction=dict(proximal="behaviour"))
    ready = jax.tree.map(lambda x: x[0], spec.prepare(batch))

    def loss(theta):
        logp = at(jax.nn.log_softmax(theta))[0]
        return spec.loss(types.SimpleNamespace(logp_BT=logp, entropy_BT=-logp, aux={}), ready)[0]

    return jax.grad(loss)(jnp.asarray(theta))


def reverse(theta):
    """Gradient of KL(policy || reference): p (log p - log q - KL)."""
    p = np.exp(theta) / np.exp(theta).sum()
    gap = np.log(p / REF)
    return p * (gap - (p * gap).sum())


def forward(theta):
    """Gradient of KL(reference || policy): p - q."""
    return np.exp(theta) / np.exp(theta).sum() - REF


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize(
    "estimator, ratio, theta, wanted",
    [
        ("k1", False, np.log(MU), lambda theta: np.zeros(V)),
        ("k2", False, np.log(MU), reverse),
        ("k3", False, np.log(MU), forward),
        ("k3_k2", False, np.log(MU), reverse),
        *[(name, True, theta, reverse) for name in ("k1", "k3") for theta in (np.log(MU), AWAY)],
    ],
)
def test_expected_gradients_by_enumeration(estimator, ratio, theta, wanted):
    with jax.enable_x64(True):
        got = expected_gradient(theta, estimator, ratio)
    np.testing.assert_allclose(got, wanted(theta), atol=1e-12)


@pytest.mark.slow
def test_without_a_ratio_nothing_is_the_reverse_kl_off_policy():
    """Which is what `ratio` is for."""
    with jax.enable_x64(True):
        for name in ("k1", "k2", "k3", "k3_k2"):
            assert np.abs(expected_gradient(AWAY, name, False) - reverse(AWAY)).max() > 1e-2
