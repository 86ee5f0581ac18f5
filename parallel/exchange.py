"""All-to-all of rows along a mesh axis with data-dependent counts."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

How = Literal["ragged", "padded"]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange(x_PD, count_NN, R: int, axis: str, how: How | None = None):
    """All-to-all of rows: returns those sent to this device, [R, D], from device 0, from device 1, ..., then zeros.

    Args:
      x_PD: this device's rows: count[me, 0] for device 0, count[me, 1] for device 1, ...; rows after them are not sent.
      count_NN: number of rows from device to device, replicated.
      R: capacity of the output; at least the rows received.
      how: "ragged" sends just these rows, on TPUs and GPUs; "padded" pads to the maximum per device, on all platforms;
        None = padded on a CPU, else ragged, decided at lowering.
    """
    operands = x_PD, count_NN
    ragged, padded = (partial(f, R=R, axis=axis) for f in (_ragged, _padded))
    if how is None:
        return jax.lax.platform_dependent(*operands, cpu=padded, tpu=ragged, cuda=ragged, rocm=ragged)
    return {"ragged": ragged, "padded": padded}[how](*operands)


def _ragged(x_PD, count_NN, *, R: int, axis: str):
    me = jax.lax.axis_index(axis)
    return jax.lax.ragged_all_to_all(
        x_PD, jnp.zeros((R, x_PD.shape[1]), x_PD.dtype),
        _before(count_NN, 1)[me], count_NN[me], _before(count_NN, 0)[me], count_NN[:, me], axis_name=axis,
    )  # fmt: skip


def _padded(x_PD, count_NN, *, R: int, axis: str):
    me = jax.lax.axis_index(axis)
    P, C = len(x_PD), min(len(x_PD), R)
    at_C = jnp.arange(C)[None]
    from_NC = jnp.where(at_C < count_NN[me][:, None], _before(count_NN, 1)[me][:, None] + at_C, P)
    got_NCD = jax.lax.all_to_all(_take(x_PD, from_NC), axis, 0, 0, tiled=True)
    at_R, start_N = jnp.arange(R), _before(count_NN, 0)[:, me]
    source_R = jnp.searchsorted(start_N + count_NN[:, me], at_R, side="right")
    place_R = source_R * C + at_R - start_N.at[source_R].get(mode="clip")
    return _take(got_NCD.reshape(-1, got_NCD.shape[-1]), jnp.where(source_R < len(start_N), place_R, len(start_N) * C))


def _before(count_NN, dim: int):
    return (jnp.cumsum(count_NN, dim) - count_NN).astype(jnp.int32)


def _take(x_PD, index):
    return x_PD.at[index].get(mode="fill", fill_value=0)


def _forward(x_PD, count_NN, R, axis, how):
    return exchange(x_PD, count_NN, R, axis, how), (count_NN, x_PD[:, :0])


def _backward(R, axis, how, kept, dy_RD):
    count_NN, like_P0 = kept
    return exchange(dy_RD, count_NN.T, len(like_P0), axis, how), None


exchange.defvjp(_forward, _backward)
