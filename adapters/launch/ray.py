"""`areax launch --on ray`: a placement group with an actor per bundle that runs one process of the job.

Trainer processes come first, so that packing keeps them together, then the servers. If any server is on another machine
than process 0, each server gets a stager, unless the command names a shared folder (--published).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...rollout.processes import keys
from . import job, spelling
from .config import Config, at, folder, joined, new_keys, option, server_words, staged, stager_words, training_words
from .host import GRACE_S, PYTHON, Gone, Host
from .job import Part

PASSED = (
    "AREAX_",
    "HF_",
    "JAX_",
    "LIBTPU_",
    "MLFLOW_",
    "NCCL_",
    "SWANLAB_",
    "TOKENIZERS_",
    "TRACKIO_",
    "WANDB_",
    "XLA_",
)  # variables passed on
CONNECT_S = 10.0
LOOK_S = 0.2
AGAIN_S = GRACE_S + 5  # until what runs on a machine that Ray alone has lost has ended (`Host`)
HEAD_LOOK_S, HEAD_S = 2.0, 30.0  # how often to look for the head, and when it counts as lost; Ray waits for 60 s
SOON_S, PLACE_S = 5.0, 1800.0  # wait for resources before reporting it, and before giving up


def launch(config: Config, command: list[str]) -> int:
    """`launch.launch` on the machines of a Ray cluster.

    Raises:
      ValueError: Ray is not installed, there is no cluster at the address, it lacks resources, or its machines lack the
        working directory.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("areax launch: --on ray needs Ray, got no installation; pip install 'areax[ray]'") from error
    address, variable = config.ray.address, os.environ.get("RAY_ADDRESS", "")
    spelling.check("ray.address", address, spelling.ADDRESS)
    try:
        if re.fullmatch(spelling.ADDRESS[0], known := address or variable):  # fail fast: Ray would retry for minutes
            Head(known).reach()
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError) as error:  # a port that is none overflows
        where = f"--ray.address {address}" if address else f"RAY_ADDRESS={variable}"
        raise ValueError(f"areax launch: no Ray cluster answers at {where} ({error})") from error
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Ray's handler exits with 15
    head = Head(ray.get_runtime_context().gcs_address)
    lost: list[float] = []  # when machines were
    try:
        while True:
            try:
                with actors(config, head) as hosts:
                    return run(config, command, hosts, head)
            except Gone:
                lost = [then for then in lost if time.monotonic() - then < job.WINDOW_S]
                if len(lost) == job.RESTARTS:
                    raise
                lost.append(time.monotonic())
                _say(f"starting the job again, from its last state, in {AGAIN_S:.0f} s, on machines that Ray has then")
                time.sleep(AGAIN_S)
                head.check()
    finally:
        ray.shutdown()


def run(config: Config, command: list[str], hosts: list[Any], head: Head) -> int:
    """Runs the job on hosts (`Remote`), in the order of their bundles."""
    places = [host.place() for host in hosts]  # (address, node)
    for host in hosts:
        host.enter(os.getcwd())
    logs, first = folder(config.logs).absolute(), places[0]
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    # Ray sets OMP_NUM_THREADS to the reserved CPUs; restore the launcher's setting.
    environ: dict[str, str | None] = {**passed, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    if config.servers and not config.server.template:  # another server may have no key, or one of its own
        environ |= new_keys(keys.SERVER)
    stage = config.servers > 0 and staged(command, any(node != first[1] for _, node in places[config.processes :]))
    if stage:
        environ |= new_keys(keys.STAGER)
    servers, stagers = [], []
    for i, (host, (address, _)) in enumerate(zip(hosts[config.processes :], places[config.processes :], strict=True)):
        port, stager_port = host.ports(address, 2)
        words = server_words(config, command, address, port)
        log, where, url = str(logs / f"server-{i}.log"), f" on {address}", f"http://{at(address, port)}"
        servers.append(Part(f"server {i}", host, words, environ, log, where, url))
        if stage:
            root = host.scratch(option(command, "--model") or "")
            words = [PYTHON, *stager_words(command), "--host", address, "--port", str(stager_port), "--root", root]
            log, url = str(logs / f"stager-{i}.log"), f"http://{at(address, stager_port)}"
            stagers.append(Part(f"stager {i}", host, words, environ, log, where, url))
    words = training_words(command, [part.url for part in servers], [part.url for part in stagers])
    coordinator = at(first[0], *hosts[0].ports(first[0], 1))
    # Ray hides other processes' devices: a process uses all that it sees.
    more = {"JAX_LOCAL_DEVICE_IDS": None, "JAX_NUM_CPU_DEVICES": str(config.devices)}
    trainers = [
        Part(f"process {i}", hosts[i], words, environ | more | joined(config, coordinator, i),
             str(logs / f"process-{i}.log"), f" on {places[i][0]}", shown=i == 0)
        for i in range(config.processes)
    ]  # fmt: skip
    return job.run(trainers, [*servers, *stagers], look_s=LOOK_S, check=head.check)


@contextlib.contextmanager
def actors(config: Config, head: Head) -> Iterator[list[Any]]:
    """Yields a host for each trainer process and server, placed by Ray; closed on exit."""
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = _devices(ray.cluster_resources())
    counts = [config.devices] * config.processes + [config.server_devices] * config.servers
    bundles = [{"CPU": float(config.cpus)} | ({kind: float(count)} if kind else {}) for count in counts]
    group = placement_group(bundles, strategy="PACK")
    hosts = []
    try:
        _wait_for_room(group, bundles)
        for i, bundle in enumerate(bundles):
            asked = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
            others = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            actor = ray.remote(Node).options(**asked, resources=others, scheduling_strategy=place)
            hosts.append(Remote(actor.remote()))
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(Gone):
                host.close()
        with contextlib.suppress(OSError):  # without a head Ray would wait for a minute, then end this process
            head.reach()
            remove_placement_group(group)


class Node(Host):
    """A host that runs as a Ray actor."""

    def place(self) -> tuple[str, str]:
        """(address, node id) of its machine."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def start(self, *arguments: Any) -> int:
        """As `Host.start`; unblocks SIGINT in the process: Ray blocks it in all that it starts."""
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            return super().start(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Remote:
    """Proxy with the methods of a `Node` actor; raises Gone if the actor is dead."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Callable:
        import ray

        def call(*arguments):
            try:
                return ray.get(getattr(self._actor, name).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.ActorUnavailableError as error:
                raise Gone("the machine, or Ray on it, does not answer") from error
            except ray.exceptions.RayActorError as error:  # in indented lines it has ids
                said = [line for line in str(error).splitlines() if not line.startswith("\t")]
                raise Gone(" ".join(" ".join(said).split())) from error

        return call


class Head:
    """The address of a cluster's head, HOST:PORT, and when it has answered last."""

    def __init__(self, address: str):
        self._address, self._looked, self._answered = address, 0.0, time.monotonic()

    def reach(self) -> None:
        """Raises OSError if it does not answer."""
        host, _, port = self._address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()

    def check(self) -> None:
        """Raises RuntimeError if it has not answered for HEAD_S; looks each HEAD_LOOK_S."""
        if time.monotonic() - self._looked < HEAD_LOOK_S:
            return
        self._looked = time.monotonic()
        try:
            self.reach()
            self._answered = time.monotonic()
        except OSError as error:
            if (silent := time.monotonic() - self._answered) >= HEAD_S:
                raise RuntimeError(
                    f"areax launch: the head of the Ray cluster must answer, {self._address} has been silent for "
                    f"{silent:.0f} s ({error}); start a cluster, and the same command goes on from its last state"
                ) from error


def _devices(resources: dict[str, float]) -> str:
    """Ray's resource name of the cluster's devices; "" if processes run on CPUs."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return ""
    return next((kind for kind in ("GPU", "TPU") if resources.get(kind)), "")


def _wait_for_room(group: Any, bundles: list[dict[str, float]]) -> None:
    """Waits until the placement group is ready: machines may be busy or still starting."""
    import ray

    began, reported = time.monotonic(), False
    while not group.wait(1):
        waited = time.monotonic() - began
        free = {name: n for name, n in ray.available_resources().items() if name in ("CPU", "GPU", "TPU")}
        if waited > PLACE_S:
            raise ValueError(
                f"areax launch: the Ray cluster must have room for {bundles}, got only {free} free in {PLACE_S:.0f} s; "
                "use fewer resources, or add machines"
            )
        if waited > SOON_S and not reported:
            reported = True
            _say(f"waiting for room in the Ray cluster for {bundles}, up to {PLACE_S:.0f} s; {free} is free")


def _say(line: str) -> None:
    print(f"areax launch: {line}", file=sys.stderr, flush=True)
