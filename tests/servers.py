"""Generation servers as child processes, embedded or real SGLang, and a plain HTTP client for both."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EMBEDDED = """
import json, sys
from areax.rollout.engine import server
from areax.rollout.servers.engine_options import EngineOptions
path, of_engine, others = json.loads(sys.argv[1])
server.serve(path, EngineOptions(**of_engine), **others)
"""


class Remote:
    """A client of one server; calls block, and each opens its own connection."""

    def __init__(self, port):
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.headers = {"Content-Type": "application/json"}

    def ask(self, method, path, body=None, timeout_s=120):
        """(status, JSON or text of the answer)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, self.headers)
            reply = connection.getresponse()
            text = reply.read().decode()
        return reply.status, json.loads(text) if text[:1] in ("{", "[") else text

    def get(self, path):
        return self.ask("GET", path)

    def post(self, path, body):
        return self.ask("POST", path, body)

    def ok(self, path, body=None):
        """The answer of a request that must succeed."""
        status, answer = self.get(path) if body is None else self.post(path, body)
        assert status == 200, (path, status, answer)
        return answer

    def generate(self, prompt, *, n=1, logprobs=True, fields=None, **sampling):
        """The answer of /generate to token ids; greedy unless `temperature` says otherwise."""
        params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
        params |= {"n": n} if n > 1 else {}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": logprobs, **(fields or {})}
        return self.ok("/generate", body)

    @contextlib.contextmanager
    def stream(self, path, body):
        """Yields an iterator over the events of a streamed answer; checks the final [DONE] and leaves it out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps({**body, "stream": True}), self.headers)
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            assert reply.getheader("content-type").startswith("text/event-stream")

            def events():
                for line in iter(reply.readline, b""):
                    if line.strip():
                        assert line.startswith(b"data: "), line
                        if line.strip() == b"data: [DONE]":
                            return
                        yield json.loads(line[6:])
                raise AssertionError("the stream ended without [DONE]")

            yield events()


class Later:
    """The result of a function that runs in its own thread."""

    def __init__(self, function):
        self._result, self._error = None, None

        def call():
            try:
                self._result = function()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    @property
    def done(self):
        return not self._thread.is_alive()

    def result(self, timeout_s=120):
        self._thread.join(timeout_s)
        assert self.done, f"no answer in {timeout_s} s"
        if self._error:
            raise self._error
        return self._result


@contextlib.contextmanager
def embedded(path, *, environment=None, **options):
    """Runs `server.serve` in its own process, on a free port; `options` are the engine's and others of it."""
    of_engine = {name: options.pop(name) for name in ("slots", "context", "draft") if name in options}
    process = subprocess.Popen(
        [sys.executable, "-c", EMBEDDED, json.dumps([str(path), of_engine, {"port": 0, **options}])],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    with ended(process):
        line = process.stdout.readline()
        assert line.startswith("http://"), f"the server ended with {process.wait()} instead of a ready line: {line!r}"
        remote = Remote(int(line.split()[0].rpartition(":")[2]))
        remote.process, remote.line = process, line
        yield remote


@contextlib.contextmanager
def command(*words, **environment):
    """Runs a server by its command, `python -m WORDS`, on a free port; yields its address."""
    command = [sys.executable, "-m", *map(str, words), "--port", "0"]
    environ = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def stager(root, *options, **environment):
    """Yields the address of a stager process that keeps versions in `root`."""
    return command("areax.rollout.weights.stager", "--root", root, *options, **environment)


SERVE = str(HERE / "sglang_cpu" / "serve.py")


@contextlib.contextmanager
def sglang(path, python, log, *options):
    """Runs the real SGLang server on the CPU with its environment's `python`; `options` go to its command line."""
    port = free_port()
    command = [python, SERVE, "--model-path", str(path), "--port", str(port), *options]
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=without_jax())
    with ended(process):
        remote = Remote(port)
        started(remote, lambda: process.poll() is None, log)
        yield remote


@contextlib.contextmanager
def sglangs(python):
    """Yields `serve(path, log, *options)`, which is `sglang`, but starts within seconds: servers are forked from a
    process that has imported SGLang."""
    command, pipe = [python, SERVE, "--many"], subprocess.PIPE
    parent: Any = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=without_jax(), bufsize=1
    )

    @contextlib.contextmanager
    def serve(path, log, *options):
        port = free_port()
        Path(log).touch()
        words = ["--model-path", str(path), "--port", str(port), *options]
        parent.stdin.write(json.dumps({"options": words, "log": str(log)}) + "\n")
        pid = int(parent.stdout.readline())
        try:
            remote = Remote(port)
            started(remote, Path(f"/proc/{pid}").exists, log)
            yield remote
        finally:
            for signal_ in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal_)
                    time.sleep(0.5)

    with ended(parent):
        yield serve
        parent.stdin.close()


class Restartable(Remote):
    """A real server on the CPU that can be killed and started again at its address.

    Args:
      kind: areax, sglang or vllm.
      python: that of the environment with SGLang or vLLM.
      options: of its command line.
    """

    def __init__(self, kind, path, python, log, *options):
        super().__init__(free_port())
        self.kind, self._log, own = kind, log, []
        self._environ = dict(os.environ) if kind == "areax" else without_jax()
        if kind == "areax":
            own = [sys.executable, "-m", "areax", "serve", str(path), "--slots", "16", "--context", "4096"]
        elif kind == "sglang":
            own = [python, SERVE, "--model-path", str(path)]
        elif kind == "vllm":
            # Its threads spin on all cores, and would leave the test none for seconds.
            own = ["nice", "-n", "15", str(Path(python).with_name("vllm")), "serve", str(path), "--host", "127.0.0.1"]
            own += ["--dtype", "float32", "--enforce-eager"]
            self._environ |= {
                "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
                "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
        self._command = [*own, "--port", str(self.port), *options]

    def start(self):
        with open(self._log, "a") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=self._environ, start_new_session=True
            )

    def ready(self):
        started(self, lambda: self._process.poll() is None, self._log, "/health")

    def kill(self):
        """Kills it with its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def restartable(kind, path, python, log, *options):
    """Runs a `Restartable`."""
    remote = Restartable(kind, path, python, log, *options)
    remote.start()
    try:
        remote.ready()
        yield remote
    finally:
        remote.kill()


def free_port():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as sock:
        return sock.getsockname()[1]


def without_jax():
    """The environment without JAX's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}


def started(remote, runs, log, ready="/ready"):
    """Waits until a server can generate, as the route `ready` says; its process must go on, as `runs()` says."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and runs():
        with contextlib.suppress(OSError):
            if remote.get(ready)[0] == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{Path(log).read_text()[-3000:]}")


@contextlib.contextmanager
def ended(process):
    """Ends a process with SIGTERM on leaving the block."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()
