"""`@shaped` speaks in sentences."""

import jax.numpy as jnp
import pytest

from areax.core.shapes import shaped


@shaped
def f(x_BT, y_BT, w_T=None, *, scale=1.0):
    return x_BT


def test_agreement_is_checked():
    x = jnp.zeros((2, 5))
    f(x, x)
    f(x[None], x[None])
    f(x, x, jnp.zeros(5), scale=3)
    with pytest.raises(ValueError, match="f: T is 5 in x_BT but 4 in y_BT"):
        f(x, x[:, :4])
    with pytest.raises(ValueError, match="f: x_BT needs axes BT, got shape"):
        f(x[0], x)
    with pytest.raises(ValueError, match="front"):
        f(x[None], x)
