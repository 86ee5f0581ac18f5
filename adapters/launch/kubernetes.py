"""`areax launch --on kubernetes`: writes a manifest to review, edit and apply with kubectl.

A JobSet with a Job of trainer processes, a pod each, and a Job of servers; or a plain indexed Job of trainer processes.
Pods find each other by their hostnames, which the JobSet, or a Service, gives them. Each server has a stager in its pod
unless the command names a shared folder (--published).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from ...rollout.processes import keys
from . import shell, spelling
from .config import SHARED, Config, server_words, staged, stager_words
from .host import PYTHON
from .job import START_S

COORDINATOR, SERVER, STAGER = 9876, 30000, 31000  # ports; each pod has an address of its own
GRACE_S = 120  # from SIGTERM to SIGKILL: enough for a step and a checkpoint
MOST_PODS = 5000  # nodes of the largest clusters that Kubernetes supports
LONGEST_SCRIPT = 128 * 1024 - 1  # bytes of one argument, on Linux
LONGEST_NAME = 40  # hostnames have at most 63 characters
BAD_INPUT = 2  # exit code of a command that would fail again
SERVER_RESTARTS = 20  # of containers of the servers' Job
# Until a pod has a machine, for which it may queue as long as the cluster needs, its hostname has no address.
QUEUED = f"[[ $why == *gaierror* ]] && late=$((SECONDS + {START_S:.0f})) # its pod has no machine yet"
VARIABLES = {PYTHON: "python", shell.HOST: '"$POD_IP"', shell.PORT: '"$port"'}


def write(config: Config, command: list[str]) -> int:
    """Prints the manifest, or writes it to `config.kubernetes.file`."""
    return shell.write(manifest(config, command), config.kubernetes.file, "kubectl apply -f")


def manifest(config: Config, command: list[str]) -> str:
    """The YAML documents: a Secret with the servers' keys if there are servers, and the JobSet, or Service and Job.

    Raises:
      ValueError: there is no image, Kubernetes would refuse a name or a count, or servers are asked of a plain Job.
    """
    options = config.kubernetes
    _check(config)
    stage = config.servers > 0 and staged(command, True)
    secret = _secret(config, stage)
    sources = [*([secret["metadata"]["name"]] if secret else []), *([options.secret] if options.secret else [])]
    script = _trainer_script(config, command, stage)
    trainer = _job(config, config.processes, [_container(config, "trainer", script, sources)])
    fatal = {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [BAD_INPUT]}}
    trainer["podFailurePolicy"] = {"rules": [fatal]}
    head = "Written by areax launch; adapt it to your cluster, then: kubectl apply -f FILE"
    if options.kind == "job":
        trainer |= {"backoffLimitPerIndex": options.restarts, "maxFailedIndexes": 0}
        trainer["template"]["spec"]["subdomain"] = options.name
        trainer["template"]["metadata"] = {"labels": {"app": options.name}}
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": options.name}}
        return shell.dump(
            [_object("v1", "Service", options.name, service), _object("batch/v1", "Job", options.name, trainer)], head
        )
    trainer["backoffLimit"] = 0  # the JobSet starts all of them again
    replicated = [{"name": "trainer", "template": {"spec": trainer}}]
    if config.servers:
        replicated.insert(0, {"name": "server", "template": {"spec": _servers(config, command, stage, sources)}})
    rule = {
        "name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": ["trainer"],
    }  # fmt: skip
    spec = {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
        "failurePolicy": {"maxRestarts": options.restarts, "rules": [rule]},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": options.name},
        "replicatedJobs": replicated,
    }
    documents = [secret] if secret else []
    return shell.dump([*documents, _object("jobset.x-k8s.io/v1alpha2", "JobSet", options.name, spec)], head)


def _check(config: Config) -> None:
    options = config.kubernetes
    if not options.image:
        raise ValueError("areax launch: --on kubernetes needs --kubernetes.image, an image with areax, got none")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", options.name) or len(options.name) > LONGEST_NAME:
        raise ValueError(
            f"areax launch: --kubernetes.name must be at most {LONGEST_NAME} lower-case letters, digits and -, got "
            f"{options.name!r}"
        )
    if options.kind == "job" and config.servers:
        raise ValueError(
            f"areax launch: a plain Job has trainer processes only, got --servers {config.servers}; use "
            "--kubernetes.kind jobset"
        )
    if (pods := config.processes + config.servers) > MOST_PODS:
        raise ValueError(
            f"areax launch: --processes and --servers must be at most {MOST_PODS} pods, as many as a cluster of "
            f"Kubernetes may have nodes, got {pods}"
        )
    for name, value, kind in (
        ("image", options.image, spelling.IMAGE), ("server-image", options.server_image, spelling.IMAGE),
        ("resource", options.resource, spelling.RESOURCE), ("memory", options.memory, spelling.QUANTITY),
        ("claim", options.claim, spelling.NAME), ("secret", options.secret, spelling.NAME),
    ):  # fmt: skip
        spelling.check(f"kubernetes.{name}", value, kind)


def _secret(config: Config, stage: bool) -> dict[str, Any]:
    """A Secret with new keys; empty if none is needed. Its name has their hash: another manifest's, with other keys,
    is another object, and a job that runs keeps its own."""
    wanted = [keys.SERVER] * (config.servers > 0 and not config.server.template) + [keys.STAGER] * stage
    if not wanted:
        return {}
    values = {name: secrets.token_urlsafe(32) for name in wanted}
    own = hashlib.sha256("\n".join(values.values()).encode()).hexdigest()[:10]
    named = {"name": f"{config.kubernetes.name}-keys-{own}", "labels": {"app": config.kubernetes.name}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": named, "immutable": True, "stringData": values}


def _object(version: str, kind: str, name: str, spec: dict) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _host(config: Config, role: str, index: int) -> str:
    """The hostname of a pod."""
    name = config.kubernetes.name
    return f"{name}-{index}.{name}" if config.kubernetes.kind == "job" else f"{name}-{role}-0-{index}.{name}"


def _job(config: Config, count: int, containers: list[dict], restart: str = "Never") -> dict[str, Any]:
    """The spec of an indexed Job of `count` pods."""
    options = config.kubernetes
    volumes: list[dict] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if options.claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}})
    pod = {
        "restartPolicy": restart, "terminationGracePeriodSeconds": GRACE_S, "containers": containers,
        "volumes": volumes,
    }  # fmt: skip
    return {"completionMode": "Indexed", "completions": count, "parallelism": count, "template": {"spec": pod}}


def _container(
    config: Config, name: str, script: str, sources: list[str], image: str = "", devices: int | None = None
) -> dict[str, Any]:
    """A container that runs a script by bash.

    Args:
      sources: names of Secrets with environment variables; a later one wins.
      devices: that it has; None = those of a trainer process.

    Raises:
      ValueError: Linux would not pass the script to bash, as it is too long.
    """
    if (size := len(script.encode(errors="surrogateescape"))) > LONGEST_SCRIPT:
        raise ValueError(
            f"areax launch: the command of a pod must be at most {LONGEST_SCRIPT} bytes, which Linux passes as one "
            f"argument, got {size} for {name}; use fewer --servers, whose addresses it has, or a shorter command"
        )
    options, count = config.kubernetes, config.devices if devices is None else devices
    requests = {"cpu": str(config.cpus if count else 1)}
    if options.memory and count:
        requests["memory"] = options.memory
    resources: dict[str, Any] = {"requests": requests}
    if options.resource and count:
        resources["limits"] = {options.resource: count}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # 64 MB without
    # Kubernetes expands $(NAME) in it, within quotes, too, and makes $ of $$.
    words = ["bash", "-c", script.replace("$", "$$")]
    made: dict[str, Any] = {"name": name, "image": image or options.image, "command": words}
    if options.claim:
        mounts.append({"name": "shared", "mountPath": SHARED})
        made["workingDir"] = SHARED
    if sources:
        made["envFrom"] = [{"secretRef": {"name": source}} for source in sources]
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return made | {
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}, address], "resources": resources, "volumeMounts": mounts,
    }  # fmt: skip


def _trainer_script(config: Config, command: list[str], stage: bool) -> str:
    lines = ["set -u", *_logs(config, "process"), f"export JAX_NUM_CPU_DEVICES={config.devices}"]
    words = shell.text([PYTHON, "-m", "areax", *command], 2, VARIABLES)
    if config.servers:
        of = lambda port: [f"http://{_host(config, 'server', i)}:{port}" for i in range(config.servers)]
        servers, stagers = of(SERVER), of(STAGER) if stage else []
        lines.append(shell.ready(" ".join([*servers, *stagers]), START_S, check=QUEUED))
        words += f" \\\n  --servers {' '.join(servers)}" + (f" \\\n  --stagers {' '.join(stagers)}" if stage else "")
    if config.processes > 1:
        lines.append(
            f"export AREAX_COORDINATOR={_host(config, 'trainer', 0)}:{COORDINATOR} "
            f"AREAX_PROCESSES={config.processes} AREAX_PROCESS=$JOB_COMPLETION_INDEX"
        )
    return "\n".join([*lines, f"exec {words}"]) + "\n"


def _servers(config: Config, command: list[str], stage: bool, sources: list[str]) -> dict[str, Any]:
    """The spec of the servers' Job: its containers start again when they end."""
    run = lambda name, port, words: "\n".join(
        ["set -u", *_logs(config, name), f"port={port}", f"exec {shell.text(words, 2, VARIABLES)}"]
    ) + "\n"  # fmt: skip
    serve = run("server", SERVER, server_words(config, command, shell.HOST, shell.PORT))
    image = config.kubernetes.server_image
    containers = [_container(config, "server", serve, sources, image, config.server_devices)]
    if stage:
        words = [PYTHON, *stager_words(command), "--host", shell.HOST, "--port", shell.PORT]
        containers.append(
            _container(config, "stager", run("stager", STAGER, [*words, "--root", "/dev/shm/areax"]), sources, "", 0)
        )
    return _job(config, config.servers, containers, "OnFailure") | {"backoffLimit": SERVER_RESTARTS}


def _logs(config: Config, name: str) -> list[str]:
    """Shell text that also writes a container's output to a file; kubectl logs has it in any case."""
    if not config.logs:
        return []
    folder = shell.text([config.logs], 0, {})
    return [f"mkdir -p {folder}", f'exec > >(tee -a {folder}/{name}-"$JOB_COMPLETION_INDEX".log) 2>&1']
