"""LoRA (arXiv:2106.09685): trains low-rank adapters while the base weights stay frozen.

A weight W [out, in] gets A [rank, in] and B [out, rank]; the layer computes x W^T + scale (x A^T) B^T without
materialising the sum. DoRA (arXiv:2402.09353) adds a magnitude m [out]: output i is multiplied by m_i / |row i of
W + scale B A|, where the norm carries no gradient. Adapters are a separate parameter tree with its own table, from
which initialisation, sharding, optimiser and checkpoints are derived as for any model. There is no dropout.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import jax

from ..core import quantised
from ..core.param import LoRAWeight, Param, Stack, Table, factors, merged, row_norms
from ..core.parts import Part


@dataclass(frozen=True)
class Lora:
    """Options of LoRA adapters.

    Attributes:
      rank: rank of LoRA adapters (PEFT's r; 0 = no LoRA): with 0 all weights are trained.
      alpha: adapters are scaled by alpha / rank (PEFT's lora_alpha).
      targets: names of the layers' matrices in the family's table, or patterns ("expert_*") (PEFT's target_modules);
        the default is all projections of attention and MLPs that the family has, including shared experts, and routed
        ones unless checkpoints have gate and up as one tensor of all experts, but not routers.
      rslora: scales by alpha / sqrt(rank) instead (arXiv:2312.03732).
      base: how the frozen weights under adapters are kept: as stored in the checkpoint, or in 8 or 4 bits with a scale
        per 64 entries (QLoRA, arXiv:2305.14314); they are published and exported as the numbers that these stand for.
      dora: also trains the length of each row of the adapted matrices (DoRA, arXiv:2402.09353; PEFT's use_dora); not
        for routed experts. Servers get the merged model.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "k", "v", "o", "delta_[qkvo]", "in_*", "*gate", "*up", "*down", "per_layer_out")
    rslora: bool = False
    base: Literal["stored", "int8", "nf4"] = "stored"
    dora: bool = False

    def __post_init__(self):
        if self.rank < 0 or not 0 < self.alpha < math.inf:
            raise ValueError(
                f"lora: rank must be at least 0 and alpha above 0 and finite, got {self.rank} and {self.alpha}"
            )
        if self.base not in ("stored", *get_args(quantised.Kind)):
            raise ValueError(f"lora: base must be one of stored, int8, nf4, got {self.base!r}; choose one of them")
        given = self.alpha, self.targets, self.rslora, self.base, self.dora
        if self.rank == 0 and given != (Lora.alpha, Lora.targets, Lora.rslora, Lora.base, Lora.dora):
            raise ValueError("lora: rank must be above 0 if other lora options are set, got 0")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def targets(base: Table, spec: Lora) -> tuple[str, ...]:
    """Names of the weights that get adapters, in the table's order.

    Raises:
      ValueError: a target matches no matrix of the layers, or there are no targets.
    """
    matrices = {name: p for stack in base.stacks for name, p in stack.params.items() if p.matrix}
    for pattern in spec.targets or ("",):
        if not fnmatch.filter(matrices, pattern) and spec.targets != Lora.targets:
            raise ValueError(
                f"lora.targets: each must name matrices of the layers ({', '.join(matrices)}), got {pattern!r}; "
                "embeddings, heads, norms and biases get no adapters"
            )
    routed = [name for name, p in matrices.items() if "experts" in p.axes.split()]
    fused = spec.targets == Lora.targets and any(matrices[name].part for name in routed)
    names = [name for name in matrices if not (fused and name in routed)]
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in spec.targets))


def table(base: Table, spec: Lora) -> Table:
    """The table of the adapters: "q_a" and "q_b" for a base weight "q", stacked like the base, one per expert; with
    DoRA also "q_m", the magnitudes, which `with_magnitudes` initialises.

    Checkpoint keys are PEFT's. As in PEFT, A is initialised uniformly in +-in^-1/2 and B with 0, so the model starts
    equal to its base. Adapters of weights that are parts of one tensor share its keys: their A are its rows in turn,
    their B have the rows of B that the weights have of the tensor.

    Raises:
      ValueError: rank is below 1; DoRA of routed experts; as `targets`.
    """
    if spec.rank < 1:
        raise ValueError(f"lora.rank: must be at least 1 for adapters, got {spec.rank}")
    names = targets(base, spec)
    routed = {name for stack in base.stacks for name, p in stack.params.items() if "experts" in p.axes.split()}
    if spec.dora and (experts := [name for name in names if name in routed]):
        raise ValueError(
            f"lora.dora: must not be of routed experts, got {', '.join(experts)}; leave them out of lora.targets"
        )

    def pair(name: str, p: Param, places: list[str]) -> dict[str, Param]:
        a, b = (" ".join(axes) for axes in factors(tuple(p.axes.split()), "rank"))
        keys = lambda part: tuple(f"base_model.model.{key.removesuffix('weight')}lora_{part}" for key in p.keys)
        start, zeros = places.index(name) * spec.rank, jax.nn.initializers.zeros
        rows = Part(len(places) * spec.rank, start, start + spec.rank) if p.part else None
        made = {
            f"{name}_a": Param(a, keys("A.weight"), _uniform, part=rows),
            f"{name}_b": Param(b, keys("B.weight"), zeros, part=p.part),
        }
        if spec.dora:
            made[f"{name}_m"] = Param(p.axes.split()[0], keys("magnitude_vector"), zeros, part=p.part)
        return made

    def stack(full: Stack) -> Stack:
        adapted = {name: p for name, p in full.params.items() if name in names}
        sharing = lambda p: [name for name, other in in_order(adapted).items() if other.keys == p.keys]
        pairs = [pair(name, p, sharing(p)) for name, p in adapted.items()]
        return Stack(full.layers, {name: p for both in pairs for name, p in both.items()})

    return Table({}, tuple(map(stack, base.stacks)), {**base.dims, "rank": spec.rank})


def in_order(weights: Mapping[str, Param]) -> dict[str, Param]:
    """Weights in the order that parts of the same tensor have in it."""
    return dict(sorted(weights.items(), key=lambda item: item[1].part.start if item[1].part else 0))


def _uniform(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -1, 1) * shape[-1] ** -0.5


def frozen(params, base: Table, spec: Lora):
    """The base's weights with those that get adapters in fewer bits, as `spec.base` says."""
    if spec.base == "stored":
        return params
    names = targets(base, spec)
    narrow = lambda name, x: quantised.quantise(x, spec.base) if name in names else x
    stacks = [{name: narrow(name, x) for name, x in stack.items()} for stack in params["stacks"]]
    return {**params, "stacks": stacks}


def join(params, adapters, spec: Lora):
    """The base's parameter tree with `LoRAWeight` in place of the targets, for `models.score` and `models.forward`."""

    def layer(weights, pairs):
        adapted = {
            name: LoRAWeight(w, pairs[f"{name}_a"], pairs[f"{name}_b"], spec.scale, pairs.get(f"{name}_m"))
            for name, w in weights.items()
            if f"{name}_a" in pairs
        }
        return {**weights, **adapted}

    stacks = zip(params["stacks"], adapters["stacks"], strict=True)
    return {**params, "stacks": [layer(*pair) for pair in stacks]}


def with_magnitudes(adapters, params, spec: Lora):
    """New adapters over a base, with DoRA's magnitudes so that the model starts equal to its base: the lengths of the
    rows of its weights. Without DoRA the adapters as they are."""
    stacks = zip(join(params, adapters, spec)["stacks"], adapters["stacks"], strict=True)
    norm = lambda weights, name, x: row_norms(weights[name[:-2]]) if spec.dora and name.endswith("_m") else x
    return {**adapters, "stacks": [{name: norm(w, name, x) for name, x in pairs.items()} for w, pairs in stacks]}


def merge(params, adapters, spec: Lora):
    """Merges adapters into the base's weights with `param.merged`, giving a plain model."""
    plain = lambda w: merged(w) if isinstance(w, LoRAWeight) else w
    return jax.tree.map(plain, join(params, adapters, spec), is_leaf=lambda w: isinstance(w, LoRAWeight))


def over_base(score: Callable, spec: Lora) -> Callable:
    """Turns `score(params, batch, *more)` into `f(adapters, batch, base, *more)` for `step.make_step` and the like: the
    base is a frozen argument and gets no gradient. Without adapters, the base is the reference model."""
    return lambda adapters, batch, base, *more: score(join(base, adapters, spec), batch, *more)
