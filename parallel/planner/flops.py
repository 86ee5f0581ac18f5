"""Closed-form FLOPs of a step, and bytes of its collectives."""

from dataclasses import dataclass

from .. import rules
from . import memory
from .job import Job, bytes_of, depth, entries, expert, matrix, nested

WIDE = 4  # bytes of values sent in fp32 whatever the compute dtype
INDEX = 4  # bytes of a segment id, an index, or an expert index


@dataclass(frozen=True)
class Flops:
    """FLOPs of an optimiser step on all devices together; a multiply-add counts as two.

    Attributes:
      matmuls: matmuls with weights, forward and backward: 6 x active weights x tokens.
      attention: scores and weighted sums of causal attention, forward and backward, over unmasked pairs.
      recomputed: recomputation in the backward pass.
      scores: forward passes without gradients, before the step.
    """

    matmuls: float
    attention: float
    recomputed: float
    scores: float

    @property
    def model(self) -> float:
        """Model FLOPs, the numerator of MFU."""
        return self.matmuls + self.attention + self.scores

    @property
    def hardware(self) -> float:
        """FLOPs computed, including recomputation: the numerator of hardware utilisation (HFU)."""
        return self.model + self.recomputed


def active(job: Job) -> int:
    """Active parameters per token: all matrices, with top_k of the experts, without the embedding lookup."""
    return sum(_active(job, leaf) for leaf in job.leaves)


def _active(job: Job, leaf) -> int:
    if not nested(leaf):
        used = {"head", "score"} | ({"embed"} if job.tied else set())
        return entries(leaf) if leaf.path in used else 0
    if not matrix(leaf):
        return 0
    return entries(leaf) * job.top_k // job.table.dims["experts"] if expert(leaf) else entries(leaf)


def pairs(job: Job) -> float:
    """Unmasked query-key pairs of an optimiser step: n (n + 1) / 2 for each sequence of n tokens."""
    return job.tokens * (job.sequence + 1) / 2


def flops(job: Job, pairs: float) -> Flops:
    """FLOPs of an optimiser step with this number of query-key pairs."""
    layer = sum(_active(job, leaf) for leaf in job.leaves if nested(leaf))
    mixture = sum(_active(job, leaf) for leaf in job.leaves if expert(leaf))
    top = active(job) - layer
    attend = 2 * job.layers * job.heads * job.head_dim * pairs  # one matmul of attention
    again = attend  # scores, recomputed from the log-sum-exp
    if job.recomputes("attention"):
        again += 2 * attend
    if job.recomputes("dots"):
        last = sum(_active(job, leaf) for leaf in job.leaves if nested(leaf) and _last(leaf))
        again += 2 * (layer - mixture - last) * job.tokens
    if job.recomputes("experts"):
        again += 2 * mixture * job.tokens
    if not memory.logits_kept(job):
        again += 2 * top * job.tokens
    return Flops(
        matmuls=6 * (layer + top) * job.tokens,
        attention=6 * attend,
        recomputed=again,
        scores=job.scores * (2 * (layer + top) * job.tokens + 2 * attend),
    )


def _last(leaf) -> bool:
    """Whether it is the layer's last matmul, which is only added to the residual stream: never recomputed."""
    return leaf.axes[-2:] == ("embed", "ffn")


# -- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """A collective, with all its calls in an optimiser step together.

    Attributes:
      name: name in text and JSON.
      axes: mesh axes that take part.
      kind: "gather" (all-gather or reduce-scatter), "reduce" (all-reduce), "trade" (all-to-all) or "send".
      payload: bytes per device: of the full array in a gather, of the local operand otherwise.
      overlaps: whether it overlaps with computation.
    """

    name: str
    axes: tuple[str, ...]
    kind: str
    payload: float
    overlaps: bool

    def sent(self, job: Job) -> float:
        """Bytes sent by each device, with ring algorithms."""
        n = job.size(*self.axes)
        return (
            self.payload
            * {"gather": (n - 1) / n, "reduce": 2 * (n - 1) / n, "trade": (n - 1) / n, "send": 1}[self.kind]
        )


def transfers(job: Job) -> list[Transfer]:
    """Collectives of an optimiser step, except tiny ones and those over axes of size 1."""
    forward, backward, again = 1 + job.scores, 1, int(job.recomputes("weights"))
    M, item, tokens, sparse = job.used, job.itemsize, job.local_tokens, _sparse_layers(job)
    stream = tokens * job.embed * item  # the residual stream of a microbatch
    found = [
        Transfer("weights_gather", ("fsdp", "ep"), "gather", M * _gathered(job, forward, again), True),
        Transfer("gradients_scatter", ("fsdp", "ep"), "gather", M * _scattered(job), True),
        Transfer("gradients_reduce", ("dp", "cp"), "reduce", M * _reduced(job), True),
        Transfer("tp_reduce", ("tp",), "reduce", M * _summed(job, forward, backward), False),
    ]
    if job.layout.cp > 1:
        found += _context(job, forward, again, backward)
    if sparse and job.layout.ep > 1:
        routed = tokens * job.top_k * (INDEX + item)
        gathered = (forward + again) * (stream + routed) + backward * stream  # tokens, and gradients of outputs
        scattered = forward * stream + backward * (stream + tokens * job.top_k * item)  # indices have no gradient
        found.append(Transfer("ep_gather", ("ep",), "gather", M * sparse * job.layout.ep * gathered, False))
        found.append(Transfer("ep_scatter", ("ep",), "gather", M * sparse * job.layout.ep * scattered, False))
    return [t for t in found if job.size(*t.axes) > 1]


def _summed(job: Job, forward: int, backward: int) -> float:
    """Bytes of the residual stream all-reduced over tp per microbatch: after attention and MLP, and before them in the
    backward pass.

    The gradients of queries, keys and values count as one all-reduce, as do those of gate and up: XLA adds them up
    first on GPUs.
    """
    stream = job.local_tokens * job.embed * job.itemsize
    layers = job.layers * (2 * forward + 2 * backward + job.recomputes("dots"))
    lookup = (forward + backward) * job.local_tokens * job.embed * WIDE  # in fp32
    return (layers + backward) * stream + lookup  # plus the head's gradient once


def _gathered(job: Job, forward: int, again: int) -> float:
    """Bytes of weights gathered over fsdp and ep per microbatch: a layer's each time it is computed."""
    total = 0
    for leaf in job.leaves:
        gathered = job.held(leaf, rules.GATHERED)
        if gathered > job.held(leaf):  # the final norm is gathered again for its backward pass, embedding and head not
            total += gathered * bytes_of(leaf) * (forward + (again if nested(leaf) else int(not matrix(leaf))))
    return total


def _scattered(job: Job) -> float:
    """Bytes of gradients reduce-scattered over fsdp and ep per microbatch; a tied embedding counts twice."""
    uses = lambda leaf: 2 if job.tied and leaf.path == "embed" else 1
    gathered = [leaf for leaf in job.leaves if job.held(leaf, rules.GATHERED) > job.held(leaf)]
    return sum(uses(leaf) * job.held(leaf, rules.GATHERED) * _gradient(job, leaf) for leaf in gathered)


def _reduced(job: Job) -> float:
    """Bytes of a device's gradients, all-reduced over replicas of the model."""
    return sum(job.held(leaf) * _gradient(job, leaf) for leaf in job.leaves)


def _gradient(job: Job, leaf) -> int:
    """Bytes per gradient entry when reduced: those of layers' matmuls are in the compute dtype."""
    matmul = nested(leaf) and matrix(leaf) and not expert(leaf)
    return min(job.itemsize, bytes_of(leaf)) if matmul else bytes_of(leaf)


def _context(job: Job, forward: int, again: int, backward: int) -> list[Transfer]:
    """Collectives of attention with positions sharded over cp, all layers."""
    L, M, n = job.layers, job.used, job.layout.cp
    entry = job.head_dim * job.itemsize * job.local_tokens // job.layout.tp  # one head at all local positions
    keys, queries = 2 * job.kv_heads * job.kv_copies * entry, job.heads * entry
    places = 2 * INDEX * job.local_tokens
    if job.cp == "gather":
        payload = (forward + again) * (keys + places) + backward * keys
        return [Transfer("cp_gather", ("cp",), "gather", M * L * n * payload, False)]
    if job.cp == "ulysses":
        payload = (forward + again + backward) * (keys + 2 * queries)
        return [Transfer("cp_trade", ("cp",), "trade", M * L * payload, False)]
    wide = keys // job.itemsize * WIDE  # gradients of keys and values are sent in fp32
    payload = (n - 1) * (forward + job.recomputes("attention") + backward) * (keys + places) + backward * n * wide
    return [Transfer("cp_send", ("cp",), "send", M * L * payload, False)]


def _sparse_layers(job: Job) -> int:
    return sum(depth(stack) for stack in job.stacks if "router" in stack)
