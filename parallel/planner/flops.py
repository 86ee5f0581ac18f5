"""What a step computes and what travels, by closed formulas: FLOPs, and the bytes of each collective."""

from dataclasses import dataclass

from .. import rules
from . import memory
from .job import Job, bytes_of, depth, entries, expert, matrix, nested

WIDE = 4  # bytes of what travels in fp32 whatever the compute dtype
INDEX = 4  # bytes of a segment number, an index, a choice of the router


@dataclass(frozen=True)
class Flops:
    """Of an optimiser step on all devices together; a multiplication and an addition are two.

    Attributes:
      matmuls: with weights, forward and backward: 6 x active weights x tokens.
      attention: scores and weighted sums of causal attention, forward and backward, over pairs that may look.
      recomputed: what the backward pass computes a second time.
      scores: forward passes without gradients, before the step.
    """

    matmuls: float
    attention: float
    recomputed: float
    scores: float

    @property
    def model(self) -> float:
        """What the mathematics needs: the numerator of MFU."""
        return self.matmuls + self.attention + self.scores

    @property
    def hardware(self) -> float:
        """What is computed: the numerator of hardware utilisation."""
        return self.model + self.recomputed


def active(job: Job) -> int:
    """Weights that a token is multiplied with: all matrices, of the experts those of its top_k; not the lookup."""
    return sum(_active(job, leaf) for leaf in job.leaves)


def _active(job: Job, leaf) -> int:
    if not nested(leaf):
        used = {"head", "score"} | ({"embed"} if job.tied else set())
        return entries(leaf) if leaf.path in used else 0
    if not matrix(leaf):
        return 0
    return entries(leaf) * job.top_k // job.table.dims["experts"] if expert(leaf) else entries(leaf)


def pairs(job: Job) -> float:
    """Pairs of a query and a key that it may see, of an optimiser step: each sequence of n tokens has n (n + 1) / 2."""
    return job.tokens * (job.sequence + 1) / 2


def flops(job: Job, pairs: float) -> Flops:
    """FLOPs of an optimiser step whose attention looks at so many pairs."""
    layer = sum(_active(job, leaf) for leaf in job.leaves if nested(leaf))
    mixture = sum(_active(job, leaf) for leaf in job.leaves if expert(leaf))
    top = active(job) - layer
    look = 2 * job.layers * job.heads * job.head_dim * pairs  # of one matmul of attention
    again = look  # scores, from the log-sum-exp
    if job.recomputes("attention"):
        again += 2 * look
    if job.recomputes("dots"):
        last = sum(_active(job, leaf) for leaf in job.leaves if nested(leaf) and _last(leaf))
        again += 2 * (layer - mixture - last) * job.tokens
    if job.recomputes("experts"):
        again += 2 * mixture * job.tokens
    if not memory.logits_kept(job):
        again += 2 * top * job.tokens
    return Flops(
        matmuls=6 * (layer + top) * job.tokens,
        attention=6 * look,
        recomputed=again,
        scores=job.scores * (2 * (layer + top) * job.tokens + 2 * look),
    )


def _last(leaf) -> bool:
    """The layer's last matmul, whose result only joins the residual stream: no gradient asks for it again."""
    return leaf.axes[-2:] == ("embed", "ffn")


# -- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """A collective, all its calls of an optimiser step together.

    Attributes:
      name: for people and JSON.
      axes: mesh axes whose devices take part.
      kind: "gather" (all-gather or reduce-scatter), "reduce" (all-reduce), "trade" (all-to-all) or "send".
      payload: bytes a device: of the whole in a gather, of its own operand otherwise.
      overlaps: whether the devices can compute meanwhile.
    """

    name: str
    axes: tuple[str, ...]
    kind: str
    payload: float
    overlaps: bool

    def sent(self, job: Job) -> float:
        """Bytes that each device sends, in a ring."""
        n = job.size(*self.axes)
        return (
            self.payload
            * {"gather": (n - 1) / n, "reduce": 2 * (n - 1) / n, "trade": (n - 1) / n, "send": 1}[self.kind]
        )


def transfers(job: Job) -> list[Transfer]:
    """All collectives of an optimiser step that carry more than a few numbers; those of axes of size 1 left out."""
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
        come = (forward + again) * (stream + routed) + backward * stream  # tokens there, output gradients there
        back = forward * stream + backward * (stream + tokens * job.top_k * item)  # numbers have no gradient
        found.append(Transfer("ep_gather", ("ep",), "gather", M * sparse * job.layout.ep * come, False))
        found.append(Transfer("ep_scatter", ("ep",), "gather", M * sparse * job.layout.ep * back, False))
    return [t for t in found if job.size(*t.axes) > 1]


def _summed(job: Job, forward: int, backward: int) -> float:
    """Bytes of the residual stream that tp sums in a microbatch: behind attention and MLP, and before them backward.

    Of the gradients of queries, keys and values one sum is counted, as of gate and up: XLA adds them up first on GPUs.
    """
    stream = job.local_tokens * job.embed * job.itemsize
    layers = job.layers * (2 * forward + 2 * backward + job.recomputes("dots"))
    lookup = (forward + backward) * job.local_tokens * job.embed * WIDE  # in fp32
    return (layers + backward) * stream + lookup  # and the head's once


def _gathered(job: Job, forward: int, again: int) -> float:
    """Bytes of weights that fsdp and ep bring together in a microbatch: a layer's as often as it is computed."""
    total = 0
    for leaf in job.leaves:
        whole = job.held(leaf, rules.GATHERED)
        if whole > job.held(leaf):  # the last norm comes again for its backward pass, embedding and head stay
            total += whole * bytes_of(leaf) * (forward + (again if nested(leaf) else int(not matrix(leaf))))
    return total


def _scattered(job: Job) -> float:
    """Bytes of gradients of a microbatch before fsdp and ep part them; lookup and head each have their own."""
    uses = lambda leaf: 2 if job.tied and leaf.path == "embed" else 1
    whole = [leaf for leaf in job.leaves if job.held(leaf, rules.GATHERED) > job.held(leaf)]
    return sum(uses(leaf) * job.held(leaf, rules.GATHERED) * _gradient(job, leaf) for leaf in whole)


def _reduced(job: Job) -> float:
    """Bytes of a device's gradients, which are summed over copies of the model."""
    return sum(job.held(leaf) * _gradient(job, leaf) for leaf in job.leaves)


def _gradient(job: Job, leaf) -> int:
    """Bytes of an entry when it is summed: matmuls of layers leave their gradients in the compute dtype."""
    matmul = nested(leaf) and matrix(leaf) and not expert(leaf)
    return min(job.itemsize, bytes_of(leaf)) if matmul else bytes_of(leaf)


def _context(job: Job, forward: int, again: int, backward: int) -> list[Transfer]:
    """Attention over positions split over cp, all layers."""
    L, M, n = job.layers, job.used, job.layout.cp
    entry = job.head_dim * job.itemsize * job.local_tokens // job.layout.tp  # of one head on each position
    keys, queries = 2 * job.kv_heads * job.kv_copies * entry, job.heads * entry
    places = 2 * INDEX * job.local_tokens
    if job.cp == "gather":
        payload = (forward + again) * (keys + places) + backward * keys
        return [Transfer("cp_gather", ("cp",), "gather", M * L * n * payload, False)]
    if job.cp == "ulysses":
        payload = (forward + again + backward) * (keys + 2 * queries)
        return [Transfer("cp_trade", ("cp",), "trade", M * L * payload, False)]
    wide = keys // job.itemsize * WIDE  # gradients of keys and values travel in fp32
    payload = (n - 1) * (forward + job.recomputes("attention") + backward) * (keys + places) + backward * n * wide
    return [Transfer("cp_send", ("cp",), "send", M * L * payload, False)]


def _sparse_layers(job: Job) -> int:
    return sum(depth(stack) for stack in job.stacks if "router" in stack)
