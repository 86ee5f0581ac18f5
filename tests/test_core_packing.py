"""Packing keeps every token once, in order, and shifts targets by one."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core import packing
from areax.rollout.types import Sample


def make(i, n, rng):
    """A sample whose every number tells where it came from."""
    return Sample(
        tokens=rng.integers(0, 1000, n).astype(np.int32),
        mask=rng.random(n) < 0.5,
        logp=rng.normal(size=n).astype(np.float32),
        version=rng.integers(0, 9, n).astype(np.int32),
        turn=np.zeros(n, np.int32),
        rewards=((n - 1, float(i)),),
        group=10**9 + i // 2,
        prompt=7 * i,
        sample=i,
        rollout=10**6 - i,
        weight=1 / (1 + i % 3),
        arrays={
            "route": ("input", rng.integers(0, 8, (n, 2))),
            "teacher": ("target", rng.normal(size=n).astype(np.float32)),
        },
    )


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 32), min_size=1, max_size=40), rows=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_token_arrives_once_with_its_own_data(sizes, rows, seed):
    rng = np.random.default_rng(seed)
    samples = [make(i, n, rng) for i, n in enumerate(sizes)]
    b = packing.pack(samples, 32, rows=rows)
    M, B, T = b.token_BT.shape
    assert (B, T) == (rows, 32)
    assert (b.segment_BT > 0).sum() == sum(sizes)
    seen = []
    for m, r, j in np.argwhere(b.sample_BJ >= 0):
        i = int(b.sample_BJ[m, r, j])
        s, here = samples[i], b.segment_BT[m, r] == j + 1
        seen.append(i)
        get = lambda x, here=here, m=m, r=r: x[m, r][here]
        assert np.array_equal(get(b.token_BT), s.tokens)
        assert np.array_equal(get(b.index_BT), np.arange(len(s.tokens)))
        assert np.array_equal(get(b.input["route"]), s.arrays["route"][1])
        # Targets stand one to the left of the token they speak of; the last position of a segment learns nothing.
        assert np.array_equal(get(b.target_BT)[:-1], s.tokens[1:])
        assert np.array_equal(get(b.mask_BT), [*s.mask[1:], False])
        assert np.array_equal(get(b.logp_BT)[:-1], s.logp[1:])
        assert np.array_equal(get(b.version_BT), [*s.version[1:], -1])
        assert np.array_equal(get(b.target["teacher"])[:-1], s.arrays["teacher"][1][1:])
        np.testing.assert_allclose(get(b.weight_BT)[:-1], s.mask[1:] * np.float32(s.weight))
        assert b.reward_BJ[m, r, j] == s.reward and b.length_BJ[m, r, j] == len(s.tokens)
        other = samples[seen[0]]
        first = np.argwhere(b.sample_BJ == seen[0])[0]
        assert (b.group_BJ[m, r, j] == b.group_BJ[tuple(first)]) == (s.group == other.group)
    assert sorted(seen) == list(range(len(samples)))
    assert not b.mask_BT[b.segment_BT == 0].any()
    # Segments are contiguous, and only the last microbatches may be empty.
    used = int(packing.used(b))
    assert (b.segment_BT[:used] > 0).any((1, 2)).all() and not (b.segment_BT[used:] > 0).any()
    back = packing.unpack(b.logp_BT, b, samples)
    for s, x in zip(samples, back, strict=True):
        assert np.array_equal(x[1:], s.logp[1:]) and x[0] == 0


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 32), min_size=1, max_size=40), rows=st.integers(2, 5), alone=st.integers(0, 3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_pairs_stay_whole(sizes, rows, alone, seed):
    """Samples of a pair lie in one microbatch, wherever they stood in the list; every token is there once."""
    rng = np.random.default_rng(seed)
    samples = [make(i, n, rng).replace(pair=-1 if i % 4 < alone else 100 - i // 2) for i, n in enumerate(sizes)]
    samples = [samples[i] for i in rng.permutation(len(samples))]
    b = packing.pack(samples, 32, rows=rows)
    assert (b.segment_BT > 0).sum() == sum(sizes)
    assert sorted(b.sample_BJ[b.sample_BJ >= 0]) == list(range(len(samples)))
    places: dict = {}
    for m, r, j in np.argwhere(b.sample_BJ >= 0):
        s = samples[b.sample_BJ[m, r, j]]
        assert np.array_equal(b.token_BT[m, r][b.segment_BT[m, r] == j + 1], s.tokens)
        assert (b.pair_BJ[m, r, j] == -1) == (s.pair == -1)
        if s.pair >= 0:
            places.setdefault(s.pair, set()).add((m, int(b.pair_BJ[m, r, j])))
    assert all(len(where) == 1 for where in places.values())
    assert len({pair for where in places.values() for _, pair in where}) == len(places)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 32), min_size=1, max_size=60), rows=st.integers(1, 5))
def test_without_pairs_each_sample_goes_into_the_first_row_with_room(sizes, rows):
    """First-fit-decreasing over all rows, which microbatches then cut."""
    room, wanted = [32] * len(sizes), {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        wanted[i] = next(b for b in range(len(sizes)) if room[b] >= sizes[i])
        room[wanted[i]] -= sizes[i]
    rng = np.random.default_rng(0)
    b = packing.pack([make(i, n, rng) for i, n in enumerate(sizes)], 32, rows=rows)
    assert {int(b.sample_BJ[m, r, j]): m * rows + r for m, r, j in np.argwhere(b.sample_BJ >= 0)} == wanted


def test_few_shapes():
    shapes = {packing.bucket(n) for n in range(1, 1000)}
    assert len(shapes) <= 20 and all(packing.bucket(n) >= n for n in range(1, 1000))
    assert all(packing.bucket(n) <= 1.5 * n for n in range(1, 1000))


def test_rows_are_dense():
    sizes = np.minimum(np.random.default_rng(0).lognormal(5, 0.8, 512).astype(int) + 1, 1024)
    rng = np.random.default_rng(0)
    b = packing.pack([make(i, n, rng) for i, n in enumerate(sizes)], 1024, rows=1)
    assert sizes.sum() / (int(packing.used(b)) * 1024) > 0.95


def test_bad_input_gives_a_one_line_error():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="got 33 in sample 1; raise length"):
        packing.pack([make(0, 5, rng), make(1, 33, rng)], 32)
    with pytest.raises(ValueError, match="at least one sample"):
        packing.pack([], 32)
    pair = [make(i, 20, rng).replace(pair=3) for i in range(2)]
    with pytest.raises(ValueError, match=r"one pair must fit into 1 rows of 32 tokens, got \[20, 20\] .* raise rows"):
        packing.pack(pair, 32, rows=1)
    with pytest.raises(ValueError, match="same arrays"):
        packing.pack([make(0, 5, rng), make(1, 5, rng).replace(arrays={})], 32)
    with pytest.raises(ValueError, match="pack: rows must be at least 1, got 0"):
        packing.pack([make(0, 5, rng)], 32, rows=0)
    with pytest.raises(ValueError, match=r"pack: length must be a whole number of at least 1, got \[\]; `shapes`"):
        packing.pack([make(0, 5, rng)], [])


def test_rewards_stand_at_tokens_that_are_learnt():
    """A reward given to a tool's message counts for the last token sampled before it, one before all for the first."""
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
    one = Sample(
        tokens=np.arange(8, dtype=np.int32), mask=mask, logp=np.zeros(8, np.float32), version=np.zeros(8, np.int32),
        turn=np.zeros(8, np.int32), rewards=((0, 1.0), (3, 2.0), (5, 4.0), (7, 8.0)), finish="length",
        components={"format": 0.5},
    )  # fmt: skip
    batch = packing.pack([one, one.replace(group=1)], 16, rows=1, components=["format"])
    own = packing.unpack(batch.reward_BT, batch, [one, one])
    np.testing.assert_array_equal(own, [[0, 0, 1, 6, 0, 0, 8, 0]] * 2)
    np.testing.assert_array_equal(batch.reward_BJ[0, 0, :2], [15, 15])
    np.testing.assert_array_equal(batch.finish_BJ[0, 0, :2], [1, 1])
    np.testing.assert_array_equal(batch.component["format"][0, 0, :2], [0.5, 0.5])
    with pytest.raises(ValueError, match="every sample needs the component style, got .'format'. in sample 0"):
        packing.pack([one], 16, components=["style"])


def test_a_sample_describes_each_of_its_fields():
    described = re.findall(r"^ {2}(\w[\w, ]*):", inspect.getdoc(Sample), re.M)
    assert {name for names in described for name in names.split(", ")} == {f.name for f in dataclasses.fields(Sample)}
