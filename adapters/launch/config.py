"""What `areax launch` is told, and the commands that come of it, wherever they run."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...parallel.multihost import processes
from .host import PYTHON


@dataclass(frozen=True)
class Server:
    """How a generation server runs.

    Attributes:
      devices: of each server, its own; the embedded engine generates on one.
      slots: sequences that a server generates at a time.
      context: longest sequence, prompt and completion; the model's own limit if that is lower.
      dtype: of weights and computation.
      command: of another server of SGLang's contract, in which {model}, {host} and {port} are filled in:
        "python -m sglang.launch_server --model-path {model} --host {host} --port {port}"; "" = `areax serve`.
    """

    devices: int = 1
    slots: int = 16
    context: int = 2048
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    command: str = ""


@dataclass(frozen=True)
class Ray:
    """Where Ray is.

    Attributes:
      address: of a cluster, as in 10.0.0.1:6379; "" = RAY_ADDRESS, one that runs here, or else a new one.
    """

    address: str = ""


@dataclass(frozen=True)
class Slurm:
    """What the batch script asks of Slurm.

    Attributes:
      script: file to write it to; "" = print it.
      gpus_per_node: GPUs of a node, all of which the job takes; 0 = none, and a node for each process and server.
      time: limit, as in 4:00:00; "" = the partition's.
      partition: where it runs; "" = Slurm's default.
      account: who pays; "" = Slurm's default.
    """

    script: str = ""
    gpus_per_node: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""


@dataclass(frozen=True)
class Config:
    """Run several processes of one command, and servers for it: areax launch --servers 2 -- train grpo --model M ...

    Attributes:
      on: this machine; the machines of a Ray cluster; or those of Slurm, for which a batch script is written.
      processes: trainer processes, which run the command together.
      devices: of each: GPUs of its own, or virtual devices on the CPU.
      servers: generation servers of the command's --model, which is told their addresses.
      server: how they run.
      cpus: CPUs that Ray and Slurm set aside for each process and each server.
      logs: folder for process-1.log, server-0.log and so on, what all but process 0 print; "" = a new one.
      ray: where Ray is.
      slurm: what the batch script asks of Slurm.
    """

    on: Literal["local", "ray", "slurm"] = "local"
    processes: int = 1
    devices: int = 1
    servers: int = 0
    server: Server = Server()
    cpus: int = 1
    logs: str = ""
    ray: Ray = Ray()
    slurm: Slurm = Slurm()

    def __post_init__(self):
        alone = self.on == "local" and not self.servers
        for name, value, least in (
            ("processes", self.processes, 2 if alone else 1),  # one process here needs no launcher
            ("devices", self.devices, 1),
            ("servers", self.servers, 0),
            ("server.devices", self.server.devices, 1),
            ("server.slots", self.server.slots, 1),
            ("server.context", self.server.context, 2),
            ("cpus", self.cpus, 1),
            ("slurm.gpus-per-node", self.slurm.gpus_per_node, 0),
        ):
            if value < least:
                without = "; one without --servers needs no launcher" if name == "processes" and alone else ""
                raise ValueError(f"areax launch: --{name} must be at least {least}, got {value}{without}")
        if self.server.devices > 1 and not self.server.command:
            raise ValueError(
                "areax launch: the embedded engine generates on one device, got --server.devices "
                f"{self.server.devices}; ask for more --servers, or give --server.command"
            )
        if "{port}" not in (self.server.command or "{port}"):
            raise ValueError(
                f"areax launch: --server.command must say where {{port}} goes, got {self.server.command!r}; {{host}} "
                "and {model} are filled in too"
            )


def joined(config: Config, coordinator: str, index: int | str) -> dict[str, str]:
    """What tells a trainer process who it is."""
    count = str(config.processes)
    return {processes.COORDINATOR: coordinator, processes.COUNT: count, processes.INDEX: str(index)}


def at(host: str, port: int) -> str:
    """host:port, also of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def folder(logs: str) -> Path:
    """The folder for logs, which is there."""
    path = Path(logs or tempfile.mkdtemp(prefix="areax-launch-"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def see_servers(config: Config, command: list[str]) -> None:
    """Sees that the command leaves its servers to the launcher, if that has any."""
    if not config.servers:
        return
    for word in command:
        name = word.partition("=")[0]
        if name in ("--servers", "--stagers") or name.startswith("--serve."):
            instead = "--server." + name.removeprefix("--serve.") if name.startswith("--serve.") else "them"
            raise ValueError(
                f"areax launch: --servers {config.servers} are started here, and the command gets their addresses; "
                f"leave out its {name}" + (f", and give {instead} before the --" if instead != "them" else "")
            )
    if option(command, "--init") == "random":
        raise ValueError(
            "areax launch: --servers serve the weights of --model, which --init random has none of; save a checkpoint "
            "first"
        )
    if option(command, "--model") is None and "{model}" in (config.server.command or "{model}"):
        raise ValueError(
            "areax launch: --servers serve the --model of the command, which names none; give --server.command with "
            "the path in it"
        )


def option(command: Sequence[str], name: str) -> str | None:
    """The value of an option in a command; None if it is not there."""
    found = None
    for word, after in zip(command, [*command[1:], None], strict=True):
        if word == name:
            found = after
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def server_words(config: Config, command: list[str], host: str, port: int | str) -> list[str]:
    """The command of a server at an address."""
    server, model = config.server, option(command, "--model") or ""
    if server.command:
        filled = {"{model}": model, "{host}": host, "{port}": str(port)}
        words = shlex.split(server.command)
        for name, value in filled.items():
            words = [word.replace(name, value) for word in words]
        return words
    return [
        PYTHON, "-m", "areax", "serve", model, "--host", host, "--port", str(port), "--slots", str(server.slots),
        "--context", str(server.context), "--dtype", server.dtype,
    ]  # fmt: skip


def training_words(command: list[str], servers: Sequence[str], stagers: Sequence[str] = ()) -> list[str]:
    """The command of a trainer process, with where its servers are."""
    addresses = ["--servers", *servers] if servers else []
    return [PYTHON, "-m", "areax", *command, *addresses, *(["--stagers", *stagers] if stagers else [])]
