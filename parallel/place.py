"""Batches onto a mesh: rows over dp, fsdp and ep, positions over cp."""

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..core.batch import Batch
from .rules import spec


def batch(packed: Batch, mesh) -> Batch:
    """A packed Batch [M, B, T] from the host, laid out over the mesh.

    Raises:
      ValueError: rows that do not divide by dp x fsdp x ep, or a length that does not divide by cp.
    """

    def rule(name: str, x) -> NamedSharding:
        axes = ("batch", "seq") if name.endswith("_BT") else ("batch",)
        where = f"{name}: rows of a microbatch or their length"
        return NamedSharding(mesh, spec(("layers", *axes), where=where, shape=x.shape, mesh=mesh))

    put = lambda name, x: jax.device_put(np.asarray(x), rule(name, x))
    values = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed)}
    placed = {
        name: {key: put("_BT", x) for key, x in value.items()} if isinstance(value, dict) else put(name, value)
        for name, value in values.items()
        if value is not None
    }
    return packed.replace(**placed)
