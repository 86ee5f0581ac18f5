"""Moves arrays between the meshes of one process, as from a trainer's to a generation engine's."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

COPIES = "copies"  # axis of the devices that hold the same


def between(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """x with the sharding of another mesh, of the same devices, some of them, or others.

    `jax.device_put` copies parts between devices where they are cut alike on both meshes, and else goes through the
    host's memory. So x is first resharded on its own devices: cut like the other mesh, once or as copies, if their
    numbers allow it; else whole.
    """
    devices = sharding.mesh.devices
    own, wanted = x.devices(), [*devices.flat]
    if len(own) == 1:
        return jax.device_put(x, sharding)
    if own == {*wanted}:
        return _resharded(x, sharding)
    first = wanted if own > {*wanted} else []  # these have their own part then, and nothing is sent
    order = np.array([*first, *sorted(own - {*first}, key=lambda device: device.id)])
    if order.size % devices.size:
        whole = _resharded(x, NamedSharding(Mesh(order, COPIES), P()))
        return jax.device_put(whole.addressable_shards[0].data, sharding)
    alike = Mesh(order.reshape(-1, *devices.shape), (COPIES, *sharding.mesh.axis_names))
    return jax.device_put(_resharded(x, NamedSharding(alike, sharding.spec)), sharding)


def _resharded(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """x with another sharding on the same devices, perhaps in another order."""
    assert isinstance(x.sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    same_order = [*x.sharding.mesh.devices.flat] == [*sharding.mesh.devices.flat]
    with jax.set_mesh(sharding.mesh):
        return _identity(sharding)(x) if same_order else jax.device_put(x, sharding)


@functools.cache
def _identity(sharding: NamedSharding):
    return jax.jit(lambda x: x, out_shardings=sharding)
