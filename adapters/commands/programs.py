"""The programs of a run that a chip's compiler is asked about: those that hold most memory, each at its largest shape.

All of them are lowered from shapes, for devices that need not be here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ... import models
from ...core import param
from ...parallel import mesh as meshes
from ...parallel import rules
from ...parallel.planner import generation as generations
from ...parallel.planner import memory
from ...parallel.planner.chips import Chip
from ...parallel.planner.figures import USABLE
from ...rollout.engine import lowering
from ...rollout.engine.options import Options
from . import aot, buffers, jobs


@dataclass(frozen=True)
class Program:
    """A program of a run.

    Attributes:
      devices: of one copy of it.
      lower: f(devices) -> jax.stages.Lowered; can be pickled.
      beside: bytes on a device, beside its arguments, that nothing frees while it runs.
      names: what sizes of its arrays mean.
      engine: it is one of the recipe's own server, whose memory its programs share.
    """

    devices: int
    lower: Callable[[Sequence[Any]], jax.stages.Lowered]
    beside: int
    names: buffers.Names = buffers.Names()
    engine: bool = False


def programs(config: Any, made: jobs.Planned, chip: Chip) -> dict[str, Program]:
    """{name: Program} of a recipe's Config, as `options.flat` gives it, and what `jobs.made` makes of it."""
    m, (step, *critics) = memory.memory(made.job), made.steps
    server, shares = jobs.beside(made, chip)
    always = round(server) if shares == "always" else 0
    whose = "policy" if made.generation else "model"
    found: dict[str, Program] = {}

    def add(name: str, lower: Callable, arguments: int, spec: aot.Step = step, **options) -> None:
        on = functools.partial(_on_mesh, lower, spec, **options)
        found[name] = Program(spec.layout.devices, on, m.held + always - arguments, _names(spec, made.job.mesh))

    own = m.params + m.moments + m.taught
    add(f"{whose}'s step", aot.lower, own)
    if step.optim.offload:
        add(f"{whose}'s update", aot.lower_update, 0)
    if made.job.scores:
        add(f"{whose}'s scores", aot.lower_scores, m.params)
    if m.reference:
        add("reference's scores", aot.lower_scores, m.reference, of="reference")
    if m.teacher:
        add("teacher's scores", aot.lower_scores, m.teacher, of="teacher")
    for critic in critics:
        assert m.critic
        of_critic = m.critic.params + m.critic.moments
        add("critic's step", aot.lower, of_critic, critic)
        add("critic's values", aot.lower_scores, m.critic.params, critic)
        if critic.optim.offload:
            add("critic's update", aot.lower_update, 0, critic)
    if made.generation and made.generation.embedded:
        g = made.generation
        beside = {"no": 0, "always": m.held, "turns": m.held + m.batch}[shares]
        if shares != "turns":  # the next weights, while they are loaded
            beside += generations.weights_bytes(made.job, g.itemsize, g.split, g.predictor)
        known = _server(config, made.settings, chip)
        for name in lowering.programs(*known):
            lower = functools.partial(_of_server, name, known)
            found[name] = Program(config.serve.mesh.replica.devices, lower, beside, engine=True)
    return found


def of_step(spec: aot.Step) -> Program:
    """A training step, or with `offload` its gradient, by itself."""
    return Program(spec.layout.devices, functools.partial(_on_mesh, aot.lower, spec), 0)


def _names(spec: aot.Step, mesh: AbstractMesh) -> buffers.Names:
    table = aot.trained(spec)
    shapes, splits = param.abstract(table), rules.of_params(table, mesh)
    weights: dict[tuple[int, ...], str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        whole = x.shape
        local = _at(splits, path).shard_shape(whole)
        stacked = jax.tree_util.keystr(path, simple=True, separator=".")
        for shape in (local, whole, *((local[1:], whole[1:]) if "stacks" in stacked else ())):
            if len(sides := tuple(side for side in shape if side > 1)) > 1:
                weights.setdefault(sides, stacked)
    vocab = spec.config.vocab
    return buffers.Names((vocab, vocab // spec.layout.tp), tuple(len(stack.layers) for stack in table.stacks), weights)


def _at(tree: Any, path: tuple) -> Any:
    for key in path:
        tree = tree[getattr(key, "key", getattr(key, "idx", None))]
    return tree


def _on_mesh(lower: Callable, spec: aot.Step, devices: Sequence[Any], **options) -> jax.stages.Lowered:
    return lower(spec, meshes.make(spec.layout, devices), **options)


def _server(config: Any, settings: Any, chip: Chip) -> tuple:
    """The arguments of `lowering.programs` of the recipe's own server."""
    serve = config.serve
    dtype = models.default_dtype(chip.platform) if serve.dtype == "auto" else serve.dtype
    context = min(serve.context or config.length, settings.context)
    fields = vars(serve.engine) | {"context": context, "mesh": serve.mesh.replica}
    options = Options(**fields).resolved(chip.platform)
    return settings, jnp.dtype(dtype).name, options, USABLE * chip.memory, jobs.predicts(config, settings)


def _of_server(name: str, known: tuple, devices: Sequence[Any]) -> jax.stages.Lowered:
    return lowering.programs(*known)[name](devices)
