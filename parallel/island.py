"""Functions that each device computes on what it holds, inside programs that the partitioner lays out."""

import jax

from .rules import spec


def rows(axes: str):
    """Spec of an array [B, T, ...]."""
    return spec(("batch", "seq", *axes.split()))


def island(fn, in_specs, out_specs):
    """`fn` on local arrays, all axes of the ambient mesh in its own hands; gradients of whole arguments are summed."""
    return jax.shard_map(
        fn, mesh=jax.sharding.get_abstract_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
