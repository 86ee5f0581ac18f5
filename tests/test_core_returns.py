"""Advantages and returns token by token against loops over each episode."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from areax.core import losses, packing, returns
from areax.rollout.types import Sample

GAE, RETURNS = jax.jit(returns.gae), jax.jit(returns.returns)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def rows(seed):
    """Several segments a row, tokens of tools and prompts in between, padding behind; one that sampled nothing."""
    rng = np.random.default_rng(seed)
    segment = np.repeat(np.array([[1, 2, 3, 0], [1, 2, 0, 0]]), 8, axis=1)[:, :27]
    segment[0, :3] = 1
    sampled = (rng.random(segment.shape) < 0.6) & (segment > 0)
    sampled[1, segment[1] == 2] = False
    return rng.normal(size=segment.shape), rng.normal(size=segment.shape), sampled, segment


@pytest.mark.parametrize(
    "seed, gamma, lam", [(0, 1.0, 1.0), (1, 0.9, 0.8), (2, 1.0, 0.0), (3, 0.0, 0.9), (4, 0.99, 0.95)]
)
def test_gae_and_returns_by_loops(seed, gamma, lam):
    reward, value, sampled, segment = rows(seed)
    wanted, whole = np.zeros(reward.shape), np.zeros(reward.shape)
    for b, j in {(b, j) for b, t in np.ndindex(segment.shape) if (j := segment[b, t])}:
        at = [t for t in range(segment.shape[1]) if segment[b, t] == j and sampled[b, t]]
        r = [float(reward[b, t]) for t in at]
        for t, a, g in zip(
            at, oracles.gae(r, [float(value[b, t]) for t in at], gamma, lam), oracles.returns(r, gamma), strict=True
        ):
            wanted[b, t], whole[b, t] = a, g
    args = [jnp.asarray(x) for x in (reward, value, sampled, segment)]
    np.testing.assert_allclose(GAE(*args, gamma=gamma, lam=lam), wanted, atol=1e-12)
    np.testing.assert_allclose(RETURNS(args[0], *args[2:], gamma=gamma), whole, atol=1e-12)


def test_gae_matches_its_definition():
    """sum_k (gamma lam)^k delta_(t+k), for the loops themselves."""
    r, v, gamma, lam = [1.0, 0.0, 2.0, -1.0], [0.5, -1.0, 0.25, 2.0], 0.9, 0.7
    ahead = [*v[1:], 0.0]
    delta = [r[t] + gamma * ahead[t] - v[t] for t in range(4)]
    wanted = [sum((gamma * lam) ** k * delta[t + k] for k in range(4 - t)) for t in range(4)]
    np.testing.assert_allclose(oracles.gae(r, v, gamma, lam), wanted)
    np.testing.assert_allclose(oracles.gae(r, [0.0] * 4, 1.0, 1.0), oracles.returns(r, 1.0))


def test_a_reward_counts_for_the_token_it_follows():
    """Rewards of turns: at a tool's token for the last sampled one before, before any for the first."""
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0], bool)
    one = Sample(
        tokens=np.arange(9, dtype=np.int32), mask=mask, logp=np.zeros(9, np.float32), version=np.zeros(9, np.int32),
        turn=np.zeros(9, np.int32), rewards=((0, 1.0), (2, 2.0), (5, 4.0), (7, 8.0), (8, 16.0)),
    )  # fmt: skip
    batch = jax.tree.map(jnp.asarray, packing.pack([one], 16, rows=1))
    spec = losses.ReinforcePlusPlus(advantage=dict(whiten="none", gamma=0.5), correction=dict(proximal="behaviour"))
    adv = packing.unpack(jax.jit(spec.prepare)(batch).adv_BT, batch, [one])[0]
    np.testing.assert_allclose(adv[mask], [3 + 4 / 2 + 24 / 8, 4 + 24 / 4, 24 / 2, 24])
