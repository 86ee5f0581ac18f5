"""What each device holds during a training step, in bytes, by closed formulas.

State, gradients and batch follow from the table of weights and the sharding rules, and are exact. What layers keep for
the backward pass is counted value by value: `job.KEPT` says which values a remat policy keeps, `values` how large they
are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from ...core import logprobs, optim, param
from ...core.param import Leaf
from .. import experts, rules
from .job import KEPT, Job, bytes_of, depth, matrix

STEP = 4  # bytes of the count of steps
WIDE = 4  # bytes of what is computed in fp32 whatever the compute dtype
GATES = {"gate": "ffn", "shared_gate": "shared_ffn"}  # gated MLPs that every token goes through, and their widths


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      params: fp32 masters.
      moments: the optimiser's state: moments, averaged weights and counters, that of steps included.
      gradients: the sum over microbatches, and with several of them those of the one at work.
      reference: weights that only score.
      batch: of the batch's arrays those that a step reads, all microbatches.
      saved: what layers keep for the backward pass of a microbatch.
      logits: of one chunk, or of all tokens where the backward pass finds them kept.
      working: the larger of what one layer and the head need while their gradients are computed.
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
        """What the compiled step is given."""
        return self.params + self.moments + self.batch

    @property
    def peak(self) -> int:
        return self.arguments + self.gradients + self.reference + self.saved + self.logits + self.working


def memory(job: Job) -> Memory:
    """Of a device in a training step."""
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
    """What training carries besides the weights: each array of the optimiser's state where the rules put it."""
    optimizer = optim.make_optimizer(job.optim, job.table)
    shapes = jax.eval_shape(optimizer.init, param.abstract(job.table))
    where = rules.of_state(optimizer, job.table, job.mesh).opt_state
    held = lambda x, its: math.prod(its.shard_shape(x.shape)) * x.dtype.itemsize
    return STEP + sum(jax.tree.leaves(jax.tree.map(held, shapes, where)))


def batch(job: Job) -> int:
    """Of the batch's arrays those that a step reads; segments lie with their rows."""
    width = lambda name: job.length // job.layout.cp if name.endswith("_BT") else job.slots
    return job.microbatches * job.local_rows * sum(size * width(name) for name, size in job.reads.items())


def saved(job: Job) -> int:
    """What the scans over layers stack up for the backward pass of a microbatch, besides the weights themselves."""
    kept = lambda stack: sum(size for name, size in values(job, stack).items() if name in job.kept)
    return round(sum(depth(stack) * kept(stack) for stack in job.stacks))


def values(job: Job, stack: Mapping[str, Leaf]) -> dict[str, float]:
    """Bytes on a device, of one layer and microbatch, of each value that a policy may keep.

    input: what the layer is given. dots: results of matmuls with weights. attention: its result and log-sum-exp.
    norms: three copies in fp32 of what a norm reads. operands: what is multiplied with weights. qkv: queries, keys and
    values as attention reads them. gates: what lies between the matmuls of a gated MLP. halves: of the hidden layer of
    experts, before the activation. experts: all of a mixture, about. weights: as they are used, gathered and cast,
    where that is not how they are stored.
    """
    tokens, tp, item, D = job.local_tokens, job.layout.tp, job.itemsize, job.embed
    heads, kv_heads = job.heads / tp, job.kv_heads * job.kv_copies / tp
    seen = job.layout.cp if job.cp == "gather" else 1  # keys of whole rows
    matrices = [axes for leaf in stack.values() if len(axes := leaf.param.axes.split()) == 2]
    width = lambda axis: job.table.dims[axis] / (tp if getattr(rules.RULES, axis) == "tp" else 1)
    norms = {"norm1": (D, 1), "norm2": (D, 1)} | {
        f"{name}_norm": (width(axis), width(axis) / job.head_dim) for name, axis in (("q", "heads"), ("k", "kv_heads"))
    }
    halves = mixture = 0.0
    if "router" in stack:  # room for all pairs of the ep group, whichever experts they choose
        ep = job.layout.ep
        pairs = tokens * ep * job.top_k
        halves = 2 * math.prod(experts.blocks(pairs, job.table.dims["experts"] // ep, ep)) * width("expert_ffn") * item
        mixture = halves + tokens * (ep * D * item + 2 * width("router") * WIDE) + 4 * pairs * WIDE
    own_dtype = job.itemsize == WIDE and job.size("fsdp", "ep") == 1
    used = sum(job.whole(leaf) for leaf in stack.values() if matrix(leaf))
    # Flattened, each matmul keeps an operand of its own; with cp they are not, and attention and MLP keep one each.
    inputs = [into for _, into in matrices]
    read = sum(map(width, inputs)) - (D * (inputs.count("embed") - 2) if job.layout.cp > 1 else 0)
    return {
        "input": tokens * D * item,
        # the last result only joins the residual stream, which needs no gradient of its own
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
        "weights": 0 if own_dtype else used * item,
    }


def logits_kept(job: Job) -> bool:
    """Whether the backward pass finds logits kept: the rule of `core.logprobs.from_hidden`, for a device's own."""
    return not job.head_chunk and job.local_tokens * job.vocab <= logprobs.KEPT


def logits(job: Job) -> int:
    """fp32 logits that a device holds at a time."""
    chunk = _chunk(job)
    held = -(-job.local_tokens // chunk) * chunk if logits_kept(job) else chunk
    return held * job.vocab * WIDE


def _chunk(job: Job) -> int:
    """Tokens whose logits a device computes at a time."""
    return min(job.head_chunk or logprobs.chunk_size(job.vocab, job.platform), job.local_tokens)


def _layer(job: Job) -> int:
    """A layer at work in the backward pass: its weights whole, all its values, and the gradients of both."""

    def at_work(stack):
        weights = sum(job.whole(leaf) * (bytes_of(leaf) + 2 * job.itemsize) for leaf in stack.values())
        return weights + 2 * sum(size for name, size in values(job, stack).items() if name in KEPT["none"][:-1])

    return round(max(map(at_work, job.stacks)))


def _head(job: Job) -> int:
    """The head at work: its matrix as stored, as used and its gradient, whole; softmax and gradient of the logits."""
    matrices = sum(job.whole(leaf) for leaf in job.top.values() if matrix(leaf)) * (2 * WIDE + job.itemsize)
    return matrices + 2 * _chunk(job) * job.vocab * WIDE + 3 * job.local_tokens * job.embed * WIDE
