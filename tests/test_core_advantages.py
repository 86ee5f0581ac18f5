"""Group advantages against a slow loop over rollouts in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core import advantages, segments


def reference(reward, group, rollout, mean, std, leave_one_out, eps, ddof):
    """One rollout at a time, from the definition."""
    rolls = {}  # rollout -> (reward, group)
    for index in np.ndindex(reward.shape):
        if rollout[index] >= 0 and not np.isnan(reward[index]):
            rolls[int(rollout[index])] = float(reward[index]), int(group[index])
    out = np.zeros(reward.shape)
    for index in np.ndindex(reward.shape):
        r = int(rollout[index])
        if r not in rolls or np.isnan(reward[index]):
            continue
        value, g = rolls[r]
        peers = {"group": [k for k in rolls if rolls[k][1] == g], "batch": list(rolls), "none": []}
        baseline, among = 0.0, peers[mean if mean != "none" else std]
        if among and len({rolls[k][0] for k in among}) < 2:  # nothing to compare with
            continue
        if mean != "none":
            others = [rolls[k][0] for k in peers[mean] if not (leave_one_out and k == r)]
            baseline = np.mean(others)
        scale = 1.0
        if std != "none":
            values = np.array([rolls[k][0] for k in peers[std]])
            scale = np.sqrt(((values - values.mean()) ** 2).sum() / max(len(values) - ddof, 1)) + eps
        out[index] = (value - baseline) / scale
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    mean=st.sampled_from(["group", "batch", "none"]),
    std=st.sampled_from(["group", "batch", "none"]),
    leave_one_out=st.booleans(),
    ddof=st.integers(0, 1),
)
def test_matches_the_definition(seed, mean, std, leave_one_out, ddof):
    rng = np.random.default_rng(seed)
    reward, group, rollout = np.full((4, 6), np.nan, np.float32), np.full((4, 6), -1), np.full((4, 6), -1)
    free = [tuple(int(i) for i in x) for x in rng.permutation(list(np.ndindex(4, 6)))]
    for r in range(rng.integers(1, 12)):
        value = np.nan if rng.random() < 0.15 else np.float32(rng.integers(0, 4))
        g = int(rng.integers(0, 4))
        for _ in range(rng.integers(1, 3)):  # rows of one rollout
            if free:
                index = free.pop()
                reward[index], group[index], rollout[index] = value, g, r
    options = dict(mean=mean, std=std, leave_one_out=leave_one_out, ddof=ddof, eps=1e-3)
    got = advantages.group(jnp.asarray(reward), jnp.asarray(group), jnp.asarray(rollout), **options)
    want = reference(reward, group, rollout, **options)
    np.testing.assert_allclose(got, want, atol=2e-3)


def test_equal_rewards_give_exact_zero():
    ids = jnp.arange(24).reshape(4, 6)
    for value in (1.0, 0.1, 1 / 3):
        got = advantages.group(jnp.full((4, 6), value), ids // 24, ids)
        np.testing.assert_array_equal(got, np.zeros((4, 6)))


def test_advantages_are_broadcast_to_completion_tokens():
    adv, segment = jnp.asarray([[5.0, 7.0]]), jnp.asarray([[1, 1, 2, 0]])
    np.testing.assert_array_equal(segments.to_tokens(adv, segment), [[5, 5, 7, 0]])


@pytest.mark.parametrize("size", [1, 2])
def test_small_groups(size):
    reward, group, rollout = np.full((4, 6), np.nan, np.float32), np.full((4, 6), -1), np.full((4, 6), -1)
    reward[0, :size], group[0, :size], rollout[0, :size] = [1.0, 0.0][:size], 0, range(size)
    got = np.asarray(advantages.group(jnp.asarray(reward), jnp.asarray(group), jnp.asarray(rollout)))
    assert np.isfinite(got).all() and (size > 1) == bool((got[0, :size] != 0).all())


@pytest.mark.parametrize(
    "rewards, wanted",  # as prime-rl's max_rl gives them
    [
        ([1, 0, 0, 0], [3, -1, -1, -1]),
        ([0.5, 1, 0, 0.1], [0.25, 1.5, -1, -0.75]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([-1, 1, 0, -0.5], [0, 0, 0, 0]),
    ],
)
def test_rewards_are_divided_by_their_mean(rewards, wanted):
    ids = jnp.arange(4)[None]
    got = advantages.group(jnp.asarray([rewards], jnp.float32), jnp.zeros_like(ids), ids, std="mean")
    np.testing.assert_allclose(got[0], wanted, rtol=1e-6)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_mean_as_divisor_maximises_a_truncated_likelihood(p):
    """MaxRL (arXiv:2602.02710): -log p = sum over k of (1 - p)^k / k, of which a group of N has the terms up to N - 1:
    its expected gradient, over all outcomes of N tries, is that of p times the sum of (1 - p)^(k - 1)."""
    N, total = 4, 0.0
    outcomes = [[n >> i & 1 for i in range(N)] for n in range(2**N)]
    for outcome in outcomes:
        ids = jnp.arange(N)[None]
        adv = advantages.group(jnp.asarray([outcome], jnp.float32), jnp.zeros_like(ids), ids, std="mean")[0]
        slope = sum(float(a) * (1 / p if r else -1 / (1 - p)) for a, r in zip(adv, outcome, strict=True)) / N
        total += slope * np.prod([p if r else 1 - p for r in outcome])
    assert total == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, N)), rel=1e-5)
