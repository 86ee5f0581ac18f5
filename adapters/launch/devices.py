"""Which devices of this machine a process gets: told by environment variables, without asking JAX for them.

Trainer processes come first, then servers. On GPUs all trainers see the trainers' share, in which
JAX_LOCAL_DEVICE_IDS names those of each; a server sees its own and no other. So the two kinds of numbers never mean
the same GPU. On the CPU devices are virtual, and there are as many as are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # of TPU chips that one process can take


def of_each(
    processes: int, devices: int, servers: int, server_devices: int, environ: Mapping[str, str] = os.environ
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Changes of the environment of each trainer process and of each server.

    Raises:
      ValueError: there are fewer devices than asked for, or a kind that cannot be divided so.
    """
    wanted, of_trainers = processes * devices + servers * server_devices, processes * devices
    own = lambda i: list(range(of_trainers + i * server_devices, of_trainers + (i + 1) * server_devices))
    trainers = [
        {"JAX_LOCAL_DEVICE_IDS": _listed(range(i * devices, (i + 1) * devices)), "JAX_NUM_CPU_DEVICES": str(devices)}
        for i in range(processes)
    ]
    plain: list[dict[str, str]] = [{} for _ in range(servers)]
    if gpus := visible_gpus(environ):
        if wanted > len(gpus):
            raise ValueError(_few(processes, devices, servers, server_devices, wanted, "GPUs", len(gpus)))
        if not servers:
            return trainers, plain
        share = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:of_trainers])}
        return (
            [trainer | share for trainer in trainers],
            [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[k] for k in own(i))} for i in range(servers)],
        )
    if servers and (chips := tpu_chips(environ)):
        if wanted > chips:
            raise ValueError(_few(processes, devices, servers, server_devices, wanted, "TPU chips", chips))
        if processes > 1 or {devices, server_devices} - BOUNDS.keys():
            raise ValueError(
                "areax launch: beside servers a TPU host has one trainer process, and a process 1, 2, 4 or 8 chips, "
                f"got --processes {processes} --devices {devices} --server.devices {server_devices}"
            )
        return [_chips(range(devices))], [_chips(own(i)) for i in range(servers)]
    return trainers, plain


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the GPUs that a process here would see, as CUDA_VISIBLE_DEVICES has them; none where JAX leaves them."""
    if not _may_be("cuda", environ):
        return []
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    return [name for word in named.split(",") if (name := word.strip()) not in ("", "-1", "NoDevFiles")]


def tpu_chips(environ: Mapping[str, str] = os.environ) -> int:
    """How many TPU chips this machine has; 0 if JAX is kept off them."""
    from jax._src import hardware_utils  # looks at the bus alone

    return hardware_utils.num_available_tpu_chips_and_device_id()[0] if _may_be("tpu", environ) else 0


def _may_be(platform: str, environ: Mapping[str, str]) -> bool:
    """Whether JAX would take such devices if they are there."""
    first = environ.get("JAX_PLATFORMS", "").split(",")[0]
    return first in ("", platform) or (first, platform) == ("gpu", "cuda")


def _chips(ids) -> dict[str, str]:
    return {
        "TPU_VISIBLE_CHIPS": _listed(ids),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[len(ids)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


def _listed(ids) -> str:
    return ",".join(map(str, ids))


def _few(processes: int, devices: int, servers: int, server_devices: int, wanted: int, what: str, there: int) -> str:
    of_servers = f" and --servers {servers} x --server.devices {server_devices}" if servers else ""
    return (
        f"areax launch: --processes {processes} x --devices {devices}{of_servers} take {wanted} {what}, this machine "
        f"shows {there}; ask for fewer, or launch on several machines (--on ray, --on slurm)"
    )
