"""The chips of `chips.CHIPS` as their compilers know them: devices to compile for that are not here.

JAX compiles for them with the TPU compiler of libtpu, and with XLA's GPU compiler in the packages of its CUDA plugin.
Neither needs a chip or a driver. Such devices have no memory: nothing can be computed while they are the ambient mesh.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Card:
    """What XLA's GPU compiler has to know of an NVIDIA card, as its driver reports it.

    The figures are those of the descriptions in XLA's repository (xla/backends/gpu/target_config/specs, 2026).

    Attributes:
      name: as JAX's device_kind.
      capability: compute capability (major, minor).
      accelerated: whether it has instructions of this capability alone, such as sm_90a's.
      cores: streaming multiprocessors.
      fpus: fp32 units of each.
      memory: bytes.
      bandwidth: of memory, bytes/s.
      l2: bytes of the L2 cache.
      ghz: clock.
      shared: bytes of shared memory of a streaming multiprocessor.
    """

    name: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus: int
    memory: int
    bandwidth: int
    l2: int
    ghz: float
    shared: int = 233472


CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, 85100068864, 2039040000000, 41943040, 1.41, 167936),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 84942979072, 3352320000000, 52428800, 1.98),
    "h200": Card("NVIDIA H200", (9, 0), True, 132, 128, 151397597184, 4800000000000, 52428800, 1.98),
    "b200": Card("NVIDIA B200", (10, 0), True, 148, 128, 191514411008, 7672320000000, 132644864, 1.965),
    "b300": Card("NVIDIA B300", (10, 3), False, 158, 128, 297021865984, 7936000000000, 135528448, 1.965),
}
TORUS = {"v5e": 2, "v6e": 2, "v5p": 3}  # dimensions of the network
HOST = 4  # chips of a host; compilers know no smaller slice
# Options of the compilers. On a card that is not here nothing can be measured, so that XLA takes kernels by its model.
OPTIONS: Mapping[str, dict[str, Any]] = {"gpu": {"xla_gpu_autotune_level": 0}, "tpu": {}}
PACKAGES = {"gpu": ("jax_cuda13_plugin", "cuda"), "tpu": ("libtpu", "tpu")}  # module, extra of areax


def devices(chip: str, count: int) -> list:
    """So many devices of `chip`, on as many hosts as they need.

    Raises:
      ValueError: the chip's compiler is not installed, or unknown; TPU slices of other sizes.
    """
    from jax.experimental import topologies

    if chip not in CARDS and chip not in TORUS:
        raise ValueError(f"--compile: can compile for {', '.join((*CARDS, *TORUS))}, got {chip}")
    platform = "gpu" if chip in CARDS else "tpu"
    module, extra = PACKAGES[platform]
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"--compile: {chip}'s compiler is not installed; install areax[{extra}] (docs/plan.md)")
    if platform == "gpu":
        near = min(count, 8)
        if count % near:
            raise ValueError(f"--compile: must be for up to 8 GPUs, or for a multiple of 8, got {count}")
        topology = f"1x{count // near}x{near}"  # partitions, hosts, GPUs of each
        made = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=topology, target_config=described(CARDS[chip])
        )
    else:
        made = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{_slice(chip, count)}")
    return list(made.devices)[:count]


def version(platform: str) -> str:
    """The version of the platform's compiler."""
    return importlib.metadata.version({"gpu": "jax-cuda13-pjrt", "tpu": "libtpu"}[platform])


def described(card: Card) -> str:
    """The card as text of XLA's GpuTargetConfigProto."""
    major, minor = card.capability
    extension = " feature_extension: ACCELERATED_FEATURES" if card.accelerated else ""
    fields = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048,
        "shared_memory_per_block": 49152, "shared_memory_per_core": card.shared,
        "shared_memory_per_block_optin": card.shared - 1024, "core_count": card.cores, "fpus_per_core": card.fpus,
        "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64,
        "memory_bandwidth": card.bandwidth, "l2_cache_size": card.l2, "clock_rate_ghz": card.ghz,
        "device_memory_size": card.memory, "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
    }  # fmt: skip
    numbers = " ".join(f"{name}: {value}" for name, value in fields.items())
    capability = f"cuda_compute_capability {{major: {major} minor: {minor}{extension}}}"
    return (
        f"gpu_device_info {{{numbers} {capability}}} "
        'platform_name: "CUDA" dnn_version_info {major: 9 minor: 10 patch: 0} '
        f'device_description_str: "{card.name}"'
    )


def _slice(chip: str, count: int) -> str:
    """The shape of the smallest slice of so many TPUs, as cubic as it can be, such as 2x4."""
    total = max(count, HOST)
    sides = [side for side in range(1, total + 1) if total % side == 0]
    whole = [
        shape
        for shape in itertools.combinations_with_replacement(sides, TORUS[chip])
        if math.prod(shape) == total and sum(side % 2 == 0 for side in shape) >= 2
    ]
    if not whole or count not in (1, 2, total):
        raise ValueError(f"--compile: {chip} must be a slice of 1, 2 or 4 chips, or of a multiple of 8, got {count}")
    shape = min(whole, key=lambda shape: max(shape) / min(shape))
    return "x".join(map(str, sorted(shape, key=lambda side: (side % 2, side))))
