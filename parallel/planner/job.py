"""Input of the planner: a model's table, its mesh layout, and the batch of a step. Needs no devices."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ...core import optim, param
from ...core.optim import Optimizer
from .. import context, experts, rules
from ..mesh import BATCH, Layout
from .leaves import abstract, held, nested, recurrent
from .tries import Tries

# Values that each remat policy keeps on the device from a layer's forward to its backward pass; their sizes are in
# `activations.values`.
KEPT = {
    "full": ("input",),
    "dots": ("input", "dots", "attention", "halves", "states", "sums"),
    "none": ("norms", "operands", "qkv", "attention", "outputs", "gates", "experts", "states", "recurrence", "weights"),
}
# Values that layers name (`models.remat`), and weights whose products they are; "offload" keeps all on the host.
NAMED: dict[str, tuple[str, ...]] = {
    "layer_input": (),
    "qkv": ("q", "k", "v", "q_gate", "q_down", "q_up", "kv_down", "kv_up", "delta_q", "delta_k", "delta_v",
            "delta_gate", "in_x", "in_b", "in_c", "in_dt", "in_gate"),
    "attention": (),
    "attention_out": ("o", "delta_o", "out"),
    "mlp_gate_up": ("gate", "up", "shared_gate", "shared_up"),
    "states": (),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model beside the one that is planned.

    Attributes:
      table, records, top_k, router_fp32, activation, vision: as in `Job`.
    """

    table: param.Table
    records: Sequence[Any]
    top_k: int = 0
    router_fp32: bool = False
    activation: str = "silu"
    vision: Any = None


@dataclass(frozen=True)
class Critic:
    """A second model, with a scalar head, that takes a step of its own after each of the policy's.

    Attributes:
      model: the critic.
      optim, reads, scores: as in `Job`.
    """

    model: Model
    optim: Optimizer
    reads: Mapping[str, int]
    scores: float = 1


@dataclass(frozen=True)
class Teacher:
    """A frozen model on the devices, in the dtype of the computation.

    Attributes:
      model: the teacher.
      scores: its forward passes before a step, for log-probabilities of the batch's tokens.
      taught: whether the step itself computes its logits, to compare distributions.
      itself: whether it is the model in training, whose weights are there.
    """

    model: Model
    scores: float = 0
    taught: bool = False
    itself: bool = False


@dataclass(frozen=True)
class Job:
    """Description of a training step.

    Attributes:
      table: the model's weights.
      records: what each layer does with its tokens, as in `models.layer`: a layer that attends has heads, kv_heads,
        key_dim, value_dim, pattern, source and kept; a recurrent one has a state: a matrix for each head, and the
        pasts of convolutions over key_channels and value_channels. One that is only an MLP has an empty state.
      layout: devices along each mesh axis.
      rows, length: B and T of a microbatch, over all devices.
      microbatches, used: M of an optimiser step, and how many of them are not empty.
      sequence: mean tokens per packed sequence, at most `length`.
      dtype: dtype of activations and matmuls; weights and gradients are fp32 unless `optim` says otherwise.
      remat, cp, head_chunk, dispatch: as in `models.Run`.
      top_k: experts per token; 0 without experts.
      router_fp32: the routers' products are in fp32, whatever the dtype.
      activation: kind of the activation of MLPs, as in `models.layers.mlp`.
      vision: the vision tower, a `models.vision.Tower`, whose weights are in `table`; None = without one.
      patches: of images, P, of each row.
      chunks: tokens per chunk of a recurrent layer, and of all rows together per block of chunks.
      slots: J, segment slots per row.
      tries: of samples with a prompt in common, computed once; then T are places. None = rows without tries.
      reads: {array of the batch that the step reads: bytes per entry}; names end in _BT, _BA, _BJ or _BP unless every
        device has the whole array, whose bytes then count.
      scores: forward passes without gradients over the same tokens, before the step; a fraction if several steps share
        them.
      reference: one of them uses other weights, held in addition: "" = none; "device", or "host", where they are while
        a step is taken.
      reference_moves: the recipe can keep it on the host.
      reference_dtype: of its matrices; "" = that of the computation.
      platform: platform of the devices, which determines the chunk size of logits.
      optim: as in a recipe's Config.
      adapters: weights of adapters, which train while the model's own are frozen; None = these train.
      frozen: dtype of frozen weights.
      frozen_shapes: the frozen weights as shapes, if some are quantised.
      value: the step reads a scalar head and computes no logits: a critic's, a reward model's.
      whole_logits: the step compares whole distributions of each token, a chunk of tokens at a time.
      trains: False = only forward passes, of weights in the dtype `frozen`: a teacher's.
      critic, teacher: models beside this one.

    Raises:
      ValueError: an unknown remat policy; rows, length, heads, channels or an axis of a weight are not divisible
        by the layout; tries would be divided by "ring".
    """

    table: param.Table
    records: Sequence[Any]
    layout: Layout
    rows: int
    length: int
    microbatches: int
    used: int
    sequence: float
    dtype: str = "float32"
    remat: str | tuple[tuple[str, str], ...] = "full"
    cp: context.Method = "gather"
    head_chunk: int | None = None
    dispatch: experts.Method = "gather"
    top_k: int = 0
    router_fp32: bool = False
    activation: str = "silu"
    vision: Any = None
    patches: int = 0
    chunks: tuple[int, int] = (64, 4096)
    slots: int = 1
    tries: Tries | None = None
    reads: Mapping[str, int] = field(default_factory=dict)
    scores: float = 0
    reference: Literal["", "device", "host"] = ""
    reference_moves: bool = True
    reference_dtype: str = ""
    platform: str = "cpu"
    optim: Optimizer = Optimizer()
    adapters: param.Table | None = None
    frozen: str = "float32"
    frozen_shapes: Any = None
    value: bool = False
    whole_logits: bool = False
    trains: bool = True
    critic: Critic | None = None
    teacher: Teacher | None = None

    def __post_init__(self):
        if self.remat not in KEPT and not set(self.named) <= set(NAMED):
            raise ValueError(
                f"plan: --run.remat must be one of {', '.join((*KEPT, 'offload'))}, or pairs of {', '.join(NAMED)} and "
                f"a place, got {self.remat!r}; plan with one of them"
            )
        if self.tries and self.cp == "ring" and self.layout.cp > 1:
            raise ValueError("--run.cp must be gather or ulysses to divide tries, got ring")
        zigzag = 2 if self.cp == "ring" and self.layout.cp > 1 else 1
        heads = {("query heads", layer.heads, "tp x cp" if self.cp == "ulysses" else "tp", self.sharing)
                 for layer in self.records if not recurrent(layer)}  # fmt: skip
        channels = {(f"channels of {name}", shape[0], "tp x cp", self.size("tp", "cp"))
                    for layer in self.records if recurrent(layer) for name, shape in layer.state}  # fmt: skip
        for what, value, axes, over in (
            ("--rows", self.rows, " x ".join(BATCH), self.size(*BATCH)),
            ("--length", self.length, "2 x cp" if zigzag == 2 else "cp", zigzag * self.layout.cp),
            *sorted(heads),
            *(sorted(channels) if self.layout.cp > 1 else ()),
        ):
            if value % over:
                raise ValueError(f"{what} must be a multiple of {axes} = {over}, got {value}")
        rules.of_params(self.table, self.mesh)
        any((self.critics_step, self.teachers_pass))  # makes them, which raises as this does

    @functools.cached_property
    def mesh(self) -> AbstractMesh:
        return abstract(self.layout)

    @property
    def kept(self) -> tuple[str, ...]:
        return KEPT.get(self.remat, ()) if isinstance(self.remat, str) else ()

    @property
    def named(self) -> dict[str, str]:
        """The place of each value of `NAMED` that the policy keeps, "save" or "offload"; empty with one of `KEPT`."""
        if self.remat in KEPT:
            return {}
        if isinstance(self.remat, str):
            return dict.fromkeys(NAMED if self.remat == "offload" else [self.remat], "offload")
        return {"layer_input": "save", **dict(self.remat)}

    def recomputes(self, value: str) -> bool:
        """Whether the backward pass recomputes a value; without rematerialisation it recomputes none."""
        return self.remat != "none" and value not in self.kept and value not in self.named

    def names(self, weight: str) -> bool:
        """Whether the products of a layer's weight are among the named values that the policy keeps."""
        return any(weight in NAMED[name] for name in self.named)

    @functools.cached_property
    def critics_step(self) -> "Job | None":
        """The critic's step: it trains all its weights on the same batch."""
        if self.critic is None:
            return None
        own = dict(optim=self.critic.optim, reads=self.critic.reads, scores=self.critic.scores, value=True)
        return self._of(self.critic.model, **own)

    @functools.cached_property
    def teachers_pass(self) -> "Job | None":
        """A forward pass of the teacher."""
        if self.teacher is None:
            return None
        return self._of(self.teacher.model, trains=False, frozen=self.dtype)

    def _of(self, model: Model, **changes) -> "Job":
        alone = dict(adapters=None, frozen_shapes=None, reference="", scores=0, value=False, whole_logits=False)
        fresh: dict[str, Any] = {**vars(model), **alone, "critic": None, "teacher": None, "frozen": "float32"}
        return replace(self, **fresh | changes)

    def size(self, *axes: str) -> int:
        """Product of the sizes of these axes."""
        return math.prod(getattr(self.layout, axis) for axis in axes)

    @functools.cached_property
    def top(self) -> dict[str, param.Leaf]:
        """Weights outside layers, by name."""
        return {name: leaf for name, leaf in param.leaves(self.table).items() if name in self.table.top}

    @functools.cached_property
    def stacks(self) -> Sequence[Mapping[str, param.Leaf]]:
        """Weights of each run of identical layers, by name."""
        return param.leaves(self.table)["stacks"]

    @functools.cached_property
    def tower(self) -> list[param.Leaf]:
        """Weights of the vision tower."""
        return [leaf for leaf in param.leaf_list(self.table) if leaf.path.startswith(optim.VISION)]

    @functools.cached_property
    def predictor(self) -> list[param.Leaf]:
        """Weights of the layer for multi-token prediction, if it trains."""
        return [leaf for leaf in param.leaf_list(self.table) if leaf.path.startswith(optim.MTP)]

    @property
    def leaves(self) -> list[param.Leaf]:
        """Weights of the text model."""
        return [*self.top.values(), *(leaf for stack in self.stacks for leaf in stack.values())]

    @functools.cached_property
    def low(self) -> list[dict[str, param.Leaf]]:
        """Weights of the adapters of each run of layers, by name."""
        return param.leaves(self.adapters)["stacks"] if self.adapters else [{} for _ in self.stacks]

    @property
    def trained(self) -> list[param.Leaf]:
        if not self.trains:
            return []
        if self.adapters:
            return [leaf for stack in self.low for leaf in stack.values()]
        return [*self.leaves, *self.predictor, *(self.tower if self.vision and self.vision.trained else ())]

    @property
    def weights(self) -> list[param.Leaf]:
        """All weights, those of adapters and of a tower included."""
        return [*self.leaves, *self.predictor, *self.tower, *(self.trained if self.adapters else ())]

    def bytes_of(self, leaf: param.Leaf) -> int:
        """Bytes per entry of a weight on the device: fp32 if it trains, unless the table says otherwise, or it has its
        master weights on the host or none."""
        train = self.trains and (self.adapters is None or "rank" in leaf.axes)
        dtype = "float32" if train else self.frozen
        if train and optim.cast(leaf):
            dtype = self.optim.weights if self.optim.weights != "float32" or not self.optim.offload else self.dtype
        return jnp.dtype(leaf.param.dtype or dtype).itemsize

    def held(self, leaf: param.Leaf, by: rules.ShardingRules = rules.RULES) -> int:
        """Entries of a leaf that a device holds under these sharding rules."""
        return held(leaf.axes, leaf.shape, leaf.path, by, self.mesh)

    def whole(self, leaf: param.Leaf) -> int:
        """Entries of one layer of a leaf that a device holds while it is in use, gathered over fsdp and ep."""
        return self.held(leaf, rules.GATHERED) // (leaf.shape[0] if nested(leaf) else 1)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def tokens(self) -> int:
        """Positions of an optimiser step, over all devices: with tries their places."""
        return self.used * self.rows * self.length

    @property
    def sampled(self) -> int:
        """Tokens of an optimiser step's samples; without tries as if these filled all rows."""
        return self.tries.tokens if self.tries else self.tokens

    @property
    def local_rows(self) -> int:
        return self.rows // self.size(*BATCH)

    @property
    def local_tokens(self) -> int:
        """Positions of a microbatch on one device."""
        return self.local_rows * (self.length // self.layout.cp)

    @property
    def local_flattened(self) -> int:
        """Tokens of samples of a microbatch on one device, for which its arrays have room."""
        return self.local_rows * (self.tries.flattened // self.layout.cp) if self.tries else self.local_tokens

    @property
    def local_patches(self) -> int:
        """Patches of a microbatch on one device."""
        return self.local_rows * (self.patches // self.layout.cp)

    @property
    def layers(self) -> int:
        return len(self.records)

    @property
    def embed(self) -> int:
        return self.table.dims["embed"]

    @property
    def sharing(self) -> int:
        """Number of devices among which the heads of a layer are divided."""
        return self.size("tp", *(("cp",) if self.cp == "ulysses" else ()))

    def record(self, stack: Mapping[str, param.Leaf]) -> Any:
        """What the layers of a run do with their tokens."""
        return self.records[next(iter(stack.values())).layers[0]]  # type: ignore[index]

    def width(self, axis: str) -> float:
        """Size of an axis on a device, of weights in use."""
        return (self.adapters or self.table).dims[axis] / (self.layout.tp if getattr(rules.RULES, axis) == "tp" else 1)

    def kv_heads(self, layer: Any) -> int:
        """Heads of keys and values, repeated until the devices that share them divide their number."""
        return math.lcm(layer.kv_heads, self.sharing)

    def seen(self, layer: Any) -> int:
        """Devices over cp whose keys a device holds in "gather": its own, and those before it within the span of
        `parallel.context.attention`; with tries all, among which the keys within a window may be anywhere."""
        if layer.pattern.span is None or self.tries:
            return self.layout.cp
        return min(self.layout.cp, -(-(layer.pattern.span - 1) // (self.length // self.layout.cp)) + 1)

    @property
    def vocab(self) -> int:
        """Vocabulary entries (columns of logits) on one device."""
        return self.table.dims["vocab"] // self.layout.tp

    @property
    def tied(self) -> bool:
        return "head" not in self.table.top

    @property
    def lookups(self) -> list[param.Leaf]:
        """Tables that tokens are looked up in, where they lie."""
        return [leaf for leaf in self.top.values() if leaf.path.endswith("embed")]

    def is_head(self, leaf: param.Leaf) -> bool:
        """Whether logits are products with it."""
        return not self.value and leaf.path == ("embed" if self.tied else "head")

    def looked_up(self, leaf: param.Leaf) -> bool:
        """Whether tokens are only looked up in it."""
        return leaf.layers is None and leaf.path.endswith("embed") and not self.is_head(leaf)
