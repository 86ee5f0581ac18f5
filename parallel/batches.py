"""Moves batches to a mesh, rows sharded over dp, fsdp and ep, positions over cp, and results back to the host."""

import dataclasses

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from ..core.batch import Batch
from .rules import spec


def batch(packed: Batch, mesh) -> Batch:
    """Shards a packed Batch [M, B, T] from the host, the same in every process, over the mesh.

    Raises:
      ValueError: rows are not divisible by dp x fsdp x ep, or the length is not divisible by cp.
    """

    def rule(name: str, x) -> NamedSharding:
        axes = () if name == "scalars" else ("batch", "seq") if name.endswith(("_BT", "_BA")) else ("batch",)
        where = f"{name}: rows of a microbatch or their length"
        return NamedSharding(mesh, spec(("layers", *axes), where=where, shape=x.shape, mesh=mesh))

    def put(name: str, x) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, rule(name, x), lambda index: x[index])

    values = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed)}
    kinds = {"input": "_BT", "target": "_BT", "component": "_BJ", "scalars": "scalars"}
    placed = {
        name: {key: put(kinds[name], x) for key, x in value.items()} if isinstance(value, dict) else put(name, value)
        for name, value in values.items()
        if value is not None and name != "trie"
    }
    trie = jax.tree_util.tree_map_with_path(lambda path, x: put(path[-1].name, x), packed.trie)
    return packed.replace(**placed, trie=trie)


def host(x) -> np.ndarray:
    """Gathers a global array to numpy in every process; all of them must call it."""
    return multihost_utils.process_allgather(x, tiled=True)
