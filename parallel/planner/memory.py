"""Closed-form memory of a training step, in bytes per device.

State and batch follow from the parameter table and the sharding rules, and are exact; so are activations saved for the
backward pass (`activations`). Temporaries are estimates: what XLA's buffer assignment for GPUs, or for TPUs,
has at the peak, part by part of a step (`phases`): within 10 % of it in models of real widths
(tests/compilers/test_plans.py), but up to twice too high for mixtures with large experts over fsdp on TPUs.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ...core import logprobs, optim, param
from ...core.param import Leaf
from .. import offload, rules
from . import activations, towers
from .activations import WIDE, saved
from .figures import AHEAD, HOLES
from .job import Job
from .leaves import depth, expert

STEP = 4  # bytes of the step counter


@dataclass(frozen=True)
class Phase:
    """What a part of a step has on the device beside its arguments.

    Attributes:
      gradients: new ones so far, and of several microbatches their sum.
      saved, logits, working: as in `Memory`.
    """

    gradients: int = 0
    saved: int = 0
    logits: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.saved + self.logits + self.working


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      params: weights: fp32 unless the optimiser keeps narrower ones; under adapters the frozen ones in their dtype, and
        the adapters.
      moments: optimiser state: moments, averaged weights and counters, including the step counter.
      gradients: at the peak of a step (`phases`) the new ones so far, and of several microbatches their sum.
      reference: weights of the reference model, which without its adapters is the model itself.
      taught: weights of a teacher that the step reads.
      teacher: weights of a teacher that only scores the batch before the step.
      tower: of `params`, those of a frozen vision tower, which a critic shares.
      batch: the batch's arrays that a step reads, all microbatches.
      saved: activations that layers save for the backward pass of a microbatch.
      logits: if they are there at the peak, those of one chunk, or of all tokens if these are saved.
      working: temporaries of the backward pass of the head or of one layer, whichever is at work at the peak.
      summed: the gradient that an update reads.
      streamed: with the optimiser's state on the host, what of it is on the device at a time, during the update.
      host: what the host holds for the device: master weights and the optimiser's state, a reference, activations.
      critic: the critic's step, which follows this one: each has the other's state beside it.
    """

    params: int
    moments: int
    gradients: int
    reference: int
    batch: int
    saved: int
    logits: int
    working: int
    summed: int
    streamed: int = 0
    host: int = 0
    taught: int = 0
    teacher: int = 0
    tower: int = 0
    critic: "Memory | None" = None

    @property
    def arguments(self) -> int:
        """Arguments of the compiled step."""
        return self.params + self.moments + self.batch + self.taught

    @property
    def held(self) -> int:
        """What is on the device between steps."""
        critic = self.critic.held - self.critic.tower if self.critic else 0
        return self.params + self.moments + self.taught + self.reference + self.teacher + critic

    @property
    def temporary(self) -> int:
        """The most that a step has on the device beside its arguments."""
        return max(self.gradients + self.saved + self.logits + self.working, self.summed + self.streamed)

    @property
    def peak(self) -> int:
        steps = [self, self.critic] if self.critic else [self]
        return self.held + max(step.batch + step.temporary for step in steps)


@dataclass(frozen=True)
class State:
    """What an optimiser holds for a device, which takes a while to find and does not depend on the batch.

    Attributes:
      moments: its state and the step counter; with `offload` in the host's memory, with the master weights.
      streamed: as in `Memory`.
    """

    moments: int
    streamed: int = 0


States = tuple[State, State | None]  # of a job and of its critic


def memory(job: Job, state: States | None = None) -> Memory:
    """Memory of a device during a training step; `state` is `states(job)`, which takes a while, if it is known."""
    own, of_critic = states(job) if state is None else state
    copy, teacher = reference(job), job.teachers_pass
    weights = size(teacher, teacher.weights) if job.teacher and teacher and not job.teacher.itself else 0
    taught = job.teacher is not None and job.teacher.taught
    critic = memory(job.critics_step, (of_critic, None) if of_critic else None) if job.critics_step else None
    fullest = max(phases(job).values(), key=lambda phase: phase.total)
    return Memory(
        params=size(job, job.weights) if job.frozen_shapes is None else _quantised(job) + size(job, job.trained),
        moments=0 if job.optim.offload else own.moments,
        gradients=fullest.gradients,
        summed=sums(job) if job.microbatches > 1 else size(job, job.trained),
        reference=copy if job.reference == "device" else 0,
        batch=batch(job),
        saved=fullest.saved,
        logits=fullest.logits,
        working=fullest.working + round(HOLES * fullest.total),
        streamed=own.streamed,
        host=(own.moments if job.optim.offload else 0) + (copy if job.reference == "host" else 0)
        + saved(job, "offload") + (critic.host if critic else 0),
        taught=weights if taught else 0,
        teacher=0 if taught else weights,
        tower=size(job, job.tower) if job.vision and not job.vision.trained else 0,
        critic=critic,
    )  # fmt: skip


def size(job: Job, leaves: Iterable[Leaf]) -> int:
    """Bytes that a device holds of weights."""
    return sum(job.held(leaf) * job.bytes_of(leaf) for leaf in leaves)


def sums(job: Job) -> int:
    """The sum of the gradients of several microbatches."""
    itemsize = lambda leaf: jnp.dtype(job.optim.gradients if optim.cast(leaf) else "float32").itemsize
    return sum(job.held(leaf) * itemsize(leaf) for leaf in job.trained)


def _quantised(job: Job) -> int:
    """The frozen weights, some of them in fewer bits."""
    return _bytes(job.frozen_shapes, rules.of_quantised(job.frozen_shapes, job.table, job.mesh))


def reference(job: Job) -> int:
    """A copy of the weights that is not trained, with matrices in `reference_dtype`."""
    if not job.reference or job.adapters:
        return 0
    narrow = jnp.dtype(job.reference_dtype or job.dtype).itemsize
    return sum(job.held(leaf) * (narrow if optim.copied(leaf) else job.bytes_of(leaf)) for leaf in job.trained)


def states(job: Job) -> States:
    """What the optimisers of the job and of its critic hold."""
    one = lambda job: _state(job.table, job.adapters, job.optim, job.dtype, job.mesh)
    return one(job), one(job.critics_step) if job.critics_step else None


@functools.lru_cache(maxsize=64)  # suggestions are found among jobs of which most differ in rows or activations alone
def _state(
    table: param.Table, adapters: param.Table | None, spec: optim.Optimizer, dtype: str, mesh: AbstractMesh
) -> State:
    """Optimiser state of a device, sharded according to the rules, plus the step counter. With `offload` the host has
    it, with the master weights, and what is on the device at a time are the largest parts, and in fp32 the weights,
    gradient and change of one."""
    if not spec.offload:
        table = adapters or table
        optimizer = optim.make_optimizer(spec, table)
        shapes = jax.eval_shape(optimizer.init, param.abstract(table))
        return State(STEP + _bytes(shapes, rules.of_state(optimizer, table, mesh).opt_state))
    parts = offload.parts(table, spec, dtype)
    held = [_bytes(*offload.abstract(part, mesh)) for part in parts]
    wide = [3 * _bytes(param.abstract(part.table), rules.of_params(part.table, mesh)) for part in parts]
    return State(
        sum(part.layers * size for part, size in zip(parts, held, strict=True)),
        max(offload.AHEAD * size + more for size, more in zip(held, wide, strict=True)),
    )


def _bytes(shapes, shardings) -> int:
    one = lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(one, shapes, shardings)))


def batch(job: Job) -> int:
    """The batch's arrays that a step reads; segment arrays are sharded like rows, others are whole on every device."""
    tokens, slots = job.local_tokens, job.local_rows * job.slots
    entries = {"_BT": tokens, "_BA": job.local_flattened, "_BP": job.local_patches, "_BJ": slots}
    return job.microbatches * sum(size * entries.get(name[-3:], 1) for name, size in job.reads.items())


def logits_kept(job: Job) -> bool:
    """Whether logits are saved for the backward pass: the rule of `core.logprobs.from_hidden`, per device."""
    few = job.local_tokens * job.vocab <= logprobs.KEPT
    return job.value or not job.head_chunk and not job.whole_logits and few


def logits(job: Job) -> int:
    """Bytes of fp32 logits that a device holds at a time; of a teacher, too, and of whole rows, if distributions are
    compared."""
    if job.value:
        return 0
    chunk = _chunk(job)
    held = -(-job.local_tokens // chunk) * chunk if logits_kept(job) else chunk
    if not job.whole_logits:
        return held * job.vocab * WIDE
    models = 1 + (job.teacher is not None and job.teacher.taught)
    return held * models * WIDE * (job.vocab + (job.table.dims["vocab"] if job.layout.tp > 1 else 0))


def _chunk(job: Job) -> int:
    """Tokens per chunk of logits on a device."""
    return min(job.head_chunk or logprobs.chunk_size(job.vocab, job.platform), job.local_tokens)


def gathers(job: Job) -> bool:
    """Whether weights are gathered from other devices."""
    return job.size("fsdp", "ep") > 1


def phases(job: Job) -> dict[str, Phase]:
    """What a step has on the device beside its arguments while it computes the head's gradients, those of its layers
    and of a vision tower, and when it has all: one after the other, so that logits and a layer's values are never there
    together."""
    total = sums(job) if job.microbatches > 1 else 0
    layers = size(job, [leaf for leaf in job.trained if leaf.layers is not None])
    if job.platform == "tpu":
        return _on_tpus(job, total, layers)
    lookups = size(job, [leaf for leaf in job.trained if job.looked_up(leaf)])
    head = _head_gradient(job)
    beside, kept = _transposed(job), saved(job)
    if job.layout.tp > 1:  # zeros in place of the tokens that other devices look up
        beside += job.local_tokens * job.embed * job.itemsize
    # Of a single microbatch one kernel makes room for the gradients of both matrices of the vocabulary.
    total += lookups if job.microbatches == 1 and not gathers(job) else 0
    found = {
        "head": Phase(total + head, kept, logits(job), beside + _head(job)),
        "layers": Phase(total + layers + head, kept, 0, beside + _layer(job)),
        "end": Phase(total + layers + head, 0, 0, beside),
    }
    if job.vision:  # after all layers; a frozen one is before them
        new = layers + head if job.vision.trained else 0
        found["tower"] = Phase(total + new, round(towers.saved(job)), 0, beside + round(towers.working(job)))
    if job.mesh.size > 1 or job.microbatches == 1:
        # XLA makes room for the layers' gradients before the head, where weights are gathered if that raises the peak
        # by little; the head's gradient is scattered after the layers.
        first = found["head"]
        room = max(found["layers"].total - first.total, round(AHEAD * first.total)) if gathers(job) else layers
        found["head"] = replace(first, gradients=first.gradients + min(layers, room))
    return found | _beside_steps(job)


def _on_tpus(job: Job, total: int, layers: int) -> dict[str, Phase]:
    """`phases` as the compiler of TPUs has them: it narrows all weights before the loops, and the sum of the head's
    gradients of two chunks is at another place than either."""
    head, kept = _head_gradient(job), saved(job)
    narrowed = sum(job.held(leaf) * job.itemsize for leaf in job.leaves if job.bytes_of(leaf) > job.itemsize)
    gathered = sum(job.whole(leaf) for leaf in job.top.values() if job.is_head(leaf)) * job.itemsize * gathers(job)
    summed = head and job.local_tokens > _chunk(job) and not logits_kept(job)
    first = Phase(total + head, kept, logits(job), narrowed + gathered + _beside_logits(job))
    found = {
        "head": Phase(total + 2 * head, kept, 0, narrowed + gathered) if summed else first,
        "layers": Phase(total + layers + head, kept, 0, narrowed + _layer(job)),
    }
    if job.vision:
        new = layers + head if job.vision.trained else 0
        found["tower"] = Phase(total + new, round(towers.saved(job)), 0, narrowed + round(towers.working(job)))
    return found | _beside_steps(job)


def _beside_steps(job: Job) -> dict[str, Phase]:
    """The phases of an update that needs memory of its own, and of a teacher in the step."""
    found = {}
    if job.optim.state == "float8" and not job.optim.offload and job.trained:
        gradient = sums(job) if job.microbatches > 1 else size(job, job.trained)
        found["update"] = Phase(gradient, 0, 0, _rescaled(job))
    teacher = job.teachers_pass
    return found | ({"teacher": Phase(0, 0, 0, _forward(teacher))} if teacher else {})


def _rescaled(job: Job) -> int:
    """New moments in fp32 of the largest weights, before they are narrowed by the largest of each block; XLA updates
    weights of the same shape together."""
    shapes: dict[tuple[int, ...], int] = {}
    for leaf in job.trained:
        shapes[leaf.shape] = shapes.get(leaf.shape, 0) + job.held(leaf)
    return (2 if job.optim.name == "adamw" else 1) * WIDE * max(shapes.values())


def _head_gradient(job: Job) -> int:
    """The new gradient of the head's matrix, of all its columns until it is scattered."""
    if job.adapters or job.value or not job.trains:
        return 0
    return sum(job.whole(leaf) * job.bytes_of(leaf) for leaf in job.top.values() if job.is_head(leaf))


def _transposed(job: Job) -> int:
    """Copies of weights that are gathered along another axis than their first: an all-gather joins parts along the
    major axis, for which XLA transposes a device's part of all layers before the loop over them."""
    if not gathers(job):
        return 0
    split = {axis for axis in dir(rules.RULES) if isinstance(getattr(rules.RULES, axis), tuple | str)
             and getattr(rules.RULES, axis) != getattr(rules.GATHERED, axis)}  # fmt: skip
    found = 0
    for leaf in job.leaves:
        axes = leaf.axes[1:] if leaf.layers is not None else leaf.axes
        if not job.looked_up(leaf) and len(axes) > 1 and axes[0] not in split and split & {*axes}:
            found += job.held(leaf) * job.bytes_of(leaf)
    return found


def _layer(job: Job) -> int:
    """Temporaries of a layer's backward pass: weights in use, the values that it computes again in the dtype of the
    computation, which fusions keep no wider, and the gradients of a part of them."""
    at_once = activations.unfused if job.platform == "cpu" else activations.at_once
    weights = _all_weights if job.platform == "cpu" else _weights
    return round(max(weights(job, stack) + at_once(job, stack) for stack in job.stacks))


def _all_weights(job: Job, stack: Mapping[str, Leaf]) -> float:
    """A layer's weights in the dtype of the computation, gathered ones as they are stored, too, and their gradients:
    XLA's CPU backend orders what it computes without regard to memory."""
    copies = (1 if job.adapters else 2) * job.itemsize
    return sum(job.whole(leaf) * (job.bytes_of(leaf) * gathers(job) + copies) for leaf in stack.values())


def _weights(job: Job, stack: Mapping[str, Leaf]) -> float:
    """Weights in use at a time.

    Of experts all as they are stored, with the sums of their gradients, and one matrix in the dtype of the
    computation; over fsdp alone all in that dtype, in which they are gathered (over ep compilers need more: not
    understood). Of a run of a single layer only that matrix of all, since nothing is copied from or to a stack. Where
    layers of several kinds take turns, gradients of those of the other kinds are not scattered yet, nor in a run of a
    single layer those of other such runs. Of other weights the largest; on a mesh with its gradient, and the one that
    is gathered next. Frozen ones are not cast, so that the layer's part of each stack is a copy.
    """
    item = job.itemsize
    experts = [job.whole(leaf) for leaf in stack.values() if expert(leaf)]
    stored = max((job.bytes_of(leaf) for leaf in stack.values() if expert(leaf)), default=0)
    if gathers(job) and job.size("ep") == 1:
        stored = min(stored, item)
    used = sum(experts) * (stored + WIDE) + max(experts, default=0) * item
    if gathers(job):
        together = lambda other: _take_turns(stack, other) or other is not stack and depth(stack) == depth(other) == 1
        waiting = [leaf for other in job.stacks if together(other) for leaf in other.values()]
        used += sum(job.whole(leaf) for leaf in waiting if expert(leaf)) * WIDE
    if depth(stack) == 1 and not gathers(job):
        used = sum(experts) * item
    others = [job.whole(leaf) for leaf in stack.values() if not expert(leaf)]
    if job.adapters and not gathers(job):
        return used + sum(others) * item
    return used + max(others, default=0) * (WIDE + 3 * item if gathers(job) else item)


def _take_turns(stack: Mapping[str, Leaf], other: Mapping[str, Leaf]) -> bool:
    """Whether one body of a loop has layers of both."""
    first, second = (next(iter(one.values())).layers or () for one in (stack, other))
    return first != second and min(first) < max(second) and min(second) < max(first)


def _forward(job: Job) -> int:
    """Temporaries of a forward pass: those of `_layer` without gradients."""
    return _layer(job)


def _head(job: Job) -> int:
    """Temporaries of the head: its matrix in the dtype of the computation; gradients of the logits; hidden states and
    their gradients. Where chunks of tokens are skipped, which is a branch, also the gradient of a chunk before it is
    added to that of the others, where it is larger than the logits, which are gone by then."""
    whole = sum(job.whole(leaf) for leaf in job.top.values() if job.is_head(leaf))
    narrow = job.itemsize < WIDE or gathers(job)
    skips = job.local_tokens > _chunk(job) and not logits_kept(job)
    new = max(0, _head_gradient(job) - logits(job)) if skips else 0
    return whole * job.itemsize * narrow + _beside_logits(job) + new


def _beside_logits(job: Job) -> int:
    """Gradients of a chunk's logits, of whole distributions the logits twice; hidden states and their gradients."""
    rows = 0 if job.value else _chunk(job) * job.vocab * max(job.itemsize, 2)
    again = 2 * logits(job) if job.whole_logits else 0
    return rows + again + 3 * job.local_tokens * job.embed * job.itemsize
