"""`areax launch --on slurm`: writes a batch script to review, edit and submit with sbatch.

Trainer processes take the first nodes, servers the others, each as an overlapping step; if one node has enough GPUs, it
runs both. A server on another node than the trainers gets a stager, unless the command names a shared folder
(--published).
"""

from __future__ import annotations

import shlex
import sys

from ...rollout.processes import keys
from . import shell, spelling
from .config import Config, server_words, staged, stager_words
from .host import PYTHON
from .job import START_S
from .places import Places, places

VARIABLES = {PYTHON: '"$python"', shell.HOST: '"${addresses[on]}"', shell.PORT: '"$at"'}
# Of the nodes, as this one, a trainers' node, knows them: in its own hosts file a node may be 127.0.1.1.
ADDRESSES = """mapfile -t addresses < <("$python" -c 'import socket, sys
for name in sys.argv[1:]:
    try: print(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error: sys.exit(f"areax: no address of {name} on {socket.gethostname()}: {error}")' "${nodes[@]}")
((${#addresses[@]} == ${#nodes[@]})) || exit 1
"""
# Ends a step, which answers the first SIGINT by passing it on to its tasks, and SIGTERM by killing them.
END = '{ kill -INT "$running"; sleep 20; kill "$running"; } 2>/dev/null & wait "$running"; kill $!'
GRACE_S = 120  # signal sent before the time limit: enough for a step and a checkpoint


def write(config: Config, command: list[str]) -> int:
    """Prints the script, or writes it to `config.slurm.script`."""
    return shell.write(script(config, command), config.slurm.script, "sbatch")


def script(config: Config, command: list[str]) -> str:
    """The batch script.

    Raises:
      ValueError: a process or a server needs more GPUs than a node has, or sbatch would not understand an option.
    """
    slurm, cpus = config.slurm, config.cpus
    spelling.check("slurm.time", slurm.time, spelling.TIME)
    spelling.check("slurm.partition", slurm.partition, spelling.WORD)
    spelling.check("slurm.account", slurm.account, spelling.WORD)
    place = places(config, slurm.gpus_per_node, "slurm.gpus-per-node")
    gpus = slurm.gpus_per_node
    asked = {
        "job-name": "areax", "nodes": place.nodes, "ntasks-per-node": max(place.trainers, place.servers),
        "cpus-per-task": cpus, "gpus-per-node": gpus, "time": slurm.time, "partition": slurm.partition,
        "account": slurm.account, "output": "areax-%j.log", "open-mode": "append", "signal": f"B:TERM@{GRACE_S}",
    }  # fmt: skip
    head = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
    stage = config.servers > 0 and staged(command, place.first_node > 0)
    # srun answers SIGTERM by killing its tasks; with --disable-status it passes on the first SIGINT. After `sbatch
    # --export=NONE` it would pass on no variables, and bash exports no PATH where it got none.
    devices = f" --gpus-per-node={gpus}" if gpus else ""
    step = f"srun --overlap --disable-status --export=ALL --cpus-per-task={cpus}{devices}"
    parts = [
        "#!/bin/bash\n" + "\n".join(head),
        f"# Trains on {place.of_trainers} of {place.nodes} node{'s' if place.nodes > 1 else ''}. Written by areax "
        "launch; adapt it to your cluster.\n"
        "set -u\n"
        "export PATH # which sbatch --export=NONE may have left out\n"
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")\n'
        "port=$((10000 + SLURM_JOB_ID % 200 * 100)) # first of the job's ports\n"
        f"python={shlex.quote(sys.executable)}\n"
        f"{ADDRESSES if config.servers else ''}"
        f"logs={shlex.quote(config.logs) if config.logs else 'areax-$SLURM_JOB_ID'}\n"
        f"step=({step})\n"
        'mkdir -p "$logs"',
    ]
    if gpus:
        parts.append(
            "# Runs a command with COUNT of the GPUs visible to it, from FIRST on; arguments: FIRST COUNT COMMAND\n"
            f"""own='IFS=, read -ra gpus <<<"${{CUDA_VISIBLE_DEVICES:-{",".join(map(str, range(gpus)))}}}"\n"""
            """first=$1 count=$2; shift 2\n"""
            """export CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:first:count}"); exec "$@"'"""
        )
    if config.servers:
        parts += _servers(config, command, place, stage)
    return "\n\n".join([*parts, _trainers(config, command, place, stage)]) + "\n"


def _servers(config: Config, command: list[str], place: Places, stage: bool) -> list[str]:
    gpus = config.slurm.gpus_per_node
    first = f"$(({place.first_gpu} + i % {place.servers} * {config.server_devices}))"
    isolated = f'bash -c "$own" - "{first}" {config.server_devices} ' if gpus else ""
    staging = f"""
  at=$((port + 2 * i + 2)) # its stager, which fetches new weights
  keep "stager-$i" "$node" "${{task[@]}}" --job-name="stager-$i" \\
    "$python" {shlex.join(stager_words(command))} --host "${{addresses[on]}}" --port "$at" --root "$stage-$i" &
  kept+=($!)
  stagers+=("http://$node:$at")
  name_at[${{stagers[-1]}}]=stager-$i"""
    start = f"""kept=() urls=() stagers=()
declare -A name_at
for i in $(seq 0 {config.servers - 1}); do
  on=$(({place.first_node} + i / {place.servers}))
  node=${{nodes[on]}}
  at=$((port + 2 * i + 1))
  task=("${{step[@]}}" --nodes=1 --ntasks=1 --nodelist="$node")
  keep "server-$i" "$node" "${{task[@]}}" --job-name="server-$i" \\
    {isolated}{shell.text(server_words(config, command, shell.HOST, shell.PORT), 4, VARIABLES)} &
  kept+=($!)
  urls+=("http://$node:$at")
  name_at[${{urls[-1]}}]=server-$i{staging if stage else ""}
done
"""
    if stage:
        start = f"""# Folders on the servers' nodes, which the stagers remove: in memory, with room for three versions.
stage=/dev/shm/areax-$SLURM_JOB_ID
{start}"""
    names = [] if config.server.template else [keys.SERVER]  # another server may have no key, or one of its own
    names += [keys.STAGER] if stage else []
    if names:
        start = f"""# Keys for this job, unless the environment has them; never arguments, which every user can read.
for name in {" ".join(names)}; do
  file=${{name}}_FILE
  [[ ${{!name:-}} || ${{!file:-}} ]] && continue
  export "$name=$("$python" -c 'import secrets; print(secrets.token_urlsafe(32))')"
done
{start}"""
    ending = """finish() { # ends the servers however this script ends
  trap '' TERM INT
  kill "${kept[@]}" 2>/dev/null
  wait
}
trap finish EXIT
trap 'exit 143' TERM"""
    ready = shell.ready(
        '"${urls[@]}" "${stagers[@]}"',
        START_S,
        python='"$python"',
        check='for one in "${kept[@]}"; do\n  kill -0 "$one" 2>/dev/null || exit 1 # failed four times\ndone',
        late='last "${name_at[$url]}"',
    )
    return [shell.LAST, shell.KEEP.format(end=END), start + ending, ready]


def _trainers(config: Config, command: list[str], place: Places, stage: bool) -> str:
    count, devices = config.processes, config.devices
    words = shell.text([PYTHON, "-m", "areax", *command], 2, VARIABLES)
    if config.servers:
        words += ' \\\n  --servers "${urls[@]}"' + (' --stagers "${stagers[@]}"' if stage else "")
    before, wrapped = f"export JAX_NUM_CPU_DEVICES={devices}\n", ""
    if count > 1:
        before += f'export AREAX_COORDINATOR="${{nodes[0]}}:$port" AREAX_PROCESSES={count}\n'
        before += """who='export AREAX_PROCESS=$SLURM_PROCID; exec "$@"'\n"""
        wrapped = 'bash -c "$who" - '
    if config.slurm.gpus_per_node:
        wrapped += f"""bash -c "$own" - 'SLURM_LOCALID * {devices}' {devices} """
    return f"""{before}"${{step[@]}}" --job-name=trainers \\
  --nodes={place.of_trainers} --ntasks={count} --ntasks-per-node={place.trainers} \\
  --nodelist="$(IFS=,; echo "${{nodes[*]:0:{place.of_trainers}}}")" \\
  {wrapped}{words} &
trainer=$!
trap 'kill -INT "$trainer"' TERM INT # scancel --batch --signal=TERM, or the time limit: saves a checkpoint
while kill -0 "$trainer" 2>/dev/null; do
  wait "$trainer" # interrupted by signals
done
wait "$trainer"
exit"""
