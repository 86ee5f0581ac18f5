"""Calls of XLA in C, for CPUs: compiled for the machine when they are first needed, by the C compiler `cc`, and kept in
the user's cache folder. Without a compiler XLA computes the same, more slowly.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from ....core import hardware

SOURCES = [Path(__file__).with_name(f"{name}.c") for name in ("blocked", "draw", "gate", "paged", "pages")]
HEADERS = [Path(__file__).with_name(f"{name}.h") for name in ("call", "tiles")]
NAMES = "blocked", "copy_pages", "draw", "paged", "put", "put_pages", "silu_product", "untouched"
HASH = ".sha256"
FLAGS = "-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC"


def ready() -> bool:
    """Whether the calls can be used: the devices are CPUs, and there is a compiler."""
    return hardware.platform() == "cpu" and not missing()


@functools.cache
def missing() -> str:
    """Compiles the calls, unless they have been compiled for this machine before, and makes them known to XLA; returns
    why that is not possible, or ""."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "there is no C compiler cc; install gcc or clang for faster decoding"
    try:
        library = _compiled(compiler)
        functions = {name: getattr(ctypes.CDLL(str(library)), f"areax_{name}") for name in NAMES}
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {error.stderr.strip()[:200]}"
    except OSError as error:
        return f"{error.filename or compiler}: {error.strerror or error}"
    except RuntimeError as error:  # there is no home
        return str(error)
    for name, function in functions.items():
        jax.ffi.register_ffi_target(f"areax_{name}", jax.ffi.pycapsule(function), platform="cpu")
    return ""


def _compiled(compiler: str) -> Path:
    """The library in the user's cache folder, compiled if it is not there as it was."""
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *FLAGS, native, f"-I{jax.ffi.include_dir()}", *map(str, SOURCES), "-lm", "-o"]
    library = _folder() / f"areax-{_machine(command)}.so"
    if not _whole(library):
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # others may compile it, too
            made = Path(folder) / library.name
            subprocess.run([*command, str(made)], check=True, capture_output=True, text=True, errors="replace")
            ctypes.CDLL(str(made))  # what is no library is not kept
            made.with_suffix(HASH).write_text(_hash(made.read_bytes()))
            made.rename(library)
            made.with_suffix(HASH).rename(library.with_suffix(HASH))
    return library


def _whole(library: Path) -> bool:
    """Whether the library is what was compiled; a damaged one would end the process."""
    hashed = library.with_suffix(HASH)
    return library.exists() and hashed.exists() and hashed.read_text() == _hash(library.read_bytes())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areax" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _machine(command: list[str]) -> str:
    """Identifies the sources, how they are compiled, and for which instructions."""
    cpu = Path("/proc/cpuinfo")
    known = ("flags", "Features", "CPU part")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    instructions = sorted({line for line in lines if line.startswith(known) or not cpu.exists()})
    sources = [file.read_text() for file in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\n".join([*command, *instructions, *sources]).encode()).hexdigest()[:16]
