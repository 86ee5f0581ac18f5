"""Kernels of other platforms, interpreted on the CPU, against the chunked reference; and that they lower for theirs."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_ir
from jax.extend import core

from areax import models
from areax.core import param
from areax.core.segments import segment_index
from areax.models import remat
from areax.models.attention import backends, chunked, cudnn, splash, triton
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
def arrays(H, dtype="float32", N=N, T=T):
    rng = np.random.default_rng(H)
    return tuple(jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, K, K, N))


def passes(causal, H, dtype="float32", **sizes):
    """(out, dq, dk, dv) of what is no padding: what padding gives is not said, and nothing comes back from it."""
    q, k, v, dout = arrays(H, dtype, **sizes)
    real_BT11 = segments(q.shape[1])[..., None, None] > 0

    @jax.jit
    def run(q, k, v):
        out, back = jax.vjp(causal, q, k, v)
        return out * real_BT11, *back(dout * real_BT11)

    return run(q, k, v)


@cache
def reference(H, window, dtype="float32", **sizes):
    segment_BT = segments(sizes.get("T", T))
    where = segment_BT, segment_index(jnp.asarray(segment_BT))
    return passes(lambda q, k, v: chunked.causal(q, k, v, *where, window=window), H, dtype, **sizes)


@pytest.mark.kernel
@pytest.mark.parametrize("H", [32, 80])  # less than a lane; no power of two
@pytest.mark.parametrize("name, window", [(name, window) for name, case in CASES.items() for window in case[1]])
def test_kernels_match_the_reference(name, window, H):
    kernel, _, (atol, atol_of_gradients) = CASES[name]
    more = {} if window is None else {"window": window}
    got = passes(lambda q, k, v: kernel(q, k, v, segments(), **more), H)
    for what, a, b in zip(("out", "dq", "dk", "dv"), got, reference(H, window), strict=True):
        np.testing.assert_allclose(a, b, atol=atol if what == "out" else atol_of_gradients, err_msg=what)


@pytest.mark.kernel
def test_triton_fills_rows_and_heads():
    """Up to whole blocks, and 3 query heads to one of keys."""
    kernel = lambda q, k, v: triton.causal(q, k, v, segments(200), window=37, interpret=True)
    sizes = {"N": 3 * K, "T": 200}
    for a, b in zip(passes(kernel, 8, **sizes), reference(8, 37, **sizes), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("N, T, window", [(K, T, None), (3 * K, 200, 37)])
@pytest.mark.parametrize("H", [8, 64, 72, 128, 256])
def test_triton_matches_the_reference_on_a_gpu(H, N, T, window):
    kernel = lambda q, k, v: triton.causal(q, k, v, segments(T), window=window)
    with jax.default_matmul_precision("highest"):
        both = passes(kernel, H, N=N, T=T), reference(H, window, N=N, T=T)
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 37])
def test_cudnn_matches_the_reference_on_a_gpu(window):
    """In rows that hold one sequence each."""
    one = np.ones((B, T), np.int32)
    causal = lambda q, k, v: chunked.causal(q, k, v, one, segment_index(jnp.asarray(one)), window=window)
    kernel = lambda q, k, v: cudnn.causal(q, k, v, one, window=window)
    for a, b in zip(passes(kernel, 64, "bfloat16"), passes(causal, 64, "bfloat16"), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_in_bfloat16(name):
    got = passes(lambda q, k, v: CASES[name][0](q, k, v, segments()), 32, "bfloat16")
    for a, b in zip(got, reference(32, None, "bfloat16"), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_kernels_work_on_whole_rows_that_ulysses_brings_together(name):
    """Positions over cp, heads over tp, as islands."""
    q, k, v, _ = arrays(32)
    segment_BT = jnp.asarray(segments())
    kernel = lambda q, k, v, segment_BT, index_BT: CASES[name][0](q, k, v, segment_BT)
    attend = partial(context.attention, kernel, None, method="ulysses")
    with jax.set_mesh(mesh.make(mesh.Layout(dp=2, cp=2, tp=2))):
        got = jax.jit(attend)(q, k, v, segment_BT, segment_index(segment_BT))
    real_BT11 = segments()[..., None, None] > 0
    np.testing.assert_allclose(got * real_BT11, reference(32, None)[0], atol=2e-6)


def live_kernels(program):
    """Names of the kernels of a program, calls within calls included, whose output anything reads."""
    read = {v for e in program.eqns for v in e.invars if isinstance(v, core.Var)} | set(program.outvars)
    for e in program.eqns:
        if e.primitive.name == "pallas_call":
            if read & set(e.outvars):
                yield e.params["name"] or e.params["name_and_src_info"].name
        else:
            for inner in core.jaxprs_in_params(e.params):
                yield from live_kernels(inner)


@pytest.mark.kernel
@pytest.mark.parametrize("name", CASES)
def test_remat_saves_the_output_of_a_kernel(name):
    """The forward kernel is needed once a step under "dots", twice under "full"."""
    q, k, v, _ = arrays(32)
    kernel = lambda q: CASES[name][0](q, k, v, segments()).sum()
    counts = []
    for keep in ("full", "dots"):
        program = jax.make_jaxpr(jax.grad(remat.checkpoint(keep)(kernel)))(q)
        counts.append(sum("fwd" in name or "forward" in name for name in live_kernels(program.jaxpr)))
    assert counts == [2, 1]


def lowered(causal, platform, H=128, dtype=jnp.bfloat16, length=1024):
    """Names of the custom calls of the forward and backward pass."""
    shape = lambda heads: jax.ShapeDtypeStruct((1, length, heads, H), dtype)

    def run(q, k, v, segment_BT):
        out, back = jax.vjp(lambda q, k, v: causal(q, k, v, segment_BT), q, k, v)
        return out, *back(out)

    args = shape(N), shape(K), shape(K), jax.ShapeDtypeStruct((1, length), jnp.int32)
    text = jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return sorted(re.findall(r"custom_call @([\w.$]+)", text))


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("window", [None, 300])
def test_splash_lowers_for_tpus(window, H):
    assert lowered(partial(splash.causal, window=window), "tpu", H) == ["tpu_custom_call"] * 3


@pytest.mark.parametrize("H, dtype, window", [(64, "bfloat16", 300), (128, "float32", None), (72, "float16", None)])
def test_triton_lowers_for_gpus(H, dtype, window, monkeypatch):
    verified = triton_ir.verify(monkeypatch)
    calls = lowered(partial(triton.causal, window=window), "cuda", H, dtype, length=1000)
    assert calls == ["__gpu$xla.gpu.triton"] * 3 and len(verified) == 3


@pytest.mark.parametrize("window", [None, 300])
def test_cudnn_lowers_for_gpus(window, monkeypatch):
    """Lowering asks which cuDNN is installed; without one it is told."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    calls = lowered(partial(cudnn.causal, window=window), "cuda")
    assert calls == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


def needs(platform="gpu", dtype="bfloat16", length=4096, head_dim=128, **more):
    return backends.Needs(platform, dtype, length, head_dim, **more)


@pytest.mark.parametrize(
    "name, asked, words",
    [
        ("splash", needs("gpu"), "attention splash: platform gpu not supported; use triton or chunked"),
        ("splash", needs("tpu", length=200), "attention splash: length 200 not supported; use chunked"),
        ("splash", needs("tpu", other_keys=True), "splash: other_keys True .*; use chunked"),
        ("splash", needs("tpu", softcap=50.0), "splash: softcap 50.0 .*; no backend supports this"),
        ("splash", needs("tpu", sinks=True), "splash: sinks True .*; no backend supports this"),
        ("triton", needs(other_keys=True), "attention triton: other_keys True not supported; use chunked"),
        ("triton", needs("tpu", packing=False), "triton: platform tpu .*; use splash or chunked"),
        ("triton", needs(head_dim=512), "triton: head_dim 512 .*; use chunked"),
        ("triton", needs(dtype="float64"), "triton: dtype float64 .*; use chunked"),
        ("cudnn", needs(), "attention cudnn: packing True not supported; use triton or chunked"),
        ("cudnn", needs("cpu", packing=False, head_dim=256), "cudnn: platform cpu and head_dim 256 .*; use chunked"),
        ("cudnn", needs(packing=False, head_dim=60), "cudnn: head_dim 60 .*; use triton or chunked"),
        ("triton", needs(chunk=128), "attention triton: chunk 128 not supported; use chunked"),
        ("chunked", needs(softcap=30.0), "chunked: softcap 30.0 .*; no backend supports this"),
        ("auto", needs(sinks=True), "chunked: sinks True .*; no backend supports this"),
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
        (needs("tpu", other_keys=True), "chunked"),
        (needs(), "triton"),
        (needs(window=8), "triton"),
        (needs(chunk=128), "chunked"),
        (needs(packing=False, window=8), "cudnn"),
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
        with pytest.raises(ValueError, match="attention triton: ring over cp not supported; use chunked"):
            forward("triton", "ring")
        with pytest.raises(ValueError, match="attention cudnn: .*other_keys True not supported; use chunked"):
            forward("cudnn", "gather")
