"""Ahead-of-time compilation of the real training step on virtual CPU devices: no accelerator, weights or batch."""

from __future__ import annotations

import functools
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ... import models
from ...core import optim, packing, param, step
from ...core.batch import Batch
from ...models import lora
from ...models.layer import Attention
from ...parallel import mesh as meshes
from ...parallel import offload, rules
from ...rollout.types import supervised
from .. import hf

# The code never runs, so it need not be fast; shardings are decided before code generation.
CHEAP = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MODEL_READS = {"token_BT", "index_BT", "segment_BT", "target_BT"}  # and position_BT if a layer has positions


@dataclass(frozen=True)
class Step:
    """A training step to compile.

    Attributes:
      config: the model's Config.
      objective, optim, run, layout: as in a recipe's Config.
      rows, length, microbatches, slots: B, T, M and J of the Batch [M, B, T].
      lora: adapters that train over frozen weights, which have the dtype of the checkpoint; rank 0 = all weights train.
    """

    config: Any
    objective: Any
    optim: optim.Optimizer
    run: models.Run
    layout: meshes.Layout
    rows: int
    length: int
    microbatches: int
    slots: int = 1
    lora: lora.Lora = lora.Lora()

    @property
    def frozen(self) -> str:
        """The dtype of weights under adapters."""
        return hf.save_dtype(self.config, param.abstract(models.table(self.config))).name


def abstract_batch(spec: Step) -> Batch:
    """The prepared Batch [M, B, T] of a step, as shapes and dtypes."""
    packed = packing.pack([supervised([0], [0], sample=0, rollout=0)], 2, rows=1)

    def shape(path, x):
        width = spec.length if _name(path).endswith("_BT") else spec.slots
        return jax.ShapeDtypeStruct((spec.microbatches, spec.rows, width), x.dtype)

    batch = jax.tree_util.tree_map_with_path(shape, packed)
    score = jax.ShapeDtypeStruct(batch.token_BT.shape, jnp.float32)
    if getattr(spec.objective, "needs_reference", False):
        batch = batch.replace(ref_BT=score)
    return jax.eval_shape(spec.objective.prepare, batch, models.Scores(score, score, score))


def reads(spec: Step) -> dict[str, int]:
    """{array: bytes per entry} of the batch's arrays that a step reads.

    With one microbatch these are what the model and the loss read; with several all, since the loop takes the whole
    batch.
    """
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), abstract_batch(spec))
    out = jax.ShapeDtypeStruct(batch.token_BT.shape, jnp.float32)
    traced = jax.make_jaxpr(lambda batch, out: spec.objective.loss(models.Scores(out, out, out), batch))(batch, out)
    placed = any(isinstance(layer, Attention) and (layer.rope or layer.growth) for layer in spec.config.records)
    model = MODEL_READS | ({"position_BT"} if placed else set())
    used = {id(x) for equation in traced.jaxpr.eqns for x in equation.invars}
    found = {}
    for (path, x), variable in zip(jax.tree_util.tree_leaves_with_path(batch), traced.jaxpr.invars, strict=False):
        if spec.microbatches > 1 or id(variable) in used or _name(path) in model:
            found[_name(path)] = x.dtype.itemsize
    return found


def check(spec: Step) -> dict:
    """Compiles the step in a separate process, with as many virtual CPU devices as the layout has.

    Returns:
      {"argument_bytes", "temporary_bytes": per device, according to XLA; "seconds", "host_bytes": of that process}.
      Temporaries are those of XLA's CPU backend, not a GPU's.

    The process is spawned: a script that calls this must guard its main part with `if __name__ == "__main__"`.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_compile, spec).result()


def _compile(spec: Step) -> dict:
    began = time.monotonic()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", spec.layout.devices)
    analysis = compile(spec).memory_analysis()
    return {
        "argument_bytes": analysis.argument_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "seconds": time.monotonic() - began,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def frozen(spec: Step):
    """The weights under adapters, as shapes and dtypes."""
    table = models.table(spec.config)
    return jax.eval_shape(
        functools.partial(lora.frozen, base=table, spec=spec.lora), param.abstract(table, spec.frozen)
    )


def compile(spec: Step):
    """Compiles `step(state, batch)` for this process's devices."""
    base = table = models.table(spec.config)
    score: Callable = functools.partial(models.score, config=spec.config, run=spec.run)
    if spec.lora.rank:
        table, score = lora.table(base, spec.lora), lora.over_base(score, spec.lora)
    optimizer = optim.make_optimizer(spec.optim, table)
    narrow = (
        (spec.run.dtype or "float32") if spec.optim.offload and spec.optim.weights == "float32" else spec.optim.weights
    )
    on = meshes.make(spec.layout)
    placed = functools.partial(jax.tree.map, lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on))
    with jax.set_mesh(on):
        shardings = rules.of_state(optimizer, table, on)
        params = jax.eval_shape(lambda params: optim.narrowed(params, table, narrow), param.abstract(table))
        state = step.State(params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))
        kept = frozen(spec) if spec.lora.rank else None
        more = [placed(kept, rules.of_quantised(kept, base, on))] if spec.lora.rank else []
        if spec.optim.offload:  # the update is many small programs
            gradient: Any = offload.make_gradient(score, spec.objective, table, spec.optim, on)
            placed_params = placed(params, shardings.params)
            return gradient.lower(placed_params, _placed(abstract_batch(spec), on), *more).compile(CHEAP)
        sums = optim.sums(table, spec.optim)
        update: Any = step.make_step(score, spec.objective, optimizer, shardings, sums=sums)
        return update.lower(placed(state, shardings), _placed(abstract_batch(spec), on), *more).compile(CHEAP)


def _placed(batch: Batch, on) -> Batch:
    """The batch with the shardings that `parallel.batches` gives it."""

    def one(path, x):
        axes = ("layers", "batch", "seq") if _name(path).endswith("_BT") else ("layers", "batch")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, rules.spec(axes, mesh=on)))

    return jax.tree_util.tree_map_with_path(one, batch)


def _name(path) -> str:
    """Name of an array of a Batch: its field, or its key among the samples' extra arrays."""
    return getattr(path[-1], "name", None) or path[-1].key
