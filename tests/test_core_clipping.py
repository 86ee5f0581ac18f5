"""Gradients at the bounds of clips, whole as in the papers, beside torch; log ratios that would overflow a step."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from areax.core import clipping, kl, losses, surrogates
from areax.core.critic import Critic


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def closed(x, low, high):
    """`torch.clamp` of a tensor, whose gradient at the bounds was 1 before torch 2.14."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


X = np.array([-21.0, -1.0, -0.5, 0.0, 0.5, 1.0, 21.0, np.inf])


def gradients(f, x):
    return np.asarray(jax.vmap(jax.grad(f))(jnp.asarray(x, jnp.float64)))


@pytest.mark.parametrize("low, high", [(-0.5, 0.5), (0.0, 1.0), (-1.0, 0.0), (0.0, 0.0)])
def test_a_clip_has_torch_clamps_values_and_whole_gradients_at_the_bounds(low, high):
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    clamped = x.clamp(low, high)
    clamped.sum().backward()
    np.testing.assert_array_equal(clipping.clip(jnp.asarray(X), low, high), clamped.detach())
    at_bound = (X == low) | (X == high)
    wanted = np.where(at_bound, 1.0, x.grad)
    np.testing.assert_array_equal(gradients(lambda x: clipping.clip(x, low, high), X), wanted)


def test_a_bounded_exponential_has_no_gradient_beyond_its_bounds():
    inside = np.abs(X) <= 20
    np.testing.assert_allclose(clipping.bounded_exp(jnp.asarray(X)), np.exp(np.clip(X, -20, 20)))
    np.testing.assert_allclose(gradients(clipping.bounded_exp, X), np.where(inside, np.exp(np.where(inside, X, 0)), 0))
    np.testing.assert_allclose(gradients(clipping.bounded_exp, [20.0, -20.0]), np.exp([20.0, -20.0]))


def ppo(gap, adv, low, high):
    """The gain of PPO with separate bounds, from the paper."""
    r = gap.exp()
    return torch.minimum(r * adv, closed(r, 1 - low, 1 + high) * adv)


def gmpo(gap, adv, low, high):
    """The gain of GMPO's sequences of one token: log ratios are bounded on the side of the advantage."""
    bounded = closed(gap, -low, high)
    return adv * torch.where(adv >= 0, torch.minimum(gap, bounded), torch.maximum(gap, bounded)).exp()


@pytest.mark.sweep
@pytest.mark.parametrize("low, high", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.28), (0.2, 0.28)])
@pytest.mark.parametrize("surrogate, theirs", [("clip", ppo), ("clip_cov", ppo), ("geometric", gmpo)])
def test_fresh_tokens_have_their_whole_gradient_whatever_the_bounds(surrogate, theirs, low, high):
    gap, adv = (x.reshape(1, -1) for x in np.meshgrid([-0.5, 0.0, 0.5], [-1.5, 0.0, 2.0]))
    bounds = dict(clip_low=low, clip_high=high)
    spec = losses.GRPO(surrogate=surrogate, **bounds)

    def gain(gap):
        now = surrogates.Now(
            gap, gap, jnp.exp(gap), jnp.asarray(adv), jnp.ones(gap.shape, bool), gap, jnp.zeros(gap.shape, int),
            lambda x: x,
        )  # fmt: skip
        return getattr(surrogates, surrogate)(spec, now)[0].sum()

    x = torch.tensor(gap, requires_grad=True)
    value = theirs(x, torch.tensor(adv), low, high).sum()
    value.backward()
    np.testing.assert_allclose(gain(jnp.asarray(gap)), value.item())
    got = np.asarray(jax.grad(gain)(jnp.asarray(gap)))
    np.testing.assert_allclose(got, x.grad, atol=1e-12)
    fresh = gap == 0
    np.testing.assert_allclose(got[fresh], adv[fresh])  # A grad log pi


def test_a_cap_or_a_dual_clip_passes_the_gradient_at_its_bound():
    """A ratio of exactly the cap, of a token that no longer should be likelier."""
    cap = 3.0
    for option in ({"ratio_cap": cap}, {"dual_clip": cap}):
        spec = losses.GRPO(**option)

        def gain(r, spec=spec):
            now = surrogates.Now(None, None, jnp.reshape(r, (1, 1)), -jnp.ones((1, 1)), None, None, None, None)
            return surrogates.clip(spec, now)[0].sum()

        assert [float(jax.grad(gain)(x)) for x in (2.9, cap, 3.1)] == [-1, -1, 0]


@pytest.mark.slow
def test_a_critics_clip_passes_the_gradient_at_its_bound():
    """1/2 max((V - R)^2, (V_old + clip(V - V_old) - R)^2), the value having moved by the clip range."""
    before, target = np.zeros((1, 4)), np.array([[1.0, 1.0, -1.0, 0.25]])
    value = np.array([[0.5, 0.75, 0.5, 0.5]])
    mask = jnp.ones((1, 4), bool)
    batch = types.SimpleNamespace(
        mask_BT=mask, value_BT=jnp.asarray(before), return_BT=jnp.asarray(target), weight_BT=jnp.ones((1, 4))
    )
    loss = lambda x: Critic(clip=0.5).loss(types.SimpleNamespace(value_BT=x), batch)[0]
    x = torch.tensor(value, requires_grad=True)
    R = torch.tensor(target)
    torch.maximum((x - R) ** 2, (closed(x, -0.5, 0.5) - R) ** 2).sum().div(2).backward()
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(value)), x.grad)


@pytest.mark.parametrize("log", [0.0, 1e-3, -3.0, 19.0, 20.0, -20.0, 25.0, 1e4, -1e4])
def test_k3_is_bounded_with_no_gradient_beyond(log):
    """r - 1 - log r in 64 bits, at the clipped log ratio."""
    at = np.clip(log, -20, 20)
    wanted, slope = np.expm1(at) - at, -np.expm1(at) if abs(log) <= 20 else 0.0  # d / d logp
    one = lambda x: jnp.reshape(x, (1, 1))
    k3 = lambda logp: kl.k3(one(logp), one(jnp.asarray(log, logp.dtype)))[0, 0]
    for dtype, close in ((jnp.float64, 1e-12), (jnp.float32, 1e-4)):
        value, gradient = jax.value_and_grad(k3)(jnp.zeros((), dtype))
        np.testing.assert_allclose(value, wanted, rtol=close, atol=1e-9 if dtype == jnp.float32 else 0)
        np.testing.assert_allclose(gradient, slope, rtol=close)
    k3_k2 = lambda logp: kl.k3_k2(one(logp), one(jnp.asarray(log, logp.dtype)))[0, 0]
    value, gradient = jax.value_and_grad(k3_k2)(jnp.zeros(()))
    np.testing.assert_allclose(value, wanted, rtol=1e-9)
    np.testing.assert_allclose(gradient, -log)
