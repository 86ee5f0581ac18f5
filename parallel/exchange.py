"""All-to-all of rows along a mesh axis with data-dependent counts."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

How = Literal["ragged", "padded"]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def exchange(x_PD, count_NN, from_NN, to_NN, R: int, axis: str, how: How | None = None):
    """All-to-all of rows: device s sends rows [from[s, d], from[s, d] + count[s, d]) of its x to device d, where they
    become rows [to[s, d], to[s, d] + count[s, d]) of the output, [R, D]; its other rows are zeros.

    Args:
      count_NN, from_NN, to_NN: i32, from device to device, replicated. What a device sends is in the order of the
        devices that receive it, what it receives in that of the senders, both without overlap.
      how: "ragged" sends just these rows, on TPUs and GPUs; "padded" sends as many rows to all devices, several
        times if some get more, on all platforms; None = padded on a CPU, else ragged, decided at lowering.
    """
    operands = x_PD, count_NN, from_NN, to_NN
    ragged, padded = (partial(f, R=R, axis=axis) for f in (_ragged, _padded))
    if how is None:
        return jax.lax.platform_dependent(*operands, cpu=padded, tpu=ragged, cuda=ragged, rocm=ragged)
    return {"ragged": ragged, "padded": padded}[how](*operands)


def _ragged(x_PD, count_NN, from_NN, to_NN, *, R: int, axis: str):
    me = jax.lax.axis_index(axis)
    return jax.lax.ragged_all_to_all(
        x_PD, jnp.zeros((R, x_PD.shape[1]), x_PD.dtype),
        from_NN[me], count_NN[me], to_NN[me], count_NN[:, me], axis_name=axis,
    )  # fmt: skip


def _padded(x_PD, count_NN, from_NN, to_NN, *, R: int, axis: str):
    me, P = jax.lax.axis_index(axis), len(x_PD)
    C = -(-max(P, R) // len(count_NN))  # rows for each device at a time
    at_C, at_R = jnp.arange(C)[None], jnp.arange(R)
    sender_R = jnp.searchsorted(to_NN[:, me], at_R, side="right") - 1
    row_R = at_R - to_NN[sender_R, me]  # within what the sender sends
    row_R = jnp.where((sender_R >= 0) & (row_R < count_NN[sender_R, me]), row_R, -1)

    def send(turn, y_RD):
        row_NC = turn * C + at_C
        row_NC = jnp.where(row_NC < count_NN[me][:, None], from_NN[me][:, None] + row_NC, P)
        got_NCD = jax.lax.all_to_all(_take(x_PD, row_NC), axis, 0, 0, tiled=True)
        place_R = jnp.where(row_R // C == turn, sender_R * C + row_R % C, got_NCD.shape[0] * C)
        return y_RD + _take(got_NCD.reshape(-1, got_NCD.shape[-1]), place_R)

    return jax.lax.fori_loop(0, -(-jnp.max(count_NN) // C), send, jnp.zeros((R, x_PD.shape[1]), x_PD.dtype))


def before(count_NN, dim: int):
    """The sum of the counts before each one along an axis."""
    return (jnp.cumsum(count_NN, dim) - count_NN).astype(jnp.int32)


def _take(x_PD, index):
    return x_PD.at[index].get(mode="fill", fill_value=0)


def _forward(x_PD, count_NN, from_NN, to_NN, R, axis, how):
    return exchange(x_PD, count_NN, from_NN, to_NN, R, axis, how), (count_NN, from_NN, to_NN, x_PD[:, :0])


def _backward(R, axis, how, kept, dy_RD):
    count_NN, from_NN, to_NN, like_P0 = kept
    dx_PD = exchange(dy_RD, count_NN.T, to_NN.T, from_NN.T, len(like_P0), axis, how)
    return dx_PD, None, None, None


exchange.defvjp(_forward, _backward)
