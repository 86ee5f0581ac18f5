"""Plans a training step: whether it fits its devices and what it costs; for RL also generation and weight pushes.

Figures are exact if they follow from shapes and sharding rules, estimates if they depend on assumptions (`figures`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..mesh import AXES, BATCH
from . import activations, flops, memory
from .chips import Chip
from .figures import ATTENTION, HOST, LINK, MATMUL, PASSES, STREAM, UPDATE, USABLE, Figure
from .generation import Generation, generation_figures, push_figures, server_bytes
from .job import Job
from .leaves import entries

TURNS = {"always": "which keeps weights and cache", "turns": "one at a time"}  # of `Generation.shares`


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


def device_bytes(job: Job, server: float, shares: str, state: memory.States | None = None) -> float:
    """Peak of a device that also holds a server's bytes, as `Generation.shares` says; `state` as `memory.memory`."""
    m = memory.memory(job, state)
    if shares == "turns":
        return max(m.peak, m.held + m.batch + server)
    return m.peak + (server if shares == "always" else 0)


def memory_figures(job: Job, chip: Chip, server: float = 0.0, shares: str = "no") -> list[Figure]:
    """Memory of one device.

    Args:
      server, shares: bytes of a generation server, and whether it is on that device.
    """
    m = memory.memory(job)
    # Closely, but to the byte only in some families.
    about = job.remat == "none" or job.adapters is not None or job.vision is not None
    of = lambda name, value, exact, text: Figure("memory", name, value, "exact" if exact else "estimate", text)
    narrow = job.optim.weights != "float32" or job.optim.offload
    weights = (
        f"matrices of layers in {job.dtype if job.optim.weights == 'float32' else job.optim.weights}, others in fp32"
    )
    weights = f"{job.frozen} weights, and adapters" if job.adapters else weights if narrow else "fp32 weights"
    counted = "four" if m.taught else "three"
    logits = "logits, all saved" if memory.logits_kept(job) else "logits of a chunk"
    return [
        of("params_bytes", m.params, True, weights),
        of("moments_bytes", m.moments, True, f"state of {job.optim.name}" + ", averaged weights" * (job.optim.ema > 0)),
        of("batch_bytes", m.batch, True, "arrays of the batch that the step reads"),
        of("teacher_bytes", m.taught + m.teacher, True, f"{job.dtype} weights of the teacher"),
        of("argument_bytes", m.arguments, True, f"sum of these {counted}: arguments of the compiled step"),
        of("gradients_bytes", m.gradients, False, "gradients" + ", summed and new" * (job.microbatches > 1)),
        of("reference_bytes", m.reference, True, "weights of the reference policy"),
        of("saved_bytes", m.saved, not about, f"activations saved for the backward pass, remat {_policy(job)}"),
        of("logits_bytes", m.logits, True, logits),
        of("working_bytes", m.working, False, "temporaries of the head or a layer, at the peak"),
        of("streamed_bytes", m.streamed, False, "of what the host holds, on the device during the update"),
        *_critic_figures(m.critic, of),
        of("peak_bytes", m.peak, False, "total"),
        of("host_bytes", m.host, True, "in the host's memory for a device"),
        *(
            [of("shared_bytes", device_bytes(job, server, shares), False, f"the same with the server, {TURNS[shares]}")]
            if shares != "no" else []
        ),
        of("usable_bytes", USABLE * chip.memory, False, f"{USABLE:.0%} of the chip's memory"),
        of("rows_that_fit", most_rows(job, chip, server, shares), False, "largest microbatch, in rows"),
    ]  # fmt: skip


def _policy(job: Job) -> str:
    return job.remat if isinstance(job.remat, str) else " ".join(map(" ".join, job.remat))


def _critic_figures(m: memory.Memory | None, of: Callable) -> list[Figure]:
    """Memory of the critic's step, beside which the policy's state stays."""
    if m is None:
        return []
    return [
        of("critic_params_bytes", m.params, True, "weights of the critic"),
        of("critic_moments_bytes", m.moments, True, "its optimiser's state"),
        of("critic_argument_bytes", m.arguments, True, "arguments of its compiled step"),
        of("critic_gradients_bytes", m.gradients, False, "its gradients, after the policy's are gone"),
        of("critic_saved_bytes", m.saved, False, "activations that its backward pass reads"),
        of("critic_working_bytes", m.working, False, "temporaries of one of its layers"),
    ]


def most_rows(job: Job, chip: Chip, server: float = 0.0, shares: str = "no") -> int:
    """The largest microbatch that fits, in rows over all devices; 0 if none does. Arguments as `memory_figures`."""
    unit, state = job.size(*BATCH), memory.states(job)
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
        of("params", sum(map(entries, [*job.leaves, *job.predictor, *job.tower])), "exact", "weights of the model"),
        of("active_params", flops.active(job), "exact", "active weights per token"),
        of("tokens", job.tokens, "estimate", "per optimiser step, padding included"),
        *_tries_figures(job, of),
        of("matmul_flops", f.matmuls, "estimate", "matmuls with weights, forward and backward"),
        of("attention_flops", f.attention, "estimate", f"causal attention in sequences of {job.sequence:g} tokens"),
        of("recurrence_flops", f.recurrence, "estimate", "recurrent layers, linear in the number of tokens"),
        of("score_flops", f.scores, "estimate", "scoring passes without gradients"),
        of("vision_flops", f.vision, "estimate", "the vision tower, with one image a sequence"),
        of("teacher_flops", f.teacher, "estimate", "forward passes of the teacher"),
        of("critic_flops", f.critic, "estimate", "the critic: its values, and its step"),
        of("model_flops", f.model, "estimate", "sum of these, used for MFU"),
        of("recomputed_flops", f.recomputed, "estimate", f"recomputed in the backward pass, remat {_policy(job)}"),
    ]


def _tries_figures(job: Job, of: Callable) -> list[Figure]:
    """Tokens of the samples, of which those that samples share are computed once."""
    if not job.tries:
        return []
    return [
        of("sample_tokens", job.tries.tokens, "estimate", "of the samples of an optimiser step"),
        of("trie_ratio", job.tries.ratio, "estimate", "tokens computed over those of the samples"),
    ]


def traffic_figures(job: Job) -> list[Figure]:
    """Bytes sent by a device in an optimiser step, per collective."""
    return [
        Figure("traffic", f"{t.name}_bytes", t.sent(job), "estimate", f"over {' x '.join(split(job, t.axes))}")
        for t in flops.transfers(job)
    ]


def split(job: Job, axes: tuple[str, ...]) -> list[str]:
    return [f"{axis} {job.size(axis)}" for axis in axes if job.size(axis) > 1]


def time(job: Job, chip: Chip, state: memory.States | None = None) -> tuple[float, list[Figure]]:
    """(seconds per optimiser step, figures); collectives of weights and gradients overlap with computation. `state` as
    `memory.memory`."""
    devices = job.layout.devices
    f = flops.flops(job)
    attention = f.hardware * f.attention / (f.matmuls + f.attention + f.recurrence)
    matmuls = f.hardware - attention
    compute = (matmuls / MATMUL + attention / ATTENTION[chip.platform]) / chip.flops / devices
    passing = PASSES * flops.passed_bytes(job) * matmuls / (2 * flops.active(job) * job.tokens)
    passing /= STREAM * chip.bandwidth * devices
    moving = flops.transfers(job)
    waits = sum(t.sent(job) / link(job, chip, t.axes) for t in moving if not t.overlaps)
    overlapped = sum(t.sent(job) / link(job, chip, t.axes) for t in moving if t.overlaps)
    of_job, of_critic = state or memory.states(job)
    updates, summing = _update_s(job, chip, of_job), _summing_s(job, chip)
    if job.critics_step and of_critic:
        updates += _update_s(job.critics_step, chip, of_critic)
        summing += _summing_s(job.critics_step, chip)
    copies = job.used * sum(2 * activations.saved(j, "offload") for j in (job, job.critics_step) if j) / HOST
    total = max(compute + passing, overlapped, copies) + waits + summing + updates
    of = lambda name, value, text: Figure("time", name, value, "estimate", text)
    return total, [
        of("compute_s", compute, f"at {MATMUL:.0%} of the chip's peak, attention at {ATTENTION[chip.platform]:.0%}"),
        of("passing_s", passing, "activations, read and written between matmuls"),
        of("beside_s", overlapped, "collectives of weights and gradients, overlapped with computation"),
        of("copies_s", copies, "activations to the host and back, overlapped with computation"),
        of("waiting_s", waits, "collectives that layers wait for"),
        of("summing_s", summing, "gradients of microbatches added up"),
        of("update_s", updates, "optimiser"),
        of("step_s", total, "optimiser step"),
        of("tokens_per_device_per_s", job.sampled / total / devices, "speed" + ", tokens of samples" * bool(job.tries)),
        of("mfu", f.model / (devices * chip.flops * total), "model FLOPs over the chips' peak"),
        of("hardware_utilisation", f.hardware / (devices * chip.flops * total), "the same including recomputation"),
    ]


def _summing_s(job: Job, chip: Chip) -> float:
    """Seconds to add up the gradients of microbatches: each reads and writes their sum, and reads its own."""
    moved = 2 * memory.sums(job) + memory.size(job, job.trained)
    return job.used * moved / (STREAM * chip.bandwidth) if job.microbatches > 1 else 0.0


def _update_s(job: Job, chip: Chip, state: memory.State) -> float:
    """Seconds of one optimiser's update."""
    weights = memory.size(job, job.trained)
    if job.optim.offload:  # copies to and from the host go on at once, and take longer than the update itself
        return max(UPDATE * weights / (STREAM * chip.bandwidth), state.moments / HOST)
    return (UPDATE * weights + 2 * state.moments) / (STREAM * chip.bandwidth)


def link(job: Job, chip: Chip, axes: tuple[str, ...]) -> float:
    """Bytes/s that a device sends in a collective over these axes; the network's rate if the group spans hosts."""
    outermost = min((axis for axis in axes if job.size(axis) > 1), key=AXES.index)
    span = job.size(*AXES[AXES.index(outermost) :])
    return LINK * (chip.link if span <= chip.near else chip.network)
