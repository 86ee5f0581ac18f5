"""`areax convert --extract`: the difference of two checkpoints as LoRA adapters of a given rank."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.sparse.linalg import svds

from ... import models
from ...core import param
from ...models import lora
from .. import hf, peft, safetensors
from ..runtime import hub
from ..tracking import progress

MOST = 4096  # rank
PART = 8  # more singular values than one in so many are computed sooner with all others
ROWS = 1 << 10  # of a weight without adapters that are compared at a time


def extract(tuned: str | os.PathLike, destination: str | os.PathLike, base: str, rank: int) -> tuple[Path, dict]:
    """Writes the adapters of a rank that are closest to what a tuned checkpoint adds to its base, as a PEFT folder.

    Every matrix that `lora.Lora` adapts by default gets them; embeddings, heads, norms and biases do not.

    Args:
      base: a checkpoint, or a model on the hub, of the same shapes.

    Returns:
      What was written, and {"rank", "kept": share of the squared difference of all weights that the adapters have,
      "kept_of": the same of the matrices of each name, "outside": share in weights without adapters}.

    Raises:
      ValueError: the checkpoints are of other models, or equal; as `peft.save`.
    """
    if not 1 <= rank <= MOST:
        raise ValueError(f"convert: --extract must be a rank of 1 to {MOST:,}, got {rank}")
    base, tuned = hub.folder(base, weights=True), hub.folder(tuned, weights=True)
    (config, before, _), (other, after, _) = (hf.mapped(path, dtype=None) for path in (base, tuned))
    table, spec = models.table(config), lora.Lora(rank, float(rank))
    _check_shapes(table, models.table(other), f"{tuned} must have the shapes of its base {base}")
    peft.modules(config, spec)  # refuses what PEFT's format cannot hold
    for path in (base, tuned):
        hf.check(path, safetensors.read(path))
    names, leaves = set(lora.targets(table, spec)), itertools.count(1)
    every, lost = defaultdict[str, float](float), defaultdict[str, float](float)

    def one(leaf: param.Leaf, x, y) -> tuple[np.ndarray, np.ndarray] | None:
        name = leaf.path.rpartition(".")[2]
        made = None
        if leaf.layers is None or name not in names:
            lost[""] += (size := _squared_difference(x, y))
            every[""] += size
        else:
            *lead, out, into = leaf.shape
            made = a, b = np.zeros((*lead, rank, into), np.float32), np.zeros((*lead, out, rank), np.float32)
            for layer in range(lead[0]):
                difference = y[layer].astype(np.float64) - x[layer]
                for at in np.ndindex(*lead[1:]):
                    b[layer][at], a[layer][at] = truncated(difference[at], rank)
                every[name] += float(np.sum(difference**2))
                lost[name] += float(np.sum((difference - np.matmul(b[layer], a[layer], dtype=np.float64)) ** 2))
        tick(next(leaves))
        return made

    with progress.steps("extract", len(param.leaf_list(table))) as tick:
        found = param.tree_map(one, table, before, after)
    if not (total := sum(every.values())):
        raise ValueError(f"convert: {tuned} must differ from its base {base}, got equal weights")
    pairs = [{name: both for name, both in stack.items() if both is not None} for stack in found["stacks"]]
    named = lambda stack: {f"{n}_{part}": x for n, both in stack.items() for part, x in zip("ab", both, strict=True)}
    adapters = {"stacks": [named(stack) for stack in pairs]}
    return peft.save(destination, config, adapters, spec, base=os.fspath(base)), {
        "rank": rank,
        "kept": 1 - sum(lost.values()) / total,
        "kept_of": {name: 1 - lost[name] / size for name, size in every.items() if name and size},
        "outside": every[""] / total,
    }


def truncated(difference: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(B [out, rank], A [rank, in]) whose product is closest to a matrix [out, in] in the least-squares sense: its
    truncated singular value decomposition in float64, scaled alike on both sides. If it has fewer than `rank` singular
    values, further rows of A and columns of B are zero.
    """
    d, sides = difference.astype(np.float64), min(difference.shape)
    left, right = np.zeros((d.shape[0], rank)), np.zeros((rank, d.shape[1]))
    if not d.any():
        return left, right
    count = min(rank, sides)
    if PART * count < sides:
        u, values, vh = svds(d, count, v0=np.random.default_rng(0).standard_normal(sides))
    else:
        u, values, vh = np.linalg.svd(d, full_matrices=False)
    left[:, :count] = (u * np.sqrt(values))[:, :count]
    right[:count] = (np.sqrt(values)[:, None] * vh)[:count]
    return left, right


def _squared_difference(x, y) -> float:
    rows = len(x) if x.shape else 0
    cuts = [slice(at, at + ROWS) for at in range(0, rows, ROWS)] if isinstance(x, np.ndarray) else range(rows)
    return sum(float(np.sum((y[cut].astype(np.float64) - x[cut]) ** 2)) for cut in cuts)


def _check_shapes(table: param.Table, other: param.Table, rule: str) -> None:
    one, two = ({leaf.path: leaf.shape for leaf in param.leaf_list(of)} for of in (table, other))
    for path in {**one, **two}:
        if one.get(path) != two.get(path):
            raise ValueError(f"convert: {rule}, got {path} {two.get(path)} and {one.get(path)}")
