"""Recurrent layers in the engine: a chunk of a prompt, and a step of decoding."""

import jax.numpy as jnp

from ...models.layer import Recurrence, Recurrent
from ...models.layers import conv


def chunk(layer: Recurrent, before, length_R, states: dict) -> Recurrence:
    """The recurrence over right-padded chunks of prompts, [R, T, ...], from the states `before`, zero at the start of a
    prompt; those after the chunks are put into `states`."""

    def convolve(name, x_RTC, weight_CW, bias_C=None):
        seen_RXC = before[name].swapaxes(1, 2).astype(x_RTC.dtype)
        x_RLC = jnp.concatenate([seen_RXC, x_RTC], 1)
        W = weight_CW.shape[1]
        states[name] = conv.tail(x_RLC, length_R + W - 1, W)
        return conv.convolve(x_RLC, weight_CW, jnp.ones(x_RLC.shape[:2], jnp.int32), bias_C)[:, W - 1 :]

    def gate(x_RTN):
        real_RT = jnp.arange(x_RTN.shape[1])[None] < length_R[:, None]
        return jnp.where(real_RT[..., None], x_RTN, 0)

    def recur(name, rule, *inputs):
        segment_RT = jnp.ones(inputs[0].shape[:2], jnp.int32)
        out_RTNV, states[name] = rule.prefill(*inputs, segment_RT, state=before[name])
        return out_RTNV

    return Recurrence(layer, convolve, gate, recur)


def step(layer: Recurrent, before, active_S, states: dict) -> Recurrence:
    """The recurrence for one token of each slot, [S, 1, ...], from the states `before`; those of active slots after it
    are put into `states`, others are kept."""

    def keep(name, new):
        where = active_S.reshape(-1, *[1] * (new.ndim - 1))
        states[name] = jnp.where(where, new, before[name])

    def convolve(name, x_S1C, weight_CW, bias_C=None):
        y_SC, after_SCX = conv.step(x_S1C[:, 0], weight_CW, before[name], bias_C)
        keep(name, after_SCX)
        return y_SC[:, None]

    def recur(name, rule, *inputs):
        after, out_SNV = rule.step(before[name], *(x[:, 0] if x.ndim > 2 else x for x in inputs))
        keep(name, after)
        return out_SNV[:, None]

    return Recurrence(layer, convolve, lambda x_S1N: x_S1N, recur)
