"""Kernels of other platforms, interpreted on the CPU, against the chunked reference; and that they lower for theirs."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_ir

from areax import models
from areax.core import param
from areax.core.segments import segment_index
from areax.models import remat
from areax.models.attention import backends, chunked, cudnn, splash, triton
from areax.models.attention.pattern import PLAIN, Pattern
from areax.parallel import context, mesh

B, T, N, K = 2, 256, 4, 2
# (atol of the output, atol of gradients) in fp32; values and gradients are of size 3 and 5.
CASES = {
    "splash": (partial(splash.causal, interpret=True), (None, 1, 37, 128, 129, T), (2e-6, 1e-5)),
    "triton": (partial(triton.causal, interpret=True), (None, 1, 37, 128, 129, T), (2e-6, 1e-5)),
}


def segments(length=T):
    """Sequences that begin and end within blocks, and padding; a row of one sequence."""
    out = np.zeros((B, T), np.int32)
    out[0, :240] = np.repeat([1, 2, 3, 4], [100, 1, 29, 110])
    out[1] = 1
    return out[:, :length]


@cache
def arrays(H, dtype="float32", N=N, T=T, V=None):
    """q, k, v, dout; values have V = H entries."""
    rng = np.random.default_rng(H)
    sizes = (N, H), (K, H), (K, V or H), (N, V or H)
    return tuple(jnp.asarray(rng.normal(size=(B, T, *each)), dtype) for each in sizes)


def passes(causal, H, dtype="float32", sinks=False, **sizes):
    """(out, dq, dk, dv) of what is no padding: what padding gives is not said, and nothing comes back from it. With
    sinks, `causal` gets them as a fourth argument, and dsinks follows."""
    q, k, v, dout = arrays(H, dtype, **sizes)
    real_BT11 = segments(q.shape[1])[..., None, None] > 0
    sinks_N = (jnp.linspace(-1, 3, q.shape[2], dtype=jnp.float32),) if sinks else ()

    @jax.jit
    def run(*inputs):
        out, back = jax.vjp(causal, *inputs)
        return out * real_BT11, *back(dout * real_BT11)

    return run(q, k, v, *sinks_N)


@cache
def reference(H, pattern=PLAIN, dtype="float32", sinks=False, **sizes):
    segment_BT = segments(sizes.get("T", T))
    where = segment_BT, segment_index(jnp.asarray(segment_BT))
    causal = lambda q, k, v, *sinks: chunked.causal(q, k, v, *where, *sinks, pattern=pattern)
    return passes(causal, H, dtype, sinks, **sizes)


@pytest.mark.kernel
@pytest.mark.parametrize("H", [32, 80])  # less than a lane; no power of two
@pytest.mark.parametrize("name, window", [(name, window) for name, case in CASES.items() for window in case[1]])
def test_kernels_match_the_reference(name, window, H):
    kernel, _, (atol, atol_of_gradients) = CASES[name]
    pattern = Pattern(window=window)
    got = passes(lambda q, k, v: kernel(q, k, v, segments(), pattern=pattern), H)
    for what, a, b in zip(("out", "dq", "dk", "dv"), got, reference(H, pattern), strict=True):
        np.testing.assert_allclose(a, b, atol=atol if what == "out" else atol_of_gradients, err_msg=what)


PATTERNS = {
    "scale": Pattern(scale=0.15),
    "softcap": Pattern(softcap=2.0),
    "chunk": Pattern(chunk=37),
    "chunk of a block": Pattern(chunk=64),
    "all": Pattern(chunk=100, window=70, scale=0.3, softcap=3.0),
    "all but chunks": Pattern(window=70, scale=0.3, softcap=3.0),
    "bidirectional": Pattern(bidirectional=True),
    "bidirectional window": Pattern(bidirectional=True, window=37),
}


@pytest.mark.kernel
@pytest.mark.parametrize("V, sinks", [(None, False), (48, True)])
@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind)
        for name in CASES
        for kind, pattern in PATTERNS.items()
        if backends.BACKENDS[name].chunk or pattern.chunk is None
    ],
)
def test_kernels_match_the_reference_in_every_pattern(name, kind, V, sinks):
    """That they support; with sinks, and values of another size than keys."""
    kernel, _, (atol, atol_of_gradients) = CASES[name]
    pattern = PATTERNS[kind]
    got = passes(lambda q, k, v, *sinks: kernel(q, k, v, segments(), *sinks, pattern=pattern), 80, sinks=sinks, V=V)
    for what, a, b in zip(
        ("out", "dq", "dk", "dv", "dsinks")[: 4 + sinks], got, reference(80, pattern, sinks=sinks, V=V), strict=True
    ):
        scale = 10 if what == "dsinks" else 1  # a sum over the rows' tokens
        np.testing.assert_allclose(a, b, atol=scale * (atol if what == "out" else atol_of_gradients), err_msg=what)


@pytest.mark.kernel
def test_triton_fills_rows_and_heads():
    """Up to whole blocks, and 3 query heads to one of keys."""
    kernel = lambda q, k, v: triton.causal(q, k, v, segments(200), pattern=Pattern(window=37), interpret=True)
    sizes = {"N": 3 * K, "T": 200}
    for a, b in zip(passes(kernel, 8, **sizes), reference(8, Pattern(window=37), **sizes), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# Queries and keys of a device in "gather", as positions of the row: a part of it and all of it; or the first part, and
# before its own keys those of the last part, as devices fetch them for a window.
PARTS = {
    "middle": (np.arange(70, 170), np.arange(T)),
    "half": (np.arange(128, 256), np.arange(T)),
    "wrapped": (np.arange(128), np.r_[128:256, 0:128]),
}


@pytest.mark.kernel
@pytest.mark.parametrize(
    "name, part, kind",
    [
        *(("triton", part, kind) for part in ("middle", "half") for kind in (None, "softcap", "all")),
        *(("splash", "half", kind) for kind in (None, "all but chunks")),
        *((name, "wrapped", "all but chunks") for name in CASES),
        *((name, "half", kind) for name in CASES for kind in ("bidirectional", "bidirectional window")),
    ],
)
def test_kernels_attend_to_keys_of_other_tokens(name, part, kind):
    """With sinks, and values of another size, in sequences that begin before the queries do."""
    pattern, (atol, atol_of_gradients) = PATTERNS.get(kind, PLAIN), CASES[name][2]
    queries, keys = PARTS[part]
    q, k, v, dout = arrays(32, V=48)
    segment_BT = jnp.asarray(segments())
    where = segment_BT, segment_index(segment_BT)
    real_BT11 = segments()[:, queries, None, None] > 0
    here, there = ([x[:, at] for x in where] for at in (queries, keys))
    names = dict(key_segment_BS=there[0], key_index_BS=there[1], pattern=pattern)
    kernel = lambda q, k, v, sinks_N: CASES[name][0](q, k, v, here[0], sinks_N, index_BT=here[1], **names)
    plain = lambda q, k, v, sinks_N: chunked.causal(q, k, v, *here, sinks_N, **names)

    @partial(jax.jit, static_argnums=0)
    def run(causal):
        out, back = jax.vjp(causal, q[:, queries], k[:, keys], v[:, keys], jnp.linspace(-1, 3, N))
        return out * real_BT11, *back(dout[:, queries] * real_BT11)

    for what, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), run(kernel), run(plain), strict=True):
        scale = 10 if what == "dsinks" else 1  # a sum over the rows' tokens
        np.testing.assert_allclose(a, b, atol=scale * (atol if what == "out" else atol_of_gradients), err_msg=what)


def over_cp(kernel, ring, method, pattern):
    """f(q, k, v, segment, sinks): a kernel with positions over cp."""

    def causal(q, k, v, segment_BT, index_BT, sinks_N, **others):
        return kernel(q, k, v, segment_BT, sinks_N, index_BT=index_BT, pattern=pattern, **others)

    def attend(q, k, v, segment_BT, sinks_N):
        into, back = context.arrange(method, q.shape[1])
        rows = *map(into, (q, k, v, segment_BT, segment_index(segment_BT))), sinks_N
        passed = partial(ring, axis="cp", pattern=pattern)
        return back(context.attention(causal, passed, *rows, method=method, pattern=pattern))

    return attend


@pytest.mark.kernel
@pytest.mark.parametrize("name, method", [("triton", "gather"), ("triton", "ring"), ("splash", "gather")])
@pytest.mark.parametrize("kind", [None, "all but chunks"])
def test_kernels_with_positions_over_devices(kind, name, method):
    """Sequences that cross the borders of devices, and of the pieces that a ring makes of a row; heads over tp."""
    pattern, (atol, atol_of_gradients) = PATTERNS.get(kind, PLAIN), CASES[name][2]
    attend = over_cp(CASES[name][0], partial(triton.ring, interpret=True), method, pattern)
    with jax.set_mesh(mesh.make(mesh.Layout(dp=2, cp=2, tp=2))):
        got = passes(lambda q, k, v, sinks_N: attend(q, k, v, jnp.asarray(segments()), sinks_N), 32, sinks=True)
    for what, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), got, reference(32, pattern, sinks=True), strict=True):
        scale = 10 if what == "dsinks" else 1
        np.testing.assert_allclose(a, b, atol=scale * (atol if what == "out" else atol_of_gradients), err_msg=what)


@pytest.mark.gpu
@pytest.mark.parametrize("N, T, window", [(K, T, None), (3 * K, 200, 37)])
@pytest.mark.parametrize("H", [8, 64, 72, 128, 256])
def test_triton_matches_the_reference_on_a_gpu(H, N, T, window):
    pattern = Pattern(window=window)
    kernel = lambda q, k, v: triton.causal(q, k, v, segments(T), pattern=pattern)
    with jax.default_matmul_precision("highest"):
        both = passes(kernel, H, N=N, T=T), reference(H, pattern, N=N, T=T)
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.gpu
@pytest.mark.parametrize("H, V", [(64, 64), (192, 128)])
@pytest.mark.parametrize("kind", PATTERNS)
def test_triton_matches_the_reference_in_every_pattern_on_a_gpu(kind, H, V):
    pattern = PATTERNS[kind]
    kernel = lambda q, k, v, sinks: triton.causal(q, k, v, segments(), sinks, pattern=pattern)
    with jax.default_matmul_precision("highest"):
        both = passes(kernel, H, sinks=True, V=V), reference(H, pattern, sinks=True, V=V)
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.gpu
@pytest.mark.parametrize("window, scale", [(None, None), (37, None), (37, 0.3)])
def test_cudnn_matches_the_reference_on_a_gpu(window, scale):
    """In rows that hold one sequence each."""
    one = np.ones((B, T), np.int32)
    pattern = Pattern(window=window, scale=scale)
    causal = lambda q, k, v: chunked.causal(q, k, v, one, segment_index(jnp.asarray(one)), pattern=pattern)
    kernel = lambda q, k, v: cudnn.causal(q, k, v, one, pattern=pattern)
    for a, b in zip(passes(kernel, 64, "bfloat16"), passes(causal, 64, "bfloat16"), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_in_bfloat16(name):
    got = passes(lambda q, k, v: CASES[name][0](q, k, v, segments()), 32, "bfloat16")
    for a, b in zip(got, reference(32, dtype="bfloat16"), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_float32_sinks_beside_bfloat16_is_float32(name):
    kernel = lambda q, k, v, sinks: CASES[name][0](q, k, v, segments(), sinks)
    got, wanted = passes(kernel, 32, "bfloat16", True), reference(32, dtype="bfloat16", sinks=True)
    assert got[-1].dtype == wanted[-1].dtype == jnp.float32
    for a, b in zip(got, wanted, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_work_on_whole_rows_that_ulysses_brings_together(name):
    """Positions over cp, heads over tp, as islands."""
    q, k, v, _ = arrays(32)
    segment_BT = jnp.asarray(segments())
    kernel = lambda q, k, v, segment_BT, index_BT, sinks_N: CASES[name][0](q, k, v, segment_BT, sinks_N)
    attend = partial(context.attention, kernel, None, method="ulysses")
    with jax.set_mesh(mesh.make(mesh.Layout(dp=2, cp=2, tp=2))):
        got = jax.jit(attend)(q, k, v, segment_BT, segment_index(segment_BT), jnp.linspace(-1, 3, N))
    real_BT11 = segments()[..., None, None] > 0
    np.testing.assert_allclose(got * real_BT11, reference(32, sinks=True)[0], atol=2e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_remat_saves_the_output_of_a_kernel(name):
    """The forward kernel is needed once a step under "dots", twice under "full"."""
    q, k, v, _ = arrays(32)
    kernel = lambda q: CASES[name][0](q, k, v, segments()).sum()
    counts = []
    for keep in ("full", "dots"):
        program = jax.make_jaxpr(jax.grad(remat.checkpoint(keep)(kernel)))(q)
        counts.append(sum("fwd" in name or "forward" in name for name in triton_ir.live_kernels(program.jaxpr)))
    assert counts == [2, 1]


def program(causal, platform, H=128, dtype=jnp.bfloat16, length=1024, V=None):
    """The lowered forward and backward pass, as text."""
    shape = lambda heads, H=H: jax.ShapeDtypeStruct((1, length, heads, H), dtype)

    def run(q, k, v, segment_BT):
        out, back = jax.vjp(lambda q, k, v: causal(q, k, v, segment_BT), q, k, v)
        return out, *back(out)

    args = shape(N), shape(K), shape(K, V or H), jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def lowered(causal, platform, H=128, dtype=jnp.bfloat16, length=1024, V=None):
    """Names of the custom calls of the forward and backward pass."""
    return sorted(re.findall(r"custom_call @([\w.$]+)", program(causal, platform, H, dtype, length, V)))


MOST = Pattern(window=300, scale=0.3, softcap=20.0)
SINKS = np.zeros(N, np.float32)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "H, V, pattern, sinks_N",
    [
        *((H, H, Pattern(window=window), None) for H in (64, 128) for window in (None, 300)),
        (192, 128, MOST, SINKS),
    ],
)
def test_splash_lowers_for_tpus(H, V, pattern, sinks_N):
    causal = partial(splash.causal, sinks_N=sinks_N, pattern=pattern)
    assert lowered(causal, "tpu", H, V=V) == ["tpu_custom_call"] * 3


@pytest.mark.sweep
@pytest.mark.parametrize(
    "H, V, dtype, pattern, sinks_N",
    [
        (64, 64, "bfloat16", Pattern(window=300), None),
        (128, 128, "float32", PLAIN, None),
        (72, 72, "float16", PLAIN, None),
        (192, 128, "bfloat16", MOST, SINKS),
        (64, 64, "float32", Pattern(chunk=300), SINKS),
    ],
)
def test_triton_lowers_for_gpus(H, V, dtype, pattern, sinks_N, monkeypatch):
    verified = triton_ir.verify(monkeypatch)
    calls = lowered(partial(triton.causal, sinks_N=sinks_N, pattern=pattern), "cuda", H, dtype, length=1000, V=V)
    assert calls == ["__gpu$xla.gpu.triton"] * 3 and len(verified) == 3


def lowered_over_cp(kernel, method, platform, length):
    """Names of the custom calls of the forward and backward pass with positions over four devices."""
    attend = over_cp(kernel, triton.ring, method, MOST)
    with jax.set_mesh(mesh.make(mesh.Layout(dp=2, cp=4))):
        shape = lambda heads: jax.ShapeDtypeStruct((2, length, heads, 64), jnp.bfloat16)

        def run(q, k, v, segment_BT):
            out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segment_BT, SINKS), q, k, v)
            return out, *back(out)

        args = shape(N), shape(K), shape(K), jax.ShapeDtypeStruct((2, length), jnp.int32)
        text = jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return [name for name in re.findall(r"custom_call @([\w.$]+)", text) if "triton" in name or "tpu" in name]


@pytest.mark.sweep
@pytest.mark.parametrize("method, kernels", [("gather", 3), ("ring", 9)])
def test_triton_lowers_for_gpus_with_positions_over_devices(method, kernels, monkeypatch):
    """In a ring, the device's own block and one of each other kind, forward and twice backward."""
    verified = triton_ir.verify(monkeypatch)
    calls = lowered_over_cp(triton.causal, method, "cuda", 1000)
    assert calls == ["__gpu$xla.gpu.triton"] * kernels and len(verified) == kernels


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("length", [1024, 4096])  # all keys; those within the window
def test_splash_lowers_for_tpus_with_positions_over_devices(length):
    assert lowered_over_cp(splash.causal, "gather", "tpu", length) == ["tpu_custom_call"] * 3


@pytest.mark.parametrize("window", [None, 300])
def test_cudnn_lowers_for_gpus(window, monkeypatch):
    """Lowering asks which cuDNN is installed; without one it is told."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    causal = partial(cudnn.causal, pattern=Pattern(window=window, scale=0.3))
    assert lowered(causal, "cuda") == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert re.findall(r"fmha_scale\\22: ([\d.]+)", program(causal, "cuda")) == ["0.3"] * 2


def needs(platform="gpu", dtype="bfloat16", length=4096, head_dim=128, **more):
    return backends.Needs(platform, dtype, length, head_dim, **more)


@pytest.mark.parametrize(
    "name, asked, words",
    [
        ("splash", needs("gpu"), "attention splash: platform gpu not supported; use triton or chunked"),
        ("splash", needs("tpu", length=200), "attention splash: length 200 not supported; use chunked"),
        ("splash", needs("tpu", dtype="float16"), "splash: dtype float16 .*; use chunked"),
        ("splash", needs("tpu", chunk=8192), "splash: chunk 8192 .*; use chunked"),
        ("cudnn", needs(packing=False, bidirectional=True), "cudnn: bidirectional True .*; use triton or chunked"),
        ("splash", needs("tpu", ring=True), "attention splash: ring True not supported; use chunked"),
        ("cudnn", needs(packing=False, ring=True), "cudnn: ring True not supported; use triton or chunked"),
        ("cudnn", needs(packing=False, other_keys=True), "cudnn: other_keys True .*; use triton or chunked"),
        ("triton", needs("tpu", packing=False), "triton: platform tpu .*; use splash or chunked"),
        ("triton", needs(head_dim=512), "triton: head_dim 512 .*; use chunked"),
        ("triton", needs(value_dim=512), "triton: value_dim 512 .*; use chunked"),
        ("triton", needs(dtype="float64"), "triton: dtype float64 .*; use chunked"),
        ("cudnn", needs(), "attention cudnn: packing True not supported; use triton or chunked"),
        ("cudnn", needs("cpu", packing=False, head_dim=256), "cudnn: platform cpu and head_dim 256 .*; use chunked"),
        ("cudnn", needs(packing=False, head_dim=60), "cudnn: head_dim 60 .*; use triton or chunked"),
        ("triton", needs(query_chunk=128), "attention triton: query_chunk 128 not supported; use chunked"),
        ("cudnn", needs(packing=False, softcap=30.0), "cudnn: softcap 30.0 not supported; use triton or chunked"),
        ("cudnn", needs(packing=False, sinks=True), "cudnn: sinks True not supported; use triton or chunked"),
        ("cudnn", needs(packing=False, chunk=8), "cudnn: chunk 8 not supported; use triton or chunked"),
        ("cudnn", needs(packing=False, value_dim=64), "cudnn: value_dim 64 not supported; use triton or chunked"),
    ],
)
def test_unsupported_options_are_refused_by_name(name, asked, words):
    with pytest.raises(ValueError, match=words):
        backends.choose(name, asked)


@pytest.mark.parametrize(
    "asked, taken",
    [
        (needs("cpu"), "chunked"),
        (needs("cpu", packing=False, window=8), "chunked"),
        (needs("tpu"), "splash"),
        (needs("tpu", window=4096), "splash"),
        (needs("tpu", dtype="float16"), "chunked"),
        (needs("tpu", other_keys=True, window=8), "splash"),
        (needs("tpu", other_keys=True, chunk=8), "chunked"),
        (needs("tpu", ring=True), "chunked"),
        (needs("tpu", bidirectional=True), "splash"),
        (needs(bidirectional=True, window=64, head_dim=80), "triton"),
        (needs(), "triton"),
        (needs(window=8), "triton"),
        (needs(other_keys=True, window=8, chunk=16), "triton"),
        (needs(ring=True, sinks=True, softcap=30.0), "triton"),
        (needs(query_chunk=128), "chunked"),
        (needs(packing=False, window=8), "cudnn"),
        (needs(packing=False, scale=1.0, value_dim=128), "cudnn"),
        (needs(packing=False, sinks=True), "triton"),
        (needs(head_dim=192, value_dim=128, chunk=8, scale=1.0, softcap=50.0, sinks=True), "triton"),
        (needs("tpu", head_dim=192, value_dim=128, scale=1.0, softcap=50.0, sinks=True), "splash"),
        (needs("tpu", chunk=8), "chunked"),
        (needs(dtype="float32", length=100, head_dim=72), "triton"),
        (needs(dtype="float64"), "chunked"),
    ],
)
def test_auto_takes_the_first_that_honours_everything(asked, taken):
    assert backends.choose("auto", asked) == taken
    assert backends.choose(taken, asked) == taken


TINY = dict(
    model_type="qwen3", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def forward(how="auto", cp="gather"):
    config = models.config_from_hf(TINY)
    params = jax.eval_shape(lambda key: param.init(key, models.table(config)), jax.random.key(0))
    run = models.Run(attention=how, cp=cp)
    token_BT = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    return jax.make_jaxpr(lambda params, token_BT: models.forward(params, token_BT, config=config, run=run))(
        params, token_BT
    )


def test_a_run_says_which():
    assert str(forward()) == str(forward("chunked"))
    with pytest.raises(ValueError, match="attention splash: platform cpu and length 64 not supported; use chunked"):
        forward("splash")
    with jax.set_mesh(mesh.make(mesh.Layout(dp=2, cp=4))):
        with pytest.raises(ValueError, match="attention triton: platform cpu not supported; use chunked"):
            forward("triton", "ring")
        with pytest.raises(ValueError, match="attention cudnn: .*other_keys True not supported; use chunked"):
            forward("cudnn", "gather")


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern, sinks_N, V, words",
    [
        (Pattern(window=3, chunk=5, scale=0.5, softcap=2.0), None, 8, "chunk 5 and softcap 2.0"),
        (PLAIN, jnp.zeros(N), 8, "sinks True"),
        (PLAIN, None, 4, "value_dim 4"),
    ],
)
def test_a_call_says_all_that_it_needs(pattern, sinks_N, V, words):
    """None of it is dropped on the way to a kernel."""
    q, k, v, _ = arrays(8, T=8, V=V)
    segment_BT = jnp.ones((B, 8), jnp.int32)
    with pytest.raises(ValueError, match=f"cudnn: platform cpu and dtype float32 and {words} not supported"):
        how = dict(backend="cudnn", packing=False, pattern=pattern)
        backends.causal(q, k, v, segment_BT, segment_index(segment_BT), sinks_N, **how)
