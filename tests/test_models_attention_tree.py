"""Attention over tries against a dense mask in float64 numpy."""

import math
import re
from functools import partial

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.core.segments import segment_index
from areax.models import remat
from areax.models.attention import backends, chunked, tree
from areax.models.attention.pattern import PLAIN, Pattern
from areax.parallel import context, mesh

B, T, N, K, H = 2, 64, 4, 2, 8
NAMES = "out", "dq", "dk", "dv", "dsinks"
SIZES = (8, 8), (4, 16), (10, 7)  # queries of a chunk, keys of a block; the row is no multiple of the last ones
PATTERNS = {
    "plain": {},
    "scale and softcap": dict(scale=0.7, softcap=2.0),
    "window": dict(window=5),
    "window of one token": dict(window=1),
    "chunk": dict(chunk=4),
    "all": dict(chunk=9, window=6, scale=0.9, softcap=3.0),
}


@partial(jax.jit, static_argnames=("pattern", "sizes"))
def passes(q_BTNH, k_BTKH, v_BTKV, place_BT, position_BT, until_BT, dout_BTNV, sinks_N=None, pattern=PLAIN, sizes=None):
    """`sizes` are those that `tree` is set to: each compiles another program."""
    where = place_BT, position_BT, until_BT, position_BT
    attend = lambda q, k, v, sinks_N: tree.tree(q, k, v, *where, sinks_N, pattern=pattern)
    out, back = jax.vjp(attend, q_BTNH, k_BTKH, v_BTKV, sinks_N)
    return out, *back(dout_BTNV)


def run(*arrays, sizes=SIZES[0], **how):
    """`passes` with these sizes of blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "ON_CPU", sizes)
        return passes(*arrays, sizes=sizes, **how)


def row(*tries, align=1):
    """The path from the root to each place of a row of tries of these samples, strings of tokens; None = padding. Each
    run of tokens without a fork begins at a multiple of `align`."""
    out = []
    for number, samples in enumerate(tries):
        paths = sorted({sample[:end] for sample in samples for end in range(1, len(sample) + 1)})  # depth-first
        for before, path in zip(["", *paths], paths, strict=False):
            siblings = sum(other[:-1] == path[:-1] for other in paths) - 1
            if siblings or before != path[:-1] or len(path) == 1:
                out += [None] * (-len(out) % align)
            out.append((number, path))
    assert len(out) <= T
    return out + [None] * (T - len(out))


def layout(rows):
    """(position_BT, until_BT, sees_BTT) by brute force: a token sees the prefixes of its path."""
    position, until, sees = (np.zeros(shape, np.int32) for shape in ((B, T), (B, T), (B, T, T)))
    for b, places in enumerate(rows):
        for j, key in enumerate(places):
            below = [i for i, query in enumerate(places) if query and key and _on_path(key, query)] or [j]
            position[b, j] = len(key[1]) - 1 if key else 0
            until[b, j] = max(below) + 1
            sees[b, below, j] = True
    return position, until, sees.astype(bool)


def _on_path(key, query):
    return key[0] == query[0] and query[1].startswith(key[1])


def arrays(V=H, sinks=False):
    """q, k, v, dout, sinks or None."""
    rng = np.random.default_rng(V)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, V), draw(B, T, N, V), draw(N) * 2 if sinks else None


def check(rows, sizes=SIZES[0], V=H, sinks=False, **pattern):
    position_BT, until_BT, sees_BTT = layout(rows)
    q, k, v, dout, sinks_N = arrays(V, sinks)
    real_BT11 = np.array([[place is not None for place in places] for places in rows])[..., None, None]
    where = places(), position_BT, until_BT
    got = run(q, k, v, *where, dout * real_BT11, sinks_N, pattern=Pattern(**pattern), sizes=sizes)
    limits = {name: pattern[name] for name in ("window", "chunk") if name in pattern}
    sees_BTT &= attention_oracle.limits(position_BT[:, :, None], position_BT[:, None, :], **limits)
    factors = {name: pattern[name] for name in ("scale", "softcap") if name in pattern}
    wanted = attention_oracle.masked(q, k, v, sees_BTT, dout * real_BT11, sinks_N, **factors)
    assert np.isfinite(got[0]).all()  # padding too
    for name, ours, theirs in zip(NAMES, got, wanted, strict=True):
        if theirs is not None:
            keep = real_BT11 if name == "out" else 1
            np.testing.assert_allclose(ours * keep, theirs * keep, atol=1e-5, err_msg=name)


def places():
    return np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))


PROMPT = "abcdefghij"
GROUPS = [  # rows of tries of samples
    [[PROMPT + x for x in ("x", "yyyyyyyyyy", "zzz", "zzzzz")], ["q", "qr"]],  # one token; a prefix of another
    [["u", "v", "w"], [PROMPT], [PROMPT[:5] + "xxxx", PROMPT[:5] + "xxyy", PROMPT[:9] + "zzzzzz"]],
]


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("align", [1, 4])
def test_a_token_sees_the_tokens_on_its_path(sizes, align):
    check([row(*tries, align=align) for tries in GROUPS], sizes)


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2]], ids=str)
@pytest.mark.parametrize("kind", list(PATTERNS)[1:])
def test_patterns_count_positions_in_samples(sizes, kind):
    """With sinks, values of another size than keys, and padding after every run."""
    for align in (1, 4):
        check([row(*tries, align=align) for tries in GROUPS], sizes, V=5, sinks=True, **PATTERNS[kind])


SAMPLES = st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=3)


@pytest.mark.slow
@given(st.tuples(*[st.tuples(SAMPLES, SAMPLES)] * B), st.sampled_from(["window", "all"]))
def test_random_tries(groups, kind):
    check([row(*tries) for tries in groups], V=5, sinks=True, **PATTERNS[kind])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_tries_of_one_sample_are_packed_rows(kind):
    pattern = Pattern(**PATTERNS[kind])
    segment_BT = np.repeat([[1, 2, 3, 4], [1, 2, 3, 0]], [9, 30, 1, 24], axis=1).astype(np.int32)
    index_BT = np.asarray(segment_index(jnp.asarray(segment_BT)))
    until_BT = np.where(segment_BT > 0, np.array([0, 9, 39, 40, 64])[segment_BT], places() + 1).astype(np.int32)
    q, k, v, dout, sinks_N = arrays(sinks=True)
    dout = dout * (segment_BT > 0)[..., None, None]
    got = run(q, k, v, places(), index_BT * (segment_BT > 0), until_BT, dout, sinks_N, pattern=pattern)
    attend = lambda q, k, v, sinks_N: chunked.causal(q, k, v, segment_BT, index_BT, sinks_N, pattern=pattern)
    out, back = jax.vjp(attend, q, k, v, sinks_N)
    real_BT11 = (segment_BT > 0)[..., None, None]
    for name, ours, theirs in zip(NAMES, (got[0] * real_BT11, *got[1:]), (out * real_BT11, *back(dout)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.slow
def test_gradients_of_branches_add_up_in_float32():
    """A root with 63 branches: 256 + 63 / 8 is 264 in bfloat16, but in it 256 and those of a chunk are 256."""
    position_BT, until_BT, _ = layout([row([chr(100) + chr(200 + i) for i in range(63)])] * B)
    zeros, ones = jnp.zeros((B, T, N, H), jnp.bfloat16), jnp.ones((B, T, K, H), jnp.bfloat16)
    dout = jnp.full((B, T, N, H), 0.25 / (N // K), jnp.bfloat16).at[:, 0].set(256 / (N // K))
    out, _, _, dv = run(zeros, ones, ones, places(), position_BT, until_BT, dout)[:4]
    assert out.dtype == dv.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_array_equal(dv[:, 0], 264)


@pytest.mark.slow
def test_bfloat16():
    position_BT, until_BT, sees_BTT = layout([row(*tries) for tries in GROUPS])
    q, k, v, dout, sinks_N = (jnp.asarray(x, jnp.bfloat16) for x in arrays(5, True))
    got = run(q, k, v, places(), position_BT, until_BT, dout, sinks_N)
    wanted = attention_oracle.masked(q, k, v, sees_BTT, dout, sinks_N)
    for name, ours, theirs in zip(NAMES, got, wanted, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(ours), theirs, atol=0.02 * np.abs(theirs).max(), err_msg=name)


def program(length, keep=None):
    """The forward and backward pass over a row of this length, under a rematerialisation policy if one is named."""
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct((1, length, *sizes), dtype)
    heads, where = (shape(N, H), shape(K, H), shape(K, H)), [shape(dtype=jnp.int32)] * 4

    def loss(q, k, v, *where):
        attend = lambda q, k, v: tree.tree(q, k, v, *where, pattern=Pattern(window=200))
        return ((remat.checkpoint(keep)(attend) if keep else attend)(q, k, v) ** 2).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).trace(*heads, *where)


@pytest.mark.slow
def test_no_array_has_a_place_for_every_query_and_key():
    length = 1024
    text = program(length).lower().compile().as_text()
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\[(\d+(?:,\d+)+)\]", text)}
    assert any(math.prod(shape) >= length * N * H for shape in shapes)
    assert not [shape for shape in shapes if math.prod(shape) >= length * length]


@pytest.mark.slow
def test_remat_saves_the_output():
    """The forward loop runs once a step under "dots", twice under "full"."""
    loops = [program(256, keep).lower().compile().as_text().count(" while(") for keep in ("none", "dots", "full")]
    assert loops == [4, 4, 6]  # over chunks and their blocks, in both passes


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "limits, prompt, branch", [({}, [1, 2], 3), (dict(window=5), [1, 2], 2), (dict(chunk=8), [1, 1], 1)]
)
def test_chunks_read_only_blocks_on_their_path_within_the_pattern(limits, prompt, branch):
    """Four branches of one chunk behind a prompt of two, then padding; each chunk reads its own block."""
    places_T = row([PROMPT + "uvwxyz" + letter + "1234567" for letter in "abcd"])
    position_BT, until_BT, _ = layout([places_T] * B)
    _, count = tree._needed((places(), position_BT), (until_BT, position_BT), Pattern(**limits), 8, 8)
    np.testing.assert_array_equal(count, ([*prompt] + [branch] * 4 + [1] * 2) * B)


def test_bidirectional_patterns_are_refused():
    q, k, v, *_ = arrays()
    for attend in tree.tree, partial(backends.tree, backend="auto"):
        with pytest.raises(ValueError, match="tokens of a trie see only those before them, got a bidirectional"):
            attend(q, k, v, *[places()] * 4, pattern=Pattern(bidirectional=True))


def test_backends_of_tries():
    choose = lambda platform, name="auto": backends.choose(
        name, backends.Needs(platform, "bfloat16", 128, 64, tree=True)
    )
    assert [choose(platform) for platform in ("cpu", "gpu", "tpu")] == ["chunked", "triton", "chunked"]
    with pytest.raises(ValueError, match="attention splash: tree True not supported; use chunked"):
        choose("tpu", "splash")


LAYOUTS = {
    "dp2 cp2 tp2": mesh.Layout(dp=2, cp=2, tp=2),
    "fsdp2 cp2 tp2": mesh.Layout(fsdp=2, cp=2, tp=2),
    "dp2 cp4": mesh.Layout(dp=2, cp=4),
}


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("devices", LAYOUTS)
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_places_over_devices(kind, devices, method):
    """Values and gradients equal those of one device."""
    position_BT, until_BT, _ = layout([row(*tries, align=4) for tries in GROUPS])
    q, k, v, dout, sinks_N = arrays(5, True)
    pattern = Pattern(**PATTERNS[kind])

    local = partial(tree.tree, pattern=pattern)

    def attend(q, k, v, sinks_N):
        return context.tree_attention(local, q, k, v, until_BT, position_BT, sinks_N, method=method)

    @jax.jit
    def passes_on_mesh(*inputs):
        out, back = jax.vjp(attend, *inputs)
        return out, *back(dout)

    with jax.set_mesh(mesh.make(LAYOUTS[devices])), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "ON_CPU", SIZES[0])
        got = passes_on_mesh(q, k, v, sinks_N)
    wanted = run(q, k, v, places(), position_BT, until_BT, dout, sinks_N, pattern=pattern)
    for name, ours, theirs in zip(NAMES, got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)
