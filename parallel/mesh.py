"""Device meshes with five named axes. An axis of size 1 costs nothing.

    with jax.set_mesh(mesh.make(mesh.Layout(fsdp=4, tp=2))):
        logits_BTV = models.forward(params, token_BT, config=config)

The mesh is ambient, set by jax.set_mesh; `size` reads it, and without a mesh every axis has size 1. Axis types are
Auto: XLA's partitioner chooses all shardings that are not specified.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType

MOST = 1 << 20  # devices, more than the largest clusters have


@dataclass(frozen=True)
class Layout:
    """Number of devices along each mesh axis; the last axis varies fastest over devices.

    Attributes:
      dp: data parallelism: replicas of the model, each with its own rows.
      fsdp: fully sharded data parallelism: rows and weights are sharded; each layer's weights are gathered for use
        (ZeRO-3, arXiv:1910.02054).
      cp: context parallelism: positions of each row are sharded.
      ep: expert parallelism: rows and experts are sharded; all other weights are sharded as over fsdp.
      tp: tensor parallelism: heads, ffn and vocabulary are sharded (arXiv:1909.08053).
    """

    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self):
        for name, count in dataclasses.asdict(self).items():
            if count < 1:
                raise ValueError(f"mesh: {name} must be at least 1, got {count}")
            if count > MOST:
                raise ValueError(f"mesh: {name} must be at most {MOST}, got {count}")
        if self.devices > MOST:
            raise ValueError(f"mesh: {self} must have at most {MOST} devices, got {self.devices}")

    def __str__(self):
        named = [f"{name} {count}" for name, count in dataclasses.asdict(self).items() if count > 1]
        return " x ".join(named) or "one device"

    @property
    def devices(self) -> int:
        return math.prod(dataclasses.astuple(self))


AXES = tuple(field.name for field in dataclasses.fields(Layout))
BATCH = ("dp", "fsdp", "ep")  # axes that split rows
EXPERTS = "experts"  # axis of meshes to generate on, of devices that share each layer's experts and have all rows


def make(layout: Layout = Layout(), devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Builds the mesh of a layout over all devices of all processes, or over `devices`.

    In a single process, a layout of fewer devices uses the first ones.

    Raises:
      ValueError: the number of devices differs from the layout's.
    """
    if devices is None:
        devices = jax.devices() if jax.process_count() > 1 else jax.devices()[: layout.devices]
    if layout.devices != len(devices):
        raise ValueError(
            f"mesh: {layout} needs {layout.devices} devices, got {len(devices)}; the product of the axes "
            f"{', '.join(AXES)} must be {'the' if jax.process_count() > 1 else 'at most the'} number of devices"
        )
    sizes = dataclasses.astuple(layout)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def generating(ep: int, tp: int, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Builds a mesh on which no rows are split: experts are, over `ep` devices (the axis EXPERTS), and heads, ffn and
    vocabulary over `tp`."""
    sizes = {axis: 1 for axis in AXES if axis != "tp"} | {EXPERTS: ep, "tp": tp}
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def size(*axes: str) -> int:
    """Product of the sizes of these axes of the ambient mesh; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in axes)


def one_device() -> bool:
    """Whether the ambient mesh has one device, or there is no mesh."""
    return size(*AXES, EXPERTS) == 1
