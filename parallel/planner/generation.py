"""Generation of an RL job on chips of the trainer's type, and the pushes of weights to its servers."""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.param import Leaf
from ..mesh import Layout
from . import flops
from .chips import Chip
from .figures import DISK, FILLED, HOST, LATENCY, LAUNCH, LINK, MATMUL, PAGED, STREAM, USABLE, Figure
from .job import Job
from .leaves import ONE, depth, expert, in_use, stored

Shares = Literal["no", "always", "turns"]  # whether a server is on the trainer's first device


@dataclass(frozen=True)
class Generation:
    """Generation for one training batch of RL.

    Attributes:
      samples: completions per training batch.
      prompt, new: mean tokens of a prompt, and of a completion.
      slots: maximum number of concurrent sequences per server, of all its replicas; None = what its memory holds.
      itemsize: bytes of a weight and a cache entry on the servers.
      devices: devices for generation; 0 = as many as keep up with training.
      steps: optimiser steps per training batch.
      ahead: eta, batches that generation may be ahead of training.
      cache, state: bytes that a server holds for a token, and for a sequence whatever its length; of the recipe's own
        servers, on each of the chips that have it.
      embedded: the recipe starts servers.
      split: how each of them is split over chips: replicas over dp, all but experts copied over ep.
      count: how many it starts.
      capacity, held: tokens that fit into such a server's caches, and the bytes of these on each chip.
      predictor: weights of its layer for multi-token prediction.
      shares: whether a server is on the trainer's first device: "no", each has devices of its own; "always", with its
        weights and cache; or in "turns": it releases both while the trainer updates, which keeps weights and optimiser
        state meanwhile.
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
    split: Layout = ONE
    count: int = 1
    capacity: int = 0
    held: int = 0
    predictor: Sequence[Leaf] = ()
    shares: Shares = "no"


def weights_bytes(job: Job, itemsize: int, split: Layout = ONE, predictor: Sequence[Leaf] = ()) -> int:
    """Bytes of a server's weights, with an output head of its own, on each chip of this layout."""
    own = [*job.tower, *predictor, *([job.top["embed"]] if job.tied else [])]
    return sum(stored(leaf, itemsize, split) for leaf in [*job.leaves, *own] if not leaf.path.startswith("score"))


def chips_per_server(job: Job, chip: Chip, itemsize: int) -> int:
    return 1 << max(0, math.ceil(math.log2(weights_bytes(job, itemsize) / (FILLED * USABLE * chip.memory))))


def server_bytes(job: Job, chip: Chip, g: Generation) -> float:
    """Bytes that a server holds on one chip: weights, and the recipe's own server its whole cache from the start, and
    the next version of the weights while it is loaded, unless it has released the last one; of others, which take what
    there is, a cache for one sequence."""
    if g.embedded:
        versions = 1 if g.shares == "turns" else 2
        return versions * weights_bytes(job, g.itemsize, g.split, g.predictor) + g.held
    held = weights_bytes(job, g.itemsize) + (g.prompt + g.new) * g.cache + g.state
    return held / chips_per_server(job, chip, g.itemsize)


def pushed(job: Job) -> list[Leaf]:
    """The weights of a push: a frozen tower stays on servers."""
    return [*job.leaves, *job.predictor, *(job.tower if job.vision and job.vision.trained else ())]


def push_figures(job: Job, itemsize: int) -> list[Figure]:
    """A weight push: device to host, host to a shared folder, folder to the servers."""
    size = sum(stored(leaf, itemsize) for leaf in pushed(job))
    return [
        Figure("push", "push_bytes", size, "exact", f"exported weights, {itemsize} bytes each unless kept in fp32"),
        Figure("push", "push_s", size / HOST + 2 * size / DISK, "estimate", "to the host, to a folder, to the servers"),
    ]


@dataclass(frozen=True)
class Rates:
    """The speed of a server, as figures and simulations take it: decoding is bound by memory bandwidth, and reading of
    prompts by FLOPs.

    Attributes:
      devices: its chips.
      slots: sequences that it generates at a time.
      cache_tokens: tokens in its KV cache; 0 = without one.
      step_s: seconds of a decoding step that do not depend on the number of sequences: reading the weights, starting
        kernels.
      request_s: seconds that each sequence adds: reading its keys and values, and states, which are written, too.
      read_tokens_s: tokens of prompts per second.
      publish_s, load_s: of a push: to the host and a folder, while training waits; from there to a server.
    """

    devices: int
    slots: float
    cache_tokens: float
    step_s: float
    request_s: float
    read_tokens_s: float
    publish_s: float
    load_s: float

    def token_s(self, running: float) -> float:
        """Seconds of a decoding step, in which each running sequence gets a token."""
        return self.step_s + running * self.request_s


def rates(job: Job, chip: Chip, g: Generation, running: float = math.inf) -> Rates:
    """The speed of one server with so many sequences, of which the chosen experts are read."""
    devices = g.split.devices if g.embedded else chips_per_server(job, chip, g.itemsize)  # `Plan.fits` says if it fits
    alike = 1 if g.embedded else devices  # chips that share what is counted here as a whole
    weights, bandwidth = weights_bytes(job, g.itemsize, g.split, g.predictor), alike * STREAM * chip.bandwidth
    sequence, room = (g.prompt + g.new) * g.cache + g.state, devices * USABLE * chip.memory - weights
    most: float
    tokens: float
    if g.embedded:
        most, tokens = g.capacity / (g.prompt + g.new), g.capacity
    else:
        most, tokens = room / sequence, room / g.cache if g.cache else 0
    slots = max(1.0, min(most, g.slots or math.inf))
    sparse = sum(in_use(leaf, g.split) for leaf in job.leaves if expert(leaf)) * g.itemsize
    chosen = min(running, slots) / g.split.dp * job.top_k / job.table.dims["experts"] if sparse else 1.0
    context = g.prompt + g.new / 2  # mean length of a sequence while it grows
    size = sum(stored(leaf, g.itemsize) for leaf in pushed(job))
    wait_s, sum_s = _sums(job, chip, g)
    ours = g.embedded and chip.platform == "gpu"
    launch_s, paged = (job.layers * LAUNCH, PAGED / STREAM) if ours else (0.0, 1.0)
    experts = flops.chosen(job)
    own = (flops.active(job) - experts + experts / g.split.ep) / g.split.tp  # of the weights that a token passes
    peak = MATMUL * chip.flops
    return Rates(
        devices, slots, tokens, (weights - max(0.0, 1 - chosen) * sparse) / bandwidth + wait_s + launch_s,
        ((context * g.cache / paged + 2 * g.state) / bandwidth + sum_s) / g.split.dp,
        g.split.dp * alike * peak / (2 * own + sum_s * peak), size / HOST + size / DISK, size / DISK,
    )  # fmt: skip


def _sums(job: Job, chip: Chip, g: Generation) -> tuple[float, float]:
    """Seconds that a step waits for sums over the chips of a recipe's own server: (however few tokens, for each token).

    There are two a layer, of the outputs of attention and MLP, and one of embeddings; those of experts are also over
    ep.
    """
    sparse = sum(depth(stack) for stack in job.stacks if any(map(expert, stack.values())))
    wait_s = token_s = 0.0
    for chips, sums in ((g.split.tp, 1 + 2 * job.layers - sparse), (g.split.tp * g.split.ep, sparse)):
        if chips > 1:
            link = LINK * (chip.link if chips <= chip.near else chip.network)
            wait_s += sums * LATENCY
            token_s += sums * 2 * (chips - 1) / chips * job.embed * g.itemsize / link
    return wait_s, token_s


def batch_s(job: Job, chip: Chip, g: Generation, servers: int) -> float:
    """Seconds in which so many servers generate a batch, with eta + 1 batches in flight."""
    flying = g.samples * (g.ahead + 1) / servers
    speed = rates(job, chip, g, flying)
    running = max(1.0, min(flying, speed.slots))
    return g.samples * g.new / servers / running * speed.token_s(running)


def generation_figures(job: Job, chip: Chip, g: Generation, step_s: float) -> list[Figure]:
    """Generation on chips of the same type: KV cache memory, and decoding speed limited by memory bandwidth."""
    speed, seconds = rates(job, chip, g), functools.partial(batch_s, job, chip, g)
    train_s, least = g.steps * step_s, seconds(g.samples)
    wanted = "chips needed to keep up with training, if possible"
    if g.embedded:
        servers, wanted = g.count, "chips of the recipe's servers"
    elif g.devices:
        if g.devices < speed.devices:
            raise ValueError(
                f"plan: --rollout-chips must be at least {speed.devices}, as needed for a server's weights, got "
                f"{g.devices}"
            )
        servers, wanted = g.devices // speed.devices, "chips reserved for generation"
    else:
        counts, enough = range(1, g.samples + 1), max(train_s, 2 * least)
        servers = counts[bisect.bisect_left(counts, True, key=lambda n: seconds(n) <= enough)]
    own = weights_bytes(job, g.itemsize, g.split, g.predictor) if g.embedded else 0
    each = ", on each chip" if g.embedded and speed.devices > 1 else ""
    of = lambda name, value, kind, text: Figure("generation", name, value, kind, text)
    return [
        of("server_weights_bytes", weights_bytes(job, g.itemsize, ONE, g.predictor), "exact", "weights on a server"),
        of("cache_bytes_per_token", g.cache, "exact", f"KV cache per token{each}"),
        of("state_bytes", g.state, "exact", f"states of recurrent layers per sequence{each}"),
        of("server_devices", speed.devices, "estimate", "chips per server"),
        of("cache_tokens", speed.cache_tokens, "estimate", "tokens in a server's KV cache"),
        of("chip_weights_bytes", own, "exact", "weights on each chip of a server"),
        of("chip_cache_bytes", g.held, "exact", "KV cache and states on each chip of a server"),
        of("server_bytes", server_bytes(job, chip, g), "estimate", "most on a server's chip, as weights are loaded"),
        of("generated_tokens", g.samples * g.new, "estimate", "per training batch"),
        of("train_batch_s", train_s, "estimate", "training on a batch"),
        of("rollout_devices", servers * speed.devices, "estimate", wanted),
        of("generate_batch_s", seconds(servers), "estimate", f"generating a batch on them, {g.ahead + 1} in flight"),
    ]
