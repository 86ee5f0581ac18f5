"""Sums over a number of rounds that is known only at run time, differentiable in memory of one round."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(part, rounds, inputs, fixed):
    """part(0, inputs, fixed) + ... + part(rounds - 1, inputs, fixed), of at least one round, in fp32 or wider.

    Round 0 is differentiated as if it were alone, and rematerialisation policies apply to what it keeps. Later rounds
    keep nothing: the backward pass recomputes one at a time.

    Args:
      part: f(round, inputs, fixed) -> array.
      rounds: i32[]. If part communicates, the same on all devices that take part.
      inputs: a tree of float arrays.
      fixed: a tree of arrays without gradients.
    """
    return _add(lambda r: part(r, inputs, fixed), rounds, part(0, inputs, fixed))


def _forward(part, rounds, inputs, fixed):
    out, back = jax.vjp(lambda inputs: part(0, inputs, fixed), inputs)
    return _add(lambda r: part(r, inputs, fixed), rounds, out), (back, rounds, inputs, fixed)


def _backward(part, kept, dout):
    back, rounds, inputs, fixed = kept

    def gradients(r):
        _, back = jax.vjp(lambda inputs: part(r, inputs, fixed), inputs)
        return back(dout)[0]

    return None, _add(gradients, rounds, back(dout)[0]), None


total.defvjp(_forward, _backward)


def _add(part, rounds, first):
    """first + part(1) + ... + part(rounds - 1), trees of arrays, in the dtypes of first."""
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), first)
    more = lambda r, sums: jax.tree.map(jnp.add, sums, part(r))
    sums = jax.lax.fori_loop(1, rounds, more, wide)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, first)
