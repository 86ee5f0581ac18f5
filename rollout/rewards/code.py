"""A reward for Python programs: runs the row's tests against the program in a sandbox."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .. import sandbox
from .answers import block

SECONDS = 8.0  # for all tests of a program; below the default timeout of a pool
MEMORY = 512 << 20  # bytes
OUTPUT = 1 << 20  # bytes that a program may print
# Printing the token proves that the tests ran and passed: a program that exits early does not know it.
# The program is a module, in which dataclasses look up types and pickle looks up classes.
HARNESS = """import sys, types
def run(token, print=print, out=sys.stdout):
    module = sys.modules["solution"] = types.ModuleType("solution")
    for name, source in (("solution.py", {code!r}), ("tests.py", {tests!r})):
        exec(compile(source, name, "exec"), module.__dict__)
    print("", token, sep="\\n", file=out)
run(sys.stdin.readline().strip())
"""


def reward(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if the program in `text` passes all tests of the row within SECONDS and MEMORY, else 0.0.

    The program is the last ```python block outside of thoughts, else the last block without a language, or the whole
    text if there is none (`answers.block`). It runs in `sandbox`, one at a time in each worker of a pool. Asserts share
    a process with the program, so a malicious program can fake them: if that matters, test by input and output.

    Args:
      row: `tests` is Python source with asserts, or a list of such sources, which run after the program in its
        namespace; or a list of {"input", "output"}: stdin and the expected stdout, trailing white space ignored.

    Raises:
      ValueError: the row has no tests, or malformed ones.
      ServerError: this machine allows no sandbox, or the sandbox failed.
    """
    return float(asyncio.run(passes(block(text, "python", "py", "ipython", "pypy"), row.get("tests"))))


async def passes(code: str, tests: str | Sequence[str] | Sequence[Mapping[str, str]] | None) -> bool:
    """Whether a program passes its tests (see `reward`); for rewards that are coroutines."""
    sources: list[Any] = [tests] if isinstance(tests, str) else list(tests or ())
    if sources and all(isinstance(source, str) and source.strip() for source in sources):
        token = secrets.token_hex(16)
        program = HARNESS.format(code=code, tests="\n".join(sources))
        return ((await _printed(program, f"{token}\n", SECONDS))[0] or [""])[-1] == token
    if not sources or not all(
        isinstance(pair, Mapping) and isinstance(pair.get("input"), str) and isinstance(pair.get("output"), str)
        for pair in sources
    ):
        raise ValueError(
            "rewards.code: tests must be Python source, a list of sources, or a list of "
            f'{{"input", "output"}} with texts, and not be empty; got {tests!r:.80}'
        )
    left = SECONDS
    for pair in sources:
        printed, took = await _printed(code, pair["input"], left)
        left -= took
        if printed != _lines(pair["output"]):
            return False
    return True


async def _printed(program: str, stdin: str, seconds: float) -> tuple[list[str] | None, float]:
    """(lines that a program prints, None if it fails or exceeds a limit; the seconds that it took)."""
    if seconds <= 0:
        return None, 0.0
    limits = {"timeout_s": seconds, "memory_bytes": MEMORY, "output_bytes": OUTPUT}
    result = await sandbox.run_python(program, stdin=stdin, **limits)
    return None if result.code or result.why else _lines(result.stdout), result.seconds


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
