"""Ahead-of-time compilation of the real training step on virtual CPU devices: no accelerator, weights or batch."""

from __future__ import annotations

import functools
import math
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ... import models
from ...core import balance, centering, mtp, optim, packing, param, step, teacher_rows
from ...core.batch import Batch
from ...core.distill import Distill, Taught
from ...core.mtp import MTP
from ...core.preference import RewardModel
from ...core.process_reward import ProcessReward
from ...core.trie import Trie
from ...models import frozen as teachers
from ...models import lora, vision
from ...models.layer import Attention
from ...parallel import mesh as meshes
from ...parallel import offload, rules
from ...rollout.types import supervised
from .. import hf

# The code never runs, so it need not be fast; shardings are decided before code generation.
CHEAP: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
PATCHES = {"patch", "patch_frame", "patch_place", "patch_window"}  # arrays of images with an entry for each patch
MODEL_READS = {"token_BT", "index_BT", "segment_BT"}  # and position_BT if a layer has positions
KINDS = {"input": "_BT", "target": "_BT", "component": "_BJ", "scalars": ""}  # of a Batch's dictionaries of arrays


@dataclass(frozen=True)
class Array:
    """An array of a batch beside those that every batch has.

    Attributes:
      where: the dictionary of `Batch` that has it.
      name, dtype: its own.
      tail: sizes of its axes behind those of `KINDS`.
    """

    where: str
    name: str
    dtype: str = "float32"
    tail: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A training step to compile.

    Attributes:
      config: the model's Config.
      objective, optim, run, layout: as in a recipe's Config.
      rows, length, microbatches, slots: B, T, M and J of the Batch [M, B, T].
      lora: adapters that train over frozen weights, which have the dtype of the checkpoint; rank 0 = all weights train.
      arrays: what the batch has beside the arrays of every batch.
      balance, mtp: as in a recipe's Config.
      patches: of images, P, of each row, where the Config has a vision tower.
      flattened: A of a batch with tries, whose places are then T; 0 = rows without tries.
      teacher: Config of a local teacher whose distributions the step compares.
      self_distillation: whether the teacher is the model itself, which reads other rows.
      follows: the step of the policy, if this is that of its critic: they read the same batch.
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
    arrays: tuple[Array, ...] = ()
    balance: balance.Balance = balance.Balance()
    mtp: MTP = MTP()
    patches: int = 0
    flattened: int = 0
    teacher: Any = None
    self_distillation: bool = False
    follows: Step | None = None

    @property
    def whole(self):
        """The objective with the terms of `mtp` and `balance`."""
        return balance.wrap(mtp.wrap(self.objective, self.mtp), self.balance)

    @property
    def distill(self) -> Distill | None:
        """The divergence from a teacher in the objective."""
        if isinstance(self.objective, Taught):
            return self.objective.distill
        return self.objective if isinstance(self.objective, Distill) else None

    @property
    def reported(self) -> int:
        """Number of the sampler's tokens that score centering reads; 0 = it is off."""
        on = getattr(self.objective, "score_centering", False)
        return next((array.tail[0] for array in self.arrays if on and array.name == centering.IDS), 0)

    @property
    def score(self) -> Callable:
        """`score(params, microbatch, *frozen)` of the model in training, without adapters."""
        if self.follows:
            value = functools.partial(models.value, config=self.config, run=self.run)
            return lambda params, batch: value(params, batch.without("routed_experts"))
        if isinstance(self.objective, ProcessReward):
            return functools.partial(models.classify, config=self.config, run=self.run)
        drafts = self.mtp.trunk if self.mtp.coef else None
        if self.reported:
            return functools.partial(models.score_centred, config=self.config, run=self.run, drafts=drafts)
        if self.distill is None:
            return functools.partial(models.score, config=self.config, run=self.run, learnt_only=True, drafts=drafts)
        return functools.partial(
            teachers.score, objective=self.distill, config=self.config, run=self.run, drafts=drafts,
            teacher_config=self.config if self.self_distillation else self.teacher,
        )  # fmt: skip

    @property
    def frozen(self) -> str:
        """The dtype of weights under adapters."""
        return hf.save_dtype(self.config, param.abstract(models.table(self.config))).name


def abstract_batch(spec: Step) -> Batch:
    """The prepared Batch [M, B, T] of a step, or [M, B, A] with tries, as shapes and dtypes."""
    if spec.follows:
        return jax.eval_shape(spec.objective.prepare, abstract_batch(spec.follows))
    packed = packing.pack([supervised([0], [0], sample=0, rollout=0)], 2, rows=1)
    row, tokens = (spec.microbatches, spec.rows), spec.flattened or spec.length

    def shape(path, x):
        width = tokens if _name(path).endswith("_BT") else spec.slots
        return jax.ShapeDtypeStruct((*row, width), x.dtype)

    batch = jax.tree_util.tree_map_with_path(shape, packed)
    if spec.flattened:
        place_BT, place_BA = (jax.ShapeDtypeStruct((*row, size), jnp.int32) for size in (spec.length, spec.flattened))
        seeing = [each for each in (spec.config, spec.teacher) if each]
        align = math.lcm(*map(models.trie_alignment, seeing))
        apart = tuple(sorted({length for each in seeing for length in models.trie_lengths(each)}))
        batch = batch.replace(trie=Trie(place_BT, place_BT, place_BT, place_BA, align, apart))
    score = jax.ShapeDtypeStruct(batch.token_BT.shape, jnp.float32)
    inner = spec.objective.objective if isinstance(spec.objective, Taught) else spec.objective
    if getattr(inner, "needs_reference", False):
        batch = batch.replace(ref_BT=score)
    if getattr(inner, "needs_values", False):
        batch = batch.replace(value_BT=score)
    lead = {"_BT": (*row, tokens), "_BP": (*row, spec.patches), "_BJ": (*row, spec.slots), "": row[:1]}
    for array in (*spec.arrays, *_images(spec)):
        kind = KINDS[array.where] if array.name not in PATCHES else "_BP"
        made = jax.ShapeDtypeStruct((*lead[kind], *array.tail), jnp.dtype(array.dtype))
        batch = batch.replace(**{array.where: {**getattr(batch, array.where), array.name: made}})
    extra = score if getattr(inner, "needs_squares", False) else None
    scores = models.Scores(score, score, score, extra=extra, aux=_sums(spec, row[:1]))
    return jax.eval_shape(spec.whole.prepare, batch, scores)


def _images(spec: Step) -> list[Array]:
    """The arrays of `models.vision.arrange`, if the model has a tower."""
    tower = spec.config.vision
    if tower is None:
        return []
    found = [
        Array("input", "patch", spec.run.dtype or "float32", (tower.pixels,)),
        Array("input", "patch_frame", "int32"), Array("input", "patch_place", "int32", (4,)),
        Array("input", "feature", "int32"), Array("input", "axis_position", "int32", (3,)),
    ]  # fmt: skip
    return [*found, *([Array("input", "patch_window", "int32")] if tower.window else [])]


def _sums(spec: Step, lead: tuple[int, ...] = ()) -> dict:
    """The `aux` of a model's Scores, as shapes."""
    stacks = [stack for stack in models.table(spec.config).stacks if "router" in stack.params]
    if not stacks:
        return {}
    layers, experts = sum(len(stack.layers) for stack in stacks), models.table(spec.config).dims["experts"]
    sizes = {"load": (experts,), "prob": (experts,), "lse2": (), "tokens": ()}
    return {name: jax.ShapeDtypeStruct((*lead, layers, *size), jnp.float32) for name, size in sizes.items()}


def reads(spec: Step) -> dict[str, int]:
    """{array: bytes per entry} of the batch's arrays that a step reads, named as in `planner.job.Job`.

    With one microbatch these are what the model and the loss read; with several all, since the loop takes the whole
    batch.
    """
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), abstract_batch(spec))
    one = jax.ShapeDtypeStruct(batch.token_BT.shape, jnp.float32)
    extra: Any = {"divergence": one, "usable": jax.ShapeDtypeStruct(one.shape, bool)} if spec.distill else None
    if spec.reported:
        extra = jax.ShapeDtypeStruct((*one.shape, spec.reported), jnp.float32)
    labels = spec.config.score_head.labels if spec.config.score_head else 1
    label = jax.ShapeDtypeStruct((*one.shape, labels), jnp.float32)
    out = models.Scores(one, one, one, one, extra, _sums(spec), label, one, one)
    traced = jax.make_jaxpr(lambda batch, out: spec.whole.loss(out, batch))(batch, out)
    used = {id(x) for equation in traced.jaxpr.eqns for x in equation.invars}
    model, found = _of_model(spec) | {array.name for array in _images(spec)}, {}
    for (path, x), variable in zip(jax.tree_util.tree_leaves_with_path(batch), traced.jaxpr.invars, strict=False):
        name, kind = _name(path), _kind(path)
        kind = "_BP" if name in PATCHES else kind
        if spec.microbatches > 1 or id(variable) in used or name in model:
            tail = x.shape[len(kind.removeprefix("_")) :]
            name += kind * (not name.endswith(kind))
            if spec.flattened and path[0].name != "trie":
                name = name.replace("_BT", "_BA")
            found[name] = x.dtype.itemsize * math.prod(tail)
    return found


def _of_model(spec: Step) -> set[str]:
    """Names of the arrays that the model reads."""
    own = spec.config.vision is None  # with images, rotary embeddings turn by positions on three axes
    attends = [layer for layer in spec.config.records if isinstance(layer, Attention)]
    placed = any(layer.growth or own and layer.rope for layer in attends)
    scores = not spec.follows and not isinstance(spec.objective, RewardModel | ProcessReward)
    read = MODEL_READS
    if spec.flattened:
        stateful = any(not isinstance(layer, Attention) and layer.state for layer in spec.config.records)
        read = {"token_BT", "first_BT", "place_BA"} | ({"until_BT", "index_BT"} if attends else set())
        read |= {"segment_BT"} if stateful or _sums(spec) else set()
        read |= {"parent_BT"} if stateful or scores else set()
    read = read | ({"position_BT"} if placed else set())
    if scores:
        read |= {"target_BT", "routed_experts", "sampling_mask"}
    read |= {centering.IDS} if spec.reported else set()
    if spec.distill and spec.self_distillation:
        return read | {teacher_rows.TOKEN, teacher_rows.SEGMENT, teacher_rows.PLACE}
    return read | ({"teacher_ids", "teacher_logp"} if spec.distill and spec.teacher is None else set())


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
    return lower(spec, meshes.make(spec.layout)).compile(CHEAP)


def lower(spec: Step, on: jax.sharding.Mesh) -> jax.stages.Lowered:
    """Lowers `step(state, batch)` for the devices of a mesh, which need not be here (`planner.targets`); with `offload`
    its gradient: the update is many small programs (`lower_update`)."""
    own = _model(spec, on)
    score = own.over(spec.score)
    optimizer = optim.make_optimizer(spec.optim, own.table)
    shardings = rules.of_state(optimizer, own.table, on)  # outside: it computes, which devices to compile for do not
    with jax.set_mesh(on):
        state = step.State(own.params, jax.eval_shape(optimizer.init, own.params), jax.ShapeDtypeStruct((), jnp.int32))
        frozen = [*own.frozen, *([_teacher(spec, on)] if spec.teacher else [])]
        batch = _placed(abstract_batch(spec), on)
        if spec.optim.offload:
            gradient: Any = offload.make_gradient(score, spec.whole, own.table, spec.optim, on)
            return gradient.lower(placed(own.params, shardings.params), batch, *frozen)
        sums = optim.sums(own.table, spec.optim)
        adjust = balance.adjust(spec.balance)
        update: Any = step.make_step(score, spec.whole, optimizer, shardings, adjust=adjust, sums=sums)
        return update.lower(placed(state, shardings), batch, *frozen)


def lower_update(spec: Step, on: jax.sharding.Mesh) -> jax.stages.Lowered:
    """Lowers the largest of the updates that follow a gradient with `offload`."""
    return offload.lower_update(_model(spec, on).table, spec.optim, spec.run.dtype or "float32", on)


def lower_scores(spec: Step, on: jax.sharding.Mesh, of: str = "policy") -> jax.stages.Lowered:
    """Lowers the scoring of a batch.

    Args:
      of: whose scores: the "policy" in training, its "reference", or the "teacher".
    """
    own = _model(spec, on)
    batch = _placed(abstract_batch(spec), on)
    plain = functools.partial(models.score, run=spec.run, learnt_only=True)
    with jax.set_mesh(on):
        if of == "teacher":
            theirs = lambda params, batch: plain(params, batch.without("routed_experts"), config=spec.teacher)
            return _lowered(step.make_scores(theirs), _teacher(spec, on), batch)
        score = functools.partial(plain, config=spec.config) if not spec.follows else spec.score
        weights = placed(own.params, rules.of_params(own.table, on))
        if of == "policy":
            return _lowered(step.make_scores(own.over(score)), weights, batch, *own.frozen)
        if spec.lora.rank:
            base, *tower = own.frozen
            return _lowered(step.make_scores(vision.over_frozen(score) if tower else score), base, batch, *tower)
        dtype = spec.run.dtype or "float32"
        copied = param.tree_map(
            lambda leaf, x: jax.ShapeDtypeStruct(
                x.shape, dtype if optim.copied(leaf) else x.dtype, sharding=x.sharding
            ),
            own.table, weights,
        )  # fmt: skip
        return _lowered(step.make_scores(own.over(score)), copied, batch, *own.frozen)


def _lowered(f: Any, *arguments) -> jax.stages.Lowered:
    return f.lower(*arguments)


@dataclass(frozen=True)
class _Model:
    """What a step trains, and what it only reads, as shapes.

    Attributes:
      table, params: of what trains, without shardings.
      frozen: the weights under adapters, and a frozen tower, with theirs.
      over: makes a score of all of them of the model's.
    """

    table: param.Table
    params: Any
    frozen: list
    over: Callable[[Callable], Callable]


def _model(spec: Step, on: jax.sharding.Mesh) -> _Model:
    apart, base, table = _apart(spec), _base(spec), trained(spec)
    narrow: str = spec.optim.weights
    if spec.optim.offload and narrow == "float32":
        narrow = spec.run.dtype or "float32"
    kept: Any = frozen(spec) if spec.lora.rank else None
    tower, beside = kept and kept.pop("vision", None), []
    if spec.lora.rank:
        beside.append(placed(kept, rules.of_quantised(kept, base, on)))
    if apart:
        seeing = vision.table(spec.config.vision)
        beside.append(placed(tower or param.abstract(seeing), rules.of_params(seeing, on)))
    params = jax.eval_shape(lambda params: optim.narrowed(params, table, narrow), param.abstract(table))

    def over(score: Callable) -> Callable:
        score = vision.over_frozen(score) if apart else score
        return lora.over_base(score, spec.lora) if spec.lora.rank else score

    return _Model(table, params, beside, over)


def _teacher(spec: Step, on: jax.sharding.Mesh):
    table = models.table(spec.teacher)
    return placed(param.abstract(table, spec.run.dtype or "float32"), rules.of_params(table, on))


def trained(spec: Step) -> param.Table:
    """The table of the weights that a step trains."""
    return lora.table(_base(spec), spec.lora) if spec.lora.rank else _base(spec)


def _base(spec: Step) -> param.Table:
    """That of the model, without a frozen tower."""
    return models.table(replace(spec.config, vision=None) if _apart(spec) else spec.config)


def _apart(spec: Step) -> bool:
    return bool(spec.config.vision) and not spec.config.vision.trained


def placed(shapes, shardings):
    """Shapes with shardings."""
    return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, shardings)


def _placed(batch: Batch, on) -> Batch:
    """The batch with the shardings that `parallel.batches` gives it."""
    seq = "layers", "batch", "seq"
    axes = {"_BT": seq, "_BA": seq, "_BJ": ("layers", "batch"), "": ("layers",)}

    def one(path, x):
        sharding = NamedSharding(on, rules.spec(axes[_kind(path)], mesh=on))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(one, batch)


def _name(path) -> str:
    """Name of an array of a Batch: its field, or its key among the samples' extra arrays."""
    return getattr(path[-1], "name", None) or path[-1].key


def _kind(path) -> str:
    """The leading axes of an array of a Batch: "_BT", "_BJ", of a trie also "_BA", or "" if it has neither rows nor
    positions."""
    return KINDS.get(path[0].name, _name(path)[-3:])
