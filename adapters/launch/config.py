"""Options of `areax launch`, and the commands built from them."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...parallel.multihost import processes
from ...rollout.processes import memory
from ...rollout.servers.engine_options import EngineOptions
from .host import PYTHON

MOST = 10_000  # processes or servers: more than the largest clusters run, and two ports each are left for the servers
MOST_DEVICES, MOST_CPUS = 1024, 4096  # of one process
SHARED = "/shared"  # where pods and nodes see a shared folder
COMMANDS = {  # of kinds of servers, with the option that bounds their context
    "sglang": (
        "python -m sglang.launch_server --model-path {model} --host {host} --port {port} --tp-size {devices}",
        "--context-length",
    ),
    "vllm": (
        "env VLLM_SERVER_DEV_MODE=1 vllm serve {model} --host {host} --port {port} --tensor-parallel-size {devices} "
        "--enable-scale-out --logprobs-mode processed_logprobs",
        "--max-model-len",
    ),
}


@dataclass(frozen=True)
class Server(EngineOptions):
    """Options of a generation server.

    Attributes:
      kind: `areax serve`, or SGLang or vLLM with the options that training needs; they must be in PATH.
      devices: devices of each server of another kind, or that `command` starts.
      mesh: devices of each `areax serve`, and how it uses them (docs/serve.md).
      context: maximum sequence length, prompt plus completion; the model's limit if that is lower. 0 = the command's
        `--length`, if it has one.
      dtype: dtype of weights and computation; auto = bfloat16 on accelerators, float32 on a CPU.
      command: a command of your own that starts a server, with {model}, {host}, {port} and {devices} filled in; "" =
        that of `kind`.
    """

    kind: Literal["areax", "sglang", "vllm"] = "areax"
    devices: int = 1
    context: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    command: str = ""

    @property
    def template(self) -> str:
        """The command of a server, to be filled in; "" = that of `areax serve`."""
        return self.command or COMMANDS.get(self.kind, ("",))[0]


@dataclass(frozen=True)
class Ray:
    """Options of Ray.

    Attributes:
      address: address of a cluster, as in 10.0.0.1:6379; "" = RAY_ADDRESS, else a cluster running here, else a new one.
    """

    address: str = ""


@dataclass(frozen=True)
class Slurm:
    """Options of the Slurm batch script.

    Attributes:
      script: file to write the script to; "" = print it.
      gpus_per_node: GPUs per node, all of which the job allocates; 0 = none, and one node per process and server.
      time: time limit, as in 4:00:00; "" = the partition's.
      partition: partition to run on; "" = Slurm's default.
      account: account to charge; "" = Slurm's default.
    """

    script: str = ""
    gpus_per_node: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""


@dataclass(frozen=True)
class Kubernetes:
    """Options of the Kubernetes manifest.

    Attributes:
      file: file to write the manifest to; "" = print it.
      kind: jobset, whose controller (JobSet) the cluster needs, or job: a plain indexed Job, without servers.
      image: container image with areax, as the Dockerfile's.
      server_image: image of the servers if another kind or `server.command` needs another; "" = `image`.
      name: name of the objects, and first part of the pods' hostnames.
      resource: resource name of the devices, such as nvidia.com/gpu or google.com/tpu; "" = CPUs.
      memory: memory requested per pod, as in 64Gi; "" = none.
      claim: PersistentVolumeClaim that all pods mount at /shared, where they run; "" = none.
      secret: Secret whose entries become environment variables, such as HF_TOKEN; "" = none.
      restarts: times that a job that failed is started again; it goes on from its saved state.
    """

    file: str = ""
    kind: Literal["jobset", "job"] = "jobset"
    image: str = ""
    server_image: str = ""
    name: str = "areax"
    resource: str = "nvidia.com/gpu"
    memory: str = ""
    claim: str = ""
    secret: str = ""
    restarts: int = 3


@dataclass(frozen=True)
class SkyPilot:
    """Options of the SkyPilot task.

    Attributes:
      file: file to write the task to; "" = print it.
      accelerators: accelerators of a node, as H100:8; "" = none, and one node per process and server.
      setup: command that installs areax on a node; the default is for the directory of a checkout.
      shared: address of a bucket, as s3://mine, that all nodes mount at /shared; "" = none.
    """

    file: str = ""
    accelerators: str = ""
    setup: str = "pip install '.[cuda]'"
    shared: str = ""


@dataclass(frozen=True)
class Config:
    """Launch several processes of a command and its servers: areax launch --servers 2 -- train grpo --model M ...

    Attributes:
      on: where to run: this machine or a Ray cluster; for slurm, kubernetes and skypilot a file is written.
      processes: trainer processes, which run the command together.
      devices: devices per process: GPUs, or virtual devices on the CPU.
      servers: generation servers of the command's --model; the command gets their addresses.
      server: options of the servers.
      cpus: CPUs that a cluster reserves per process and server.
      logs: folder for the output of all but process 0: process-1.log, server-0.log etc.; "" = a new one.
      ray: options of Ray.
      slurm: options of the Slurm batch script.
      kubernetes: options of the Kubernetes manifest.
      skypilot: options of the SkyPilot task.
    """

    on: Literal["local", "ray", "slurm", "kubernetes", "skypilot"] = "local"
    processes: int = 1
    devices: int = 1
    servers: int = 0
    server: Server = Server()
    cpus: int = 1
    logs: str = ""
    ray: Ray = Ray()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    skypilot: SkyPilot = SkyPilot()

    @property
    def server_devices(self) -> int:
        """Devices of each server."""
        return self.server.devices if self.server.template else self.server.mesh.devices

    @property
    def server_option(self) -> str:
        """The option that says so."""
        return "server.devices" if self.server.template else "server.mesh"

    def __post_init__(self):
        serverless = self.on == "local" and not self.servers
        for name, value, least, most in (
            ("processes", self.processes, 2 if serverless else 1, MOST),  # one local process needs no launcher
            ("devices", self.devices, 1, MOST_DEVICES),
            ("servers", self.servers, 0, MOST),
            (self.server_option, self.server_devices, 1, MOST_DEVICES),
            ("cpus", self.cpus, 1, MOST_CPUS),
            ("kubernetes.restarts", self.kubernetes.restarts, 0, MOST),
            ("slurm.gpus-per-node", self.slurm.gpus_per_node, 0, MOST_DEVICES),
        ):
            if value > most:
                raise ValueError(f"areax launch: --{name} must be at most {most}, got {value}")
            if value < least:
                hint = "; one process without --servers needs no launcher" if name == "processes" and serverless else ""
                raise ValueError(f"areax launch: --{name} must be at least {least}, got {value}{hint}")
        if self.on == "local":
            both = self.processes + self.servers
            options = f"--processes {self.processes}" + f" and --servers {self.servers}" * bool(self.servers)
            memory.check(f"areax launch: {options}", both * memory.PROCESS)
        if not self.server.template and self.server.devices != 1:
            raise ValueError(
                f"areax launch: --server.devices is for --server.kind and --server.command, got {self.server.devices} "
                "without; `areax serve` takes --server.mesh, such as --server.mesh.tp 2"
            )
        if self.server.command and self.server.kind != "areax":
            raise ValueError(
                f"areax launch: --server.command and --server.kind both say which server, got kind {self.server.kind}; "
                "leave out one of them"
            )
        lost = self.server.words if self.server.command else replace(self.server, context=0).words
        lost += ["--dtype", self.server.dtype] if self.server.command and self.server.dtype != "auto" else []
        if self.server.template and lost:
            raise ValueError(
                "areax launch: another server takes no options of `areax serve`, got "
                f"{' '.join(lost).replace('--', '--server.')}; set --server.devices, and others by --server.command"
            )
        try:
            shlex.split(self.server.command)
        except ValueError as error:
            raise ValueError(
                f"areax launch: --server.command must be words as a shell reads them, got {self.server.command!r} "
                f"({str(error).lower()})"
            ) from error
        if "{port}" not in (self.server.command or "{port}"):
            raise ValueError(
                f"areax launch: --server.command must contain {{port}}, got {self.server.command!r}; {{host}} and "
                "{model} are filled in too"
            )


def joined(config: Config, coordinator: str, index: int | str) -> dict[str, str]:
    """Environment variables with a trainer process's index, the process count and the coordinator."""
    count = str(config.processes)
    return {processes.COORDINATOR: coordinator, processes.COUNT: count, processes.INDEX: str(index)}


def at(host: str, port: int) -> str:
    """Formats host:port, with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def folder(logs: str) -> Path:
    """The folder for logs, created if missing."""
    path = Path(logs or tempfile.mkdtemp(prefix="areax-launch-"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def check_servers(config: Config, command: list[str]) -> None:
    """Raises ValueError if the launcher starts servers and the command sets its own or has no model to serve."""
    if not config.servers:
        return
    for word in command:
        name = word.partition("=")[0]
        if name in ("--servers", "--stagers") or name.startswith("--serve."):
            same = name.removeprefix("--serve.").partition(".")[0] in Server.__dataclass_fields__
            instead = name.replace("--serve.", "--server.", 1) if same else ""
            raise ValueError(
                f"areax launch: the launcher starts the servers (--servers {config.servers}) and passes their "
                f"addresses, got {name} in the command; leave it out"
                + (f", and set {instead} before the --" if instead else "")
            )
    if option(command, "--init") == "random":
        raise ValueError(
            "areax launch: --servers serve the weights of --model, got --init random, which has none; save a "
            "checkpoint first"
        )
    if option(command, "--model") is None and "{model}" in (config.server.template or "{model}"):
        raise ValueError(
            "areax launch: --servers serve the command's --model, got none; add it, or set --server.command with "
            "the path in it"
        )


def option(command: Sequence[str], name: str) -> str | None:
    """The value of an option in a command; None if missing."""
    found = None
    for word, after in zip(command, [*command[1:], None], strict=True):
        if word == name:
            found = after
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def new_keys(*variables: str) -> dict[str, str]:
    """A new key for each of these environment variables, unless it is set, or VARIABLE_FILE names a file with a key."""
    needed = [name for name in variables if not (os.environ.get(name) or os.environ.get(f"{name}_FILE"))]
    return {name: secrets.token_urlsafe(32) for name in needed}


def server_words(config: Config, command: list[str], host: str, port: int | str) -> list[str]:
    """The command that starts a server at an address."""
    server, model = config.server, option(command, "--model") or ""
    context = str(server.context or option(command, "--length") or "")
    if server.template:
        filled = {"{model}": model, "{host}": host, "{port}": str(port), "{devices}": str(server.devices)}
        fill = lambda word: re.sub(r"\{(model|host|port|devices)\}", lambda found: filled[found[0]], word)
        words = [fill(word) for word in shlex.split(server.template)]
        if server.command:
            return words
        bound = COMMANDS[server.kind][1]
        return [*words, "--dtype", server.dtype, *([bound, context] if context else [])]
    return [
        "env", "AREAX_PROCESSES=1",  # by itself, also as one of several tasks of a scheduler's step
        *([f"JAX_NUM_CPU_DEVICES={server.mesh.devices}"] if server.mesh.devices > 1 else []),
        PYTHON, "-m", "areax", "serve", model, "--host", host, "--port", str(port),
        *(["--context", context] if context else []), "--dtype", server.dtype, *replace(server, context=0).words,
    ]  # fmt: skip


def staged(command: Sequence[str], apart: bool) -> bool:
    """Whether servers get stagers: for a bucket, or if some are `apart` from the trainers, without a shared folder."""
    return option(command, "--push.bucket") is not None or (apart and option(command, "--published") is None)


def stager_words(command: Sequence[str]) -> list[str]:
    """The program of a stager, and where it fetches from if the command has versions uploaded to a bucket."""
    bucket = option(command, "--push.bucket")
    return ["-m", "areax.rollout.weights.stager", *(["--bucket", bucket] if bucket else [])]


def training_words(command: list[str], servers: Sequence[str], stagers: Sequence[str] = ()) -> list[str]:
    """The command of a trainer process, with the addresses of its servers and stagers."""
    addresses = ["--servers", *servers] if servers else []
    return [PYTHON, "-m", "areax", *command, *addresses, *(["--stagers", *stagers] if stagers else [])]
