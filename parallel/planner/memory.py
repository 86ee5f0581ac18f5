"""Closed-form memory of a training step, in bytes per device.

State, gradients and batch follow from the parameter table and the sharding rules, and are exact. Activations saved for
the backward pass are counted value by value: `job.KEPT` and `job.NAMED` list the values that a remat policy keeps,
`values` and `named` their sizes.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ...core import logprobs, optim, param
from ...core.param import Leaf
from .. import experts, offload, rules
from . import towers
from .job import KEPT, NAMED, Job, added, depth, expert, matrix, matrix_states, recurrent

STEP = 4  # bytes of the step counter
WIDE = 4  # bytes of values computed in fp32 whatever the compute dtype
MLPS = {"up": "gate", "shared_up": "shared_gate", "per_layer_out": "per_layer_gate"}  # of every token, and their gates
GATES = {"silu": 5, "gelu_tanh": 7}  # what an MLP with a gate keeps, in multiples of its width; 3 without a gate
NORMS = "_norm", "_after", "_before"  # ends of the names of norms inside layers
HEADS = {"q_norm": "heads", "k_norm": "kv_heads"}  # norms of heads, or of all heads at once


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


def saved(job: Job, place: str = "save") -> int:
    """Activations of layers that are kept for the backward pass of a microbatch: those that scans over layers stack,
    inputs of single layers, and keys and values that later layers use.

    Args:
      place: "save", on the device, or "offload", in the host's memory.
    """

    def kept(stack) -> float:
        by_name = sum(size for name, size in named(job, stack).items() if job.named.get(name) == place)
        return by_name + sum(size for name, size in values(job, stack).items() if name in job.kept)

    if place == "offload":
        text = sum(depth(stack) * kept(stack) for stack in job.stacks)
        return round(text + towers.saved(job, place)) if job.named else 0
    tokens, item = job.local_tokens, job.itemsize
    beside = job.layers * tokens * job.table.dims.get("per_layer", 0) * item
    shared = sum(
        tokens * layer.kv_heads / job.layout.tp * (layer.key_dim + layer.value_dim) * item
        for layer in job.records
        if not recurrent(layer) and layer.kept
    )
    return round(sum(depth(stack) * kept(stack) for stack in job.stacks) + beside + shared + towers.saved(job))


def values(job: Job, stack: Mapping[str, Leaf]) -> dict[str, float]:
    """Bytes per device, for one layer and microbatch, of each value that a remat policy may keep.

    input: the layer's input. dots: outputs of matmuls with weights. attention: output and log-sum-exp. norms: three
    fp32 copies of a norm's input. operands: inputs of matmuls with weights. qkv: queries, keys and values as read by
    attention. outputs: what sinks or a gate do with the output of attention. gates: intermediates of an MLP. halves:
    the experts' hidden layer before the activation, both halves if it has a gate. experts: all intermediates of a
    mixture, approximately. states, sums: of a recurrence, the states at the starts of chunks, and the decays between
    the tokens of a chunk. recurrence: all else that it keeps, approximately. weights: gathered and cast weights, if
    they differ from the stored ones.
    """
    tokens, item, D = job.local_tokens, job.itemsize, job.embed
    matrices = {name: leaf.param.axes.split() for name, leaf in stack.items() if matrix(leaf) and not expert(leaf)}
    low = [leaf.param.axes.split() for leaf in job.low[job.stacks.index(stack)].values() if not expert(leaf)]
    as_stored = job.itemsize == jnp.dtype(job.frozen).itemsize and job.size("fsdp", "ep") == 1
    used = sum(job.whole(leaf) for leaf in stack.values() if matrix(leaf))
    # Each matmul keeps its own flattened operand; with cp they are not flattened, and attention and MLP keep one each.
    inputs = [into for _, into in matrices.values()]
    read = sum(map(job.width, inputs)) - (D * (inputs.count("embed") - 2) if job.layout.cp > 1 else 0)
    mlps = [(matrices[up], gate in stack) for up, gate in MLPS.items() if up in stack]
    widths = [
        (job.width(axes[axes[0] == "embed"]), GATES.get(job.activation, 5) if gated else 3) for axes, gated in mlps
    ]
    scaled = D if "scalar" in stack else 0  # the layer's output, before its factor
    layer = job.record(stack)
    return {
        "input": tokens * D * item,
        "dots": tokens
        * sum(
            job.width(out) * (WIDE if name == "router" and job.router_fp32 else item)
            for name, (out, _) in matrices.items()
            if name not in added(stack)
        )
        + tokens * item * sum(job.width(out) for out, _ in low),
        "norms": sum(
            (tokens * (3 * size + 2 * groups) + job.whole(stack[name])) * WIDE
            for name, (size, groups) in _norms(job, stack).items()
        ),
        "operands": tokens * item * (read + sum(job.width(into) for _, into in low)),
        "gates": tokens * item * (sum(width * count for width, count in widths) + scaled),
        "weights": 0 if as_stored else used * item,
        **(_recurrence(job, layer) if recurrent(layer) else _attention(job, layer, stack)),
        **(_mixture(job, stack) if "router" in stack else {}),
    }


def named(job: Job, stack: Mapping[str, Leaf]) -> dict[str, float]:
    """Bytes per device, for one layer and microbatch, of each of the values that layers name: `models.remat`."""
    found = values(job, stack)
    products = lambda name: sum(job.width(stack[w].param.axes.split()[0]) for w in NAMED[name] if w in stack)
    made = {name: job.local_tokens * job.itemsize * products(name) for name in NAMED}
    return made | {
        "layer_input": found["input"],
        "attention": found.get("attention", 0),
        "mlp_gate_up": made["mlp_gate_up"] + found.get("halves", 0),
        "states": found.get("states", 0),
    }


def _norms(job: Job, stack: Mapping[str, Leaf]) -> dict[str, tuple[float, float]]:
    """The size of what each norm of a layer normalises of a token, on a device, and the number of groups that are
    normalised by themselves."""
    layer, found = job.record(stack), {}
    for name, leaf in stack.items():
        if not (name.endswith(NORMS) or name in ("norm1", "norm2", "norm")):
            continue
        [axis] = leaf.param.axes.split()
        if name in HEADS and not recurrent(layer):
            size = getattr(layer, HEADS[name]) * layer.key_dim / job.layout.tp
        elif name == "out_norm":
            size = job.width("value_channels")
        else:
            size = job.width(axis)
        found[name] = size, size / job.width(axis)
    return found


def _attention(job: Job, layer, stack: Mapping[str, Leaf]) -> dict[str, float]:
    """Bytes of the values of a layer that attends; its keys and values may be those of another."""
    tokens, item = job.local_tokens, job.itemsize
    heads = layer.heads / job.layout.tp
    kv_heads = job.kv_heads(layer) / job.layout.tp if layer.source is None else 0
    seen = job.seen(layer) if job.cp == "gather" else 1  # keys of whole rows, or of the part within a layer's span
    read = heads * layer.key_dim + kv_heads * (layer.key_dim + layer.value_dim) * seen
    sinks = heads * (layer.value_dim * item + 2 * WIDE) if "sinks" in stack else 0
    gate = 3 * heads * layer.value_dim * item if "q_gate" in stack else 0
    return {
        "attention": tokens * heads * (layer.value_dim * item + WIDE),
        "qkv": tokens * item * read,
        "outputs": tokens * (sinks + gate),
    }


def _recurrence(job: Job, layer) -> dict[str, float]:
    """Bytes of the values of a recurrent layer, whose rows are whole, with channels divided over tp and cp.

    Of a convolution over W tokens the backward pass reads each tap's product and the activation, of keys and queries
    their norms, of the output its norm and gate.
    """
    rows, length, parts = job.local_rows, job.length, job.layout.tp * job.layout.cp
    size, tokens = job.chunks
    chunk = min(size, length)
    blocks = -(-length // max(tokens // rows, chunk))
    chunks = rows * blocks * -(-length // (blocks * chunk))
    channels = sum(shape[0] * (shape[1] + 5) for _, shape in layer.state if len(shape) == 2)
    heads = sum(shape[0] for shape in matrix_states(layer))
    entries = sum(map(math.prod, matrix_states(layer)))
    outputs = job.table.dims["value_channels"] if heads else 0
    return {
        "states": chunks * entries * WIDE / parts,
        "sums": chunks * heads * chunk**2 * WIDE / parts,
        "recurrence": rows * length * (channels + 6 * heads + 6 * outputs) * WIDE / parts,
    }


def _mixture(job: Job, stack: Mapping[str, Leaf]) -> dict[str, float]:
    """Bytes of the values of a layer's experts, in the first round: usual routing takes no other."""
    tokens, ep, item = job.local_tokens, job.layout.ep, job.itemsize
    count, width = job.table.dims["experts"], job.width("expert_ffn")
    pairs = tokens * ep * job.top_k
    rows = math.prod(experts.blocks(pairs, count // ep, ep))
    halves = (1 + ("expert_gate" in stack)) * rows * width * item
    biases = tokens * job.top_k * count * item if "expert_down_bias" in stack else 0
    within = job.table.dims["expert_embed"]
    # All tokens of the ep group; or a copy of each for every expert that it is sent to, of which two are kept.
    arrived = 2 * pairs if job.dispatch == "all_to_all" and job.layout.devices > 1 else tokens * ep
    chosen = arrived * within * item + 2 * tokens * count * WIDE + 4 * pairs * WIDE
    return {"halves": halves, "experts": halves + chosen + biases}


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
