"""Tries of samples: every sample reads its own tokens through them, and values move as in loops over tokens."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core import packing, trie
from areax.rollout.types import Image, Sample


def make(i, tokens, rng, arrays=None):
    """A sample whose every number but the tokens tells where it came from."""
    n = len(tokens)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
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
        components={"style": i / 2},
        arrays=arrays or {},
    )


def branching(count, rng, longest=24):
    """Samples that go on from prefixes of others: duplicates, whole prefixes and one-token branches are among them."""
    texts = [rng.integers(0, 3, rng.integers(1, longest))]
    while len(texts) < count:
        old = texts[rng.integers(len(texts))]
        cut = rng.integers(0, len(old) + 1)
        new = rng.integers(0, 3, rng.integers(0, longest - cut + 1))
        texts.append(np.concatenate([old[:cut], new]) if cut + len(new) else old)
    return [make(i, texts[i], rng) for i in rng.permutation(count)]


def packed(samples, length, **options):
    """`pack_tries` without the fallback to rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "SAVED", -math.inf)
        return packing.pack_tries(samples, length, **options)


def paths(batch, samples):
    """(sample's number, microbatch, row, its slice of A, the places of its tokens)."""
    for m, b, j in np.argwhere(batch.sample_BJ >= 0):
        at = np.flatnonzero(batch.segment_BT[m, b] == j + 1)
        assert np.array_equal(at, np.arange(at[0], at[0] + len(at)))
        yield int(batch.sample_BJ[m, b, j]), m, b, at, batch.trie.place_BA[m, b, at]


def check(batch, samples, align=1):
    """Checks all arrays of a trie against samples by walking through parents."""
    made = batch.trie
    M, B, T = made.first_BT.shape
    assert made.place_BA.shape == batch.token_BT.shape and batch.token_BT.shape[-1] % T == 0
    above = {}  # of each place the places before it in its samples
    sharing: dict = {}
    for i, m, b, at, own in paths(batch, samples):
        assert np.array_equal(batch.token_BT[m, b, at], samples[i].tokens)
        up = [own[-1]]
        while (before := made.parent_BT[m, b, up[-1]]) != up[-1]:
            up.append(before)
        assert np.array_equal(up[::-1], own), "the path to the last token is the sample"
        for d, place in enumerate(own):
            assert above.setdefault((m, b, place), tuple(own[:d])) == tuple(own[:d])
            sharing.setdefault((m, b, place), []).append((at[d], i, d))
    # First: the first of the samples that share it; all of them have the token and its arrays.
    for (m, b, place), found in sharing.items():
        assert made.first_BT[m, b, place] == min(found)[0]
        for _, i, d in found:
            assert samples[i].tokens[d] == samples[found[0][1]].tokens[d]
            for name, (_, x) in samples[i].arrays.items():
                assert x[d].tobytes() == samples[found[0][1]].arrays[name][1][d].tobytes()
    # A token sees exactly those before it in its samples, and itself.
    place_T = np.arange(T)
    for m in range(M):
        for b in range(B):
            used = [p for p in range(T) if (m, b, p) in above]
            free = np.setdiff1d(place_T, used)
            assert (made.first_BT[m, b, free] == -1).all() and (made.first_BT[m, b, used] >= 0).all()
            assert np.array_equal(made.parent_BT[m, b, free], free)
            assert np.array_equal(made.until_BT[m, b, free], free + 1)
            sees = (place_T[None] <= place_T[:, None]) & (place_T[:, None] < made.until_BT[m, b][None])
            for p in used:
                assert tuple(np.flatnonzero(sees[p])) == (*above[m, b, p], p)
            # Nodes begin at multiples of align: a token that does not follow its parent's place, or whose parent forks.
            children = np.bincount([made.parent_BT[m, b, p] for p in used if above[m, b, p]], minlength=T)
            for p in used:
                parent = made.parent_BT[m, b, p]
                if p == parent or children[parent] > 1 or p != parent + 1:
                    assert p % align == 0
            for chunk in range(0, T, align):  # a chunk is a path, and only its last place may fork
                held = [p for p in used if chunk <= p < chunk + align]
                assert all(made.parent_BT[m, b, q] == p for p, q in zip(held, held[1:], strict=False))
                assert all(children[p] == 1 for p in held[:-1])


def same_fields(batch, samples, components=()):
    """Checks that each sample has in A what `pack` gives it in its row."""
    rows = packing.pack(samples, batch.token_BT.shape[-1], rows=batch.token_BT.shape[1], components=components)
    wanted = {i: (m, b, at) for i, m, b, at, _ in paths(rows.replace(trie=batch.trie), samples)}
    assert sorted(i for i, *_ in paths(batch, samples)) == list(range(len(samples)))
    for i, m, b, at, _ in paths(batch, samples):
        n, c, there = wanted[i]
        for f in dataclasses.fields(batch):
            x, y = getattr(batch, f.name), getattr(rows, f.name)
            fields = [(x[name], y[name], "component") for name in x] if isinstance(x, dict) else [(x, y, f.name)]
            for x, y, name in fields:
                if f.name in ("input", "target") or name.endswith("_BT") and name != "segment_BT" and x is not None:
                    np.testing.assert_array_equal(x[m, b, at], y[n, c, there], err_msg=f"{f.name} {name}")
                elif name.endswith("_BJ") or name == "component":
                    j, k = batch.segment_BT[m, b, at[0]] - 1, rows.segment_BT[n, c, there[0]] - 1
                    np.testing.assert_array_equal(x[m, b, j], y[n, c, k], err_msg=name)
    assert (batch.segment_BT > 0).sum() == sum(len(s.tokens) for s in samples)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 24), rows=st.integers(1, 4), length=st.sampled_from([24, 32, 64]),
    align=st.sampled_from([1, 4, 8]), seed=st.integers(0, 999),
)  # fmt: skip
def test_every_sample_reads_its_tokens_through_parents(count, rows, length, align, seed):
    samples = branching(count, np.random.default_rng(seed))
    batch = packed(samples, length, rows=rows, components=["style"], align=align)
    assert batch.trie.first_BT.shape[1:] == (rows, length)
    check(batch, samples, align)
    same_fields(batch, samples, ["style"])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 24), length=st.sampled_from([24, 64]), align=st.sampled_from([1, 4]), alone=st.integers(0, 3),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_samples_of_a_pair_are_in_one_microbatch(count, length, align, alone, seed):
    rng = np.random.default_rng(seed)
    samples = branching(count, rng)
    samples = [s.replace(pair=-1 if s.sample % 4 < alone else 100 - s.sample // 2) for s in samples]
    batch = packed(samples, length, rows=2, align=align)
    check(batch, samples, align)
    same_fields(batch, samples)
    where: dict = {}
    for i, m, *_ in paths(batch, samples):
        if samples[i].pair >= 0:
            where.setdefault(samples[i].pair, set()).add(m)
    assert all(len(microbatches) == 1 for microbatches in where.values())


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 16), seed=st.integers(0, 999))
def test_the_path_forks_where_an_extra_array_differs(count, seed):
    rng = np.random.default_rng(seed)
    samples = [
        make(s.sample, s.tokens, rng, arrays={
            "route": ("input", (rng.random((len(s.tokens), 2, 2)) < 0.05).astype(np.int8)),
            "teacher": ("target", np.where(rng.random(len(s.tokens)) < 0.1, np.nan, 0).astype(np.float32)),
        })
        for s in branching(count, rng)
    ]  # fmt: skip
    batch = packed(samples, 64, rows=2)
    check(batch, samples)
    same_fields(batch, samples)
    alike = [s.replace(tokens=np.zeros_like(s.tokens)) for s in samples]
    check(packed(alike, 64, rows=2), alike)


def test_samples_are_compared_as_they_are_packed():
    """In the widest dtype of the samples' arrays, and token ids as i32."""
    rng = np.random.default_rng(0)
    kinds = (np.float32, np.int32), (np.float64, np.int64), (np.float16, np.uint8)
    samples = [
        make(i, np.full(n, 7), rng, {"x": ("target", np.arange(n).astype(kind)), "none": ("input", np.zeros((n, 0)))})
        .replace(tokens=np.full(n, 7, ids))
        for i, ((kind, ids), n) in enumerate(itertools.product(kinds, (9, 5, 1)))
    ]  # fmt: skip
    batch = packing.pack_tries(samples, 16, rows=1)
    assert (batch.trie.first_BT >= 0).sum() == 9
    same_fields(batch, samples)


def test_one_row_holds_several_tries_and_no_token_twice():
    rng = np.random.default_rng(0)
    texts = [[g, 1, 2, 3, *tail] for g in (5, 6) for tail in ([7, 8], [7, 9, 9], [4], [])]
    samples = [make(i, text, rng) for i, text in enumerate(texts)]
    batch = packing.pack_tries(samples, 32, rows=1)
    check(batch, samples)
    assert batch.trie.first_BT.shape == (1, 1, 32) and batch.token_BT.shape == (1, 1, 64)
    roots = np.flatnonzero((batch.trie.parent_BT[0, 0] == np.arange(32)) & (batch.trie.first_BT[0, 0] >= 0))
    assert len(roots) == 2
    assert (batch.trie.first_BT >= 0).sum() == 2 * (4 + 1 + 1 + 2 + 1)
    assert packing.trie_ratio(batch) == 18 / 44
    back = packing.unpack(batch.logp_BT, batch, samples)
    for s, x in zip(samples, back, strict=True):
        np.testing.assert_array_equal(x, [0, *s.logp[1:]])
    assert int(packing.used(batch)) == 1


def test_a_trie_that_is_too_long_is_cut_and_repeats_its_stem():
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 99, 40)
    samples = [make(i, [*stem, *rng.integers(0, 99, 20)], rng) for i in range(8)]
    batch = packing.pack_tries(samples, 104, rows=1)  # a stem and three branches
    check(batch, samples)
    assert int(packing.used(batch)) == 3 and (batch.trie.first_BT >= 0).sum() == 3 * 40 + 8 * 20


def test_a_common_header_does_not_tie_groups_together():
    """Groups of 60 places, of which 4 are common to all, fill rows of 128 in pairs."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(4):
        stem = [1, 2, 3, 4, *rng.integers(100 * group + 5, 100 * group + 99, 32)]
        samples += [make(len(samples) + i, [*stem, *rng.integers(0, 2, 8) + 10 * i], rng) for i in range(3)]
    batch = packing.pack_tries(samples, 128, rows=1)
    check(batch, samples)
    assert int(packing.used(batch)) == 2


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("align", [1, 4])
def test_one_group_of_equal_samples_does_not_lengthen_all_rows(align):
    """All rows have room for as many tokens as the fullest: its trie is cut, for less than a quarter more places."""
    rng = np.random.default_rng(0)
    equal = [make(i, [*range(60)], rng) for i in range(200)]
    others = [[*rng.integers(100, 10**6, 48)] for _ in range(80)]
    others = [make(200 + i, [*text, i % 2], rng) for i, text in enumerate(np.repeat(others, 2, 0).tolist())]
    batch = packing.pack_tries(samples := equal + others, 64, rows=2, align=align)
    check(batch, samples, align)
    same_fields(batch, samples)
    places = (batch.trie.first_BT >= 0).sum()
    assert batch.token_BT.shape[-1] <= 32 * 64  # it would be 256 * 64
    assert batch.sample_BJ.shape[-1] <= 64 and places < 1.25 * (60 + 80 * 50)


def test_batches_of_varied_samples_have_few_shapes():
    """Each compiles a program: a row's tokens and samples vary, and are rounded up to powers of 2 and of 4."""
    shapes = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        stems = [rng.integers(0, 99, rng.integers(10, 40)) for _ in range(12)]
        texts = [[*stem, *rng.integers(0, 99, rng.integers(1, 20))] for stem in stems for _ in range(8)]
        batch = packing.pack_tries([make(i, text, rng) for i, text in enumerate(texts)], 128, rows=2)
        shapes.add((batch.token_BT.shape[-1] // 128, batch.sample_BJ.shape[-1]))
    assert shapes <= {(a, j) for a in (1, 2, 4) for j in (1, 4, 16, 64)} and len(shapes) <= 4


def test_rows_where_tries_save_too_little():
    rng = np.random.default_rng(0)
    few = [make(i, [*range(19), *rng.integers(50, 99, 81)], rng) for i in range(2)]
    assert packing.pack_tries(few, 200).trie is None and packing.trie_ratio(packing.pack_tries(few, 200)) == 1
    enough = [make(i, [*range(40), 50 + i, *rng.integers(50, 99, 59)], rng) for i in range(2)]
    assert packing.pack_tries(enough, 200).trie is not None
    assert packing.pack_tries([enough[0].replace(images=(Image(b""),)), enough[1]], 200).trie is None


def test_length_is_a_multiple_of_align():
    rng = np.random.default_rng(0)
    samples = [make(i, [*range(40), i, 9], rng) for i in range(4)]
    batch = packing.pack_tries(samples, 119, rows=1, align=16)  # 48 places for the stem, 16 for each branch
    assert batch.trie.first_BT.shape[-1] == 128 and int(packing.used(batch)) == 1
    check(batch, samples, 16)


def test_samples_on_two_sides_of_a_length_share_nothing():
    """Eight beginnings of one text: up to 12 tokens, of 13 to 14, and of more. In each trie the longest has a place for
    all of its tokens."""
    rng = np.random.default_rng(0)
    samples = [make(i, range(n), rng) for i, n in enumerate((12, 13, 11, 20, 12, 15, 14, 13))]
    for apart, places in (((), 20), ((12,), 12 + 20), ((12, 14), 12 + 14 + 20), ((99,), 20)):
        batch = packed(samples, 64, rows=1, apart=apart)
        check(batch, samples)
        same_fields(batch, samples)
        assert (batch.trie.first_BT >= 0).sum() == places and batch.trie.apart == apart
    pair = [s.replace(pair=0) for s in samples[:2]]
    check(batch := packed(pair, 64, rows=1, apart=(12,)), pair)
    assert (batch.trie.first_BT >= 0).sum() == 12 + 13 and int(packing.used(batch)) == 1


def test_bad_input_gives_the_errors_of_pack():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="got 33 in sample 1; raise length"):
        packing.pack_tries([make(0, range(5), rng), make(1, range(33), rng)], 32)
    pair = [make(i, [i] * 20, rng).replace(pair=3) for i in range(2)]
    with pytest.raises(ValueError, match=r"got \[20, 20\] tokens in samples \[0, 1\]; raise rows"):
        packed(pair, 32, rows=1)
    with pytest.raises(ValueError, match="same arrays"):
        packing.pack_tries([make(0, range(5), rng), make(1, range(5), rng, {"x": ("input", np.zeros(5))})], 32)
    with pytest.raises(ValueError, match="pack: align must be at least 1, got 0"):
        packing.pack_tries([make(0, range(5), rng)], 32, align=0)


@pytest.mark.slow
def test_values_move_as_in_loops_over_tokens():
    rng = np.random.default_rng(3)
    samples = branching(12, rng)
    batch = packed(samples, 32, rows=2, align=4)
    made = jax.tree.map(lambda x: x[0], batch.trie)
    B, T = made.first_BT.shape
    A = made.place_BA.shape[-1]
    x_BA, x_BT = rng.normal(size=(B, A, 3)), rng.normal(size=(B, T, 3))
    at_places, of_predicted, behind = np.full((B, T, 3), -1.0), np.full((B, T, 3), -1.0), x_BT.copy()
    at_samples, of_next, counts = np.zeros((B, A, 3)), {}, np.zeros((B, T), int)
    for _, m, b, at, own in sorted(paths(batch, samples), key=lambda path: -path[3][0]):  # the first sample comes last
        if m:
            continue
        for d, place in enumerate(own):
            at_places[b, place], at_samples[b, at[d]] = x_BA[b, at[d]], x_BT[b, place]
            counts[b, place] += 1
            if d:
                of_predicted[b, place], behind[b, place] = x_BA[b, at[d - 1]], x_BT[b, own[d - 1]]
                of_next[b, at[d - 1]] = x_BT[b, place]
    held = batch.segment_BT[0] > 0
    close = lambda x, y: np.testing.assert_allclose(np.asarray(x), y, rtol=1e-6)
    close(trie.to_places(made, jnp.asarray(x_BA), -1), at_places)
    close(trie.targets_to_places(made, jnp.asarray(x_BA), -1), of_predicted)
    close(trie.from_parents(made, jnp.asarray(x_BT)), behind)
    close(np.asarray(trie.to_samples(made, jnp.asarray(x_BT)))[held], at_samples[held])
    close(trie.sample_counts(made, batch.segment_BT[0]), counts)
    found = np.asarray(trie.predictions_to_samples(made, jnp.asarray(x_BT)))
    for where, value in of_next.items():
        close(found[where], value)
