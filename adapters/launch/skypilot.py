"""`areax launch --on skypilot`: writes a task to review, edit and start with sky.

All nodes run one script. Trainer processes take the first nodes, servers the others; one node runs both if it has the
devices. A server on another node than the trainers gets a stager, unless the command names a shared folder
(--published). Nodes with servers end when the first node no longer answers at the job's first port.
"""

from __future__ import annotations

import secrets
import shlex
from typing import Any

from ...rollout.processes import keys
from . import shell, spelling
from .config import SHARED, Config, server_words, staged, stager_words
from .host import PYTHON
from .job import START_S
from .places import Places, places

VARIABLES = {PYTHON: "python", shell.HOST: '"$node"', shell.PORT: '"$at"'}
CHECK = 'for one in "${kept[@]}"; do kill -0 "$one" 2>/dev/null || exit 1; done'  # a server has failed four times
PORTS = 20000  # of the job: one that says that it runs, the coordinator, then two per server
# Accepts connections, so that the nodes of the servers know that the trainers run.
ALIVE = """if ((rank == 0)); then
  python -c 'import socket, sys
alive = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True: alive.accept()[0].close()' "${{nodes[0]}}" {port} &
  beside=($!)
fi"""


def write(config: Config, command: list[str]) -> int:
    """Prints the task, or writes it to `config.skypilot.file`."""
    return shell.write(task(config, command), config.skypilot.file, "sky launch")


def task(config: Config, command: list[str]) -> str:
    """The task as YAML.

    Raises:
      ValueError: a process or a server needs more devices than a node has, or an option is misspelt.
    """
    options = config.skypilot
    spelling.check("skypilot.accelerators", options.accelerators, spelling.ACCELERATORS)
    spelling.check("skypilot.shared", options.shared, spelling.BUCKET)
    place = places(config, _per_node(options.accelerators), "skypilot.accelerators")
    stage = config.servers > 0 and staged(command, place.first_node > 0)
    made: dict[str, Any] = {"name": "areax", "num_nodes": place.nodes, "workdir": "."}
    each = max(place.trainers, place.servers if config.servers else 0)
    made["resources"] = {"cpus": f"{config.cpus * each}+"}
    if options.accelerators:
        made["resources"]["accelerators"] = options.accelerators
    if options.shared:
        made["file_mounts"] = {SHARED: {"source": options.shared, "mode": "MOUNT"}}
    wanted = [keys.SERVER] * (config.servers > 0 and not config.server.template) + [keys.STAGER] * stage
    if wanted:
        made["secrets"] = {name: secrets.token_urlsafe(32) for name in wanted}
    made |= {"setup": options.setup, "run": _script(config, command, place, stage)}
    return shell.dump([made], "Written by areax launch; adapt it to your cloud, then: sky launch FILE")


def _per_node(accelerators: str) -> int:
    """Devices per node, the number in "H100:8"; 0 = CPUs."""
    return int(accelerators.partition(":")[2] or "1") if accelerators else 0


def _script(config: Config, command: list[str], place: Places, stage: bool) -> str:
    gpus = _per_node(config.skypilot.accelerators)
    logs = shlex.quote(config.logs) if config.logs else '"areax-$SKYPILOT_TASK_ID"'
    parts = [
        "set -u\n"
        'mapfile -t nodes <<<"$SKYPILOT_NODE_IPS"\n'
        f"rank=$SKYPILOT_NODE_RANK node=${{nodes[rank]}} logs={logs}\n"
        'mkdir -p "$logs"'
    ]
    if config.servers:
        parts += _servers(config, command, place, stage, gpus)
    return "\n\n".join([*parts, _trainers(config, command, place, stage, gpus)]) + "\n"


def _servers(config: Config, command: list[str], place: Places, stage: bool, gpus: int) -> list[str]:
    numbers = ",".join(str(i) for i in range(gpus))
    first = f"{place.first_gpu} + i % {place.servers} * {config.server_devices}"
    seen = f"""
    gpus=({numbers.replace(",", " ")})
    own=$(IFS=,; echo "${{gpus[*]:{first}:{config.server_devices}}}")"""
    isolated = 'env CUDA_VISIBLE_DEVICES="$own" ' if gpus else ""
    serve = shell.text(server_words(config, command, shell.HOST, shell.PORT), 6, VARIABLES)
    staging = f"""
    at=$(({PORTS + 3} + 2 * i))
    keep "stager-$i" "$node" \\
      python {shlex.join(stager_words(command))} --host "$node" --port "$at" --root "/dev/shm/areax/$i" &
    kept+=($!)"""
    start = f"""kept=() beside=() urls=() stagers=()
trap 'kill "${{kept[@]}}" "${{beside[@]}}" 2>/dev/null; wait' EXIT # however this script ends
trap 'exit 143' TERM INT
for i in $(seq 0 {config.servers - 1}); do
  on=$(({place.first_node} + i / {place.servers}))
  urls+=("http://${{nodes[on]}}:$(({PORTS + 2} + 2 * i))")
  stagers+=("http://${{nodes[on]}}:$(({PORTS + 3} + 2 * i))")
  if ((on == rank)); then
    at=$(({PORTS + 2} + 2 * i)){seen if gpus else ""}
    keep "server-$i" "$node" {isolated}{serve} &
    kept+=($!){staging if stage else ""}
  fi
done"""
    parts = [shell.LAST, shell.KEEP.format(end='kill "$running"; wait "$running"'), start]
    if place.first_node:
        answers = f'(exec 3<>"/dev/tcp/${{nodes[0]}}/{PORTS}") 2>/dev/null'
        parts.append(f"""if ((rank >= {place.of_trainers})); then # until the trainers have ended
  until {answers}; do
    {CHECK}
    sleep 1
  done
  while {answers}; do sleep 1; done
  exit 0
fi""")
    return parts


def _trainers(config: Config, command: list[str], place: Places, stage: bool, gpus: int) -> str:
    count, devices = config.processes, config.devices
    words = shell.text([PYTHON, "-m", "areax", *command], 4, VARIABLES)
    lines = []
    if config.servers:
        words += ' \\\n    --servers "${urls[@]}"' + (' --stagers "${stagers[@]}"' if stage else "")
        urls = '"${urls[@]}"' + (' "${stagers[@]}"' if stage else "")
        lines.append(shell.ready(urls, START_S, check=CHECK))
        if place.first_node:
            lines.append(ALIVE.format(port=PORTS))
    setting = [f"JAX_NUM_CPU_DEVICES={devices}"]
    if count > 1:
        setting += [f'AREAX_COORDINATOR="${{nodes[0]}}:{PORTS + 1}"', f"AREAX_PROCESSES={count}", 'AREAX_PROCESS="$p"']
    if gpus:
        lines.append(f"gpus=({' '.join(map(str, range(gpus)))})")
        visible = f'$(IFS=,; echo "${{gpus[*]:0:{place.trainers * devices}}}")'
        setting += [f'CUDA_VISIBLE_DEVICES="{visible}"']
        if place.trainers > 1:
            local = f'$(IFS=,; echo "${{gpus[*]:p % {place.trainers} * {devices}:{devices}}}")'
            setting += [f'JAX_LOCAL_DEVICE_IDS="{local}"']
    last = f"({place.trainers} * (rank + 1) < {count} ? {place.trainers} * (rank + 1) : {count})"
    lines.append(f"""running=()
for ((p = {place.trainers} * rank; p < {last}; p++)); do
  if ((p)); then exec 4>>"$logs/process-$p.log"; else exec 4>&1; fi
  env {f" {chr(92)}{chr(10)}    ".join(setting)} \\
    {words} >&4 2>&4 &
  running+=($!)
done
trap 'kill -TERM "${{running[@]}}"' TERM INT # saves a checkpoint
code=0
for one in "${{running[@]}}"; do
  while kill -0 "$one" 2>/dev/null; do wait "$one"; done # interrupted by signals
  wait "$one" || code=$?
done
exit "$code\"""")
    return "\n".join(lines)
