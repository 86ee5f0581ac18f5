"""Packing keeps every token once, in order, and shifts targets by one."""

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


def test_few_shapes():
    shapes = {packing.bucket(n) for n in range(1, 1000)}
    assert len(shapes) <= 20 and all(packing.bucket(n) >= n for n in range(1, 1000))
    assert all(packing.bucket(n) <= 1.5 * n for n in range(1, 1000))


def test_rows_are_dense():
    sizes = np.minimum(np.random.default_rng(0).lognormal(5, 0.8, 512).astype(int) + 1, 1024)
    rng = np.random.default_rng(0)
    b = packing.pack([make(i, n, rng) for i, n in enumerate(sizes)], 1024, rows=1)
    assert sizes.sum() / (int(packing.used(b)) * 1024) > 0.95


def test_lengths_are_chosen_from_the_list():
    rng = np.random.default_rng(0)
    samples = [make(0, 20, rng)]
    assert packing.pack(samples, [16, 32, 64]).token_BT.shape[-1] == 32


def test_bad_input_is_told():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="got 33 in sample 1; raise length"):
        packing.pack([make(0, 5, rng), make(1, 33, rng)], 32)
    with pytest.raises(ValueError, match="at least one sample"):
        packing.pack([], 32)
    with pytest.raises(ValueError, match="same arrays"):
        packing.pack([make(0, 5, rng), make(1, 5, rng).replace(arrays={})], 32)
