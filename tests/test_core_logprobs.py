"""The chunked primitive against float64 numpy, its gradients against full logits, and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import logprobs


def reference(hidden, head, target, temperature):
    """log-softmax, entropy and log-sum-exp in float64, as the textbook has them."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / np.broadcast_to(temperature, len(hidden))[:, None]
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    logp = logits - lse[:, None]
    return logp[np.arange(len(target)), target], -(np.exp(logp) * logp).sum(-1), lse


def data(A=37, D=16, V=101, seed=0):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(A, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32)
    return hidden, head, rng.integers(0, V, A).astype(np.int32)


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", [None, 8, 37, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "each"])
def test_matches_float64(chunk, temperature):
    hidden, head, target = data()
    if temperature == "each":
        temperature = np.linspace(0.5, 2, len(target)).astype(np.float32)
    got = logprobs.from_hidden(hidden, head, target, temperature=temperature, chunk=chunk)
    for a, b in zip(got[:3], reference(hidden, head, target, temperature), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)
    assert got[3] is None


def test_gradients_equal_those_of_full_logits():
    hidden, head, target = data()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(3, len(target))), jnp.float32)

    def chunked(hidden, head):
        out = logprobs.from_hidden(hidden, head, target, temperature=0.7, chunk=8)
        return sum(jnp.sum(w * x) for w, x in zip(weight, out[:3], strict=True))

    def full(hidden, head):
        logits = hidden @ head.T / 0.7
        logp = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        picked = logp[np.arange(len(target)), target]
        return sum(jnp.sum(w * x) for w, x in zip(weight, (picked, entropy, jax.nn.logsumexp(logits, -1)), strict=True))

    for a, b in zip(jax.grad(chunked, (0, 1))(hidden, head), jax.grad(full, (0, 1))(hidden, head), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("chunk", [None, 8])
def test_the_tokens_that_the_sampler_kept_are_all_there_are(chunk):
    """Against float64 over the kept columns alone, and gradients against full logits; some rows keep all."""
    hidden, head, target = data()
    rng, A, V = np.random.default_rng(3), len(target), len(head)
    kept = np.full((A, 9), -1, np.int32)
    columns = [np.arange(V)] * A
    for i in range(0, A, 2):
        columns[i] = np.union1d(rng.integers(0, V, rng.integers(0, 9)), target[i])
        kept[i, : len(columns[i])] = columns[i]
    weight = rng.normal(size=(3, A)).astype(np.float32)

    def loss(hidden, head):
        out = logprobs.from_hidden(hidden, head, target, temperature=0.7, kept_AK=kept, chunk=chunk)
        return sum(jnp.sum(w * x) for w, x in zip(weight, out[:3], strict=True)), out

    def full(hidden, head):
        outside = np.ones((A, V), bool)
        for i, here in enumerate(columns):
            outside[i, here] = False
        logits = jnp.where(outside, -jnp.inf, hidden @ head.T / 0.7)
        logp = jnp.where(outside, 0, jax.nn.log_softmax(logits))
        entropy = -jnp.sum(jnp.where(outside, 0, jnp.exp(logp) * logp), -1)
        sums = logp[np.arange(A), target], entropy, jax.nn.logsumexp(logits, -1)
        return sum(jnp.sum(w * x) for w, x in zip(weight, sums, strict=True))

    gradient, got = jax.grad(loss, (0, 1), has_aux=True)(hidden, head)
    for i, here in enumerate(columns):
        one = slice(i, i + 1)
        wanted = reference(hidden[one], head[here], np.searchsorted(here, target[one]), 0.7)
        for a, b in zip(got[:3], wanted, strict=True):
            np.testing.assert_allclose(a[i], b[0], atol=2e-5, rtol=1e-5)
    for a, b in zip(gradient, jax.grad(full, (0, 1))(hidden, head), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_chunks_of_tokens_that_nobody_needs_cost_nothing():
    """Needed tokens share chunks, wherever they are; others get zeros and no gradient."""
    hidden, head, target = data(A=64)
    needed = np.random.default_rng(2).random(64) < 0.2
    n, seen = int(needed.sum()), []
    top = lambda logits_CV, target_C, given: (
        jax.debug.callback(lambda t: seen.append(t.shape), target_C), logits_CV.max(-1),
    )[1]  # fmt: skip

    def of(hidden, head, needed_A):
        return logprobs.from_hidden(hidden, head, target, needed_A=needed_A, chunk=8, per_chunk=top)

    def loss(hidden, head, needed_A):
        logp, entropy, lse, most = of(hidden, head, needed_A)
        return jnp.sum(jnp.where(needed, 2 * logp - entropy + 0.3 * lse + 0.1 * most, 0))

    got = jax.jit(of)(hidden, head, needed)
    jax.effects_barrier()
    assert len(seen) == -(-n // 8) < 8
    for a, b in zip(got, of(hidden, head, None), strict=True):
        np.testing.assert_array_equal(a, np.where(needed, b, 0))
    for a, b in zip(*(jax.grad(loss, (0, 1))(hidden, head, x) for x in (needed, None)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.slow
def test_small_gradients_survive_half_precision():
    """Of a mean over a million tokens; fp16 has no room for what most logits get of it."""
    hidden, head, target = data(A=64, D=64, V=512)
    scale = 1e-6

    def loss(hidden, dtype):
        return scale * jnp.sum(logprobs.from_hidden(hidden.astype(dtype), head, target, chunk=16)[0])

    wanted = jax.grad(loss)(jnp.asarray(hidden), "float32")
    for dtype, atol in (("float16", 0.08), ("bfloat16", 0.02)):
        got = jax.grad(loss)(jnp.asarray(hidden), dtype)
        assert jnp.linalg.norm(got - wanted) < atol * jnp.linalg.norm(wanted)


def test_per_chunk_sees_whole_rows():
    hidden, head, target = data()
    top = lambda logits_CV, target_C, given: jax.lax.top_k(logits_CV, 3)[1]
    got = logprobs.from_hidden(hidden, head, target, chunk=8, per_chunk=top)[3]
    np.testing.assert_array_equal(got, np.argsort(-(hidden @ head.T), -1, kind="stable")[:, :3])


@pytest.mark.slow
def test_memory_is_bounded_by_the_chunk_size():
    A, D, V = 1024, 32, 8192
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((A, D), "float32"), ((V, D), "float32"), ((A,), "int32"))]
    loss = lambda h, w, t, chunk: jnp.sum(logprobs.from_hidden(h, w, t, chunk=chunk)[0])

    def temporaries(chunk):
        grad = jax.jit(jax.grad(lambda h, w, t: loss(h, w, t, chunk), (0, 1)))
        return grad.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    full = A * V * 4
    assert temporaries(64) < 0.3 * full < temporaries(A)


@pytest.mark.slow
def test_bf16_hidden_gives_an_fp32_head_gradient():
    hidden, head, target = data(A=512)
    loss = lambda w, h: jnp.sum(logprobs.from_hidden(h, w, target, chunk=16)[0])
    exact = jax.grad(loss)(head, hidden)
    got = jax.grad(loss)(head, jnp.asarray(hidden, jnp.bfloat16))
    assert got.dtype == jnp.float32
    assert float(jnp.abs(got - exact).max() / jnp.abs(exact).max()) < 2e-2
