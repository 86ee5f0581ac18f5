"""Which node runs which processes: trainers take the first nodes, servers the others, or one node all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import Config


@dataclass(frozen=True)
class Places:
    """Placement of processes on nodes.

    Attributes:
      nodes: nodes of the job; the first `of_trainers` run trainer processes.
      trainers: trainer processes per node.
      servers: servers per node; server i is on node `first_node` + i // servers, server GPUs start at `first_gpu`.
    """

    nodes: int
    of_trainers: int
    trainers: int
    servers: int
    first_node: int
    first_gpu: int


def places(config: Config, per_node: int, option: str) -> Places:
    """Computes the placement of processes on nodes.

    Args:
      per_node: GPUs of a node; 0 = none, and one node per process and server.
      option: that says so, for errors.

    Raises:
      ValueError: a process or a server needs more GPUs than a node has.
    """
    processes, count, devices, of_server = config.processes, config.servers, config.devices, config.server_devices
    if not per_node:
        return Places(processes + count, processes, 1, 1, processes, 0)
    for name, wanted in (("devices", devices), (config.server_option, of_server if count else 0)):
        if wanted > per_node:
            raise ValueError(
                f"areax launch: --{name} must be at most --{option} {per_node}, got {wanted}; one process drives "
                "devices of one node"
            )
    if processes * devices + count * of_server <= per_node:
        return Places(1, 1, processes, max(count, 1), 0, processes * devices)
    trainers, servers = per_node // devices, per_node // of_server
    of_trainers = math.ceil(processes / trainers)
    return Places(of_trainers + math.ceil(count / servers), of_trainers, trainers, servers, of_trainers, 0)
