"""Assigns this machine's devices to processes by environment variables, without initialising JAX.

Trainer processes come first, then servers. Each trainer sees all the trainers' GPUs and selects its own with
JAX_LOCAL_DEVICE_IDS; a server sees only its own GPUs. On the CPU, devices are virtual, as many as requested.

A run that starts servers itself places them by `of_own_servers`: in the same order, sharing where there are too few.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # TPU topologies by the number of chips of a process


def of_each(
    processes: int, devices: int, servers: int, server_devices: int, environ: Mapping[str, str] = os.environ
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Environment changes of each trainer process and of each server.

    Raises:
      ValueError: there are fewer devices than requested, or TPU chips that cannot be divided this way.
    """
    wanted, of_trainers = processes * devices + servers * server_devices, processes * devices
    of_server = lambda i: list(range(of_trainers + i * server_devices, of_trainers + (i + 1) * server_devices))
    trainers = [
        {"JAX_LOCAL_DEVICE_IDS": _joined(range(i * devices, (i + 1) * devices)), "JAX_NUM_CPU_DEVICES": str(devices)}
        for i in range(processes)
    ]
    plain: list[dict[str, str]] = [{} for _ in range(servers)]
    if gpus := visible_gpus(environ):
        if wanted > len(gpus):
            raise ValueError(_too_few(processes, devices, servers, server_devices, wanted, "GPUs", len(gpus)))
        if not servers:
            return trainers, plain
        share = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:of_trainers])}
        return (
            [trainer | share for trainer in trainers],
            [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[k] for k in of_server(i))} for i in range(servers)],
        )
    if servers and (chips := tpu_chips(environ)):
        if wanted > chips:
            raise ValueError(_too_few(processes, devices, servers, server_devices, wanted, "TPU chips", chips))
        if processes > 1 or {devices, server_devices} - BOUNDS.keys():
            raise ValueError(
                "areax launch: a TPU host with servers must have one trainer process, and each process 1, 2, 4 or 8 "
                f"chips, got --processes {processes} --devices {devices} and {server_devices} a server"
            )
        return [_chips(range(devices))], [_chips(of_server(i)) for i in range(servers)]
    return trainers, plain


def of_own_servers(there: int, trainer: int, count: int, each: int) -> list[list[int]]:
    """The devices of each server that a run starts on its own machine.

    Servers take the devices behind the trainer's, in order. Those for which too few are left share the trainer's, round
    robin from the first on.

    Args:
      there: devices of this machine, at least `each`.
      trainer: how many the trainer's mesh takes, the first ones; 0 = servers take turns with it on the same devices.
      count, each: servers, and the devices of each.
    """
    parts = lambda first, end: [list(range(k, k + each)) for k in range(first, end - each + 1, each)]
    free, shared = parts(trainer, there), parts(0, min(trainer, there) or there) or parts(0, each)
    return free[:count] + [shared[i % len(shared)] for i in range(count - len(free))]


def showing(gpus: Sequence[int], amd: bool = False, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variable that makes only these GPUs visible to a child process, by their numbers in this one.

    For AMD it is HIP_VISIBLE_DEVICES, which overrides CUDA_VISIBLE_DEVICES; both count within ROCR_VISIBLE_DEVICES,
    which the child inherits.
    """
    variables = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")[0 if amd else 1 :]
    names = next((_named(environ[name]) for name in variables if name in environ), None)
    return {variables[0]: _joined(names[i] for i in gpus) if names else _joined(gpus)}


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """GPUs visible to a process here, as named in CUDA_VISIBLE_DEVICES; none if JAX_PLATFORMS excludes them."""
    if not _uses("cuda", environ):
        return []
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    return _named(named)


def tpu_chips(environ: Mapping[str, str] = os.environ) -> int:
    """Number of TPU chips of this machine; 0 if JAX_PLATFORMS excludes them."""
    from jax._src import hardware_utils  # only looks at the PCI bus

    return hardware_utils.num_available_tpu_chips_and_device_id()[0] if _uses("tpu", environ) else 0


def _uses(platform: str, environ: Mapping[str, str]) -> bool:
    """Whether JAX would use devices of this platform if present."""
    first = environ.get("JAX_PLATFORMS", "").split(",")[0]
    return first in ("", platform) or (first, platform) == ("gpu", "cuda")


def _chips(ids) -> dict[str, str]:
    return {
        "TPU_VISIBLE_CHIPS": _joined(ids),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[len(ids)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


def _named(variable: str) -> list[str]:
    """The devices that a variable such as CUDA_VISIBLE_DEVICES names."""
    return [name for word in variable.split(",") if (name := word.strip()) not in ("", "-1", "NoDevFiles")]


def _joined(ids) -> str:
    return ",".join(map(str, ids))


def _too_few(
    processes: int, devices: int, servers: int, server_devices: int, wanted: int, what: str, there: int
) -> str:
    of_servers = f" and --servers {servers} x {server_devices}" if servers else ""
    return (
        f"areax launch: --processes {processes} x --devices {devices}{of_servers} need {wanted} {what}, this machine "
        f"has {there}; use fewer, or launch on several machines (--on ray, --on slurm)"
    )
