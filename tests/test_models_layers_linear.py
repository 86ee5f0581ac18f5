"""The linear layer on a CPU: gradients of wide weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core.param import LoRAWeight
from areax.models.layers import linear


@pytest.mark.sweep
@pytest.mark.parametrize("out, into", [(512, 576), (576, 512), (511, 576)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_weights_have_the_gradients_of_a_product(out, into, dtype):
    rng = np.random.default_rng(0)
    x, w, bias, dy = (rng.normal(size=size) for size in ((2, 3, into), (out, into), (out,), (2, 3, out)))
    given = [jnp.asarray(a, dtype) for a in (x, w, bias)]
    y, back = jax.vjp(linear.linear, *given)
    x, w, bias, dy = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (x, w, bias, dy))
    want = [dy @ w, np.einsum("BTF,BTD->FD", dy, x), dy.sum((0, 1))]
    close = dict(rtol=1e-5, atol=1e-4) if dtype == "float32" else dict(rtol=2e-2, atol=0.5)
    np.testing.assert_allclose(np.asarray(y, np.float64), x @ w.T + bias, **close)
    for got, wanted in zip(back(jnp.asarray(dy, dtype)), want, strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, **close)


def test_a_frozen_wide_weight_costs_no_gradient():
    """Under an adapter, whose weights alone are trained, no product makes a gradient of the weight."""
    rng = np.random.default_rng(0)
    sizes = (4, 576), (512, 576), (2, 576), (512, 2)
    x, w, a, b = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)
    loss = lambda ab, w: jnp.sum(linear.linear(x, LoRAWeight(w, *ab, 1.0)) ** 2)
    flops = lambda of: jax.jit(jax.grad(loss, argnums=of)).lower((a, b), w).compile().cost_analysis()["flops"]
    assert flops((0, 1)) - flops(0) > 0.9 * 2 * x.shape[0] * w.size
