"""Where a computation runs: asked of the ambient mesh, so that programs compile for devices that are not here."""

import re

import jax

# Bytes of shared memory that a program may take, by names of NVIDIA's cards (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability": 9.0 and 10.x, 8.0, and the least of the others from 8.0 on).
SHARED = {r"NVIDIA (H|GH|B|GB)\d": 232448, r"NVIDIA A(100|800|30)\b": 166912, "": 101376}
# Cards of compute capability 8.0 and 8.6, which do not convert float8.
WITHOUT_FLOAT8 = r"NVIDIA (A\d|RTX A\d|GeForce RTX 30)"


def platform() -> str:
    """JAX's name of the platform of the ambient mesh's devices, "cpu", "gpu" or "tpu"; without a mesh, of JAX's default
    backend. May be called while tracing."""
    device = _of_mesh()
    return device.platform if device else jax.default_backend()


def kind() -> str:
    """JAX's name of the kind of these devices, such as "NVIDIA H100 80GB HBM3"."""
    device = _of_mesh()
    return device.device_kind if device else jax.devices()[0].device_kind


def shared_memory() -> int:
    """Bytes of shared memory that a program on these GPUs may take; elsewhere, where programs are interpreted, on the
    largest of them."""
    if platform() != "gpu":
        return max(SHARED.values())
    return next(size for names, size in SHARED.items() if re.match(names, kind()))


def converts_float8() -> bool:
    """Whether these GPUs have instructions for it."""
    return not re.match(WITHOUT_FLOAT8, kind())


def _of_mesh():
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device
