"""Launches several processes of a command and its servers, here or on a cluster: `areax launch ... -- train grpo ...`.

config.py builds the commands, the same everywhere; devices.py and ray.py place them, job.py starts them in order and
handles their exits; slurm.py, kubernetes.py and skypilot.py write what others start.
"""

from __future__ import annotations

from . import devices, job, kubernetes, ray, skypilot, slurm
from .config import Config, check_servers, folder, joined, option, server_words, training_words
from .host import Host
from .job import Part

__all__ = ["Config", "check_servers", "launch", "option"]


def launch(config: Config, command: list[str]) -> int:
    """Runs `config.processes` processes of `areax COMMAND`, and servers if configured; returns process 0's exit code.

    See `job.run`. On Slurm, Kubernetes and SkyPilot only a file is written.

    Raises:
      ValueError: there are fewer devices than requested, or the command sets its own servers or no model.
    """
    check_servers(config, command)
    if writer := {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}.get(config.on):
        return writer.write(config, command)
    if config.on == "ray":
        return ray.launch(config, command)
    trainers, served = devices.of_each(
        config.processes, config.devices, config.servers, config.server_devices
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
