"""Group advantages against a slow loop over rollouts in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core import advantages, returns, segments


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


def test_the_value_of_the_optimal_policy():
    """T log mean exp(R / T), written as a sum of 64-bit exponentials; and its ends."""
    rewards = [0.0, 1.0, 0.0, 0.0, 1.0, 0.5]
    for temperature in (0.05, 0.5, 3.0):
        wanted = temperature * np.log(np.mean(np.exp(np.array(rewards) / temperature)))
        np.testing.assert_allclose(advantages.optimal_value(rewards, temperature), wanted, rtol=1e-12)
    assert advantages.optimal_value(rewards, 1e-9) == pytest.approx(1.0)
    assert advantages.optimal_value(rewards, 1e9) == pytest.approx(np.mean(rewards))
    assert advantages.optimal_value([-2.0], 0.5) == -2.0


def test_squared_probabilities_are_summed():
    logits = np.random.default_rng(0).normal(0, 3, (5, 40))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(advantages.squares(jnp.asarray(logits), None, None), (p**2).sum(1), rtol=1e-5)


def test_optimal_tokens_are_those_of_verl():
    """`compute_multi_turn_optimal_token_baseline_advantage` of verl (handle_zero_tail off), written anew: rows aligned
    at their sampled tokens. The last token that only one row has is 0 in both."""
    rng = np.random.default_rng(1)
    B, T = 6, 12
    mask = (rng.random((B, T)) < 0.7) & (np.arange(T) >= 2)
    reward, group = np.where(mask, rng.integers(0, 3, (B, T)), 0).astype(float), np.array([0, 0, 0, 1, 1, 1])
    energy = rng.uniform(0.1, 1.5, (B, T))
    wanted = np.zeros((B, T))
    for g in (0, 1):
        rows = np.flatnonzero(group == g)
        G, W = np.full((3, T), 0.0), np.full((3, T), 0.0)
        for k, i in enumerate(rows):
            own = reward[i, mask[i]]
            G[k, : len(own)], W[k, : len(own)] = own[::-1].cumsum()[::-1], energy[i, mask[i]].cumsum()
        baseline = (G * W).sum(0) / (W.sum(0) + 1e-8)
        for k, i in enumerate(rows):
            wanted[i, mask[i]] = G[k, : mask[i].sum()] - baseline[: mask[i].sum()]
    segment, put = np.ones((B, T), int), lambda x: jnp.asarray(x)
    after = returns.returns(put(reward), put(mask), put(segment))
    group_BT = put(np.repeat(group[:, None], T, 1))
    got = advantages.by_energy(after, put(energy), put(mask), put(segment), group_BT)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(wanted).max() > 0.5


def test_baselines_of_certain_tokens_lie_between_the_returns():
    """Their energies, near 0, are rounded to either side of it, and stand behind a long row's sum."""
    rng, long = np.random.default_rng(0), 4096
    near = rng.choice([-2e-6, -1e-6, 0, 1e-6, 2e-6], (200, 4))
    segment = np.repeat([[1, 2]], 4, 0).repeat([long, 1], 1)
    mask, after = segment == 2, np.where(segment == 2, np.array([[1.0], [0.0], [0.0], [1.0]]), 0)
    for own in near:
        energy = np.where(mask, own[:, None], rng.uniform(0, 1, segment.shape)).astype(np.float32)
        given = (jnp.asarray(x) for x in (after.astype(np.float32), energy, segment > 0, segment))
        got = advantages.by_energy(*given, jnp.where(mask, 1, 0))[:, -1]
        weight = np.maximum(own, 0)
        wanted = after[:, -1] - weight @ after[:, -1] / (weight.sum() or 1)
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("std", ["none", "group"])
def test_states_are_compared_as_by_verl_agent(std):
    """`compute_step_discounted_returns` and `step_norm_reward` of verl-agent's GiGPO, written anew for turns as rows of
    a table: episode, state, reward; std with ddof 1 and eps 1e-6, 0 for a state of one turn."""
    table = [  # of one group: three episodes
        ((7, 0.0), (8, 0.5), (7, 0.0), (9, 1.0)), ((7, 0.0), (9, 0.0), (8, 1.0)), ((7, 0.25), (11, 0.5)),
    ]  # fmt: skip
    flat, G = [(e, s) for e, turns in enumerate(table) for s, _ in turns], []
    for turns in table:
        running, own = 0.0, []
        for _, r in reversed(turns):
            running = r + 0.95 * running
            own.insert(0, running)
        G += own
    wanted = []
    for (_, s), value in zip(flat, G, strict=True):
        same = [x for (_, other), x in zip(flat, G, strict=True) if other == s]
        spread = np.std(same, ddof=1) + 1e-6 if std == "group" and len(same) > 1 else 1.0
        wanted.append((value - np.mean(same)) / spread)
    reward, state, mask = (np.zeros((3, 16), kind) for kind in (np.float32, np.int32, bool))
    for e, turns in enumerate(table):
        for k, (s, r) in enumerate(turns):
            mask[e, 4 * k + 1 : 4 * k + 3], state[e, 4 * k + 1 : 4 * k + 3], reward[e, 4 * k + 2] = True, s, r
    arrays = [jnp.asarray(x) for x in (reward, state, mask, np.ones((3, 16), int), np.zeros((3, 16), int))]
    got = np.asarray(advantages.by_state(*arrays, gamma=0.95, std=std, eps=1e-6, ddof=1))
    np.testing.assert_allclose([got[e, 4 * k + 1] for e, turns in enumerate(table) for k in range(len(turns))], wanted,
                               atol=1e-5)  # fmt: skip
    np.testing.assert_array_equal(got[:, 1::4], got[:, 2::4])
    assert not got[~mask].any()
