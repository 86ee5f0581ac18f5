"""A server and a recipe that log what `areax launch` gives them, for its tests."""

import contextlib
import json
import socket
from pathlib import Path

from areax.adapters.tracking import run_dir

# Answers /health like a server; logs to a file which GPUs it was given and which signal ended it.
SERVER = """
import http.server, json, os, signal, sys
folder, host, port = sys.argv[1:]
def say(what):
    with open(f"{folder}/said", "a") as file:
        file.write(json.dumps([what, int(port), os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")]) + chr(10))
def end(number, frame):
    say("ended")
    os._exit(0)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer.allow_reuse_address = True
server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
say("began")
server.serve_forever()
"""

# A recipe that logs its options, and ends once the file `go` exists.
RECIPE = """
import dataclasses, json, os, pathlib, sys, time
@dataclasses.dataclass(frozen=True)
class Config:
    out: str
    code: int = 0
    published: str = ""
    servers: tuple[str, ...] = ()
    stagers: tuple[str, ...] = ()
NAMES = ("AREAX_COORDINATOR", "AREAX_PROCESSES", "AREAX_PROCESS", "AREAX_SERVER_KEY", "AREAX_STAGER_KEY",
         "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "JAX_NUM_CPU_DEVICES", "OMP_NUM_THREADS")
def main(config):
    out = pathlib.Path(config.out)
    told = {name: os.environ.get(name) for name in NAMES} | dataclasses.asdict(config) | {"pid": os.getpid()}
    process = os.environ.get("AREAX_PROCESS", "0")
    (out / f"part-{process}").write_text(json.dumps(told))
    (out / f"part-{process}").rename(out / f"told-{process}")
    while not (out / "go").exists():
        time.sleep(0.05)
    sys.exit(config.code)
"""


# Options of --on skypilot, each at least once, by name.
TASKS = {
    "plain": [],
    "servers": ["--servers", "2", "--cpus", "3", "--skypilot.setup", ""],
    "accelerators": ["--processes", "2", "--devices", "8", "--servers", "9", "--skypilot.accelerators", "H100:8"],
    "one node": ["--servers", "1", "--skypilot.accelerators", "A100-80GB:2", "--logs", "my logs"],
    **{
        bucket: ["--skypilot.shared", bucket, "--skypilot.accelerators", "H100"]
        for bucket in (
            "s3://mine", "gs://mine/", "r2://mine", "oci://mine", "nebius://mine", "cw://mine", "vastdata://mine",
            "cos://us-east/mine", "https://mine.blob.core.windows.net/box", "hf://buckets/me/mine",
        )
    },
}  # fmt: skip
SERVED = ["--servers", "2", "--server.slots", "8", "--server.context", "64"]


def grpo(data, out, steps):
    """The command line of a small run."""
    named = {
        "model": data / "model", "data": data / "rows.jsonl", "reward": "areax.rollout.tasks.arithmetic:reward",
        "out": out, "steps": steps, "groups": 4, "group-size": 4, "max-concurrent": 8, "length": 32, "rows": 4,
        "eta": 0, "sampling.max-new-tokens": 4, "objective.advantage.std": "none", "optim.lr": 0.01,
    }  # fmt: skip
    return ["train", "grpo", *(str(word) for name, value in named.items() for word in (f"--{name}", value))]


def trained(out, steps):
    """Checks that a run did its steps and that its servers have the last version; returns their addresses."""
    summary = json.loads((out / "summary.json").read_text())
    lines = [line for line in run_dir.read_lines(out / "metrics.jsonl") if line["kind"] == "grpo"]
    assert [line["step"] for line in lines] == list(range(1, steps + 1)) and summary["complete"]
    # the servers sample from the pushed weights: the trainer finds the same log-probabilities
    assert all(line["max_logp_diff"] <= 1e-4 for line in lines)
    assert [label.partition("-")[0] for label in summary["server_version"]] == [str(steps)]
    return json.loads((out / "config.json").read_text())["serving"]["servers"]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def gone(pid):
    """Whether a process has ended."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def said_in(folder):
    """[event, port, pid, GPUs] that the stand-in servers logged, in order."""
    path = folder / "said"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
