"""Activations that layers keep for the backward pass, value by value, in bytes per device.

`job.KEPT` and `job.NAMED` list the values that a remat policy keeps, `values` and `named` their sizes.
"""

import math
from collections.abc import Mapping

import jax.numpy as jnp

from ...core.param import Leaf
from .. import experts
from . import towers
from .job import KEPT, NAMED, Job
from .leaves import added, depth, expert, matrix, matrix_states, recurrent

WIDE = 4  # bytes of values computed in fp32 whatever the compute dtype
MLPS = {"up": "gate", "shared_up": "shared_gate", "per_layer_out": "per_layer_gate"}  # of every token, and their gates
GATES = {"silu": 5, "gelu_tanh": 7}  # what an MLP with a gate keeps, in multiples of its width; 3 without a gate
NORMS = "_norm", "_after", "_before"  # ends of the names of norms inside layers
HEADS = {"q_norm": "heads", "k_norm": "kv_heads"}  # norms of heads, or of all heads at once


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


def unfused(job: Job, stack: Mapping[str, Leaf]) -> float:
    """`at_once` of XLA's CPU backend, which writes all of a layer's values, those of norms in fp32, and the gradients
    of all but norms, which it adds up at once."""
    sizes = {name: size for name, size in values(job, stack).items() if name in KEPT["none"][:-1]}
    return 2 * sum(sizes.values()) - sizes["norms"]


def at_once(job: Job, stack: Mapping[str, Leaf]) -> float:
    """Bytes of a layer's values while its backward pass computes them again, and of the gradients of the part in which
    most are there: of the MLP those of its halves, its input and output; of attention those of queries and output."""
    tokens, item, D = job.local_tokens, job.itemsize, job.embed
    found, layer = values(job, stack), job.record(stack)
    normed = sum(tokens * size * item for size, groups in _norms(job, stack).values() if groups == 1 and size == D)
    names = ("input", "dots", "attention", "qkv", "outputs")
    made = normed + sum(found.get(name, 0) for name in names)
    half = max((job.width(stack[up].param.axes.split()[0]) for up in MLPS if up in stack), default=0)
    sums = job.layout.tp > 1  # of products, before they are added up over tp
    mlp = tokens * item * (2 * half + (3 + sums) * D)
    low = [
        job.width(axes.split()[0]) for axes in (leaf.param.axes for leaf in job.low[job.stacks.index(stack)].values())
    ]
    made -= tokens * item * (sum(low) - max(low, default=0))  # an adapter's product is added to that of its weight
    mixer = 0.0
    if recurrent(layer):
        made += found["states"] + found["sums"] + found["recurrence"]
    else:
        mixer = tokens * item * (half + 3 * layer.heads * layer.key_dim / job.layout.tp + D)
    if "router" in stack:
        made += found["experts"]
        mlp += found["halves"]
    return made + max(mlp, mixer)


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
