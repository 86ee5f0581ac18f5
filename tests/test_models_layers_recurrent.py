"""Recurrent layers over packed rows against one sequence and one token at a time in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next import modeling_qwen3_next

from areax.models.layers import conv, delta, mamba, recurrence

T, N, G, K, V, W = 150, 4, 2, 10, 14, 4
# Sequences of one token, many in a chunk, one over several chunks and blocks; padding; a row of one sequence.
SEGMENT = np.stack([np.repeat([1, 2, 3, 4, 5, 6, 0], [1, 1, 5, 20, 1, 110, 12]), np.repeat([1], T)]).astype(np.int32)
B = len(SEGMENT)


def strengths(rng, strong):
    """-log of the decay of each token and head, [B, T, N]: up to 5, or 100."""
    scale = np.array([0.05, 1.0, 4.0, 16.0] if strong else [0.05, 0.1, 0.3, 1.0])
    return scale * np.logaddexp(0, 2 * rng.normal(size=(B, T, N)))


def delta_inputs(strong=False):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(B, T, G, K)), rng.normal(size=(B, T, G, K)), rng.normal(size=(B, T, N, V))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    inputs = unit(q), unit(k), v, rng.random((B, T, N)), -strengths(rng, strong)
    return [x.astype(np.float32) for x in inputs]


def mamba_inputs(strong=False):
    rng = np.random.default_rng(1)
    A = -np.array([16.0, 1.0, 4.0, 0.2] if strong else [0.1, 1.0, 0.3, 0.05])
    dt = np.logaddexp(0, rng.normal(size=(B, T, N)))
    x, b, c = rng.normal(size=(B, T, N, V)), rng.normal(size=(B, T, G, K)), rng.normal(size=(B, T, G, K))
    return [x.astype(np.float32) for x in (x, dt, A, b, c, rng.normal(size=N))]


def delta_by_tokens(q, k, v, beta, g):
    """(out, last state) of one sequence [T, N, ...], arXiv:2412.06464, equation 10."""
    q, k = (x.repeat_interleave(N // G, 1) for x in (q, k))
    S, out = torch.zeros(N, K, V, dtype=torch.float64), []
    for t in range(len(v)):
        eye = torch.eye(K, dtype=torch.float64)
        erase = eye - beta[t, :, None, None] * k[t, :, :, None] * k[t, :, None]
        S = erase @ (g[t].exp()[:, None, None] * S) + beta[t, :, None, None] * k[t, :, :, None] * v[t, :, None]
        out.append(torch.einsum("nkv,nk->nv", S, q[t]))
    return torch.stack(out), S


def mamba_by_tokens(x, dt, A, b, c, D):
    """(out, last state) of one sequence, arXiv:2405.21060, section 7."""
    b, c = (each.repeat_interleave(N // G, 1) for each in (b, c))
    S, out = torch.zeros(N, V, K, dtype=torch.float64), []
    for t in range(len(x)):
        write = dt[t, :, None, None] * x[t, :, :, None] * b[t, :, None]
        S = (dt[t] * A).exp()[:, None, None] * S + write
        out.append(torch.einsum("npk,nk->np", S, c[t]) + D[:, None] * x[t])
    return torch.stack(out), S


def by_tokens(one_sequence, inputs, dout, dstate):
    """(out, state, gradients of sum(out dout) + sum(state dstate)), each sequence by itself, in float64."""
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    out, state, total = np.zeros(dout.shape), np.zeros(dstate.shape), 0.0
    for row, segments in enumerate(SEGMENT):
        for segment in dict.fromkeys(segments):
            [own] = np.nonzero(segments == segment)
            of_row, last = one_sequence(*(x if x.ndim == 1 else x[row, own] for x in leaves))
            out[row, own] = of_row.detach()
            total = total + (of_row * torch.tensor(dout[row, own])).sum()
        state[row] = last.detach()
        total = total + (last * torch.tensor(dstate[row])).sum()
    total.backward()
    return out, state, *(x.grad.numpy() for x in leaves)


KINDS = {
    "delta": (delta, delta_inputs, delta_by_tokens, (B, N, K, V)),
    "mamba": (mamba, mamba_inputs, mamba_by_tokens, (B, N, V, K)),
}


def relative(got, want):
    return np.abs(np.float64(got) - want).max() / np.abs(want).max()


@pytest.mark.sweep
@pytest.mark.parametrize("strong", [False, True], ids=["mild", "strong"])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_recurrence_of_each_sequence(kind, chunk, strong):
    module, draw, one_sequence, shape = KINDS[kind]
    inputs, rng = draw(strong), np.random.default_rng(2)
    dout, dstate = rng.normal(size=(B, T, N, V)).astype(np.float32), rng.normal(size=shape).astype(np.float32)

    @jax.jit
    def run(*inputs):
        (out, state), pull = jax.vjp(lambda *inputs: module.prefill(*inputs, SEGMENT, chunk), *inputs)
        return out, state, *pull((dout, dstate))

    for got, want in zip(run(*inputs), by_tokens(one_sequence, inputs, dout, dstate), strict=True):
        assert got.dtype == np.float32
        assert relative(got, want) < 1e-6


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_a_row_do_not_see_each_other(kind):
    module, draw, *_ = KINDS[kind]
    inputs = draw()
    tokens = [x.ndim > 1 for x in inputs]
    run = jax.jit(lambda *inputs: module.chunked(*inputs, SEGMENT))
    changed = [np.where((SEGMENT == 4).reshape(B, T, *[1] * (x.ndim - 2)), -3 * x, x) if many else x
               for x, many in zip(inputs, tokens, strict=True)]  # fmt: skip
    same = np.asarray(run(*inputs) == run(*changed)).all((2, 3))
    np.testing.assert_array_equal(same, SEGMENT != 4)
    of_fourth = lambda *inputs: jnp.sum(jnp.where((SEGMENT == 4)[..., None, None], run(*inputs), 0))
    grads = jax.jit(jax.grad(of_fourth, tuple(np.flatnonzero(tokens).tolist())))(*inputs)
    for grad in grads:
        assert not np.asarray(grad)[SEGMENT != 4].any() and np.asarray(grad)[SEGMENT == 4].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_after_a_prompt_continue_from_its_state(kind):
    module, draw, one_sequence, _ = KINDS[kind]
    inputs, lengths, more = draw(), np.array([37, 64]), 5
    want = by_tokens_of_rows(one_sequence, inputs, lengths + more)
    # Prompts are padded behind their ends; there beta = g = 0, or dt = 0, and the rest is anything.
    real = np.arange(80)[None] < lengths[:, None]
    padded = [x[:, :80] * real[..., None] if x.ndim == 3 else x[:, :80] if x.ndim > 1 else x for x in inputs]
    out, state = jax.jit(module.prefill)(*padded, np.ones((B, 80), np.int32))
    assert state.dtype == jnp.float32
    for row, length in enumerate(lengths):
        assert relative(out[row, :length], want[row][:length]) < 1e-6
    step = jax.jit(module.step)
    for t in range(more):
        state, out = step(state, *(x[np.arange(B), lengths + t] if x.ndim > 1 else x for x in inputs))
        for row, length in enumerate(lengths):
            assert relative(out[row], want[row][length + t]) < 2e-6


def by_tokens_of_rows(one_sequence, inputs, lengths):
    """The outputs of the first tokens of each row, one sequence each."""
    wide = [torch.tensor(x, dtype=torch.float64) for x in inputs]
    return [one_sequence(*(x if x.ndim == 1 else x[row, :n] for x in wide))[0].numpy() for row, n in enumerate(lengths)]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_inputs_are_computed_in_fp32(kind):
    module, draw, one_sequence, shape = KINDS[kind]
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in draw()]
    rounded = [np.asarray(x, np.float32) for x in narrow]

    @jax.jit
    def run(*inputs):
        (out, state), pull = jax.vjp(lambda *inputs: module.prefill(*inputs, SEGMENT), *inputs)
        return out, state, *pull((jnp.ones_like(out), jnp.zeros_like(state)))

    out, state, *grads = run(*narrow)
    want, want_state, *wanted = by_tokens(one_sequence, rounded, np.ones(out.shape), np.zeros(shape))
    assert relative(state, want_state) < 1e-6
    for got, exact in zip((out, *grads), (want, *wanted), strict=True):
        assert got.dtype == jnp.bfloat16
        assert relative(got, exact) < 2**-8
    first = lambda inputs: [x[:, 0] if x.ndim > 1 else x for x in inputs]
    state, out = module.step(jnp.zeros(shape, jnp.float32), *first(narrow))
    want_state, want = module.step(jnp.zeros(shape, jnp.float32), *first(rounded))
    assert (state.dtype, out.dtype) == (jnp.float32, jnp.bfloat16)
    assert relative(state, np.float64(want_state)) < 1e-6 and relative(out, np.float64(want)) < 2**-8


def test_the_delta_rule_of_transformers():
    q, k, v, beta, g = delta_inputs()
    repeated = [torch.tensor(np.repeat(x, N // G, 2)) for x in (q, k)]
    theirs = *repeated, *map(torch.tensor, (v, g, beta))
    out, state = jax.jit(delta.prefill)(q * K**-0.5, k, v, beta, g, np.ones_like(SEGMENT))
    for name in ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"):
        wanted = getattr(modeling_qwen3_next, name)(*theirs, output_final_state=True)
        for got, want in zip((out, state), wanted, strict=True):
            assert relative(got, want.double().numpy()) < 5e-6


def test_the_scan_of_transformers():
    x, dt, A, b, c, D = inputs = mamba_inputs()
    theirs = dict(zip(("hidden_states", "dt", "A", "B", "C", "D"), map(torch.tensor, inputs), strict=True))
    wanted = modeling_nemotron_h.mamba2_chunk_scan(**theirs, chunk_size=16, return_final_states=True)
    for got, want in zip(jax.jit(mamba.prefill)(*inputs, np.ones_like(SEGMENT)), wanted, strict=True):
        assert relative(got, want.double().numpy()) < 5e-6


def test_the_l2_norm_of_transformers():
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * 1e-3
    np.testing.assert_allclose(delta.l2_norm(x), modeling_qwen3_next.l2norm(torch.tensor(x), dim=-1, eps=1e-6), 1e-6)
    assert delta.l2_norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32


def gradients(kind):
    module, draw, *_ = KINDS[kind]
    inputs = draw()
    loss = lambda segment_BT, *inputs: jnp.sum(jnp.square(module.chunked(*inputs, segment_BT)))
    return jax.grad(loss, tuple(range(1, 1 + len(inputs)))), inputs


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_linear_in_the_row_and_no_loop_is_over_tokens(kind):
    fn, inputs = gradients(kind)

    def memory(T):
        shapes = [jax.ShapeDtypeStruct((1, T, *x.shape[2:]) if x.ndim > 1 else x.shape, x.dtype) for x in inputs]
        traced = jax.jit(fn).trace(jax.ShapeDtypeStruct((1, T), np.int32), *shapes)
        loops = [eqn.params["length"] for eqn in equations(traced.jaxpr.jaxpr) if eqn.primitive.name == "scan"]
        assert loops and max(loops) <= T // 32
        return traced.lower().compile().memory_analysis().temp_size_in_bytes

    half, whole = map(memory, (1024, 2048))
    tokens = sum(x.nbytes for x in inputs if x.ndim > 1) / (B * T)
    states = N * K * V * 4 / 32
    assert whole < 2.1 * half
    assert whole < 4 * 2048 * (tokens + states)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_heads_are_computed_where_they_are(kind):
    """Sharded over rows and heads, no device needs anything of another, but for sums of gradients over rows."""
    fn, inputs = gradients(kind)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = lambda x: NamedSharding(mesh, PartitionSpec(*(("dp", None, "tp") if x.ndim > 1 else ("tp",))))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)) for x in inputs]
    rows = jax.ShapeDtypeStruct((B, T), np.int32, sharding=NamedSharding(mesh, PartitionSpec("dp")))
    program = jax.jit(fn).lower(rows, *shapes).compile().as_text()
    assert not any(f"{name}(" in program for name in ("all-gather", "all-to-all", "collective-permute"))
    assert ("all-reduce(" in program) == (kind == "mamba")
    # A solver of LAPACK waits in XLA's pool for the same pool: two at once never end on two cores.
    assert "lapack" not in program and "custom-call" not in program


def test_the_names_of_a_layers_states_can_be_saved():
    """With the states saved, a rematerialised layer runs its scan over chunks once."""
    fn, inputs = gradients("delta")

    def loops(**how):
        out = jax.checkpoint(lambda *inputs: delta.chunked(*inputs, SEGMENT), **how)
        jaxpr = jax.make_jaxpr(jax.grad(lambda *inputs: jnp.sum(jnp.square(out(*inputs)))))(*inputs)
        return sum(eqn.primitive.name == "scan" for eqn in equations(jaxpr.jaxpr))

    assert loops() - loops(policy=jax.checkpoint_policies.save_only_these_names(recurrence.STATES)) == 2


def conv_inputs(width=W):
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return draw(B, T, 6), draw(6, width), draw(6)


def conv_of_torch(x_TC, weight_CW, bias_C):
    padded = torch.nn.functional.pad(torch.tensor(x_TC).double().T, (weight_CW.shape[1] - 1, 0))
    weight, bias = torch.tensor(weight_CW).double()[:, None], None if bias_C is None else torch.tensor(bias_C).double()
    return torch.nn.functional.conv1d(padded, weight, bias, groups=len(weight)).T.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("width, with_bias", [(W, True), (3, False), (1, True)])
def test_the_convolution_is_that_of_torch_on_each_sequence(width, with_bias):
    x, weight, bias = conv_inputs(width)
    bias = bias if with_bias else None
    out = jax.jit(conv.convolve)(x, weight, SEGMENT, bias)
    assert out.dtype == np.float32
    for row, segments in enumerate(SEGMENT):
        for segment in dict.fromkeys(segments):
            [own] = np.nonzero(segments == segment)
            np.testing.assert_allclose(out[row, own], conv_of_torch(x[row, own], weight, bias), atol=2e-6)


@pytest.mark.parametrize("width", [W, 1])
def test_a_convolution_continues_from_its_tail(width):
    x, weight, bias = conv_inputs(width)
    lengths = np.array([2, 40])  # shorter than the convolution, and not
    state = jax.jit(conv.tail, static_argnums=2)(x[:, :50], lengths, width)
    assert state.shape == (B, 6, width - 1)
    for t in range(5):
        out, state = jax.jit(conv.step)(x[np.arange(B), lengths + t], weight, state, bias)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(out[row], conv_of_torch(x[row, : length + t + 1], weight, bias)[-1], atol=2e-6)


@pytest.mark.slow
def test_a_convolution_of_bf16_sums_in_fp32():
    x, weight, bias = (jnp.asarray(each, jnp.bfloat16) for each in conv_inputs())
    out = jax.jit(conv.convolve)(x, weight, SEGMENT, bias)
    wide_x, wide_weight, wide_bias = (each.astype(jnp.float32) for each in (x, weight, bias))
    wide = jax.jit(conv.convolve)(wide_x, wide_weight, SEGMENT, wide_bias)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    one, state = conv.step(x[:, 3], weight, conv.tail(x, np.full(B, 3), W), bias)
    assert (one.dtype, state.dtype) == (jnp.bfloat16, jnp.bfloat16)
    alone = jax.jit(conv.convolve)(x, weight, np.ones_like(SEGMENT), bias)
    np.testing.assert_array_equal(one, alone[:, 3])
