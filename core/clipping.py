"""Clipping with a defined gradient at the bounds."""

import jax.numpy as jnp

BOUND = 20.0  # of a log ratio


def clip(x, low, high):
    """x within [low, high]; the gradient is 1 within and at the bounds, and 0 outside.

    That of `torch.clamp` before torch 2.14, for which the losses of the papers were written. At a bound `jnp.clip`
    passes half of it and later releases of torch pass none: with a clip range of 0 the step of every fresh token,
    whose ratio is exactly 1, would be halved (PPO takes the smaller of two equal terms, one of them clipped).
    """
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def bounded_log(log_BT):
    """A log ratio clipped to [-20, 20]: one faulty token must not overflow the whole step."""
    return clip(log_BT, -BOUND, BOUND)


def bounded_exp(log_BT):
    """exp of a `bounded_log`, without gradient outside its bounds."""
    return jnp.exp(bounded_log(log_BT))
