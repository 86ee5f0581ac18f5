"""Detects devices and runs each step in a process group of its own, which is killed at its time limit.

The parent process never initialises JAX's backend, so each step has all of the device's memory.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from chips import rows
from chips.steps import Step

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(__file__).parents[1] / "chip.py"
SHARE = "0.94"  # of GPU memory for JAX, whose default is 0.75
TAIL = 15  # lines of output shown of a failed step


@dataclass(frozen=True)
class Device:
    """JAX's first device.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: JAX's name of the model.
    """

    platform: str
    kind: str

    @property
    def chip(self) -> str | None:
        """Its name in `areax plan`, None if it has none."""
        sys.path.append(package())  # areax need not be installed
        from areax.parallel.planner.chips import named

        return named(self.kind)


def device() -> Device:
    """Detects JAX's first device, in a separate process.

    Raises:
      RuntimeError: JAX cannot be imported, or finds no device.
    """
    code = "import jax, json; d = jax.local_devices()[0]; print(json.dumps([d.platform, d.device_kind]))"
    done = _python(code, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if done.returncode:
        raise RuntimeError(f"JAX finds no device: {done.stderr.strip().rpartition(chr(10))[2]}")
    return Device(*json.loads(done.stdout.splitlines()[-1]))


def peer(device: Device) -> bool:
    """Whether transformers can be measured: torch sees the accelerator, or there is no accelerator."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return False
    return device.platform == "cpu" or not _python("import torch; assert torch.cuda.is_available()").returncode


def _python(code: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True)


def run(step: Step, device: Device, chip: str | None) -> tuple[dict, list[str]]:
    """Returns {"seconds", and "result", "failed" or both}, and the last lines of output if the step failed."""
    with tempfile.TemporaryDirectory(prefix="chip-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        task = json.dumps({"kind": step.kind, "settings": step.settings, "chip": chip, "answer": str(answer)})
        began = time.monotonic()
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(COMMAND), "--one", task], cwd=ROOT, env=_environ(step, device, folder),
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        code = None
        try:
            code = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
            process.wait()
        row = json.loads(answer.read_text()) if answer.exists() else {}
        row["seconds"] = round(time.monotonic() - began, 1)
        if code is None:
            row["failed"] = f"not finished after {step.limit_s} s"
        elif code:
            ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            row.setdefault("failed", ended)
        tail = log.read_text(errors="replace").splitlines()[-TAIL:]
        return row, tail if "failed" in row else []


def _environ(step: Step, device: Device, folder: str) -> dict[str, str]:
    """The environment of a step: imports this checkout, puts temporary files into its folder."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package(), os.environ.get("PYTHONPATH"))))}
    environ |= {"TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
    environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if step.kind == "smoke":  # tests default to the CPU
        environ.setdefault("JAX_PLATFORMS", {"gpu": "cuda"}.get(device.platform, device.platform))
        if device.platform == "gpu":  # tests need not be fast: XLA would try many forms of each product
            environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
            if importlib.util.find_spec("xdist"):  # most of the time is compilation; the processes share the memory
                several = f"-n {min(8, os.cpu_count() or 1)} -p no:benchmark"  # pytest-benchmark warns of several
                environ["PYTEST_ADDOPTS"] = f"{environ.get('PYTEST_ADDOPTS', '')} {several}"
                environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if step.settings.get("system") == "transformers":
        environ["JAX_PLATFORMS"] = "cpu"  # for the plan: JAX must not allocate device memory
    if device.platform != "cpu":
        environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/programs"  # starts empty, so first steps include compilation
    if device.platform == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environ:
        environ.setdefault("XLA_CLIENT_MEM_FRACTION", SHARE)
    return environ


def package() -> str:
    """A folder for PYTHONPATH with a link `areax` to this checkout, whatever its name is."""
    link = ROOT / ".dev" / "areax"
    link.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        link.symlink_to("..")
    return str(link.parent)


def one(task: str) -> None:
    """Runs a step in this process; writes {"result"} or {"failed"} to the task's answer file."""
    job = json.loads(task)
    threading.Thread(target=_follow, args=(os.dup(0),), daemon=True).start()
    answer: dict = {}

    def keep(result: dict) -> None:  # partial results survive a timeout
        answer["result"] = result
        rows.write_text(Path(job["answer"]), json.dumps(answer))

    try:
        keep(importlib.import_module(f"chips.{job['kind']}").measure(**job["settings"], chip=job["chip"], keep=keep))
    except BaseException as error:
        answer["failed"] = cause(error)
        if isinstance(error, ModuleNotFoundError) and error.name:
            answer["needs"] = error.name
        rows.write_text(Path(job["answer"]), json.dumps(answer))
        raise


def _follow(pipe: int) -> None:
    """Kills this process group when the parent process ends, however it ends."""
    os.read(pipe, 1)  # nothing is ever written; returns when the parent's end is closed
    os.killpg(0, signal.SIGKILL)


def cause(error: BaseException) -> str:
    """The reason for a failure, in one line."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, MemoryError) or "out of memory" in line.lower():
        return "out of memory"
    return line[:200]
