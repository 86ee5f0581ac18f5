"""The Triton kernel over tries, interpreted on the CPU, against a mask in float64; and that it lowers for GPUs."""

import re
from functools import cache, partial

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_ir

from areax.models import remat
from areax.models.attention import triton
from areax.models.attention.pattern import PLAIN, Pattern
from areax.parallel import context, mesh

B, T, N, K = 2, 300, 4, 2  # rows that are no multiple of a block
PARTS = {"whole": slice(0, T), "first": slice(0, T // 2), "last": slice(T // 2, T), "middle": slice(70, 129)}
PATTERNS = {
    "plain": PLAIN,
    "window": Pattern(window=37),
    "window of 1": Pattern(window=1),
    "chunk": Pattern(chunk=64),
    "softcap": Pattern(softcap=2.0),
    "all": Pattern(chunk=50, window=30, scale=0.3, softcap=3.0),
}
NAMES = "out", "dq", "dk", "dv", "dsinks"


@cache
def tries():
    """(until_BT, position_BT, sees_BTT, real_BT): many small nodes; few nodes, longer than a block."""
    rng = np.random.default_rng(0)
    made = random_tries(rng), random_tries(rng, longest=150, padding=0.02)
    return tuple(np.stack(x) for x in zip(*made, strict=True))


def random_tries(rng, longest=40, padding=0.1):
    """A row of tries of nodes of 1 to `longest` tokens, with padding between some; a token sees its path."""
    until_T, position_T = np.arange(1, T + 1, dtype=np.int32), np.zeros(T, np.int32)
    sees_TT, real_T = np.eye(T, dtype=bool), np.zeros(T, bool)
    path, at = [], 0
    while at < T:
        if rng.random() < padding:
            at += int(rng.integers(1, 9))
            continue
        # A node begins behind any token of the path before it, or another trie.
        path = [] if rng.random() < 0.2 else path[: int(rng.integers(0, len(path) + 1))]
        for place in range(at, min(T, at + int(rng.integers(1, longest + 1)))):
            position_T[place], real_T[place], at = len(path), True, place + 1
            path.append(place)
            sees_TT[place, path], until_T[path] = True, place + 1
    return until_T, position_T, sees_TT, real_T


@cache
def arrays(H, V, dtype="float32", group=N // K):
    rng = np.random.default_rng(H)
    sizes = (K * group, H), (K, H), (K, V), (K * group, V)
    return tuple(jnp.asarray(rng.normal(size=(B, T, *each)), dtype) for each in sizes)


def check(H, V, pattern=PLAIN, part="whole", dtype="float32", sinks=True, group=N // K, atol=1e-5, interpret=True):
    """Output and gradients of queries of a part of the row over all keys; `atol` of the largest value."""
    (until_BT, position_BT, sees_BTT, real_BT), at = tries(), PARTS[part]
    place_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    where = place_BT[:, at], position_BT[:, at], until_BT, position_BT
    q, k, v, dout = arrays(H, V, dtype, group)
    real_BT11 = real_BT[:, at, None, None]
    q, dout = q[:, at], dout[:, at] * real_BT11
    inputs = q, k, v, *([jnp.linspace(-1, 3, K * group)] if sinks else [])

    @jax.jit
    def run(*inputs):
        attend = lambda q, k, v, *sinks: triton.tree(q, k, v, *where, *sinks, pattern=pattern, interpret=interpret)
        out, back = jax.vjp(attend, *inputs)
        return out, *back(dout)

    with jax.default_matmul_precision("highest"):
        got = run(*inputs)
    sees_BTS = sees_BTT & attention_oracle.limits(
        position_BT[:, :, None], position_BT[:, None], pattern.window, pattern.chunk
    )
    factors = dict(scale=pattern.scale, softcap=pattern.softcap)
    wanted = attention_oracle.masked(*inputs[:3], sees_BTS[:, at], dout, *inputs[3:], **factors)
    for name, a, b, x in zip(NAMES, got, wanted, (dout, *inputs), strict=False):
        assert a.dtype == x.dtype and a.shape == b.shape and np.isfinite(a).all(), name
        keep = real_BT11 if name == "out" else 1
        np.testing.assert_allclose(a * keep, b * keep, atol=atol * np.abs(b).max(), err_msg=name)


def test_rows_of_random_tries_are_varied():
    until_BT, position_BT, _, real_BT = tries()
    assert (real_BT & (position_BT == 0)).sum(1).min() > 1 and not real_BT.all()  # several tries in a row; padding
    assert (until_BT - np.arange(T)).max(1).min() > 2 * 64  # subtrees of several blocks


@pytest.mark.kernel
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", PATTERNS)
def test_tries_match_a_mask(kind, part):
    check(32, 48, PATTERNS[kind], part)


@pytest.mark.kernel
@pytest.mark.parametrize("H, V, group", [(80, 80, 1), (8, 8, 3), (192, 128, 2)])
def test_tries_match_a_mask_for_other_heads(H, V, group):
    check(H, V, PATTERNS["window"], sinks=False, group=group)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_tries_in_bfloat16(kind):
    check(64, 64, PATTERNS[kind], dtype="bfloat16", atol=0.02)


@pytest.mark.kernel
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_tries_with_positions_over_devices(method):
    """Rows of which no device has a multiple of a block; heads over tp."""
    until_BT, position_BT, _, _ = tries()
    q, k, v, _ = arrays(32, 48)
    sinks_N, kernel = jnp.linspace(-1, 3, N), partial(triton.tree, pattern=PATTERNS["all"], interpret=True)

    @partial(jax.jit, static_argnums=0)
    def run(attend, *inputs):
        out, back = jax.vjp(lambda *inputs: attend(kernel, *inputs[:3], until_BT, position_BT, inputs[3]), *inputs)
        return out, *back(out)

    whole = run(partial(context.tree_attention, method="gather"), q, k, v, sinks_N)
    with jax.set_mesh(mesh.make(mesh.Layout(dp=2, cp=2, tp=2))):
        parts = run(partial(context.tree_attention, method=method), q, k, v, sinks_N)
    for name, a, b in zip(NAMES, parts, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), err_msg=name)


PROMPT, BRANCH, BRANCHES = 128, 64, 4


def branches():
    """(until_1T, position_1T) of a prompt with branches of one block each."""
    place_T = np.arange(PROMPT + BRANCHES * BRANCH)
    begin_T = np.maximum(place_T - PROMPT, 0) // BRANCH * BRANCH
    until_T = np.where(place_T < PROMPT, len(place_T), PROMPT + begin_T + BRANCH)
    return tuple(
        jnp.asarray(x[None], jnp.int32) for x in (until_T, np.where(place_T < PROMPT, place_T, place_T - begin_T))
    )


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["plain", "window"])
def test_branches_do_not_visit_each_other(kind):
    """A branch of NaN spoils what its own and the prompt's tokens compute, and nothing of the branches beside it."""
    until_1T, position_1T = branches()
    length, spoilt = until_1T.shape[1], slice(PROMPT + BRANCH, PROMPT + 2 * BRANCH)
    place_1T = jnp.arange(length, dtype=jnp.int32)[None]
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=(1, length, heads, 16)), jnp.float32) for heads in (N, K, K)]
    attend = lambda *qkv: triton.tree(
        *qkv, place_1T, position_1T, until_1T, position_1T, pattern=PATTERNS[kind], interpret=True
    )
    out, back = jax.vjp(attend, *(x.at[:, spoilt].set(jnp.nan) for x in inputs))
    clean = np.setdiff1d(np.arange(PROMPT, length), np.arange(spoilt.start, spoilt.stop))
    for x in (out, *back(jnp.ones_like(out).at[:, spoilt].set(jnp.nan))):
        assert np.isfinite(x[:, clean]).all() and np.isnan(x[:, spoilt]).any()
    wanted, again = jax.vjp(attend, *inputs)
    for a, b in zip((out, back(jnp.ones_like(out))[0]), (wanted, again(jnp.ones_like(out))[0]), strict=True):
        np.testing.assert_array_equal(a[:, clean], b[:, clean])


@pytest.mark.kernel
def test_remat_saves_the_output_over_tries():
    """The forward kernel is needed once a step under "dots", twice under "full"."""
    until_1T, position_1T = branches()
    length = until_1T.shape[1]
    q, k, v = (jnp.ones((1, length, heads, 16)) for heads in (N, K, K))
    where = jnp.arange(length, dtype=jnp.int32)[None], position_1T, until_1T, position_1T
    attend = lambda q: triton.tree(q, k, v, *where).sum()
    counts = []
    for keep in ("full", "dots"):
        program = jax.make_jaxpr(jax.grad(remat.checkpoint(keep)(attend)))(q)
        counts.append(sum("forward" in name for name in triton_ir.live_kernels(program.jaxpr)))
    assert counts == [2, 1]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "H, V, dtype, pattern, sinks_N",
    [
        (128, 128, "bfloat16", PLAIN, None),
        (72, 72, "float16", Pattern(window=300), None),
        (192, 128, "bfloat16", Pattern(window=300, scale=0.3, softcap=20.0), np.zeros(N, np.float32)),
        (64, 64, "float32", Pattern(chunk=300), None),
    ],
)
def test_tries_lower_for_gpus(H, V, dtype, pattern, sinks_N, monkeypatch):
    """Forward and backward, without an array of a row by itself."""
    verified, length = triton_ir.verify(monkeypatch), 4000
    shape = lambda heads, size, dtype=dtype: jax.ShapeDtypeStruct((1, length, heads, size), dtype)

    def run(q, k, v, place_BT, position_BT, until_BT):
        where = place_BT, position_BT, until_BT, position_BT
        out, back = jax.vjp(lambda q, k, v: triton.tree(q, k, v, *where, sinks_N, pattern=pattern), q, k, v)
        return out, *back(out)

    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    program = jax.jit(run).trace(shape(N, H), shape(K, H), shape(K, V), row, row, row)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @([\w.$]+)", text) == ["__gpu$xla.gpu.triton"] * 3 and len(verified) == 3
    assert not re.search(r"(4000|4096)x(4000|4096)x", text)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PATTERNS)
def test_tries_match_a_mask_on_a_gpu(kind):
    check(64, 64, PATTERNS[kind], "middle", interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("H, V, group", [(8, 8, 3), (80, 80, 1), (128, 128, 2), (192, 128, 2)])
def test_tries_match_a_mask_for_other_heads_on_a_gpu(H, V, group):
    check(H, V, group=group, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128])
def test_tries_in_bfloat16_on_a_gpu(H):
    check(H, H, dtype="bfloat16", atol=0.02, interpret=False)
