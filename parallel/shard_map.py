"""shard_map over the ambient mesh, for per-device functions inside automatically partitioned programs."""

import jax

from .rules import spec


def rows():
    """Spec of an array [B, T, ...] with rows and positions sharded and all other axes replicated."""
    return spec(("batch", "seq"))


def island(fn, in_specs, out_specs):
    """shard_map of `fn` over all axes of the ambient mesh; gradients of replicated arguments are summed."""
    return jax.shard_map(
        fn, mesh=jax.sharding.get_abstract_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
