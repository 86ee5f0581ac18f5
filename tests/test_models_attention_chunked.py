"""Attention over packed rows against one sequence at a time in float64 numpy."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core.segments import segment_index
from areax.models.attention import chunked

T, N, K, H, CHUNK = 48, 4, 2, 8, 4


def alone(q_BTNH, k_BTKH, v_BTKH, segment_BT, dout_BTNH, window=None):
    """(out, dq, dk, dv): softmax(q k^T / sqrt(H)) v over the triangle, or band, of each sequence, and its gradients."""
    q, k, v, dout = (np.float64(x) for x in (q_BTNH, k_BTKH, v_BTKH, dout_BTNH))
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for b, segment_T in enumerate(segment_BT):
        for s in np.unique(segment_T):
            own = np.flatnonzero(segment_T == s)
            for n in range(N):
                g = n // (N // K)
                score = q[b, own, n] @ k[b, own, g].T / np.sqrt(H)
                score[np.triu_indices(len(own), 1)] = -np.inf
                score[np.tril_indices(len(own), -(window or T))] = -np.inf
                p = np.exp(score - score.max(-1, keepdims=True))
                p /= p.sum(-1, keepdims=True)
                out[b, own, n] = p @ v[b, own, g]
                dp = dout[b, own, n] @ v[b, own, g].T
                ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(H)
                dq[b, own, n] = ds @ k[b, own, g]
                dk[b, own, g] += ds.T @ q[b, own, n]
                dv[b, own, g] += p.T @ dout[b, own, n]
    return out, dq, dk, dv


@partial(jax.jit, static_argnames=("window", "elsewhere"))
def packed(q_BTNH, k_BTKH, v_BTKH, segment_BT, dout_BTNH, window=None, elsewhere=False):
    where = segment_BT, segment_index(segment_BT)
    keys = dict(zip(("key_segment_BS", "key_index_BS"), where, strict=True)) if elsewhere else {}
    causal = lambda q, k, v: chunked.causal(q, k, v, *where, window=window, chunk=CHUNK, **keys)
    out, back = jax.vjp(causal, q_BTNH, k_BTKH, v_BTKH)
    return out, *back(dout_BTNH)


def rows(*lengths_of_rows):
    """segment_BT with sequences of these lengths, then padding."""
    segment = np.zeros((len(lengths_of_rows), T), np.int32)
    for row, lengths in zip(segment, lengths_of_rows, strict=True):
        ends = np.minimum(np.cumsum(lengths), T)
        for j, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            row[start:end] = j + 1
    return segment


def check(segment_BT, window=None, elsewhere=False):
    B = len(segment_BT)
    rng = np.random.default_rng(B)
    q, k, v, dout = (rng.normal(size=(B, T, heads, H)).astype(np.float32) for heads in (N, K, K, N))
    for name, ours, theirs in zip(
        ("out", "dq", "dk", "dv"),
        packed(q, k, v, segment_BT, dout, window, elsewhere), alone(q, k, v, segment_BT, dout, window), strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=2, max_size=2))
def test_a_token_sees_its_own_sequence_up_to_itself(lengths):
    check(rows(*lengths))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("elsewhere, near", [(False, (2, 4)), (True, (2, 4)), (False, ())])
def test_rows_of_more_chunks_than_are_compiled_singly(monkeypatch, window, elsewhere, near):
    """Runs of 4 chunks of 4; without near keys as accelerators compute them."""
    monkeypatch.setattr(chunked, "RUNS", 3)
    monkeypatch.setattr(chunked, "NEAR", near)
    assert [each.stop - each.start for each, _ in chunked._runs(T - 1, T - 1, None, 4, True)] == [16, 16, 12, 3]
    packed.clear_cache()  # it would not see other constants
    check(rows([48], [7, 20, 15]), window, elsewhere)  # the row from its beginning
    check(rows([20, 20, 8], [7, 21, 15]), window, elsewhere)  # 16 before each chunk of the last run
    check(rows([9] * 5, [3, 8, 5, 2] * 2), window, elsewhere)  # 8 before each chunk of the last two
    packed.clear_cache()


def test_chunks_of_a_run_look_back_no_further_than_they_need():
    """All, 20 or 8 keys before each chunk of 4, where those are at most half of all; no more than a window has."""
    reaches = lambda window: [[reach for _, reach in ways] for _, ways in chunked._runs(48, 48, window, 4, True)]
    assert reaches(None) == [[None]] * 4 + [[None, 8]] * 6 + [[None, 20, 8]] * 2
    assert reaches(33) == [[None]] * 4 + [[None, 8]] * 5 + [[32, 8]] * 3
    assert reaches(5) == [[None]] * 2 + [[4]] * 10


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


@pytest.mark.parametrize(
    "window, elsewhere",
    [(1, False), (CHUNK, False), (11, False), (T, False), pytest.param(11, True, id="11-given keys")],
)
def test_a_window_is_the_token_and_those_just_before_it(window, elsewhere):
    check(rows([T], [9, 1, 30]), window, elsewhere)
    check(rows([CHUNK] * 12, [5, 13, 27]), window, elsewhere)


def test_a_window_reads_only_keys_inside_it():
    """The work grows with the window, not with the row: each chunk reads its own places and 3 before them."""
    shape = lambda heads, length: jax.ShapeDtypeStruct((1, length, heads, H), np.float32)
    place = lambda length: jax.ShapeDtypeStruct((1, length), np.int32)

    def flops(length, window):
        args = shape(N, length), shape(K, length), shape(K, length), place(length), place(length)
        fn = partial(chunked.causal, window=window, chunk=4)
        return jax.jit(fn).lower(*args).cost_analysis()["flops"]

    assert flops(64, 4) < 2.2 * flops(32, 4)
    assert flops(64, None) > 3 * flops(32, None)
