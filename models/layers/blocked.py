"""Products of few rows with weights in blocks, on CPUs: weights are read once, in the dtype in which they are kept.

XLA's own products of few rows run at a fraction of what a CPU reads and multiplies, widen weights in memory first, and
sum in an order that depends on the number of rows. `blocked.c` does none of that. It is compiled for the machine when
it is first needed, by the C compiler `cc`, and kept in the user's cache folder.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ...core.quantised import NF4, QuantisedWeight

SOURCE = Path(__file__).with_suffix(".c")
CALL = "areax_blocked"
OUTPUTS = 32  # of a block
FLAGS = "-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocked:
    """A weight [out, in] as [out / OUTPUTS, in, OUTPUTS]; the last block is filled up with zeros.

    Attributes:
      weight: in fp32 or bf16, or the code of a `QuantisedWeight`: two entries a byte along `in` if it has 4 bits.
      scale: f32[out / OUTPUTS, groups of entries, OUTPUTS] of the code; None = no code.
      outputs: its size `out`.
      active: bool[S], which rows of [S, in] are multiplied; None = all.
    """

    weight: Any
    scale: Any
    outputs: int = field(metadata={"static": True})
    active: Any = None


def blocks(w) -> Blocked:
    """The weight [out, in], an array or a `QuantisedWeight`, in blocks."""
    if isinstance(w, QuantisedWeight):
        scale = w.scale / 127 if w.kind == "int8" else w.scale
        return Blocked(_rows_apart(w.code), _rows_apart(scale), w.shape[0])
    return Blocked(_rows_apart(w), None, w.shape[0])


def _rows_apart(w_FD):
    F, D = w_FD.shape
    return jnp.pad(w_FD, ((0, -F % OUTPUTS), (0, 0))).reshape(-1, OUTPUTS, D).swapaxes(1, 2)


def of_rows(weights, active_S):
    """The weights, a tree, such that products with rows [S, in] compute the active ones alone; others give 0."""
    is_leaf = lambda x: isinstance(x, Blocked)
    return jax.tree.map(lambda w: replace(w, active=active_S) if is_leaf(w) else w, weights, is_leaf=is_leaf)


def product(x_SD, w: Blocked):
    """x @ w^T, f32[S, out], of x in fp32. If `ready`, the bits of a row depend neither on S nor on other rows."""
    if not ready():
        return _by_xla(x_SD, w)
    active_S = jnp.ones(len(x_SD), bool) if w.active is None else w.active
    scale = () if w.scale is None else (w.scale,)
    call = jax.ffi.ffi_call(CALL, jax.ShapeDtypeStruct((len(x_SD), w.outputs), jnp.float32))
    return call(x_SD, active_S, w.weight, *scale)


def _by_xla(x_SD, w: Blocked):
    w_FDN = w.weight
    if w_FDN.dtype == jnp.uint8:
        pair_FD2N = jnp.stack([w_FDN & 15, w_FDN >> 4], 2)
        w_FDN = jnp.asarray(NF4)[pair_FD2N.reshape(len(w_FDN), -1, OUTPUTS)]
    w_FDN = w_FDN.astype(jnp.float32)
    if w.scale is not None:
        by_group = w_FDN.reshape(*w.scale.shape[:2], -1, OUTPUTS) * w.scale[:, :, None]
        w_FDN = by_group.reshape(w_FDN.shape)
    y_SFN = jnp.einsum("SD,FDN->SFN", x_SD, w_FDN, preferred_element_type=jnp.float32)
    return y_SFN.reshape(len(x_SD), -1)[:, : w.outputs]


def ready() -> bool:
    """Whether `blocked.c` multiplies: the devices are CPUs, and there is a compiler."""
    return jax.default_backend() == "cpu" and not missing()


@functools.cache
def missing() -> str:
    """Compiles `blocked.c`, unless it has been compiled for this machine before, and makes it known to XLA; returns why
    that is not possible, or ""."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "there is no C compiler cc; install gcc or clang for faster decoding"
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *FLAGS, native, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o"]
    try:
        library = _folder() / f"{SOURCE.stem}-{_machine(command)}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # others may compile it, too
                made = Path(folder) / library.name
                subprocess.run([*command, str(made)], check=True, capture_output=True, text=True)
                made.rename(library)
        function = getattr(ctypes.CDLL(str(library)), CALL)
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {error.stderr.strip()[:200]}"
    except OSError as error:
        return f"{error.filename or library}: {error.strerror or error}"
    jax.ffi.register_ffi_target(CALL, jax.ffi.pycapsule(function), platform="cpu")
    return ""


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "areax" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _machine(command: list[str]) -> str:
    """Identifies the source, how it is compiled, and for which instructions."""
    cpu = Path("/proc/cpuinfo")
    known = ("flags", "Features", "CPU part")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    instructions = sorted({line for line in lines if line.startswith(known) or not cpu.exists()})
    return hashlib.sha256("\n".join([*command, *instructions, SOURCE.read_text()]).encode()).hexdigest()[:16]
