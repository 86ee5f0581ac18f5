"""Rows of an environment that runs in worker processes, read in a process of their own: its code is not loaded here."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .. import object_path
from ..processes import guard
from ..processes.environment import passed
from .environment_workers import OPTION, line, plain


class Description(NamedTuple):
    """What a process says of an environment's class.

    Attributes:
      steps: it is a World, with a method `step`.
      rows: its rows, a list if they have an end; None = it has no method `rows`, or no split was asked for.
    """

    steps: bool
    rows: Iterable[dict] | None


def describe(world: str, split: str, options: Mapping[str, Any], environment: Sequence[str]) -> Description:
    """What a class is, and its rows of a split (`rows(split, **options)`), which must be JSON.

    Raises:
      ValueError: it cannot be loaded, or its rows do not take the options.
    """
    how = world, split, json.dumps(dict(options)), passed(environment, OPTION)
    lines = _lines(*how)
    head = next(lines)
    if head.get("count") is None:
        lines.close()
        return Description(head["steps"], Rows(functools.partial(_after, *how)) if head["rows"] else None)
    return Description(head["steps"], list(lines))


class Rows:
    """What `make()` iterates over; the iteration can start anew."""

    def __init__(self, make: Callable[[], Iterable[dict]]):
        self._make = make

    def __iter__(self) -> Iterator[dict]:
        return iter(self._make())


def _after(*how: Any) -> Iterator[dict]:
    """The rows, without what comes before them."""
    lines = _lines(*how)
    next(lines)
    yield from lines


def _lines(world: str, split: str, options: str, environ: Mapping[str, str]) -> Generator[dict, None, None]:
    """What `write` writes, in a process that ends with the iteration."""
    answers, out = os.pipe()
    with open(answers, encoding="utf-8") as stream:
        given = f"{out}, {world!r}, {split!r}, {options!r}"
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import write; write({given})"
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=[out], env=dict(environ),
            start_new_session=True,
        )  # fmt: skip
        os.close(out)
        guard.process(process.pid)
        try:
            for text in stream:
                said = json.loads(text)
                if "error" in said:
                    raise ValueError(f"environment {world}: {said['error']}")
                if "end" in said:
                    return
                yield said.get("row", said)
            raise ValueError(f"environment {world}: the process that reads its rows ended; see its output")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            guard.process_ended(process.pid)


def write(out: int, world: str, split: str, options: str) -> None:
    """The main function of a process that writes the description and then the rows, as JSON lines."""
    os.set_inheritable(out, False)
    with open(out, "w", encoding="utf-8") as stream:
        put = lambda content: print(json.dumps(content, default=plain), file=stream, flush=True)
        try:
            own: Any = object_path.resolve(world)
            given, rows = json.loads(options), None
            if split and isinstance(inspect.getattr_static(own, "rows", None), staticmethod):
                inspect.signature(own.rows).bind(split, **given)
                rows = own.rows(split, **given)
            count = len(rows) if rows is not None and hasattr(rows, "__getitem__") else None
            steps = not inspect.isclass(own) or hasattr(own, "step")
            put({"steps": steps, "rows": rows is not None, "count": count})
            for row in rows or ():
                put({"row": row})
            put({"end": True})
        except BrokenPipeError:  # enough was read
            pass
        except BaseException as error:  # any error must reach the waiting process
            put({"error": line(error)})
