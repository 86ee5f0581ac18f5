"""Where a computation runs: asked of the ambient mesh, so that programs compile for devices that are not here."""

import jax


def platform() -> str:
    """JAX's name of the platform of the ambient mesh's devices, "cpu", "gpu" or "tpu"; without a mesh, of JAX's default
    backend. May be called while tracing."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() if mesh.empty or mesh.abstract_device is None else mesh.abstract_device.platform
