"""Closed-form FLOPs of a step, and bytes of its collectives."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from .. import rules
from . import memory, towers
from .job import Job
from .leaves import added, depth, entries, expert, matrix, matrix_states, nested, recurrent

WIDE = 4  # bytes of values sent in fp32 whatever the compute dtype
INDEX = 4  # bytes of a segment id, an index, or an expert index


@dataclass(frozen=True)
class Flops:
    """FLOPs of an optimiser step on all devices together; a multiply-add counts as two.

    Attributes:
      matmuls: matmuls with weights, forward and backward: 6 x active weights x tokens, 4 for frozen ones,
        which have no gradient.
      attention: scores and weighted sums of causal attention, forward and backward, over unmasked pairs.
      recurrence: linear recurrences, forward and backward, in chunks.
      recomputed: what the backward pass computes again, and what recurrences compute beyond their formula.
      scores: forward passes without gradients, before the step.
      teacher: forward passes of a teacher, before and in the step.
      critic: the critic's step: model FLOPs, its scores included. What it recomputes is in `recomputed`.
      vision: of a vision tower, all passes, with one image a sequence.
    """

    matmuls: float
    attention: float
    recurrence: float
    recomputed: float
    scores: float
    teacher: float = 0
    critic: float = 0
    vision: float = 0

    @property
    def model(self) -> float:
        """Model FLOPs, the numerator of MFU."""
        return self.matmuls + self.attention + self.recurrence + self.scores + self.teacher + self.critic + self.vision

    @property
    def hardware(self) -> float:
        """FLOPs computed, including recomputation: the numerator of hardware utilisation (HFU)."""
        return self.model + self.recomputed


def active(job: Job) -> int:
    """Active parameters per token: all matrices, with top_k of the experts, without tables that tokens are looked up
    in."""
    return sum(_active(job, leaf) for leaf in job.leaves)


def chosen(job: Job) -> int:
    """The part of `active` in experts."""
    return sum(_active(job, leaf) for leaf in job.leaves if expert(leaf))


def _active(job: Job, leaf) -> int:
    if not matrix(leaf):
        return 0
    if not nested(leaf) and leaf.path.endswith("embed"):
        return entries(leaf) if job.tied and leaf.path == "embed" and not job.value else 0
    return entries(leaf) * job.top_k // job.table.dims["experts"] if expert(leaf) else entries(leaf)


def pairs(job: Job, layer) -> float:
    """Unmasked query-key pairs of a layer in an optimiser step: for each sequence of n tokens n (n + 1) / 2, within
    each chunk of attention by itself, less those further apart than its window. Over tries those of a shared prompt
    are counted once."""

    def within(n: float) -> float:
        far = max(0.0, n - (layer.pattern.window or n))
        return (n * (n + 1) - far * (far + 1)) / 2

    def seen(n: float) -> float:
        whole, rest = divmod(n, layer.pattern.chunk or n)
        return whole * within(layer.pattern.chunk or n) + within(rest)

    if job.tries:
        return job.tokens / job.tries.places * job.tries.pairs(seen)
    return job.tokens / job.sequence * seen(job.sequence)


def attention(layer, pairs: float) -> tuple[float, float]:
    """FLOPs of (the scores, the weighted sums of values) of a layer's forward pass, expanded: latent attention makes
    the keys and values of all heads in training (DeepSeek-V2, arXiv:2405.04434)."""
    return 2 * layer.heads * layer.key_dim * pairs, 2 * layer.heads * layer.value_dim * pairs


@dataclass(frozen=True)
class Rule:
    """How a recurrence uses its state S, a matrix per head.

    Attributes:
      key_axis: axis of the state along which keys lie.
      solves: what is written depends on S, by a triangular system in each chunk.
    """

    key_axis: int
    solves: bool


RULES = {"delta": Rule(1, solves=True), "mamba": Rule(2, solves=False)}  # by name of the state


def recurrence(job: Job, layer) -> tuple[float, float]:
    """FLOPs per token of a recurrent layer's forward pass: (of the formula, computed beyond it).

    In chunks of C tokens, for N heads with keys of size K, shared by N / G heads, and values of size V (Gated DeltaNet,
    arXiv:2412.06464, section 3.3; Mamba 2, arXiv:2405.21060, section 6):

        2 C K G    products of queries and keys, and with a triangular system as many of keys with keys
        C (K + V) N    the triangular system, if any, by substitution
        2 C V N    sums over the chunk
        2 K V N    each product with the state: of queries, of what is written, with a triangular system of keys

    Beyond it, each decay between two tokens of a chunk is a sum of its own, by a product of 2 C^2 N. With a triangular
    system, its inverse takes 2 (C^2 - 1) N / 3, by halves, and as many FLOPs again as substitution when it is applied,
    and what is written is computed twice.
    """
    C = min(job.chunks[0], job.length)
    wanted = beyond = 0.0
    for name, shape in layer.state:
        if len(shape) != 3:
            continue
        if name not in RULES:
            raise ValueError(
                f"plan: a recurrence must be one of {', '.join(RULES)}, got {name}; add its FLOPs to planner/flops.py"
            )
        rule, N = RULES[name], shape[0]
        K, V = shape[rule.key_axis], shape[3 - rule.key_axis]
        G = job.table.dims["key_channels"] // K
        solved = int(rule.solves)
        wanted += 2 * C * K * G * (1 + solved) + C * (K + V) * N * solved + 2 * C * V * N + 2 * K * V * N * (2 + solved)
        inverse = 2 * (C**2 - 1) * N / 3 + C * (K + V) * N
        beyond += 2 * C**2 * N + (inverse + 2 * K * V * N) * solved
    return wanted, beyond


def flops(job: Job, pairs: Callable = pairs) -> Flops:
    """FLOPs of an optimiser step, with `pairs(job, layer)` query-key pairs in each layer."""
    layers = _of_layers(job)
    mixture = sum(_active(job, leaf) for leaf in job.leaves if expert(leaf))
    low = sum(_active(job, leaf) for leaf in job.trained) if job.adapters else 0
    top = active(job) - layers
    attends = [attention(layer, pairs(job, layer)) for layer in job.records if not recurrent(layer)]
    scores, attend = sum(score for score, _ in attends), sum(map(sum, attends))
    rules_of = [recurrence(job, layer) for layer in job.records if recurrent(layer)]
    recur, beyond = (job.tokens * sum(each) for each in zip(*rules_of, strict=True)) if rules_of else (0, 0)
    # Scores are recomputed from the log-sum-exp, and the terms of chunks before their backward pass.
    again = scores + (1 + job.scores) * beyond + recur + beyond
    if job.remat != "none":
        again += recur + beyond  # no policy keeps a recurrence's output
    if job.recomputes("attention"):
        again += attend
    if job.recomputes("dots"):
        last = sum(
            _active(job, leaf)
            for stack in job.stacks
            for name, leaf in stack.items()
            if name in added(stack) or (job.names(name) and not expert(leaf))
        )
        again += 2 * (layers - mixture - last + low) * job.tokens
    if job.recomputes("experts"):
        again += 2 * mixture * job.tokens
    if not memory.logits_kept(job):
        again += 2 * top * job.tokens
    critic, taught = flops(job.critics_step, pairs) if job.critics_step else None, 0.0
    if job.teachers_pass and job.teacher:
        passes = job.teacher.scores + job.teacher.taught
        taught = passes * forward(job.teachers_pass, pairs)
        if job.teacher.taught:  # chunks of its logits, too, are computed again
            again += 2 * (active(job.teachers_pass) - _of_layers(job.teachers_pass)) * job.tokens
    seeing, seen_again = towers.flops(job)
    return Flops(
        matmuls=((4 if job.adapters else 6) * (layers + top) + 6 * low) * job.tokens,
        attention=3 * attend,
        recurrence=3 * recur,
        recomputed=again + seen_again + (critic.recomputed if critic else 0),
        scores=job.scores * forward(job, pairs),
        teacher=taught,
        critic=critic.model if critic else 0,
        vision=seeing,
    )


def forward(job: Job, pairs: Callable = pairs) -> float:
    """FLOPs of a forward pass over an optimiser step's tokens."""
    low = sum(_active(job, leaf) for leaf in job.trained) if job.adapters else 0
    mixed = sum(
        job.tokens * recurrence(job, layer)[0] if recurrent(layer) else sum(attention(layer, pairs(job, layer)))
        for layer in job.records
    )
    return 2 * (active(job) + low) * job.tokens + mixed


def passed_bytes(job: Job) -> float:
    """Bytes of the inputs and outputs of the matmuls of a forward pass over an optimiser step's tokens."""
    ends = lambda leaf: 1 / leaf.shape[-2] + 1 / leaf.shape[-1]  # the sum of sizes, by their product
    sizes = sum(_active(job, leaf) * ends(leaf) for leaf in job.leaves if matrix(leaf))
    return jnp.dtype(job.dtype).itemsize * job.tokens * sizes


def _of_layers(job: Job) -> int:
    return sum(_active(job, leaf) for leaf in job.leaves if nested(leaf))


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
    """Collectives of an optimiser step, except tiny ones and those over axes of size 1; a critic's are its own step's.

    A teacher's passes gather weights and reduce activations as the model's do.
    """
    found = _transfers(job, 1 + job.scores, 1)
    if job.teachers_pass and job.teacher:
        found += _transfers(job.teachers_pass, job.teacher.scores + job.teacher.taught, 0)
    if job.critics_step:
        found += transfers(job.critics_step)
    return [Transfer(t.name, t.axes, t.kind, sum(u.payload for u in found if u.name == t.name), t.overlaps)
            for t in {t.name: t for t in reversed(found)}.values()][::-1]  # fmt: skip


def _transfers(job: Job, forward: float, backward: int) -> list[Transfer]:
    """Of passes forward and backward."""
    again = backward * int(job.recomputes("weights"))
    M, item, tokens, sparse = job.used, job.itemsize, job.local_tokens, _sparse_layers(job)
    stream = tokens * job.embed * item  # the residual stream of a microbatch
    found = [
        Transfer("weights_gather", ("fsdp", "ep"), "gather", M * _gathered(job, forward, again), True),
        Transfer("gradients_scatter", ("fsdp", "ep"), "gather", M * _scattered(job), True),
        Transfer("gradients_reduce", ("dp", "cp"), "reduce", M * _reduced(job), True),
        Transfer("lookup_trade", ("fsdp", "ep"), "trade", M * (forward + backward) * stream * len(job.lookups), False),
        Transfer("tp_reduce", ("tp",), "reduce", M * _summed(job, forward, backward), False),
    ]
    if job.layout.cp > 1:
        found += _context(job, forward, again, backward)
    if sparse and job.dispatch == "all_to_all":
        copies = tokens * job.top_k * job.table.dims["expert_embed"] * item  # sent to the experts, and back
        found.append(
            Transfer("ep_trade", ("ep",), "trade", M * sparse * 2 * (forward + again + backward) * copies, False)
        )
    elif sparse and job.layout.ep > 1:
        routed = tokens * job.top_k * (INDEX + item)
        gathered = (forward + again) * (stream + routed) + backward * stream  # tokens, and gradients of outputs
        scattered = forward * stream + backward * (stream + tokens * job.top_k * item)  # indices have no gradient
        found.append(Transfer("ep_gather", ("ep",), "gather", M * sparse * job.layout.ep * gathered, False))
        found.append(Transfer("ep_scatter", ("ep",), "gather", M * sparse * job.layout.ep * scattered, False))
    return [t for t in found if job.size(*t.axes) > 1]


def _summed(job: Job, forward: float, backward: int) -> float:
    """Bytes of the residual stream all-reduced over tp per microbatch: after attention and MLP, and before them in the
    backward pass.

    The gradients of queries, keys and values count as one all-reduce, as do those of gate and up: XLA adds them up
    first on GPUs.
    """
    stream = job.local_tokens * job.embed * job.itemsize
    mixes = lambda layer: not recurrent(layer) or bool(layer.state)
    parts = lambda stack: mixes(job.record(stack)) + ("router" in stack or "down" in stack)
    # What an MLP adds is not computed again, what comes before it is.
    layers = sum(
        depth(stack) * (parts(stack) * (forward + backward) + backward * job.recomputes("dots") * (parts(stack) - 1))
        for stack in job.stacks
    )
    # Plus embeddings, which all devices that share columns look up, and the head's gradient once.
    return (layers + forward + backward + backward * (not job.value)) * stream


def _gathered(job: Job, forward: float, again: int) -> float:
    """Bytes of weights gathered over fsdp and ep per microbatch: a layer's each time it is computed, matrices in the
    dtype of the computation."""
    total = 0.0
    for leaf in job.weights:
        gathered = job.held(leaf, rules.GATHERED)
        if gathered == job.held(leaf) or job.looked_up(leaf):
            continue
        # The final norm is gathered again for its backward pass, the head not.
        later = again if nested(leaf) else int(job.trains and not matrix(leaf))
        narrow = job.is_head(leaf) or _cast(leaf)
        size = min(job.itemsize, job.bytes_of(leaf)) if narrow else job.bytes_of(leaf)
        total += gathered * size * (forward + later)
    return total


def _scattered(job: Job) -> float:
    """Bytes of gradients reduce-scattered over fsdp and ep per microbatch; those of embeddings are not divided."""
    parted = [leaf for leaf in job.trained if job.held(leaf, rules.GATHERED) > job.held(leaf)]
    return sum(job.held(leaf, rules.GATHERED) * _gradient(job, leaf) for leaf in parted if not job.looked_up(leaf))


def _reduced(job: Job) -> float:
    """Bytes of a device's gradients, all-reduced over replicas of the model."""
    return sum(job.held(leaf) * _gradient(job, leaf) for leaf in job.trained)


def _gradient(job: Job, leaf) -> int:
    """Bytes per gradient entry when reduced: those of layers' matmuls are in the compute dtype, of experts if they are
    gathered in it."""
    narrow = _cast(leaf) and (not expert(leaf) or job.size("fsdp", "ep") > 1)
    return min(job.itemsize, job.bytes_of(leaf)) if narrow else job.bytes_of(leaf)


def _cast(leaf) -> bool:
    """Whether a layer's weight is cast to the compute dtype before it is gathered (`rules.gather`)."""
    return nested(leaf) and leaf.param.cast


def _context(job: Job, forward: float, again: int, backward: int) -> list[Transfer]:
    """Collectives of layers with positions sharded over cp: keys and values by the method, "gather" only as far as a
    layer's pattern reaches; what recurrent layers read and return by all-to-all."""
    M, n, tokens, item = job.used, job.layout.cp, job.local_tokens, job.itemsize
    sent = dict.fromkeys(("gather", "trade", "send"), 0.0)
    places = 2 * INDEX * tokens
    for layer in job.records:
        if recurrent(layer):
            sent["trade"] += (forward + again + backward) * _exchanged(job, layer) * tokens * item / job.layout.tp
            continue
        entry = item * tokens / job.layout.tp
        keys = job.kv_heads(layer) * (layer.key_dim + layer.value_dim) * entry
        outer = layer.heads * (layer.key_dim + layer.value_dim) * entry  # queries and outputs
        if job.cp == "ulysses":
            sent["trade"] += (forward + again + backward) * (keys + outer)
        elif job.cp == "ring":
            wide = keys / item * WIDE  # gradients of keys and values are sent in fp32
            turns = forward + backward * job.recomputes("attention") + backward
            sent["send"] += (n - 1) * turns * (keys + places) + backward * n * wide
        else:
            payload = (forward + again) * (keys + places) + backward * keys
            seen = job.seen(layer)
            sent["gather" if seen == n else "send"] += payload * (n if seen == n else seen - 1)
    return [Transfer(f"cp_{kind}", ("cp",), kind, M * size, False) for kind, size in sent.items() if size]


def _exchanged(job: Job, layer) -> int:
    """Values of a token that a recurrent layer exchanges for whole rows: channels of convolutions, two gates a head,
    and outputs."""
    heads = sum(shape[0] for shape in matrix_states(layer))
    outputs = job.table.dims["value_channels"] if heads else 0
    return sum(shape[0] for _, shape in layer.state if len(shape) == 2) + 2 * heads + outputs


def _sparse_layers(job: Job) -> int:
    return sum(depth(stack) for stack in job.stacks if "router" in stack)
