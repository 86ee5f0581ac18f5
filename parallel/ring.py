"""Ring attention (arXiv:2310.01889): keys and values are passed from device to device, queries stay.

Positions are in zig-zag order: of 2n equal pieces of a row, device i has pieces i and 2n - 1 - i. This balances the
work, half a block per turn: only the first piece of a lower device's keys is visible, and only the last piece of its
own queries attends to a higher device's keys.
"""

import jax
import jax.numpy as jnp
import numpy as np


def order(length: int, devices: int) -> np.ndarray:
    """Zig-zag order: slot p of a row holds position order[p].

    Raises:
      ValueError: the length is not divisible by 2 x devices.
    """
    if length % (2 * devices):
        raise ValueError(f"ring attention: row length must be a multiple of 2 x cp = {2 * devices}, got {length}")
    pieces = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([pieces[[i, 2 * devices - 1 - i]].reshape(-1) for i in range(devices)])


def attention(forward, backward, keep, axis: str, along: tuple[int, int] = (3, 2)):
    """Returns a function of each device's `q_BKGTH, k_BKTH, v_BKTV, where` that attends over the whole ring.

    It returns (out_BKGTV, lse_BKGT1): the log-sum-exp is that of all scores of a query, and has a gradient.

    Gradients of keys and values are passed along with them, so memory is linear in one device's positions.

    Args:
      forward: one block, `(q, k, v, here, there, aligned=) -> (out_BKGTV, lse_BKGT1)`, where `here` and `there` are
        (segment_BT, index_BT) of queries and keys.
      backward: one block, `(q, k, v, here, there, lse, inner, dout, aligned=) -> (dq, dk, dv)`; inner is the sum over V
        of dout * out, less the gradient of lse.
      keep: names the backward pass's residuals for rematerialisation policies.
      along: axis of positions in arrays of queries, outputs and log-sum-exps, and in keys and values, as here by
        default. The axes may be in another order.
    """

    of_queries, of_keys = along

    @jax.custom_vjp
    def ring(q_BKGTH, k_BKTH, v_BKTV, where):
        return run(q_BKGTH, k_BKTH, v_BKTV, where)[0]

    def run(q, k, v, where):
        def lower(k, v, there):
            return wide(forward(q, first(k, of_keys), first(v, of_keys), where, first(there, 1), aligned=False))

        def higher(k, v, there):
            out, lse = wide(forward(last(q, of_queries), k, v, last(where, 1), there, aligned=False))
            return behind(out, of_queries), behind(lse, of_queries, -jnp.inf)

        def turn(r, carry):
            travelling, out, lse = carry
            travelling = send(travelling, axis)
            new, new_lse = jax.lax.cond(from_lower(r, axis), lower, higher, *travelling)
            total = jnp.logaddexp(lse, new_lse)
            return travelling, out * jnp.exp(lse - total) + new * jnp.exp(new_lse - total), total

        start = (k, v, where), *wide(forward(q, k, v, where, where, aligned=True))
        _, out, lse = jax.lax.fori_loop(1, jax.lax.axis_size(axis), turn, start)
        out, lse = keep(out.astype(q.dtype)), keep(lse)
        return (out, lse), (q, k, v, where, out, lse)

    def gradients(kept, given):
        q, k, v, where, out, lse = kept
        dout, dlse = given
        inner = jnp.sum(dout.astype(lse.dtype) * out, -1, keepdims=True) - dlse

        def lower(k, v, there):
            block = q, first(k, of_keys), first(v, of_keys), where, first(there, 1)
            dq, dk, dv = backward(*block, lse, inner, dout, aligned=False)
            return dq, ahead(dk, of_keys), ahead(dv, of_keys)

        def higher(k, v, there):
            block = last(q, of_queries), k, v, last(where, 1), there
            dq, dk, dv = backward(
                *block, last(lse, of_queries), last(inner, of_queries), last(dout, of_queries), aligned=False
            )
            return behind(dq, of_queries), dk, dv

        def turn(r, carry):
            travelling, grads, dq = carry
            travelling, grads = send((travelling, grads), axis)
            more, *rest = jax.lax.cond(from_lower(r, axis), lower, higher, *travelling)
            return travelling, jax.tree.map(jnp.add, grads, tuple(rest)), dq + more

        dq, *grads = backward(q, k, v, where, where, lse, inner, dout, aligned=True)
        start = (k, v, where), tuple(grads), dq
        _, grads, dq = jax.lax.fori_loop(1, jax.lax.axis_size(axis), turn, start)
        dk, dv = send(grads, axis)  # back to their own device
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    ring.defvjp(run, gradients)
    return ring


def send(tree, axis: str):
    """Sends arrays to the next device of the ring and receives those of the previous one."""
    n = jax.lax.axis_size(axis)
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]), tree)


def from_lower(turn, axis: str):
    """Whether the keys received in this turn belong to a device with a lower index."""
    return jax.lax.axis_index(axis) >= turn


def wide(block):
    """Casts the output of a block to the dtype of its log-sum-exp."""
    out, lse = block
    return out.astype(lse.dtype), lse


def first(tree, axis: int):
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, x.shape[axis] // 2, axis=axis), tree)


def last(tree, axis: int):
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, x.shape[axis] // 2, None, axis=axis), tree)


def ahead(x, axis: int):
    """Pads x with zeros after it, to twice its size."""
    return jnp.concatenate([x, jnp.zeros_like(x)], axis)


def behind(x, axis: int, value=0.0):
    """Pads x with `value` before it, to twice its size."""
    return jnp.concatenate([jnp.full_like(x, value), x], axis)
