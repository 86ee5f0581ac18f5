"""Closed-form memory of a training step, in bytes per device.

State, gradients and batch follow from the parameter table and the sharding rules, and are exact; so are activations
saved for the backward pass (`activations`). Temporaries are estimates.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ...core import logprobs, optim, param
from ...core.param import Leaf
from .. import offload, rules
from . import towers
from .activations import WIDE, saved, values
from .job import KEPT, Job

STEP = 4  # bytes of the step counter


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      params: weights: fp32 unless the optimiser keeps narrower ones; under adapters the frozen ones in their dtype, and
        the adapters.
      moments: optimiser state: moments, averaged weights and counters, including the step counter.
      gradients: the gradient; of several microbatches their sum, and that of the current one.
      reference: weights of the reference model, which without its adapters is the model itself.
      taught: weights of a teacher that the step reads.
      teacher: weights of a teacher that only scores the batch before the step.
      tower: of `params`, those of a frozen vision tower, which a critic shares.
      batch: the batch's arrays that a step reads, all microbatches.
      saved: activations that layers save for the backward pass of a microbatch.
      logits: logits of one chunk, or of all tokens if they are saved for the backward pass.
      working: temporaries of the backward pass of one layer or of the head, whichever is larger.
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
    weights = size(teacher, teacher.weights) if teacher else 0
    taught = job.teacher is not None and job.teacher.taught
    critic = memory(job.critics_step, (of_critic, None) if of_critic else None) if job.critics_step else None
    return Memory(
        params=size(job, job.weights) if job.frozen_shapes is None else _quantised(job) + size(job, job.trained),
        moments=0 if job.optim.offload else own.moments,
        gradients=size(job, job.trained) + (sums(job) if job.microbatches > 1 else 0),
        summed=sums(job) if job.microbatches > 1 else size(job, job.trained),
        reference=copy if job.reference == "device" else 0,
        batch=batch(job),
        saved=saved(job),
        logits=logits(job),
        working=round(max(_layer(job), _head(job), towers.working(job), _forward(teacher) if teacher else 0)),
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


def _layer(job: Job) -> int:
    """Temporaries of a layer's backward pass: its weights in the dtype of the computation, gathered ones as they are
    stored, too, all its values, and the gradients of both; frozen weights have none, and those of a norm's values are
    computed at once, into the gradient of its input."""
    copies = (1 if job.adapters else 2) * job.itemsize

    def at_work(stack):
        weights = sum(job.whole(leaf) * (_gathered(job, leaf) + copies) for leaf in stack.values())
        sizes = {name: size for name, size in values(job, stack).items() if name in KEPT["none"][:-1]}
        return weights + 2 * sum(sizes.values()) - sizes["norms"]

    return round(max(map(at_work, job.stacks)))


def _gathered(job: Job, leaf: Leaf) -> int:
    """Bytes per entry of a weight that a device gathers from others; none if it has the whole."""
    return job.bytes_of(leaf) if job.size("fsdp", "ep") > 1 else 0


def _forward(job: Job) -> int:
    """Temporaries of a forward pass: those of `_layer` without gradients."""

    def at_work(stack):
        weights = sum(job.whole(leaf) * (_gathered(job, leaf) + job.itemsize) for leaf in stack.values())
        return weights + sum(size for name, size in values(job, stack).items() if name in KEPT["none"][:-1])

    return round(max(map(at_work, job.stacks)))


def _head(job: Job) -> int:
    """Temporaries of the head: its matrix in the dtype of the computation, and if it is gathered its gradient; softmax
    and gradient of the logits, of both models if distributions are compared."""
    gathered = WIDE if job.size("fsdp", "ep") > 1 else 0
    matrices = sum(job.whole(leaf) for leaf in job.top.values() if job.is_head(leaf)) * (gathered + job.itemsize)
    rows = 0 if job.value else _chunk(job) * job.vocab * WIDE
    return matrices + 2 * (logits(job) if job.whole_logits else rows) + 3 * job.local_tokens * job.embed * WIDE
