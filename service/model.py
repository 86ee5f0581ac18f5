"""A base model and adapters in training on it: passes, updates, and the compiled functions of both."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import models
from ..core import metrics, optim, packing, param, step
from ..models import lora, remat
from ..rollout.engine.adapters import EXPERTS
from . import batches
from .codec import Pass
from .losses import LOSSES

ALPHA = 32.0  # of all adapters, at every rank
ATTENTION, MLP = ("q", "k", "v", "o", "delta_[qkvo]", "in_*"), ("*gate", "*up", "*down", "per_layer_out")


@dataclass
class Adapter:
    """An adapter in training.

    Attributes:
      gradient: the sum since the last update.
    """

    spec: lora.Lora
    state: step.State
    gradient: step.Gradient


class Base:
    """The frozen weights under all adapters.

    Attributes:
      config, params: the model's.
      context: most tokens of a datum.
    """

    def __init__(self, config, params, context: int, dtype: Any):
        self.config, self.params, self.context = config, params, context
        run = models.Run(dtype=dtype, remat=remat.chosen("auto", jax.default_backend()))
        self._score = functools.partial(models.score, config=config, run=run)
        self._table = models.table(config)
        self._passes: dict[tuple[lora.Lora, str], Callable] = {}
        self._updates: dict[lora.Lora, Callable] = {}
        self._inits: dict[lora.Lora, Callable] = {}

    def spec(self, rank: int, attention: bool = True, mlp: bool = True) -> lora.Lora:
        """The adapters of a rank, on the layers' matrices that the family has of these kinds.

        Raises:
          ValueError: there are none.
        """
        patterns = (ATTENTION if attention else ()) + (MLP if mlp else ())
        names = lora.targets(self._table, lora.Lora(1))
        sampled = (name for name in names if not name.startswith(EXPERTS))  # the engine has none for experts
        chosen = tuple(name for name in sampled if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
        if not chosen:
            raise ValueError(
                "lora_config: train_attn or train_mlp must be true for this model, which has no other matrices"
            )
        return lora.Lora(rank, ALPHA, chosen)

    def table(self, spec: lora.Lora) -> param.Table:
        return lora.table(self._table, spec)

    def new(self, spec: lora.Lora, seed: int) -> Adapter:
        """A new adapter, which leaves the base as it is."""
        if spec not in self._inits:
            self._inits[spec] = jax.jit(functools.partial(param.init, table=self.table(spec)))
        return self.adapter(spec, self._inits[spec](jax.random.key(seed)))

    def adapter(self, spec: lora.Lora, weights, moments=None, steps: int = 0) -> Adapter:
        """An adapter with these weights, and the optimiser's state, None = at its start."""
        state = step.init(weights, optim.adamw(self.table(spec)))
        if moments is not None:
            state = step.State(weights, moments, jnp.int32(steps))
        return Adapter(spec, state, step.no_gradient(weights))

    def run(self, adapter: Adapter, asked: Pass) -> tuple[float, dict[str, list[np.ndarray]]]:
        """(loss, {"logprobs", "elementwise_loss"} of each datum's targets); the gradient is added to the adapter's,
        unless the pass is forward only.

        If it raises, the adapter's gradient is lost.
        """
        batch = batches.pack(asked.data, asked.options, self.context)
        compute = self._pass(adapter.spec, asked.loss)
        gradient = None if asked.forward_only else adapter.gradient
        results = []
        for m in range(int(packing.used(batch))):
            one = jax.tree.map(lambda x, m=m: x[m], batch)
            gradient, loss, shown = compute(adapter.state.params, gradient, one, self.params)
            results.append((loss, shown))
        if gradient is not None:
            adapter.gradient = gradient
        losses, shown = zip(*jax.device_get(results), strict=True)
        of_data = {name: batches.unpack([each[name] for each in shown], batch, asked.data) for name in shown[0]}
        return math.fsum(losses), of_data

    def update(self, adapter: Adapter, hyper: optim.AdamW) -> dict[str, float]:
        """One step of AdamW by the gradient, which is 0 afterwards; a gradient that is not finite changes nothing."""
        adapter.state, report = self._update(adapter.spec)(adapter.state, adapter.gradient, hyper)
        adapter.gradient = step.no_gradient(adapter.state.params)
        return {name: value for name, value in metrics.numbers(report).items() if not name.endswith("_max")}

    def _pass(self, spec: lora.Lora, loss: str) -> Callable:
        if (spec, loss) not in self._passes:
            score = lora.over_base(self._score, spec)
            self._passes[spec, loss] = step.make_forward_backward(score, LOSSES[loss].objective, _shown(loss))
        return self._passes[spec, loss]

    def _update(self, spec: lora.Lora) -> Callable:
        if spec not in self._updates:
            self._updates[spec] = step.make_apply(functools.partial(optim.adamw, self.table(spec)))
        return self._updates[spec]


def _shown(loss: str) -> Callable:
    """What a pass returns of each token."""
    objective = LOSSES[loss].objective
    return lambda out, batch: {"logprobs": out.logp_BT, "elementwise_loss": objective.of_tokens(out, batch)}


def padded(base: Base, adapter_spec: lora.Lora, weights, rank: int) -> tuple[lora.Lora, dict]:
    """(options, weights) of the same adapter with a higher rank and on all matrices, by zeros: an engine takes adapters
    of one shape."""
    full = base.spec(rank)
    table = base.table(full)
    scale = adapter_spec.scale
    stacks = []
    for empty, given in zip(param.abstract(table)["stacks"], weights["stacks"], strict=True):
        stack = {name: np.zeros(x.shape, np.float32) for name, x in empty.items()}
        for name, x in given.items():
            stack[name][tuple(slice(n) for n in x.shape)] = np.asarray(x)
        stacks.append(stack)
    return lora.Lora(rank, scale * rank, full.targets), {"stacks": stacks}
