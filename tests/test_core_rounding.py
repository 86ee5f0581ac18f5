"""Stochastic rounding: to one of the two neighbours, in expectation to the number itself, the same on any mesh."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from areax.core import rounding

DTYPES = {
    "bfloat16": (rounding.to_bfloat16, ml_dtypes.bfloat16),
    "float8": (rounding.to_float8, ml_dtypes.float8_e4m3fn),
}
COUNT = 400


def numbers():
    """Both signs, all magnitudes that float8 has, its largest, its smallest step and zero."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 64)) * 2.0 ** rng.integers(-10, 8, (8, 64))
    x[0, :6] = 448, -448, 0, 2.0**-9, 2.0**-11, -(2.0**-10)
    return np.clip(x, -448, 448).astype(np.float32)


def neighbours(x, dtype):
    """The largest number of the dtype that is at most x, and the smallest that is at least x."""
    every = np.arange(1 << 8 * np.dtype(dtype).itemsize, dtype=f"u{np.dtype(dtype).itemsize}").view(dtype)
    grid = np.unique(every.astype(np.float32)[np.isfinite(every.astype(np.float32))])
    return grid[np.searchsorted(grid, x, "right") - 1], grid[np.searchsorted(grid, x, "left")]


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_to_a_neighbour_and_right_on_average(name):
    (to, dtype), x = DTYPES[name], numbers()
    low, high = neighbours(x, dtype)
    draw = jax.jit(jax.vmap(lambda seed: to(jnp.asarray(x), seed).astype(jnp.float32)))
    got = np.asarray(draw(jnp.arange(COUNT)))
    assert np.all((got == low) | (got == high))
    up = np.where(high > low, (x - low) / np.where(high > low, high - low, 1), 0)  # the probability of the upper one
    deviation = (got.mean(0) - x) / np.where(high > low, high - low, 1) * np.sqrt(COUNT)
    assert np.all(np.abs(deviation) <= 5 * np.sqrt(up * (1 - up)) + 0.2)
    assert 0.7 < np.std(deviation[up > 0.1]) / np.sqrt(np.mean((up * (1 - up))[up > 0.1])) < 1.3


def test_numbers_that_are_not_finite_stay():
    x = jnp.asarray([np.inf, -np.inf, np.nan, 3e38], jnp.float32)
    got = np.asarray(rounding.to_bfloat16(x, 7).astype(jnp.float32))
    assert got[0] == np.inf and got[1] == -np.inf and np.isnan(got[2])


def test_random_bits_are_uniform_and_independent():
    bits = np.asarray(rounding.random_bits((300, 300), 3))
    other = np.asarray(rounding.random_bits((300, 300), 4))
    ones = np.unpackbits(bits.view(np.uint8)).reshape(300, 300, 32).mean((0, 1))
    assert np.abs(ones - 0.5).max() < 0.01
    pairs = (bits[1:], bits[:-1]), (bits[:, 1:], bits[:, :-1]), (bits, other)
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def test_small_updates_add_up():
    """A thousand updates of a hundredth of a step of bf16 move a weight by ten steps, which rounding to the nearest
    would not."""

    def one(i, x):
        return rounding.apply_updates(x, [jnp.full(2048, 2.0**-7 / 100)], i)

    [end] = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, one, x))([jnp.ones(2048, jnp.bfloat16)])
    assert end.dtype == jnp.bfloat16
    assert float(jnp.mean(end.astype(jnp.float32)) - 1) == pytest.approx(10 * 2.0**-7, rel=0.02)
    [wide] = rounding.apply_updates([jnp.ones(3)], [jnp.full(3, 1e-3)], 0)
    np.testing.assert_array_equal(wide, np.float32(1) + np.float32(1e-3))
