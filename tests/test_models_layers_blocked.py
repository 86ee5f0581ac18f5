"""Products with weights in blocks against numpy; what they need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import quantised
from areax.models.layers import blocked, native
from areax.models.layers.linear import linear

S, D, F = 11, 192, 77  # rows for which the compiled code has several loops, and an incomplete last block
KINDS = {
    "fp32": lambda w: w,
    "bf16": lambda w: w.astype(jnp.bfloat16),
    "int8": lambda w: quantised.quantise(w, "int8"),
    "nf4": lambda w: quantised.quantise(w, "nf4"),
}
ACTIVE = np.array([True, False, True, True, False, True, True, True, True, False, True])


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    """(the weight as numpy has it, in blocks, rows, their products)."""
    kept = KINDS[request.param](jnp.asarray(drawn(0, F, D)))
    plain = quantised.dequantise(kept) if isinstance(kept, quantised.QuantisedWeight) else kept
    w, x = jax.jit(blocked.blocks)(kept), jnp.asarray(drawn(1, S, D))
    return np.asarray(plain, np.float64), w, x, jax.jit(blocked.product)(x, w)


def test_they_are_those_of_the_numbers_that_a_weight_stands_for(case):
    plain, _, x, y = case
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ plain.T, atol=3e-5)


def test_a_row_has_the_same_bits_alone_and_with_any_others(case, compiled):
    _, w, x, y = case
    for n in (1, 2, 3, 7):
        np.testing.assert_array_equal(jax.jit(blocked.product)(x[S - n :], w), y[S - n :])


@pytest.mark.parametrize("rows", [1, 13, 64, 131])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "nf4"])
def test_rows_in_bf16_and_many_rows_have_their_bits_too(kind, rows, compiled):
    kept, x = KINDS[kind](jnp.asarray(drawn(0, F, D))), jnp.asarray(drawn(1, 131, D)).astype(jnp.bfloat16)
    w, product = jax.jit(blocked.blocks)(kept), jax.jit(blocked.product)
    plain = quantised.dequantise(kept) if kind == "nf4" else kept
    y = product(x, w)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ np.asarray(plain, np.float64).T, atol=6e-5)
    np.testing.assert_array_equal(product(x[-rows:], w), y[-rows:])


def test_a_weight_in_bf16_may_have_an_odd_number_of_entries():
    w, x = jnp.asarray(drawn(0, F, 7)).astype(jnp.bfloat16), jnp.asarray(drawn(1, S, 7))
    np.testing.assert_allclose(blocked.product(x, blocked.blocks(w)), x @ w.astype(jnp.float32).T, atol=1e-5)


def test_rows_that_are_not_active_are_zero_and_others_keep_their_bits(case, compiled):
    _, w, x, y = case
    x = jnp.where(ACTIVE[:, None], x, jnp.nan)
    made = jax.jit(blocked.product)(x, blocked.of_rows(w, ACTIVE))
    np.testing.assert_array_equal(made, np.where(ACTIVE[:, None], y, 0))


def test_a_linear_layer_multiplies_by_them_in_its_dtype(case):
    _, w, x, y = case
    bias = jnp.arange(F, dtype=jnp.float32)
    np.testing.assert_array_equal(linear(x[None], w, bias)[0], y + bias[None])
    assert linear(x.astype(jnp.bfloat16), w).dtype == jnp.bfloat16


def test_several_weights_are_multiplied_in_one_call(case):
    _, w, x, y = case
    other = blocked.blocks(jnp.asarray(drawn(4, 40, D)))
    both = blocked.of_rows([w, other, w], ACTIVE)
    made = jax.jit(blocked.products)(x, both)
    for one, weight in zip(made, both, strict=True):
        np.testing.assert_array_equal(one, jax.jit(blocked.product)(x, weight))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_silu_products_are_rounded_once(dtype, compiled, monkeypatch):
    gate, up = (jnp.where(ACTIVE[:, None], 9 * drawn(seed, S, F), jnp.nan).astype(dtype) for seed in (4, 5))
    exact = np.asarray(gate, np.float64) / (1 + np.exp(-np.asarray(gate, np.float64))) * np.asarray(up, np.float64)
    near = dict(rtol=2**-8 if dtype == jnp.bfloat16 else 4e-7)
    made = jax.jit(blocked.silu_product)(gate, up, ACTIVE)
    assert made.dtype == dtype
    np.testing.assert_allclose(made, np.where(ACTIVE[:, None], exact, 0), **near)
    np.testing.assert_array_equal(jax.jit(blocked.silu_product)(gate[-1:], up[-1:]), made[-1:])
    monkeypatch.setattr(native, "ready", lambda: False)
    np.testing.assert_allclose(blocked.silu_product(gate[ACTIVE], up[ACTIVE]), exact[ACTIVE], **near)


def test_rows_of_a_weight_are_read_from_its_blocks():
    for dtype in (jnp.float32, jnp.bfloat16):
        w, index = jnp.asarray(drawn(0, F, D)).astype(dtype), jnp.array([[3, 76], [0, 31]])
        np.testing.assert_array_equal(blocked.rows(blocked.blocks(w), index, dtype), w[index])


def test_many_threads_give_the_same_bits():
    x, w = jnp.asarray(drawn(2, 3, 512)), blocked.blocks(jnp.asarray(drawn(3, 4096, 512)))
    f = jax.jit(blocked.product)
    first = f(x, w)
    for _ in range(20):
        np.testing.assert_array_equal(f(x, w), first)


def test_without_a_compiler_xla_multiplies(case, monkeypatch):
    _, w, x, y = case
    monkeypatch.setattr(native, "ready", lambda: False)
    np.testing.assert_allclose(jax.jit(lambda x, w: blocked.product(x, w))(x, w), y, atol=3e-5)
