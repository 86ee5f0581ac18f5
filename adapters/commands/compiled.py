"""What a chip's own compiler makes of the programs of a run, on a machine without that chip."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from ... import __version__
from ...parallel.planner import targets
from ..runtime import compile_cache
from . import buffers
from .programs import Program

LIMIT_S = 1800.0  # for a program; the TPU compiler takes minutes for large ones
TOGETHER = 2  # that are compiled at a time; each may take some GB of memory
COLLECTIVES = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
OF_PALLAS = "__gpu$xla.gpu.triton", "tpu_custom_call"  # targets of the custom calls of its kernels
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%\S+ = .*? ([a-z][a-z-]*)\(%", re.MULTILINE)
SCATTERED = re.compile(r"^%all-reduce-scatter\S* \(", re.MULTILINE)  # a TPU's: a computation with an all-reduce in it
LONGEST = 300  # characters of a compiler's error


@dataclass(frozen=True)
class Compiled:
    """A program as a chip's compiler made it, for one device.

    Attributes:
      problem: why it did not compile, "" if it did: then all below are 0 or empty.
      argument_bytes, temporary_bytes: by the buffer assignment.
      peak_bytes: of both together, and of results that have memory of their own.
      collectives: {kind: number in the program's text}; those in a loop run in each of its turns.
      kernels: {name: number in the program's text} of Pallas kernels.
      buffers: the largest temporaries.
      seconds: that compiling took, when it was done.
    """

    problem: str = ""
    argument_bytes: int = 0
    temporary_bytes: int = 0
    peak_bytes: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    buffers: list[buffers.Buffer] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def check(program: Program, chip: str, limit_s: float = LIMIT_S) -> Compiled:
    """Compiles a program for a chip of `targets` in a process of its own, or takes what was found the last time.

    Raises:
      ValueError: as `targets.devices`, or it takes longer than `limit_s` seconds.
    """
    return check_all({"": program}, chip, limit_s)[""]


def check_all(
    programs: Mapping[str, Program],
    chip: str,
    limit_s: float = LIMIT_S,
    say: Callable[[str], None] = lambda words: None,
) -> dict[str, Compiled]:
    """`check` of each of the programs, TOGETHER at a time.

    Args:
      say: takes a line for each that is done.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running, found = list(programs.items()), dict[Connection, tuple[str, Any, float]](), dict[str, Compiled]()
    try:
        while waiting or running:
            while waiting and len(running) < TOGETHER:
                name, program = waiting.pop(0)
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_apart, args=(theirs, program, chip), daemon=True)
                process.start()
                theirs.close()
                running[mine] = name, process, time.monotonic() + limit_s
            ends = min(deadline for _, _, deadline in running.values())
            done = connection.wait(list(running), max(0.0, ends - time.monotonic()))
            if not done:
                raise ValueError(
                    f"--compile: {chip}'s compiler takes longer than {limit_s:g} s; plan fewer layers or rows"
                )
            for pipe in done:
                assert isinstance(pipe, Connection)
                name, process, _ = running.pop(pipe)
                found[name] = _received(pipe, process, chip)
                say(f"{name}: compiled in {found[name].seconds:.0f} s, {len(found)} of {len(programs)}")
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
    return {name: found[name] for name in programs}


def _received(pipe: Connection, process: Any, chip: str) -> Compiled:
    try:
        kind, found = pipe.recv()
    except EOFError:
        process.join()
        raise ValueError(
            f"--compile: {chip}'s compiler ended with exit code {process.exitcode}; is there memory enough for it?"
        ) from None
    finally:
        process.kill()
        process.join()
    if kind == "refused":
        raise ValueError(found)
    return _restored(found)


def _apart(pipe: Any, program: Program, chip: str) -> None:
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu would ask the network what machine this is
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # and lock chips for this process, which uses none
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the compilers write of drivers that are not here
    jax.config.update("jax_platforms", "cpu")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send(("found", dataclasses.asdict(compiled(program, chip))))
    except ValueError as error:
        pipe.send(("refused", str(error)))
    except (RuntimeError, ImportError) as error:  # of a compiler that does not start, or not with this JAX
        pipe.send(("refused", f"--compile: {chip}'s compiler fails: {_line(error)}"))


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)  # a compiler does not look whether anybody waits for it


def compiled(program: Program, chip: str) -> Compiled:
    """`check` in this process, whose JAX must not have chosen its platform yet."""
    began = time.monotonic()
    devices = targets.devices(chip, program.devices)
    platform = devices[0].platform
    lowered = program.lower(devices)
    file = _file(lowered.as_text(), chip, platform)
    if file and file.is_file():
        with contextlib.suppress(ValueError, TypeError):  # damaged, or of another version of areax
            return _restored(json.loads(file.read_text()))
    with tempfile.TemporaryDirectory() as dump:
        try:
            made = lowered.compile(targets.OPTIONS[platform] | buffers.DUMP | {"xla_dump_to": dump})
        except Exception as error:
            if not type(error).__module__.startswith("jax"):  # compilers of kernels have errors of their own
                raise
            return Compiled(problem=_line(error), seconds=time.monotonic() - began)
        large = buffers.largest(Path(dump), made.as_text() or "", program.names)
    found = dataclasses.replace(read(made), buffers=large, seconds=time.monotonic() - began)
    if file:
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(dataclasses.asdict(found)))
        temporary.rename(file)
    return found


def _file(text: str, chip: str, platform: str) -> Path | None:
    """Where the result for a program is kept: by its text, the chip, the compilers' versions and how it is read; None =
    nowhere."""
    folder = compile_cache.made("compiled")
    if folder is None:
        return None
    how = [Path(__file__).with_name(name).read_text() for name in ("compiled.py", "buffers.py")]
    known = [__version__, how, text, chip, jax.__version__, repr(targets.OPTIONS[platform]), targets.version(platform)]
    return folder / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()}.json"


def _restored(fields: dict) -> Compiled:
    return Compiled(**fields | {"buffers": [buffers.Buffer(**one) for one in fields["buffers"]]})


def read(made: Any) -> Compiled:
    """What a jax.stages.Compiled says of itself, but for `buffers`."""
    sizes, text = made.memory_analysis(), made.as_text()
    counted = collections.Counter(kind.removesuffix("-start") for kind in INSTRUCTION.findall(text))
    scattered = len(SCATTERED.findall(text))
    counted.update({"reduce-scatter": scattered, "all-reduce": -scattered})
    kernels = collections.Counter(
        _kernel(line) for line in text.splitlines() if any(f'_target="{one}"' in line for one in OF_PALLAS)
    )
    return Compiled(
        argument_bytes=sizes.argument_size_in_bytes,
        temporary_bytes=sizes.temp_size_in_bytes,
        peak_bytes=sizes.peak_memory_in_bytes,
        collectives={kind: counted[kind] for kind in COLLECTIVES if counted[kind]},
        kernels=dict(sorted(kernels.items())),
    )


def _kernel(line: str) -> str:
    """The name of a kernel: of its call in JAX, or on TPUs of the instruction."""
    named = re.search(r"/([^/\"]+)/pallas_call\"", line)
    return named[1] if named else line.split("=")[0].strip(" %").removeprefix("ROOT %").rpartition(".")[0]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST]
