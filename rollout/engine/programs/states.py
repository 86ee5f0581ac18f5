"""Recurrent layers in the engine: a chunk of a prompt, and a step of decoding of one or more tokens."""

import jax
import jax.numpy as jnp

from ....models.layer import Recurrence, Recurrent
from ....models.layers import conv


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


def step(layer: Recurrent, before, states: dict) -> Recurrence:
    """The recurrence for Q tokens of each slot, [S, Q, ...], from the states `before`; those after each of them,
    [Q, S, ...], are put into `states`."""

    def convolve(name, x_SQC, weight_CW, bias_C=None):
        one = lambda state_SCX, x_SC: conv.step(x_SC, weight_CW, state_SCX, bias_C)[::-1]
        states[name], y_SQC = _each(one, before[name], x_SQC)
        return y_SQC

    def recur(name, rule, *inputs):
        def one(state, *x_S):
            own = iter(x_S)
            return rule.step(state, *(next(own) if x.ndim > 2 else x for x in inputs))

        states[name], out_SQNV = _each(one, before[name], *(x for x in inputs if x.ndim > 2))
        return out_SQNV

    return Recurrence(layer, convolve, lambda x_SQN: x_SQN, recur)


def _each(one, state, *x_SQ):
    """(the state after each token, what it gave), for `one(state, *x_S) -> (state, y_S)`: a loop, so that a token gets
    the same bits at any place."""
    if x_SQ[0].shape[1] == 1:
        state, y_S = one(state, *(x[:, 0] for x in x_SQ))
        return state[None], y_S[:, None]

    def body(state, x_S):
        state, y_S = one(state, *x_S)
        return state, (state, y_S)

    _, (after_QS, y_QS) = jax.lax.scan(body, state, tuple(jnp.moveaxis(x, 1, 0) for x in x_SQ))
    return after_QS, jnp.moveaxis(y_QS, 0, 1)


def accepted(held: list, after: dict[int, dict], count_S) -> list:
    """The memory (see `pool`) with the states of recurrent layers after the first `count` of the tokens that made
    `after`, {layer: {name: states after each}}; where it is 0 they stay."""

    def choose(state, after_QS):
        for q, new in enumerate(after_QS):
            state = jnp.where((count_S > q).reshape(-1, *[1] * (new.ndim - 1)), new, state)
        return state

    layer = lambda now, after: {name: choose(now[name], after_QS) for name, after_QS in after.items()}
    return [(layer(own[0], after[i]), own[1]) if i in after else own for i, own in enumerate(held)]
