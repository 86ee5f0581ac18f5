"""Matrix-wise optimiser directions, Muon and Adafactor, for stacked weights [..., out, in].

Only batched matmuls and means over the last axes: no axis is reshaped, so shardings are preserved.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # steep at zero: five steps bring small singular values near 1
RMS = 0.2  # about that of Adam's updates


def muon(momentum: float) -> optax.GradientTransformation:
    """Muon's direction: Nesterov momentum, orthogonalised, times 0.2 sqrt(max(out, in)) (arXiv:2502.16982).

    Its root mean square is about Adam's for any shape, so both share a learning rate and weight decay.
    """

    def one(x):  # layer by layer, to hold the products of one layer at a time
        ortho = jax.lax.map(orthogonalise, x) if x.ndim > 2 else orthogonalise(x)
        return RMS * max(x.shape[-2:]) ** 0.5 * ortho

    update = lambda updates, params=None: jax.tree.map(one, updates)

    return optax.chain(optax.trace(momentum, nesterov=True), optax.stateless(update))


def orthogonalise(x):
    """Approximates U V^T of each matrix U S V^T of x [..., out, in] by five Newton-Schulz steps (Muon, Jordan 2024).

    Singular values of at least 0.01 of the Frobenius norm end between 0.6 and 1.3; zeros stay zero.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class FactoredState(NamedTuple):
    """Running means of the squared gradient over the columns and over the rows; reduced axes have size 1."""

    step: jax.Array
    row: optax.Params
    column: optax.Params


def adafactor(axes: int) -> optax.GradientTransformation:
    """Adafactor's direction (arXiv:1804.04235, algorithms 4 to 6).

    A matrix's second moment is factored, beta2 = 1 - t^-0.8. The direction's root mean square is clipped to 1, then
    scaled by that of the weight, at least 1e-3.

    Args:
      axes: trailing axes of one weight: 2 for a matrix; 1 for a vector, whose moment is not factored.
    """
    last, down = tuple(range(-axes, 0)), tuple(range(-axes, -1))
    rms = lambda x: jnp.sqrt(jnp.mean(x**2, axis=last, keepdims=True))

    def init(params):
        squeezed = lambda over: jax.tree.map(lambda x: jnp.zeros_like(x).mean(over, keepdims=True), params)
        return FactoredState(jnp.zeros((), jnp.int32), squeezed(-1), squeezed(down))

    def update(updates, state, params=None):
        step = optax.safe_increment(state.step)
        new = step**-0.8
        mean = lambda over: lambda old, g: old + new * (jnp.mean(g**2 + 1e-30, axis=over, keepdims=True) - old)
        row = jax.tree.map(mean(-1), state.row, updates)
        column = jax.tree.map(mean(down), state.column, updates)

        def direction(g, r, c, x):
            u = g * jax.lax.rsqrt(r / jnp.mean(r, axis=down, keepdims=True)) * jax.lax.rsqrt(c)
            return u / jnp.maximum(1, rms(u)) * jnp.maximum(1e-3, rms(x))

        return jax.tree.map(direction, updates, row, column, params), FactoredState(step, row, column)

    return optax.GradientTransformation(init, update)
