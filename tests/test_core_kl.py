"""KL estimators against their definitions and the exact divergence."""

import jax.numpy as jnp
import numpy as np

from areax.core import kl


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
