"""Plans a training step: whether it fits its devices and what it costs; for RL also generation and weight pushes.

Figures are exact if they follow from shapes and sharding rules, estimates if they depend on the assumptions below.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..mesh import AXES, BATCH
from . import flops, memory
from .chips import Chip
from .job import Job, entries, expert, stored

# Assumptions of every estimate.
MATMUL = 0.5  # fraction of peak FLOP/s reached by a step's matmuls and attention
LINK = 0.7  # fraction of a link's bytes/s reached by collectives
STREAM = 0.7  # fraction of HBM's bytes/s reached by the optimiser and by decoding
FILLED = 0.7  # largest fraction of a server's usable memory for weights: the rest is for the KV cache
USABLE = 0.92  # usable fraction of HBM: the rest is for the runtime and fragmentation
HOST = 20e9  # bytes/s from a device to its host
DISK = 2e9  # bytes/s to and from the folder of published weights
Shares = Literal["no", "always", "turns"]  # whether a server is on the trainer's first device
TURNS = {"always": "which keeps weights and cache", "turns": "one at a time"}  # of `Generation.shares`
UPDATE = 4  # passes over the fp32 weights in an optimiser step: gradient twice, weight read and write; over state 2


@dataclass(frozen=True)
class Figure:
    """One number of a plan; its name ends in the unit."""

    section: str
    name: str
    value: float
    kind: Literal["exact", "estimate"]
    text: str


@dataclass(frozen=True)
class Generation:
    """Generation for one training batch of RL.

    Attributes:
      samples: completions per training batch.
      prompt, new: mean tokens of a prompt, and of a completion.
      slots: maximum number of concurrent sequences per server; None = what its memory holds.
      itemsize: bytes of a weight and a cache entry on the servers.
      devices: devices for generation; 0 = as many as keep up with training.
      steps: optimiser steps per training batch.
      ahead: eta, batches that generation may be ahead of training.
      cache, state: bytes that a server holds for a token, and for a sequence whatever its length.
      embedded: the recipe starts one server on one chip, whose cache holds `slots` sequences of `context` tokens.
      context: tokens of a sequence in the cache of that server.
      shares: whether a server is on the trainer's first device: "no", "always" with its weights and cache, or in
        "turns": it releases both while the trainer updates, which keeps weights and optimiser state meanwhile.
    """

    samples: int
    prompt: float
    new: float
    slots: int | None
    itemsize: int
    devices: int
    steps: int
    ahead: int
    cache: int
    state: int = 0
    embedded: bool = False
    context: int = 0
    shares: Shares = "no"


@dataclass(frozen=True)
class Plan:
    """All figures, and whether the step fits the memory of its devices."""

    figures: tuple[Figure, ...]
    fits: bool


def plan(job: Job, chip: Chip, *, generation: Generation | None = None, push_itemsize: int = 4) -> Plan:
    """Plans a job on chips of one type.

    Args:
      generation: generation of an RL job; None = supervised.
      push_itemsize: bytes of a weight in an exported checkpoint.
    """
    usable, server = USABLE * chip.memory, server_bytes(job, chip, generation) if generation else 0.0
    shares = generation.shares if generation else "no"
    fits = device_bytes(job, server, shares) <= usable and server <= usable
    step_s, timed = time(job, chip)
    figures = [
        *memory_figures(job, chip, server, shares),
        *work_figures(job),
        *traffic_figures(job),
        *timed,
        *push_figures(job, push_itemsize),
    ]
    if generation is not None:
        figures += generation_figures(job, chip, generation, step_s)
    return Plan(tuple(figures), fits)


def device_bytes(job: Job, server: float, shares: str, state: int | None = None) -> float:
    """Peak of a device that also holds a server's bytes, as `Generation.shares` says; `state` as `memory.memory`."""
    m = memory.memory(job, state)
    if shares == "turns":
        return max(m.peak, m.arguments + m.reference + server)
    return m.peak + (server if shares == "always" else 0)


def weights_bytes(job: Job, itemsize: int) -> int:
    """Bytes of a server's weights, with an output head of its own."""
    own = [job.top["embed"]] if job.tied else []
    return sum(stored(leaf, itemsize) for leaf in [*job.leaves, *own] if leaf.path != "score")


def chips_per_server(job: Job, chip: Chip, itemsize: int) -> int:
    return 1 << max(0, math.ceil(math.log2(weights_bytes(job, itemsize) / (FILLED * USABLE * chip.memory))))


def server_bytes(job: Job, chip: Chip, g: Generation) -> float:
    """Bytes that a server holds on one chip: weights, and the recipe's own server its whole cache from the start; of
    others, which take what there is, a cache for one sequence."""
    count, tokens = (g.slots or 1, g.context) if g.embedded else (1, g.prompt + g.new)
    held = weights_bytes(job, g.itemsize) + count * (tokens * g.cache + g.state)
    return held / (1 if g.embedded else chips_per_server(job, chip, g.itemsize))


def memory_figures(job: Job, chip: Chip, server: float = 0.0, shares: str = "no") -> list[Figure]:
    """Memory of one device.

    Args:
      server, shares: bytes of a generation server, and whether it is on that device.
    """
    m = memory.memory(job)
    about = job.remat == "none" or job.adapters is not None  # closely, but to the byte only in some families
    of = lambda name, value, exact, text: Figure("memory", name, value, "exact" if exact else "estimate", text)
    narrow = job.optim.weights != "float32" or job.optim.offload
    weights = (
        f"matrices of layers in {job.dtype if job.optim.weights == 'float32' else job.optim.weights}, others in fp32"
    )
    weights = f"{job.frozen} weights, and adapters" if job.adapters else weights if narrow else "fp32 weights"
    return [
        of("params_bytes", m.params, True, weights),
        of("moments_bytes", m.moments, True, f"state of {job.optim.name}" + ", averaged weights" * (job.optim.ema > 0)),
        of("batch_bytes", m.batch, True, "arrays of the batch that the step reads"),
        of("argument_bytes", m.arguments, True, "sum of these three: arguments of the compiled step"),
        of("gradients_bytes", m.gradients, True, "gradients" + (", summed and new" if job.microbatches > 1 else "")),
        of("reference_bytes", m.reference, True, "weights of the reference policy"),
        of("saved_bytes", m.saved, not about, f"activations saved for the backward pass, remat {job.remat}"),
        of("logits_bytes", m.logits, True, "logits, all saved" if memory.logits_kept(job) else "logits of a chunk"),
        of("working_bytes", m.working, False, "temporaries of a layer or the head"),
        of("streamed_bytes", m.streamed, False, "of what the host holds, on the device during the update"),
        of("peak_bytes", m.peak, False, "total"),
        of("host_bytes", m.host, True, "in the host's memory for a device: masters and moments, or a reference"),
        *(
            [of("shared_bytes", device_bytes(job, server, shares), False, f"the same with the server, {TURNS[shares]}")]
            if shares != "no" else []
        ),
        of("usable_bytes", USABLE * chip.memory, False, f"{USABLE:.0%} of the chip's memory"),
        of("rows_that_fit", most_rows(job, chip, server, shares), False, "largest microbatch, in rows"),
    ]  # fmt: skip


def most_rows(job: Job, chip: Chip, server: float = 0.0, shares: str = "no") -> int:
    """The largest microbatch that fits, in rows over all devices; 0 if none does. Arguments as `memory_figures`."""
    unit, state = job.size(*BATCH), memory.moments(job)
    fits = lambda n: device_bytes(replace(job, rows=n * unit), server, shares, state) <= USABLE * chip.memory
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def work_figures(job: Job) -> list[Figure]:
    """FLOPs of an optimiser step, on all devices together."""
    f = flops.flops(job)
    of = lambda name, value, kind, text: Figure("work", name, value, kind, text)
    return [
        of("params", sum(map(entries, job.leaves)), "exact", "weights of the model"),
        of("active_params", flops.active(job), "exact", "active weights per token"),
        of("tokens", job.tokens, "estimate", "per optimiser step, padding included"),
        of("matmul_flops", f.matmuls, "estimate", "matmuls with weights, forward and backward"),
        of("attention_flops", f.attention, "estimate", f"causal attention in sequences of {job.sequence:g} tokens"),
        of("recurrence_flops", f.recurrence, "estimate", "recurrent layers, linear in the number of tokens"),
        of("score_flops", f.scores, "estimate", "scoring passes without gradients"),
        of("model_flops", f.model, "estimate", "sum of these, used for MFU"),
        of("recomputed_flops", f.recomputed, "estimate", f"recomputed in the backward pass, remat {job.remat}"),
    ]


def traffic_figures(job: Job) -> list[Figure]:
    """Bytes sent by a device in an optimiser step, per collective."""
    return [
        Figure("traffic", f"{t.name}_bytes", t.sent(job), "estimate", f"over {' x '.join(split(job, t.axes))}")
        for t in flops.transfers(job)
    ]


def split(job: Job, axes: tuple[str, ...]) -> list[str]:
    return [f"{axis} {job.size(axis)}" for axis in axes if job.size(axis) > 1]


def time(job: Job, chip: Chip) -> tuple[float, list[Figure]]:
    """(seconds per optimiser step, figures); collectives of weights and gradients overlap with computation."""
    devices = job.layout.devices
    f = flops.flops(job)
    compute = f.hardware / devices / (MATMUL * chip.flops)
    moving = flops.transfers(job)
    waits = sum(t.sent(job) / link(job, chip, t.axes) for t in moving if not t.overlaps)
    overlapped = sum(t.sent(job) / link(job, chip, t.axes) for t in moving if t.overlaps)
    m = memory.memory(job)
    update = (UPDATE * m.params + 2 * m.moments) / (STREAM * chip.bandwidth)
    # For each microbatch the sum of the gradients is read and written, and the new one read.
    summing = job.used * (m.gradients + m.summed) / (STREAM * chip.bandwidth) if job.microbatches > 1 else 0.0
    if job.optim.offload:  # copies to and from the host go on at once, and take longer than the update itself
        update = max(update, (m.host - (memory.reference(job) if job.reference == "host" else 0)) / HOST)
    total = max(compute, overlapped) + waits + summing + update
    of = lambda name, value, text: Figure("time", name, value, "estimate", text)
    return total, [
        of("compute_s", compute, f"at {MATMUL:.0%} of the chip's peak"),
        of("beside_s", overlapped, "collectives of weights and gradients, overlapped with computation"),
        of("waiting_s", waits, "collectives that layers wait for"),
        of("summing_s", summing, "gradients of microbatches added up"),
        of("update_s", update, "optimiser"),
        of("step_s", total, "optimiser step"),
        of("tokens_per_device_per_s", job.tokens / total / devices, "speed"),
        of("mfu", f.model / (devices * chip.flops * total), "model FLOPs over the chips' peak"),
        of("hardware_utilisation", f.hardware / (devices * chip.flops * total), "the same including recomputation"),
    ]


def link(job: Job, chip: Chip, axes: tuple[str, ...]) -> float:
    """Bytes/s that a device sends in a collective over these axes; the network's rate if the group spans hosts."""
    outermost = min((axis for axis in axes if job.size(axis) > 1), key=AXES.index)
    span = job.size(*AXES[AXES.index(outermost) :])
    return LINK * (chip.link if span <= chip.near else chip.network)


def push_figures(job: Job, itemsize: int) -> list[Figure]:
    """A weight push: device to host, host to a shared folder, folder to the servers."""
    size = sum(stored(leaf, itemsize) for leaf in job.leaves)
    return [
        Figure("push", "push_bytes", size, "exact", f"exported weights, {itemsize} bytes each unless kept in fp32"),
        Figure("push", "push_s", size / HOST + 2 * size / DISK, "estimate", "to the host, to a folder, to the servers"),
    ]


def generation_figures(job: Job, chip: Chip, g: Generation, step_s: float) -> list[Figure]:
    """Generation on chips of the same type: KV cache memory, and decoding speed limited by memory bandwidth."""
    usable = USABLE * chip.memory
    sparse = sum(entries(leaf) for leaf in job.leaves if expert(leaf)) * g.itemsize
    weights, server = weights_bytes(job, g.itemsize), chips_per_server(job, chip, g.itemsize)
    if g.embedded:
        server = 1  # whether it fits is `Plan.fits`
    room = server * usable - weights
    tokens = (g.slots or 1) * g.context if g.embedded else room / g.cache if g.cache else 0
    sequence = (g.prompt + g.new) * g.cache + g.state
    most = (g.slots or 1) * min(1.0, g.context / (g.prompt + g.new)) if g.embedded else room / sequence
    context = g.prompt + g.new / 2  # mean length of a sequence while it grows

    def batch_s(servers: int) -> float:
        flying = g.samples * (g.ahead + 1) / servers
        running = max(1.0, min(flying, most, g.slots or math.inf))
        idle = max(0.0, 1 - running * job.top_k / job.table.dims["experts"]) * sparse if sparse else 0.0
        read = weights - idle + running * (context * g.cache + 2 * g.state)  # states are written, too
        token_s = read / (server * STREAM * chip.bandwidth)
        return g.samples * g.new / servers / running * token_s

    train_s, least = g.steps * step_s, batch_s(g.samples)
    servers = next(n for n in range(1, g.samples + 1) if batch_s(n) <= max(train_s, 2 * least))
    if g.embedded:
        servers = 1
    elif g.devices:
        if g.devices < server:
            raise ValueError(
                f"plan: --rollout-chips must be at least {server}, as needed for a server's weights, got {g.devices}"
            )
        servers = g.devices // server
    of = lambda name, value, kind, text: Figure("generation", name, value, kind, text)
    wanted = "chips needed to keep up with training, if possible"
    if g.embedded:
        wanted = "chip of the recipe's server"
    elif g.devices:
        wanted = "chips reserved for generation"
    return [
        of("server_weights_bytes", weights, "exact", "weights on a server"),
        of("cache_bytes_per_token", g.cache, "exact", "KV cache per token"),
        of("state_bytes", g.state, "exact", "states of recurrent layers per sequence"),
        of("server_devices", server, "estimate", "chips per server"),
        of("cache_tokens", tokens, "estimate", "tokens in a server's KV cache"),
        of("server_bytes", server_bytes(job, chip, g), "estimate", "weights and KV cache on a server's chip"),
        of("generated_tokens", g.samples * g.new, "estimate", "per training batch"),
        of("train_batch_s", train_s, "estimate", "training on a batch"),
        of("rollout_devices", servers * server, "estimate", wanted),
        of("generate_batch_s", batch_s(servers), "estimate", f"generating a batch on them, {g.ahead + 1} in flight"),
    ]
