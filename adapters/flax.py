"""A flax.nnx module around a model's functions."""

from __future__ import annotations

import jax
from flax import nnx

from .. import models

RUN = models.Run()


class Model(nnx.Module):
    """A model of any family with its weights as `nnx.Param`s, for `nnx.split`, `nnx.grad`, `nnx.jit` and optimisers.

    Shares arrays with `params` instead of copying them.
    """

    def __init__(self, config, params, run: models.Run = RUN):
        self.config = config
        self.run = run
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    def __call__(self, token_BT, position_BT=None, segment_BT=None):
        """Next-token logits, f32[B, T, V]; see `models.forward`."""
        return models.forward(
            params(self), token_BT, config=self.config, position_BT=position_BT, segment_BT=segment_BT, run=self.run
        )


def params(model: Model):
    """The parameter tree of a module, for areax's functions and `hf.save`."""
    return jax.tree.map(lambda p: p[...], model.weights, is_leaf=lambda x: isinstance(x, nnx.Param))
