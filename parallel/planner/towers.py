"""Memory and FLOPs of a vision tower in a training step.

Its weights, and the arrays of patches, are exact. What it keeps for the backward pass is, in training, counted as that
of layers is (`activations.values`); frozen it keeps its features alone.
"""

import math

from .job import Job

WIDE = 4  # bytes of values computed in fp32 whatever the compute dtype


def saved(job: Job, place: str = "save") -> float:
    """Bytes of a microbatch that a device keeps for the backward pass, `place` as in `activations.saved`."""
    tower = job.vision
    if tower is None:
        return 0
    features = job.local_patches / tower.unit * (1 + len(tower.taps)) * tower.out * job.itemsize
    if place == "offload":
        return tower.layers * _kept(job, place) if tower.trained else 0
    return features + (tower.layers * _kept(job, place) + _mergers(job) if tower.trained else 0)


def _kept(job: Job, place: str) -> float:
    """Of a layer."""
    found = _values(job)
    named = {"layer_input": "input", "qkv": "qkv", "attention": "attention", "attention_out": "out",
             "mlp_gate_up": "hidden"}  # fmt: skip
    if job.remat == "none":
        return sum(size for name, size in found.items() if name not in ("input", "out"))
    if job.named:
        return sum(found[named[name]] for name, where in job.named.items() if name in named and where == place)
    dots = ("qkv", "attention", "out", "hidden") if job.remat == "dots" else ()
    return sum(found[name] for name in ("input", *dots))


def _values(job: Job) -> dict[str, float]:
    """Bytes of the values of a layer: its input; queries, keys and values; the output of attention and log-sum-exps,
    and of its last matmul; the hidden layer of the MLP; norms and inputs of matmuls."""
    tower, P, item = job.vision, job.local_patches, job.itemsize
    heads = tower.embed / job.layout.tp
    gated = any("gate" in stack.params for stack in job.table.inner["vision"].stacks)
    return {
        "input": P * tower.embed * item,
        "qkv": 3 * P * heads * item,
        "attention": P * (heads * item + tower.heads / job.layout.tp * WIDE),
        "out": P * tower.embed * item,
        "hidden": (1 + gated) * P * tower.ffn * item,
        "rest": P * (2 * 3 * tower.embed * WIDE + (2 * tower.embed + heads + 3 * tower.ffn) * item),
    }


def _mergers(job: Job) -> float:
    """Of the mergers, which are not computed again: norms, and the hidden layer before and after its activation."""
    tower = job.vision
    return (1 + len(tower.taps)) * job.local_patches * tower.embed * (2 * WIDE + 4 * job.itemsize)


def working(job: Job) -> float:
    """Temporaries of a layer: weights in the dtype of the computation, and values, in training with their gradients."""
    tower = job.vision
    if tower is None:
        return 0
    copies = 2 if tower.trained else 1
    weights = sum(job.whole(leaf) for leaf in job.tower if leaf.layers is not None) / tower.layers
    gathered = WIDE if job.size("fsdp", "ep") > 1 else 0
    found = _values(job)
    if job.platform == "cpu":  # as `activations.unfused`
        return weights * (gathered + copies * job.itemsize) + copies * sum(found.values())
    again = job.local_patches * job.itemsize * (2 * tower.embed + tower.ffn)  # norms' and the activation's outputs
    slopes = job.local_patches * job.itemsize * (2 * tower.ffn + 3 * tower.embed) if tower.trained else 0
    return weights * (gathered + copies * job.itemsize) + sum(found.values()) - found["rest"] + again + slopes


def flops(job: Job) -> tuple[float, float]:
    """(FLOPs of an optimiser step, those that its backward pass computes again), on all devices together.

    Each sequence is taken to have one image of one frame, which is the most that attention may cost.
    """
    tower = job.vision
    if tower is None:
        return 0, 0
    patches = job.used * job.rows * job.patches
    a_frame = min(job.patches, tower.unit * job.sequence)
    matmuls = 0.0
    for leaf in job.tower:
        if leaf.param.matrix and not leaf.param.axes.startswith("place_vocab"):
            merged = tower.unit if "vision_merged" in leaf.axes or "vision_hidden" in leaf.axes else 1
            matmuls += 2 * math.prod(leaf.shape) * patches / merged
    seen = sum(a_frame if whole else tower.window**2 for whole, _ in map(tower.kind, range(tower.layers)))
    one = matmuls + 4 * tower.embed * patches * seen
    again = one if tower.trained and job.remat != "none" else 0
    return one * (3 if tower.trained else 1) + job.scores * one, again
