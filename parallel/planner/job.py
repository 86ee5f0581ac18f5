"""What a plan is made for: a model's table, the mesh that it lies on, and the batch of a step. Needs no devices."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ...core import param
from ...core.optim import Optimizer
from .. import context, rules
from ..mesh import AXES, BATCH, Layout

# Names of the values that a layer keeps on the device from its forward to its backward pass; `memory.values` says how
# large they are. A remat policy is a line here; "attention" under "none" is among what plain differentiation keeps.
KEPT = {
    "full": ("input",),
    "dots": ("input", "dots", "attention", "halves"),
    "none": ("norms", "operands", "qkv", "attention", "gates", "experts", "weights"),
}


@dataclass(frozen=True)
class Job:
    """A training step, described.

    Attributes:
      table: the model's weights.
      layout: devices along each mesh axis.
      rows, length: B and T of a microbatch, over all devices.
      microbatches: M of an optimiser step; those behind the `used` ones are empty.
      sequence: mean tokens of a packed sequence, at most `length`.
      dtype: of activations and matmuls; weights, moments and gradients are fp32.
      remat, cp, head_chunk: as in `models.Run`.
      top_k: experts that a token goes to; 0 without experts.
      slots: J, segments that a row has room for.
      reads: of the batch's arrays those that a step reads, by name (..._BT or ..._BJ), and the bytes of one entry.
      scores: forward passes without gradients over the same tokens, before the step.
      reference: one of them is by other weights, which are held beside.
      platform: that the devices are of, which says how many logits are computed at a time.
      optim: as in a recipe's Config.

    Raises:
      ValueError: a remat policy that `KEPT` does not know; rows, length, heads or an axis of a weight that does not
        divide by the layout.
    """

    table: param.Table
    layout: Layout
    rows: int
    length: int
    microbatches: int
    used: int
    sequence: float
    dtype: str = "float32"
    remat: str = "full"
    cp: context.Method = "gather"
    head_chunk: int | None = None
    top_k: int = 0
    slots: int = 1
    reads: Mapping[str, int] = field(default_factory=dict)
    scores: int = 0
    reference: bool = False
    platform: str = "cpu"
    optim: Optimizer = Optimizer()

    def __post_init__(self):
        if self.remat not in KEPT:
            raise ValueError(
                f"plan: --run.remat must be one of {', '.join(KEPT)}, got {self.remat!r}; plan one of them"
            )
        zigzag = 2 if self.cp == "ring" and self.layout.cp > 1 else 1
        sharing = self.size("tp", *(("cp",) if self.cp == "ulysses" else ()))
        for what, value, axes, over in (
            ("--rows", self.rows, " x ".join(BATCH), self.size(*BATCH)),
            ("--length", self.length, "2 x cp" if zigzag == 2 else "cp", zigzag * self.layout.cp),
            ("query heads", self.heads, "tp x cp" if self.cp == "ulysses" else "tp", sharing),
        ):
            if value % over:
                raise ValueError(f"{what} must be a multiple of {axes} = {over}, got {value}")
        rules.of_params(self.table, self.mesh)

    @functools.cached_property
    def mesh(self) -> AbstractMesh:
        return AbstractMesh(tuple(self.size(axis) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    @property
    def kept(self) -> tuple[str, ...]:
        return KEPT[self.remat]

    def recomputes(self, value: str) -> bool:
        """Whether the backward pass computes a value again; without rematerialisation it computes none."""
        return self.remat != "none" and value not in self.kept

    def size(self, *axes: str) -> int:
        """Devices along these axes together."""
        return math.prod(getattr(self.layout, axis) for axis in axes)

    @functools.cached_property
    def top(self) -> dict[str, param.Leaf]:
        """Weights outside layers, by name."""
        return {name: leaf for name, leaf in param.leaves(self.table).items() if name != "stacks"}

    @functools.cached_property
    def stacks(self) -> list[dict[str, param.Leaf]]:
        """Weights of each run of equal layers, by name."""
        return param.leaves(self.table)["stacks"]

    @property
    def leaves(self) -> list[param.Leaf]:
        return [*self.top.values(), *(leaf for stack in self.stacks for leaf in stack.values())]

    def held(self, leaf: param.Leaf, by: rules.ShardingRules = rules.RULES) -> int:
        """Entries of a leaf that a device holds under the rules."""
        spec = rules.spec(leaf.axes, by, where=leaf.path, shape=leaf.shape, mesh=self.mesh)
        return math.prod(NamedSharding(self.mesh, spec).shard_shape(leaf.shape))

    def whole(self, leaf: param.Leaf) -> int:
        """Entries of one layer of a leaf that a device holds while it is used: gathered over fsdp and ep."""
        return self.held(leaf, rules.GATHERED) // (leaf.shape[0] if nested(leaf) else 1)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def tokens(self) -> int:
        """Positions of an optimiser step, over all devices."""
        return self.used * self.rows * self.length

    @property
    def local_rows(self) -> int:
        return self.rows // self.size(*BATCH)

    @property
    def local_tokens(self) -> int:
        """Positions of a microbatch on one device."""
        return self.local_rows * (self.length // self.layout.cp)

    @property
    def layers(self) -> int:
        return sum(map(depth, self.stacks))

    @property
    def embed(self) -> int:
        return self.table.dims["embed"]

    @property
    def head_dim(self) -> int:
        return self.table.dims["head"]

    @property
    def heads(self) -> int:
        return self.table.dims["heads"] // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.table.dims["kv_heads"] // self.head_dim

    @property
    def kv_copies(self) -> int:
        """How often kv heads are repeated so that they divide by the devices that share them."""
        sharing = self.size("tp", *(("cp",) if self.cp == "ulysses" else ()))
        return math.lcm(self.kv_heads, sharing) // self.kv_heads

    @property
    def vocab(self) -> int:
        """Columns of logits on one device."""
        return self.table.dims["vocab"] // self.layout.tp

    @property
    def tied(self) -> bool:
        return "head" not in self.table.top


def depth(stack: Mapping[str, param.Leaf]) -> int:
    """Layers of a run."""
    return next(iter(stack.values())).shape[0]


def bytes_of(leaf: param.Leaf) -> int:
    """Of one entry: masters are fp32 unless the table says otherwise."""
    return jnp.dtype(leaf.param.dtype or "float32").itemsize


def entries(leaf: param.Leaf) -> int:
    return math.prod(leaf.shape)


def nested(leaf: param.Leaf) -> bool:
    """The leaf belongs to a layer, not to the top level."""
    return leaf.layers is not None


def matrix(leaf: param.Leaf) -> bool:
    return len(leaf.param.axes.split()) > 1


def expert(leaf: param.Leaf) -> bool:
    return "experts" in leaf.axes
