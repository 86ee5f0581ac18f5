"""Closed-form memory of a training step, in bytes per device.

State, gradients and batch follow from the parameter table and the sharding rules, and are exact. Activations saved for
the backward pass are counted value by value: `job.KEPT` lists the values that a remat policy keeps, `values` their
sizes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from ...core import logprobs, optim, param
from ...core.param import Leaf
from .. import experts, rules
from .job import KEPT, Job, bytes_of, depth, matrix

STEP = 4  # bytes of the step counter
WIDE = 4  # bytes of values computed in fp32 whatever the compute dtype
GATES = {"gate": "ffn", "shared_gate": "shared_ffn"}  # gated MLPs applied to every token, and their widths


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      params: fp32 master weights.
      moments: optimiser state: moments, averaged weights and counters, including the step counter.
      gradients: the accumulated gradients, plus with several microbatches those of the current one.
      reference: weights of the reference model.
      batch: the batch's arrays that a step reads, all microbatches.
      saved: activations that layers save for the backward pass of a microbatch.
      logits: logits of one chunk, or of all tokens if they are saved for the backward pass.
      working: temporaries of the backward pass of one layer or of the head, whichever is larger.
    """

    params: int
    moments: int
    gradients: int
    reference: int
    batch: int
    saved: int
    logits: int
    working: int

    @property
    def arguments(self) -> int:
        """Arguments of the compiled step."""
        return self.params + self.moments + self.batch

    @property
    def peak(self) -> int:
        return self.arguments + self.gradients + self.reference + self.saved + self.logits + self.working


def memory(job: Job) -> Memory:
    """Memory of a device during a training step."""
    params = sum(job.held(leaf) * bytes_of(leaf) for leaf in job.leaves)
    return Memory(
        params=params,
        moments=moments(job),
        gradients=params * (1 if job.microbatches == 1 else 2),
        reference=params if job.reference else 0,
        batch=batch(job),
        saved=saved(job),
        logits=logits(job),
        working=max(_layer(job), _head(job)),
    )


def moments(job: Job) -> int:
    """Optimiser state on a device, sharded according to the rules, plus the step counter."""
    optimizer = optim.make_optimizer(job.optim, job.table)
    shapes = jax.eval_shape(optimizer.init, param.abstract(job.table))
    where = rules.of_state(optimizer, job.table, job.mesh).opt_state
    held = lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return STEP + sum(jax.tree.leaves(jax.tree.map(held, shapes, where)))


def batch(job: Job) -> int:
    """The batch's arrays that a step reads; segment arrays are sharded like rows."""
    width = lambda name: job.length // job.layout.cp if name.endswith("_BT") else job.slots
    return job.microbatches * job.local_rows * sum(size * width(name) for name, size in job.reads.items())


def saved(job: Job) -> int:
    """Activations that the scans over layers stack for the backward pass of a microbatch."""
    kept = lambda stack: sum(size for name, size in values(job, stack).items() if name in job.kept)
    return round(sum(depth(stack) * kept(stack) for stack in job.stacks))


def values(job: Job, stack: Mapping[str, Leaf]) -> dict[str, float]:
    """Bytes per device, for one layer and microbatch, of each value that a remat policy may keep.

    input: the layer's input. dots: outputs of matmuls with weights. attention: output and log-sum-exp. norms: three
    fp32 copies of a norm's input. operands: inputs of matmuls with weights. qkv: queries, keys and values as read by
    attention. gates: intermediates of a gated MLP. halves: both halves of the experts' hidden layer before the
    activation. experts: all intermediates of a mixture, approximately. weights: gathered and cast weights, if they
    differ from the stored ones.
    """
    tokens, tp, item, D = job.local_tokens, job.layout.tp, job.itemsize, job.embed
    heads, kv_heads = job.heads / tp, job.kv_heads * job.kv_copies / tp
    seen = job.layout.cp if job.cp == "gather" else 1  # keys of whole rows
    matrices = [axes for leaf in stack.values() if len(axes := leaf.param.axes.split()) == 2 and matrix(leaf)]
    width = lambda axis: job.table.dims[axis] / (tp if getattr(rules.RULES, axis) == "tp" else 1)
    norms = {"norm1": (D, 1), "norm2": (D, 1)} | {
        f"{name}_norm": (width(axis), width(axis) / job.head_dim) for name, axis in (("q", "heads"), ("k", "kv_heads"))
    }
    halves = mixture = 0.0
    if "router" in stack:  # room for all pairs of the ep group, for any routing
        ep = job.layout.ep
        pairs = tokens * ep * job.top_k
        rows = math.prod(experts.blocks(pairs, job.table.dims["experts"] // ep, ep))
        halves = (1 + ("expert_gate" in stack)) * rows * width("expert_ffn") * item
        mixture = halves + tokens * (ep * D * item + 2 * width("router") * WIDE) + 4 * pairs * WIDE
    as_stored = job.itemsize == WIDE and job.size("fsdp", "ep") == 1
    used = sum(job.whole(leaf) for leaf in stack.values() if matrix(leaf))
    # Each matmul keeps its own flattened operand; with cp they are not flattened, and attention and MLP keep one each.
    inputs = [into for _, into in matrices]
    read = sum(map(width, inputs)) - (D * (inputs.count("embed") - 2) if job.layout.cp > 1 else 0)
    return {
        "input": tokens * D * item,
        # without the last output, which is only added to the residual stream
        "dots": tokens * item * sum(width(out) for out, into in matrices if into != "ffn"),
        "attention": tokens * heads * (job.head_dim * item + WIDE),
        "norms": sum(
            (tokens * (3 * norms[name][0] + 2 * norms[name][1]) + job.whole(leaf)) * WIDE
            for name, leaf in stack.items()
            if name in norms
        ),
        "operands": tokens * item * read,
        "qkv": tokens * item * job.head_dim * (heads + 2 * kv_heads * seen),
        "gates": 5 * tokens * item * sum(width(axis) for name, axis in GATES.items() if name in stack),
        "halves": halves,
        "experts": mixture,
        "weights": 0 if as_stored else used * item,
    }


def logits_kept(job: Job) -> bool:
    """Whether logits are saved for the backward pass: the rule of `core.logprobs.from_hidden`, per device."""
    return not job.head_chunk and job.local_tokens * job.vocab <= logprobs.KEPT


def logits(job: Job) -> int:
    """Bytes of fp32 logits that a device holds at a time."""
    chunk = _chunk(job)
    held = -(-job.local_tokens // chunk) * chunk if logits_kept(job) else chunk
    return held * job.vocab * WIDE


def _chunk(job: Job) -> int:
    """Tokens per chunk of logits on a device."""
    return min(job.head_chunk or logprobs.chunk_size(job.vocab, job.platform), job.local_tokens)


def _layer(job: Job) -> int:
    """Temporaries of a layer's backward pass: its gathered weights, all its values, and the gradients of both."""

    def at_work(stack):
        weights = sum(job.whole(leaf) * (bytes_of(leaf) + 2 * job.itemsize) for leaf in stack.values())
        return weights + 2 * sum(size for name, size in values(job, stack).items() if name in KEPT["none"][:-1])

    return round(max(map(at_work, job.stacks)))


def _head(job: Job) -> int:
    """Temporaries of the head: its gathered matrix as stored and as used, their gradient; softmax and gradient of the
    logits."""
    matrices = sum(job.whole(leaf) for leaf in job.top.values() if matrix(leaf)) * (2 * WIDE + job.itemsize)
    return matrices + 2 * _chunk(job) * job.vocab * WIDE + 3 * job.local_tokens * job.embed * WIDE
