"""Ring attention (arXiv:2310.01889): keys and values travel from device to device, queries stay where they are.

Positions are in zig-zag order: of 2n equal pieces of a row, device i has the pieces i and 2n - 1 - i. Then every device
has the same work, half a block a turn: of keys from a lower device only the first piece is visible, and only the last
piece of its own queries sees keys from a higher device.
"""

import jax
import jax.numpy as jnp
import numpy as np


def order(length: int, devices: int) -> np.ndarray:
    """Zig-zag order: place p of a row holds position order[p].

    Raises:
      ValueError: a length that does not divide by 2 x devices.
    """
    if length % (2 * devices):
        raise ValueError(
            f"ring attention: the length of a row must be a multiple of 2 x cp = {2 * devices}, got {length}"
        )
    pieces = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([pieces[[i, 2 * devices - 1 - i]].reshape(-1) for i in range(devices)])


def attention(forward, backward, keep, axis: str):
    """A function of each device's `q_BKGTH, k_BKTH, v_BKTH, where` whose result attends over the whole ring.

    Gradients of keys and values travel along with them, so that memory is linear in one device's positions.

    Args:
      forward: one block, `(q, k, v, here, there, own=) -> (out_BKGTH, lse_BKGT1)`, where `here` and `there` are
        (segment_BT, index_BT) of queries and keys.
      backward: one block, `(q, k, v, here, there, lse, inner, dout, own=) -> (dq, dk, dv)`.
      keep: marks what the backward pass needs, for rematerialisation policies.
    """

    @jax.custom_vjp
    def ring(q_BKGTH, k_BKTH, v_BKTH, where):
        return run(q_BKGTH, k_BKTH, v_BKTH, where)[0]

    def run(q, k, v, where):
        def lower(k, v, there):
            return wide(forward(q, first(k, 2), first(v, 2), where, first(there, 1), own=False))

        def higher(k, v, there):
            out, lse = wide(forward(last(q, 3), k, v, last(where, 1), there, own=False))
            return behind(out, 3), behind(lse, 3, -jnp.inf)

        def turn(r, carry):
            travelling, out, lse = carry
            travelling = send(travelling, axis)
            new, new_lse = jax.lax.cond(from_lower(r, axis), lower, higher, *travelling)
            total = jnp.logaddexp(lse, new_lse)
            return travelling, out * jnp.exp(lse - total) + new * jnp.exp(new_lse - total), total

        start = (k, v, where), *wide(forward(q, k, v, where, where, own=True))
        _, out, lse = jax.lax.fori_loop(1, jax.lax.axis_size(axis), turn, start)
        out, lse = keep(out.astype(q.dtype)), keep(lse)
        return out, (q, k, v, where, out, lse)

    def gradients(kept, dout):
        q, k, v, where, out, lse = kept
        inner = jnp.sum(dout.astype(lse.dtype) * out, -1, keepdims=True)

        def lower(k, v, there):
            block = q, first(k, 2), first(v, 2), where, first(there, 1)
            dq, dk, dv = backward(*block, lse, inner, dout, own=False)
            return dq, ahead(dk, 2), ahead(dv, 2)

        def higher(k, v, there):
            block = last(q, 3), k, v, last(where, 1), there
            dq, dk, dv = backward(*block, last(lse, 3), last(inner, 3), last(dout, 3), own=False)
            return behind(dq, 3), dk, dv

        def turn(r, carry):
            travelling, grads, dq = carry
            travelling, grads = send((travelling, grads), axis)
            more, *rest = jax.lax.cond(from_lower(r, axis), lower, higher, *travelling)
            return travelling, jax.tree.map(jnp.add, grads, tuple(rest)), dq + more

        dq, *grads = backward(q, k, v, where, where, lse, inner, dout, own=True)
        start = (k, v, where), tuple(grads), dq
        _, grads, dq = jax.lax.fori_loop(1, jax.lax.axis_size(axis), turn, start)
        dk, dv = send(grads, axis)  # home again
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    ring.defvjp(run, gradients)
    return ring


def send(tree, axis: str):
    """To the next device of the ring, from the one before."""
    n = jax.lax.axis_size(axis)
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]), tree)


def from_lower(turn, axis: str):
    """Whether what arrived in this turn set out from a device with a lower number."""
    return jax.lax.axis_index(axis) >= turn


def wide(block):
    """The output of a block in the dtype of its log-sum-exp."""
    out, lse = block
    return out.astype(lse.dtype), lse


def first(tree, axis: int):
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, x.shape[axis] // 2, axis=axis), tree)


def last(tree, axis: int):
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, x.shape[axis] // 2, None, axis=axis), tree)


def ahead(x, axis: int):
    """x as the first half of an array of zeros."""
    return jnp.concatenate([x, jnp.zeros_like(x)], axis)


def behind(x, axis: int, value=0.0):
    """x as the last half of an array of that value."""
    return jnp.concatenate([jnp.full_like(x, value), x], axis)
