"""Accelerators of this machine, beside those that JAX sees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .finding import Finding, broken, note, ok
from .packages import older, version

PROBE_S, SMI_S = 180.0, 20.0
HANGS = "no answer"  # of nvidia-smi
# CUDA version of a plugin -> (least driver, least compute capability), from NVIDIA's and JAX's release notes.
NEEDS = {"12": ("525", "5.2"), "13": ("580", "7.5")}
ROOT = Path("/")


@dataclass(frozen=True)
class Nvidia:
    """NVIDIA GPUs that the system shows.

    Attributes:
      names: one per GPU.
      driver: version of the driver; "" = unknown.
      error: why nvidia-smi cannot list them; "" if it can, or is missing.
    """

    names: Sequence[str] = ()
    driver: str = ""
    error: str = ""


class Done(NamedTuple):
    """What a program printed, and its exit code."""

    stdout: str
    stderr: str
    code: int


def devices(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What JAX sees and can use, and which devices of the machine it does not see, with the reason.

    Args:
      root: the folder that has `dev` and `proc`.
    """
    seen, said = probe()
    if seen is None and version("jax"):  # else it is among the missing packages
        yield broken(f"jax does not start: {said}")
    elif seen:
        size = f", {seen['memory'] / 1e9:.1f} GB each" if seen["memory"] else ""
        yield ok(f"jax sees {seen['count']} x {seen['kind']} ({seen['platform']}){size}")
    platform = seen["platform"] if seen else ""
    yield from _plugins()
    yield from _unseen_gpus(nvidia(root), platform, said, environ)
    yield from _unseen_tpu((seen or {}).get("tpu_chips", 0), platform, said, environ)
    yield from _kernels(seen or {})


def probe() -> tuple[dict | None, str]:
    """(what probe.py found, or None; the last line of its complaints)."""
    # With this process's packages; without -P those of the working directory would come first.
    words = [sys.executable, "-P", "-m", f"{__package__}.probe"]
    environ = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # beside a run that uses the device
    }  # fmt: skip
    print("asking JAX for its devices, which runs the attention kernels once ...", file=sys.stderr, flush=True)
    done = _run(words, PROBE_S, environ)
    if done is None:
        return None, f"no answer in {PROBE_S:.0f} s; another process may hold the device, end it"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = " ".join(lines[-1].split())[:300] if lines else f"it ended with exit code {done.code}"
    try:
        return json.loads(done.stdout.splitlines()[-1]), said if lines else ""
    except (ValueError, IndexError):
        return None, said


def nvidia(root: Path = ROOT) -> Nvidia:
    """The GPUs that nvidia-smi lists; without it, those with a device file."""
    files = sorted(root.glob("dev/nvidia[0-9]*"))
    text = ""
    if program := shutil.which("nvidia-smi"):
        query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            done = _run(query, SMI_S)
        except OSError as error:
            done = Done("", str(error), 1)
        rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line] if done else []
        if done and done.code == 0 and rows:
            return Nvidia([name.strip() for name, _, _ in rows], rows[0][2].strip())
        text = " ".join(f"{done.stdout} {done.stderr}".split())[:200] if done else HANGS
        text = text or "it lists none"
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", (root / "proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return Nvidia([f"NVIDIA GPU {file.name.removeprefix('nvidia')}" for file in files], found[1] if found else "", text)


def _run(words: Sequence[str], limit_s: float, environ: Mapping[str, str] = os.environ) -> Done | None:
    """Runs a program, without input; None if it has not ended within the limit. Then it is killed, with its children,
    but not waited for: a driver may keep it for ever.

    Raises:
      OSError: it cannot be started.
    """
    process = subprocess.Popen(
        words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        return Done(*process.communicate(timeout=limit_s), process.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return None


def _plugins() -> Iterator[Finding]:
    """CUDA plugins that do not go with jaxlib, which JAX then leaves out."""
    for cuda in NEEDS:
        plugin = f"jax-cuda{cuda}-plugin"
        if (got := version(plugin)) and (jaxlib := version("jaxlib")) and got != jaxlib:
            yield broken(f"{plugin} {got} does not go with jaxlib {jaxlib}; pip install -U 'jax[cuda{cuda}]=={jaxlib}'")
        elif got:
            yield ok(f"{plugin} {got}")


def _unseen_gpus(gpus: Nvidia, platform: str, said: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Why JAX does not use the GPUs that are here."""
    cuda = next((cuda for cuda in reversed(NEEDS) if version(f"jax-cuda{cuda}-plugin")), "")
    if gpus.error and (gpus.names or platform == "gpu"):
        yield broken(f"nvidia-smi fails ({gpus.error}); load the NVIDIA driver again, or restart the machine")
        return
    if not gpus.names:
        if gpus.error == HANGS:
            yield note("nvidia-smi gives no answer, and /dev has no NVIDIA GPU; see whether the driver hangs")
        if cuda and platform != "gpu":
            yield note(f"no NVIDIA GPU is visible to jax-cuda{cuda}-plugin; start a container with --gpus all")
        return
    count = len(gpus.names)
    what = f"{count} x {gpus.names[0]} here" + (f", driver {gpus.driver}" if gpus.driver else "")
    if platform == "gpu":
        yield ok(what)
        return
    chosen = environ.get("JAX_PLATFORMS", "")
    if chosen and not {"cuda", "gpu"} & set(chosen.split(",")):
        yield note(f"{what}, but JAX_PLATFORMS={chosen} keeps jax from them; unset it to use them")
    elif environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        yield note(f"{what}, but CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} hides them; unset it")
    elif not cuda:
        yield broken(f"{what}, but jax is a CPU-only build; pip install 'areax[cuda]'")
    elif gpus.driver and older(gpus.driver, NEEDS[cuda][0]):
        instead = "" if cuda == "12" else ", or pip install 'jax[cuda12]' in place of jax-cuda13-plugin"
        yield broken(
            f"{what}: too old for CUDA {cuda} of jax-cuda{cuda}-plugin, which needs {NEEDS[cuda][0]} or newer; update "
            f"the driver{instead}"
        )
    else:
        yield broken(
            f"{what}, but jax does not use them: {said or 'it says nothing'}; GPUs need compute capability "
            f"{NEEDS[cuda][1]} or newer for CUDA {cuda}"
        )


def _unseen_tpu(chips: int, platform: str, said: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    if not chips or platform == "tpu":
        return
    what, chosen = f"{chips} TPU chips here", environ.get("JAX_PLATFORMS", "")
    if chosen and "tpu" not in chosen.split(","):
        yield note(f"{what}, but JAX_PLATFORMS={chosen} keeps jax from them; unset it to use them")
    elif version("libtpu") is None:
        yield broken(f"{what}, but libtpu is missing; pip install 'areax[tpu]'")
    else:
        yield broken(f"{what}, but jax does not use them: {said}; another process may hold them, end it")


def _kernels(seen: dict) -> Iterator[Finding]:
    """Which attention kernels ran; docs/attention.md says what each is for."""
    if "error" in seen:
        yield broken(f"attention could not be tried: {seen['error']}")
    kernels = seen.get("kernels", {})
    if works := [name for name, why in kernels.items() if not why]:
        yield ok(f"attention on {seen['platform']}: {', '.join(works)}")
    for name, why in kernels.items():
        if why:
            yield broken(
                f"attention {name} fails on {seen['platform']}: {why}; --run.attention chunked runs without it"
            )
