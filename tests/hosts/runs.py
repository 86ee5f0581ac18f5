"""Jobs over the hosts of `network.py`: a trainer of several processes, a server with a stager, and what they leave."""

import contextlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import tiny
from network import OWN, SHARED

from areax.adapters.tracking import run_dir
from areax.rollout.tasks import arithmetic

PROGRAM = str(Path(__file__).with_name("program.py"))
COORDINATOR = 9876
KEYS = {"AREAX_SERVER_KEY": "of-servers", "AREAX_STAGER_KEY": "of-stagers"}
SERVER, STAGER = 30000, 31000
START_S, SILENT_S = 300, 15


def prepare(network):
    """A model and rows in the shared folder, and a copy of the model for the host without it."""
    place = network.shared
    if (place / "rows.jsonl").exists():
        return place
    tiny.model(place / "model")
    split = arithmetic.splits()
    tiny.rows(place / "shown.jsonl", list(itertools.islice(arithmetic.demonstrations(split["train"]), 60)))
    tiny.rows(place / "rows.jsonl", split["train"][:40])
    shutil.copytree(place / "model", network.hosts["c"].own / "model")
    return place


def job(network, names, words, log, *, at=None, start_s=START_S, silent_s=SILENT_S, environ=None):
    """Starts a command on hosts, process 0 on the first: their processes."""
    at = at or f"{network.hosts[names[0]].name}:{COORDINATOR}"
    logs = [network.folder / f"{log}-{name}.log" for name in names]
    for path in logs:
        path.unlink(missing_ok=True)
    return [
        start(network, name, words, path, i, len(names), at, start_s, silent_s, (environ or {}).get(name, {}))
        for i, (name, path) in enumerate(zip(names, logs, strict=True))
    ]


def start(network, name, words, log, index, count, at, start_s=START_S, silent_s=SILENT_S, environ=None):
    joined = {"AREAX_COORDINATOR": at, "AREAX_PROCESSES": str(count), "AREAX_PROCESS": str(index)}
    command = [PROGRAM, start_s, silent_s, *words]
    return network[name].python(*command, log=log, **(joined if count > 1 else {}), **KEYS, **(environ or {}))


def sft(out, steps, count=2, **changes):
    """Supervised training, a state after every second step."""
    named = {
        "model": f"{SHARED}/model", "data": f"{SHARED}/shown.jsonl", "out": f"{SHARED}/{out}", "steps": steps,
        "batch": 8, "length": 64, "rows": 4, "save-every": 2, "optim.warmup": 0, "mesh.fsdp": count, **changes,
    }  # fmt: skip
    return ["train", "sft", *options(named)]


def grpo(out, steps, count=2, **changes):
    """Reinforcement learning at eta 0 with the server of host c."""
    named = {
        "model": f"{SHARED}/model", "data": f"{SHARED}/rows.jsonl", "out": f"{SHARED}/{out}", "steps": steps,
        "reward": "areax.rollout.tasks.arithmetic:reward", "groups": 4, "group-size": 4, "max-concurrent": 8,
        "length": 32, "rows": 4, "eta": 0, "sampling.max-new-tokens": 4, "objective.advantage.std": "none",
        "save-every": 1, "optim.warmup": 0, "mesh.fsdp": count,
        "servers": f"http://host-c:{SERVER}", "stagers": f"http://host-c:{STAGER}", **changes,
    }  # fmt: skip
    return ["train", "grpo", *options(named)]


def options(named):
    return [str(word) for name, value in named.items() for word in (f"--{name}", value)]


@contextlib.contextmanager
def serving(network, staged="/dev/shm/areax"):
    """A server and its stager on host c, which has a copy of the first model and no folder of the trainer."""
    host = network["c"]
    log, stager_log = network.folder / "server.log", network.folder / "stager.log"
    for path in (log, stager_log):
        path.unlink(missing_ok=True)
    at = ["--host", host.address, "--port"]
    serve = ["-m", "areax", "serve", f"{OWN}/model", "--slots", 8, "--context", 64, *at, SERVER]
    stage = ["-m", "areax.rollout.weights.stager", "--root", staged, *at, STAGER]
    server, stager = host.python(*serve, log=log, **KEYS), host.python(*stage, log=stager_log, **KEYS)
    server.until("http://")
    stager.until("http://")
    yield server, stager


def metrics(network, out):
    path = network.shared / out / "metrics.jsonl"
    return [line for line in run_dir.read_lines(path) if line["kind"] in ("sft", "grpo")] if path.exists() else []


def equal(got, wanted, tolerance=0.0):
    """Steps have the same numbers, but those of time."""
    assert [line["step"] for line in got] == [line["step"] for line in wanted]
    for a, b in zip(got, wanted, strict=True):
        for name in ("loss", "grad_norm", "tokens", "reward"):
            if name in b:
                np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=name)


def summary(network, out):
    return json.loads((network.shared / out / "summary.json").read_text())
