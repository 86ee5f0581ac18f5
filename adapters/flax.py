"""Flax modules around a model's functions: `Model` of nnx, and `LinenModel`."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import linen, nnx

from .. import models
from ..core import param

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


def optimizer(model: Model, chain: optax.GradientTransformation) -> nnx.Optimizer:
    """An `nnx.Optimizer` by an optax chain that knows the parameter tree, such as those of `optim.make_optimizer`."""
    tree = jax.tree.structure(params(model))
    plain = lambda state: jax.tree.unflatten(tree, jax.tree.leaves(state))

    def update(gradient, state, weights=None):
        changes, state = chain.update(plain(gradient), state, plain(weights))
        return jax.tree.unflatten(jax.tree.structure(gradient), jax.tree.leaves(changes)), state

    return nnx.Optimizer(
        model, optax.GradientTransformation(lambda state: chain.init(plain(state)), update), wrt=nnx.Param
    )


class LinenModel(linen.Module):
    """A model of any family as a `linen` module, whose collection "params" is areax's parameter tree.

    `LinenModel(config).apply({"params": params}, token_BT)` takes the parameters of `hf.load`; `init` draws new ones.
    """

    config: Any
    run: models.Run = RUN

    @linen.compact
    def __call__(self, token_BT, position_BT=None, segment_BT=None):
        """Next-token logits, f32[B, T, V]; see `models.forward`."""
        table = models.table(self.config)
        weights = {name: self.param(name, _init, table, name) for name in param.leaves(table)}
        return models.forward(
            weights, token_BT, config=self.config, position_BT=position_BT, segment_BT=segment_BT, run=self.run
        )


def _init(key, table: param.Table, name: str):
    """Random parameters of one name at the top of the tree."""
    chosen = lambda given: {name: given[name]} if name in given else {}
    stacks = table.stacks if name == "stacks" else ()
    return param.init(key, param.Table(chosen(table.top), stacks, table.dims, inner=chosen(table.inner)))[name]
