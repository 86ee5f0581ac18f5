"""Processes of one command, and servers for it, here or on a cluster: `areax launch --servers 2 -- train grpo ...`.

What is run is the same everywhere (launch_config.py); launch_devices.py, launch_ray.py and launch_slurm.py say where,
launch_job.py in which order, and what happens when a process ends.
"""

from __future__ import annotations

from . import devices, job, ray, slurm
from .config import Config, folder, joined, see_servers, server_words, training_words
from .host import Host
from .job import Part

__all__ = ["Config", "launch"]


def launch(config: Config, command: list[str]) -> int:
    """Runs `areax COMMAND` so many times, with servers if there are to be any; returns the exit code of process 0.

    See `launch_job.run`. On Slurm the script is all that is made.

    Raises:
      ValueError: there are fewer devices than asked for, or the command has servers of its own or names no model.
    """
    see_servers(config, command)
    if config.on == "slurm":
        return slurm.write(config, command)
    if config.on == "ray":
        return ray.launch(config, command)
    trainers, served = devices.of_each(
        config.processes, config.devices, config.servers, config.server.devices
    )  # fmt: skip
    here, address, logs = Host(), "127.0.0.1", folder(config.logs)
    try:
        port, *ports = here.ports(address, 1 + config.servers)
        servers = [
            Part(f"server {i}", here, server_words(config, command, address, ports[i]), served[i],
                 str(logs / f"server-{i}.log"), url=f"http://{address}:{ports[i]}")
            for i in range(config.servers)
        ]  # fmt: skip
        words = training_words(command, [server.url for server in servers])
        return job.run(
            [
                Part(f"process {i}", here, words, trainers[i] | joined(config, f"{address}:{port}", i),
                     str(logs / f"process-{i}.log") if i else "")
                for i in range(config.processes)
            ],
            servers,
        )  # fmt: skip
    finally:
        here.close()
