"""Functions that each device computes on what it holds, inside programs that the partitioner lays out."""

import jax

from .rules import spec


def rows():
    """Spec of an array [B, T, ...] whose rows and positions are split and all else is whole."""
    return spec(("batch", "seq"))


def island(fn, in_specs, out_specs):
    """`fn` on local arrays, all axes of the ambient mesh in its own hands; gradients of whole arguments are summed."""
    return jax.shard_map(
        fn, mesh=jax.sharding.get_abstract_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
