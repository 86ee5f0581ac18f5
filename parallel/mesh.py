"""Meshes: five named axes over the devices, built in one place. An axis of size 1 costs nothing.

    with jax.set_mesh(mesh.make(mesh.Layout(fsdp=4, tp=2))):
        logits_BTV = models.forward(params, token_BT, config=config)

The mesh is ambient: code that cares asks `size`; without a mesh, or on one device, every axis has size 1. Axis types
are Auto: XLA's partitioner places what nobody states.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType


@dataclass(frozen=True)
class Layout:
    """How many devices along each axis; neighbours in the last axis are neighbours in the machine.

    Attributes:
      dp: copies of the model, each with its own rows.
      fsdp: rows and weights are split; a layer's weights are gathered when it is their turn (ZeRO-3,
        arXiv:1910.02054).
      cp: the positions of each row are split.
      ep: rows and experts are split; all other weights are split as over fsdp.
      tp: heads, ffn and vocabulary are split (arXiv:1909.08053).
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

    def __str__(self):
        named = [f"{name} {count}" for name, count in dataclasses.asdict(self).items() if count > 1]
        return " x ".join(named) or "one device"

    @property
    def devices(self) -> int:
        return math.prod(dataclasses.astuple(self))


AXES = tuple(field.name for field in dataclasses.fields(Layout))
BATCH = ("dp", "fsdp", "ep")  # axes that split rows


def make(layout: Layout = Layout(), devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh of a layout over all devices of all processes, or over `devices`.

    In a single process a layout of one device takes the first of them.

    Raises:
      ValueError: the layout needs another number of devices than there are.
    """
    if devices is None:
        alone = layout.devices == 1 and jax.process_count() == 1
        devices = jax.devices()[:1] if alone else jax.devices()
    if layout.devices != len(devices):
        raise ValueError(
            f"mesh: {layout} needs {layout.devices} devices, got {len(devices)}; the product of the axes "
            f"{', '.join(AXES)} must be the number of devices"
        )
    sizes = dataclasses.astuple(layout)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def size(*axes: str) -> int:
    """Devices along these axes of the ambient mesh together; 1 where there is none."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in axes)


def alone() -> bool:
    """The ambient mesh has one device, or there is none."""
    return size(*AXES) == 1
