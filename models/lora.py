"""LoRA (arXiv:2106.09685): a family's table -> that of its adapters, which train while the model's own weights stay.

Beside a weight W [out, in] stand A [rank, in] and B [out, rank]; the layer computes x W^T + scale (x A^T) B^T and never
holds their sum. Adapters are a parameter tree of their own with a table of its own, from which initialisation,
sharding, optimiser and checkpoints follow as for any model. There is no dropout.
"""

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from ..core.param import LoRAWeight, Param, Stack, Table, factors, merged


@dataclass(frozen=True)
class Lora:
    """Which weights get adapters, and of what rank.

    Attributes:
      rank: of each change; 0 = no adapters, all weights train.
      alpha: scale of the change: alpha / rank times B A.
      targets: matrices of the layers by their names in the family's table, or patterns of them ("expert_*"); the
        default is the projections of attention and of every MLP, experts' and shared ones too, but no router.
      rslora: the scale is alpha / sqrt(rank) (arXiv:2312.03732).
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "k", "v", "o", "*gate", "*up", "*down")
    rslora: bool = False

    def __post_init__(self):
        if self.rank == 0 and (self.alpha, self.targets, self.rslora) != (Lora.alpha, Lora.targets, Lora.rslora):
            raise ValueError("lora.rank: must be above 0 where other options of adapters are set, got 0")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def targets(base: Table, spec: Lora) -> tuple[str, ...]:
    """Names of the weights that get adapters, in the table's order.

    Raises:
      ValueError: a target that is no matrix of the layers, or no target at all.
    """
    matrices = dict.fromkeys(name for stack in base.stacks for name, p in stack.params.items() if " " in p.axes)
    for pattern in spec.targets or ("",):
        if not fnmatch.filter(matrices, pattern):
            raise ValueError(
                f"lora.targets: each must name matrices of the layers ({', '.join(matrices)}), got {pattern!r}; "
                "embeddings, heads, norms and biases get no adapters"
            )
    return tuple(name for name in matrices if any(fnmatch.fnmatchcase(name, pattern) for pattern in spec.targets))


def table(base: Table, spec: Lora) -> Table:
    """The table of the adapters alone: for a weight "q" of the base "q_a" and "q_b", stacked as their base is, experts
    apart. Checkpoint keys are PEFT's. A starts uniform in +-in^-1/2, as in PEFT, and B at 0, so that the model starts
    as its base.

    Raises:
      ValueError: a rank below 1; as `targets`.
    """
    if spec.rank < 1:
        raise ValueError(f"lora.rank: must be at least 1 for adapters, got {spec.rank}")
    names = targets(base, spec)

    def pair(name: str, p: Param) -> dict[str, Param]:
        a, b = (" ".join(axes) for axes in factors(tuple(p.axes.split()), "rank"))
        keys = lambda part: tuple(f"base_model.model.{key.removesuffix('weight')}lora_{part}.weight" for key in p.keys)
        return {f"{name}_a": Param(a, keys("A"), _uniform), f"{name}_b": Param(b, keys("B"), jax.nn.initializers.zeros)}

    def stack(whole: Stack) -> Stack:
        pairs = [pair(name, p) for name, p in whole.params.items() if name in names]
        return Stack(whole.layers, {name: p for both in pairs for name, p in both.items()})

    return Table({}, tuple(map(stack, base.stacks)), {**base.dims, "rank": spec.rank})


def _uniform(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -1, 1) * shape[-1] ** -0.5


def join(params, adapters, spec: Lora):
    """The tree that `models.score` and `models.forward` take: the base's, with `LoRAWeight` in the place of targets."""

    def layer(weights, pairs):
        adapted = {
            name: LoRAWeight(w, pairs[f"{name}_a"], pairs[f"{name}_b"], spec.scale)
            for name, w in weights.items()
            if f"{name}_a" in pairs
        }
        return {**weights, **adapted}

    stacks = zip(params["stacks"], adapters["stacks"], strict=True)
    return {**params, "stacks": [layer(*pair) for pair in stacks]}


def merge(params, adapters, spec: Lora):
    """The base's tree with the changes added to its weights, by `param.merged`: a plain model."""
    plain = lambda w: merged(w) if isinstance(w, LoRAWeight) else w
    return jax.tree.map(plain, join(params, adapters, spec), is_leaf=lambda w: isinstance(w, LoRAWeight))


def over_base(score: Callable, spec: Lora) -> Callable:
    """`score(params, batch, *more)` -> `f(adapters, batch, base, *more)`, for `step.make_step` and its kin: the base
    takes part as a frozen argument, of which no gradient is computed. It alone is what training started from."""
    return lambda adapters, batch, base, *more: score(join(base, adapters, spec), batch, *more)
