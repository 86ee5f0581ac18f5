"""Attention over packed rows against one sequence at a time in float64 numpy."""

from functools import partial

import attention_oracle
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core.segments import segment_index
from areax.models.attention import chunked
from areax.models.attention.pattern import PLAIN, Pattern

T, N, K, H, CHUNK = 48, 4, 2, 8, 4
NAMES = "out", "dq", "dk", "dv", "dsinks"
KINDS = {
    "scale and softcap": dict(scale=0.7, softcap=2.0),
    "chunk": dict(chunk=7),
    "chunk of one token": dict(chunk=1),
    "chunk and window": dict(chunk=11, window=5),
    "all": dict(chunk=13, window=10, scale=0.9, softcap=3.0),
}


@partial(jax.jit, static_argnames=("pattern", "elsewhere"))
def packed(q_BTNH, k_BTKH, v_BTKV, segment_BT, dout_BTNV, sinks_N=None, pattern=PLAIN, elsewhere=False):
    where = segment_BT, segment_index(segment_BT)
    keys = dict(zip(("key_segment_BS", "key_index_BS"), where, strict=True)) if elsewhere else {}
    causal = lambda q, k, v, sinks: chunked.causal(q, k, v, *where, sinks, pattern=pattern, query_chunk=CHUNK, **keys)
    out, back = jax.vjp(causal, q_BTNH, k_BTKH, v_BTKV, sinks_N)
    return out, *back(dout_BTNV)


def rows(*lengths_of_rows):
    """segment_BT with sequences of these lengths, then padding."""
    segment = np.zeros((len(lengths_of_rows), T), np.int32)
    for row, lengths in zip(segment, lengths_of_rows, strict=True):
        ends = np.minimum(np.cumsum(lengths), T)
        for j, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            row[start:end] = j + 1
    return segment


def arrays(B, V=H, sinks=False):
    """q, k, v, dout, sinks or None."""
    rng = np.random.default_rng(B)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, V), draw(B, T, N, V), draw(N) * 2 if sinks else None


def check(segment_BT, elsewhere=False, V=H, sinks=False, **pattern):
    q, k, v, dout, sinks_N = arrays(len(segment_BT), V, sinks)
    got = packed(q, k, v, segment_BT, dout, sinks_N, Pattern(**pattern), elsewhere)
    wanted = attention_oracle.alone(q, k, v, segment_BT, dout, sinks_N, **pattern)
    for name, ours, theirs in zip(NAMES, got, wanted, strict=True):
        if theirs is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=2, max_size=2))
def test_a_token_sees_its_own_sequence_up_to_itself(lengths):
    check(rows(*lengths))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("elsewhere, near", [(False, (2, 4)), (True, (2, 4)), (False, ())])
def test_rows_of_more_chunks_than_are_compiled_singly(monkeypatch, window, elsewhere, near):
    """Runs of 4 chunks of 4; without near keys as accelerators compute them."""
    monkeypatch.setattr(chunked, "RUNS", 3)
    monkeypatch.setattr(chunked, "NEAR", near)
    assert [each.stop - each.start for each, _ in chunked._runs(T - 1, T - 1, None, 4, True)] == [16, 16, 12, 3]
    packed.clear_cache()  # it would not see other constants
    check(rows([48], [7, 20, 15]), elsewhere, window=window)  # the row from its beginning
    check(rows([20, 20, 8], [7, 21, 15]), elsewhere, window=window)  # 16 before each chunk of the last run
    check(rows([9] * 5, [3, 8, 5, 2] * 2), elsewhere, window=window)  # 8 before each chunk of the last two
    packed.clear_cache()


def test_chunks_of_a_run_look_back_no_further_than_they_need():
    """All, 20 or 8 keys before each chunk of 4, where those are at most half of all; no more than a window has."""
    reaches = lambda window: [[reach for _, reach in ways] for _, ways in chunked._runs(48, 48, window, 4, True)]
    assert reaches(None) == [[None]] * 4 + [[None, 8]] * 6 + [[None, 20, 8]] * 2
    assert reaches(33) == [[None]] * 4 + [[None, 8]] * 5 + [[32, 8]] * 3
    assert reaches(5) == [[None]] * 2 + [[4]] * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [
        [[T], [T]],
        [[1] * T, [1] * T],  # nobody needs more than the nearest keys
        [[CHUNK] * 12, [CHUNK] * 12],
        [[9, 39], [1] * 40],  # one row needs all, the other nothing
        [[8 + 1, 12], [8, 13, 27]],  # around the shortest run
        [[], []],
    ],
    ids=str,
)
def test_runs_of_keys_at_their_limits(lengths):
    check(rows(*lengths))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "window, elsewhere",
    [(1, False), (CHUNK, False), (11, False), (T, False), pytest.param(11, True, id="11-given keys")],
)
def test_a_window_is_the_token_and_those_just_before_it(window, elsewhere):
    check(rows([T], [9, 1, 30]), elsewhere, window=window)
    check(rows([CHUNK] * 12, [5, 13, 27]), elsewhere, window=window)


@pytest.mark.slow
def test_a_window_reads_only_keys_inside_it():
    """The work grows with the window or chunk, not with the row: each chunk reads its own places and 3 before them."""
    shape = lambda heads, length: jax.ShapeDtypeStruct((1, length, heads, H), np.float32)
    place = lambda length: jax.ShapeDtypeStruct((1, length), np.int32)

    def flops(length, **limits):
        args = shape(N, length), shape(K, length), shape(K, length), place(length), place(length)
        fn = partial(chunked.causal, pattern=Pattern(**limits), query_chunk=4)
        return jax.jit(fn).lower(*args).cost_analysis()["flops"]

    assert flops(64, window=4) < 2.2 * flops(32, window=4)
    assert flops(64, chunk=4) < 2.2 * flops(32, chunk=4)
    assert flops(64) > 3 * flops(32)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_patterns(kind):
    """On whole rows, one-token sequences, padding; with values of the keys' size."""
    check(rows([T], [9, 1, 1, 30]), **KINDS[kind])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind, elsewhere",
    [
        ("none", False),
        ("all", True),
        *(pytest.param(*case, marks=pytest.mark.wide) for case in [("none", True), ("all", False)]),
    ],
)
def test_sinks_and_values_of_their_own_size(kind, elsewhere):
    check(rows([T], [9, 1, 1, 30]), elsewhere, V=12 if elsewhere else 5, sinks=True, **KINDS.get(kind, {}))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["chunk", "all"])
@pytest.mark.parametrize("near", [(2, 4), ()])
def test_patterns_in_rows_of_more_chunks_than_are_compiled_singly(monkeypatch, near, kind):
    monkeypatch.setattr(chunked, "RUNS", 3)
    monkeypatch.setattr(chunked, "NEAR", near)
    packed.clear_cache()  # it would not see other constants
    for lengths in ([48], [7, 20, 15]), ([20, 20, 8], [7, 21, 1, 15]), ([9] * 5, [3, 8, 5, 2] * 2):
        check(rows(*lengths), V=5, sinks=True, **KINDS[kind])
    packed.clear_cache()


BOTH_WAYS = {"all": {}, "window": dict(window=6), "all of it": dict(window=5, softcap=2.0, scale=0.7)}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", BOTH_WAYS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_bidirectional_patterns(kind, elsewhere):
    """Every token sees those after it as those before it, of its own sequence alone."""
    for lengths in ([[T], [9, 1, 1, 30]], [[1] * T, [CHUNK] * 12], [[3, 5, 2] * 4, []]):
        check(rows(*lengths), elsewhere, bidirectional=True, **BOTH_WAYS[kind])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", BOTH_WAYS)
@pytest.mark.parametrize("near", [(1, 2), ()])
def test_bidirectional_patterns_in_rows_of_more_chunks_than_are_compiled_singly(monkeypatch, near, kind):
    """By the longest sequence of the rows, each chunk sees 4, 8 or all keys on either side."""
    monkeypatch.setattr(chunked, "RUNS", 6)
    monkeypatch.setattr(chunked, "NEAR", near)
    packed.clear_cache()  # it would not see other constants
    for lengths in ([[48], [7, 20, 15]], [[9, 9, 8], [7, 2, 1, 9]], [[5] * 9, [3, 5, 2] * 4]):
        check(rows(*lengths), V=5, sinks=True, bidirectional=True, **BOTH_WAYS[kind])
    packed.clear_cache()


def test_chunks_look_both_ways_no_further_than_they_need():
    ways = lambda window: [
        [(keys.start, keys.stop, reach) for keys, reach in ways]
        for _, ways in chunked._runs(48, 48, window, 4, True, True)
    ]
    assert ways(None)[0] == [(0, 48, None)] and ways(None)[3] == [(0, 48, None), (4, 24, 8)]
    assert ways(5) == [[(0, 8, None)], *([(i - 4, i + 8, 4)] for i in range(4, 44, 4)), [(40, 48, None)]]


@pytest.mark.slow
def test_sinks_far_from_the_scores():
    """A sink far below changes nothing, one far above takes all; neither gives a NaN."""
    q, k, v, dout, _ = arrays(1)
    segment_BT = rows([20, 28])
    without = packed(q, k, v, segment_BT, dout)
    below = packed(q, k, v, segment_BT, dout, np.full(N, -1e30, np.float32))
    above = packed(q, k, v, segment_BT, dout, np.full(N, 1e30, np.float32))
    for name, a, b, c in zip(NAMES, below, without, above, strict=True):
        np.testing.assert_array_equal(a, 0 if b is None else b, err_msg=name)
        np.testing.assert_array_equal(c, 0, err_msg=name)


def test_the_oracle_differentiates_itself():
    """Its gradients along a random direction are its own finite differences."""
    q, k, v, dout, sinks = (np.float64(x) for x in arrays(1, 5, True))
    rng = np.random.default_rng(1)
    inputs, segment_BT = (q, k, v, sinks), rows([9, 1, 30])
    steps = [rng.normal(size=x.shape) * 1e-6 for x in inputs]

    def run(sign):
        *heads, sinks = (x + sign * step for x, step in zip(inputs, steps, strict=True))
        return attention_oracle.alone(*heads, segment_BT, dout, sinks, **KINDS["all"])

    _, *grads = run(0)
    slope = sum(np.vdot(grad, step) for grad, step in zip(grads, steps, strict=True))
    np.testing.assert_allclose(np.vdot(run(1)[0] - run(-1)[0], dout) / 2, slope, rtol=1e-6)


@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(window=0), "window must be a whole number of at least 1, or None, got 0"),
        (dict(chunk=8192.0), "chunk must be a whole number of at least 1, or None, got 8192.0"),
        (dict(window=True), "window must be .* got True"),
        (dict(softcap=0.0), "softcap must be a finite number above 0, or None, got 0.0"),
        (dict(scale=float("nan")), "scale must be .* got nan"),
        (dict(scale="1"), "scale must be .* got '1'"),
        (dict(bidirectional=True, chunk=3), "bidirectional needs no chunk, got 3; give each chunk a segment"),
    ],
    ids=str,
)
def test_a_pattern_refuses_what_is_none(bad, words):
    with pytest.raises(ValueError, match=f"attention: {words}"):
        Pattern(**bad)
