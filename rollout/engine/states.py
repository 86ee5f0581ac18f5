"""Recurrent layers in the engine: the state after a prompt, and a step of decoding."""

import jax.numpy as jnp

from ...models.layer import Recurrence, Recurrent
from ...models.layers import conv


def after_prompts(layer: Recurrent, length_P, segment_PT, states: dict) -> Recurrence:
    """The recurrence over right-padded prompts; puts their states, [P, ...] by name, into `states`."""
    real_PT = jnp.arange(segment_PT.shape[1])[None] < length_P[:, None]

    def convolve(name, x_PTC, weight_CW, bias_C=None):
        states[name] = conv.tail(x_PTC, length_P, weight_CW.shape[1])
        return conv.convolve(x_PTC, weight_CW, segment_PT, bias_C)

    def gate(x_PTN):
        return jnp.where(real_PT[..., None], x_PTN, 0)

    def recur(name, rule, *inputs):
        out_PTNV, states[name] = rule.prefill(*inputs, segment_PT)
        return out_PTNV

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
