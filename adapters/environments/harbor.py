"""Tasks in Harbor's format: a policy with a shell works in a machine of its own, and the task's tests score it.

A task is a folder with task.toml, instruction.md, environment/ and tests/test.sh (schema 1.4); tests write
/logs/verifier/reward.json or reward.txt.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import math
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...rollout.processes.printable import one_line
from ...rollout.rewards.signatures import is_fault, reported
from ...rollout.sandbox import machine

log = logging.getLogger(__name__)

TESTS, LOGS = "/tests", "/logs/verifier"
COMMAND_S = 60.0
SHOWN = 8000  # characters of a command's output that the policy sees
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in a shell that keeps its directory and exported variables; returns its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
# Of each table of task.toml: what is read, or changes nothing here.
READ = {
    "": {"schema_version", "version", "source", "metadata", "task", "artifacts", "solution", "agent", "verifier",
         "environment"},
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec", "env"},
    "environment": {"docker_image", "workdir", "env", "memory_mb", "build_timeout_sec", "cpus", "storage_mb", "os",
                    "allow_internet", "network_mode"},
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A task, read and checked.

    Attributes:
      image: of its machine, "" = that of environment/Dockerfile.
      workdir: where commands run; "" = the image's.
      env: variables of all commands; `tests_env` of the tests alone.
      memory_mb: 0 = the provider's limit.
    """

    folder: Path
    instruction: str
    image: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    tests_env: Mapping[str, str] = field(default_factory=dict)
    agent_s: float = float("inf")
    tests_s: float = 600.0
    memory_mb: int = 0

    def files(self, name: str, to: str) -> dict[str, bytes]:
        """The files below a folder of the task, by their paths below `to`."""
        root = self.folder / name
        found = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return {f"{to.rstrip('/')}/{path.relative_to(root).as_posix()}": path.read_bytes() for path in found}


@functools.lru_cache(maxsize=4096)
def task(folder: Path) -> Task:
    """Reads a task. Raises ValueError, in one line, for one that is none, or that asks for what is not supported."""
    try:
        given = tomllib.loads((folder / "task.toml").read_text())
        instruction = (folder / "instruction.md").read_text()
    except (OSError, ValueError) as error:
        raise ValueError(f"harbor: {folder}: must be a task, with task.toml and instruction.md ({error})") from error
    tables = {name: given.get(name) or {} for name in READ if name}
    for name, known in READ.items():
        if unknown := {*(tables[name] if name else given)} - known:
            place = f"[{name}] " if name else ""
            raise ValueError(f"harbor: {folder}/task.toml: {place}{', '.join(sorted(unknown))} is not supported here")
    agent, tests, machine = (tables[name] for name in ("agent", "verifier", "environment"))
    if not (folder / "tests/test.sh").is_file():
        raise ValueError(f"harbor: {folder}: must have tests/test.sh, got none")
    if machine.get("os", "linux") != "linux":
        raise ValueError(f"harbor: {folder}/task.toml: [environment] os must be linux, got {machine['os']}")
    for name, table in (("environment", machine), ("verifier", tests)):
        if asked := [key for key, value in (table.get("env") or {}).items() if "${" in str(value)]:
            told = f"[{name}] env {asked[0]} takes a variable of the host"
            raise ValueError(f"harbor: {folder}/task.toml: {told}, which is not supported here; write its value")
    built = (folder / "environment/Dockerfile").is_file()
    if built == bool(machine.get("docker_image")):
        raise ValueError(f"harbor: {folder}: must have either environment/Dockerfile or docker_image in task.toml")
    return Task(
        folder, instruction, machine.get("docker_image", ""), machine.get("workdir") or "",
        {key: str(value) for key, value in (machine.get("env") or {}).items()},
        {key: str(value) for key, value in (tests.get("env") or {}).items()},
        float(agent.get("timeout_sec") or float("inf")), float(tests.get("timeout_sec", 600)),
        int(machine.get("memory_mb") or 0),
    )  # fmt: skip


class World:
    """A task, in a machine of its own.

    Args:
      name: folder of tasks, or of one.
      heldout: the same for evaluation.
      provider: where machines are, one of `machine.PROVIDERS`.
      image: instead of those of the tasks.
      options: of the provider.
    """

    tools = (TOOL,)

    def __init__(self, name: str, *, heldout: str = "", provider: str = "local", image: str = "", **options: Any):
        self._start = functools.partial(machine.provider(provider), **options)
        self._image = image
        self._machine: machine.Machine | None = None

    @staticmethod
    def rows(split: str, name: str, *, heldout: str = "", **options: Any) -> Iterable[dict]:
        """{"task", "sha256"} of each task, its folder and a hash of its files, by name. Raises ValueError for one that
        cannot be played."""
        option, place = ("name", name) if split == "train" else ("heldout", heldout)
        if not place:
            raise ValueError(f'harbor: rows for {split} need "{option}" in --env-options, a folder of tasks')
        root = Path(place)
        folders = [root] if (root / "task.toml").is_file() else sorted(p.parent for p in root.glob("*/task.toml"))
        if not folders:
            raise ValueError(f"harbor: must be a folder of tasks, or one with a task.toml, got {place}")
        return [{"task": str(task(folder.resolve()).folder), "sha256": _digest(folder)} for folder in folders]

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Starts the machine of the row's task; returns its instruction. Raises ValueError for a task that was changed
        since its row was read."""
        self._task = task(Path(row["task"]))
        if await asyncio.to_thread(_digest, self._task.folder) != row["sha256"]:
            raise ValueError(
                f"{self._task.folder} was changed since the run began; tasks of a run must stay as they are"
            )
        self._machine = await self._start(self._image or self._task.image, self._task.folder / "environment",
                                          memory_mb=self._task.memory_mb, workdir=self._task.workdir)  # fmt: skip
        self._workdir = self._task.workdir or self._machine.workdir
        if self._task.image:
            await self._machine.put(await asyncio.to_thread(self._task.files, "environment", self._workdir))
        self._until = time.monotonic() + self._task.agent_s
        return self._task.instruction

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any, bool]:
        """Runs the commands of the message; one without a command, or too late, has the tests score what there is."""
        seen = []
        try:
            for call in message.get("tool_calls") or []:
                name, given = call["function"]["name"], call["function"]["arguments"]
                told = await self._ran(given) if name == "bash" else f"error: there is no tool {name!r:.80}, only bash"
                seen.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": told})
        except machine.Ended as error:
            log.info("harbor: %s: %s", self._task.folder, error)
            return [], 0.0, True
        done = not seen or time.monotonic() >= self._until
        return seen, await self.stop() if done else None, done

    async def _ran(self, arguments: str) -> str:
        assert self._machine is not None
        try:
            given = json.loads(arguments)
            command = given["command"]
            if given.keys() != {"command"} or not isinstance(command, str) or "\0" in command:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return 'error: arguments of bash must be {"command": text}'
        seconds = min(COMMAND_S, max(0.1, self._until - time.monotonic()))
        command = machine.in_shell(command.encode(errors="replace").decode(), self._workdir, self._task.env)
        try:
            result = await self._machine.run(command, timeout_s=seconds)
        except OSError as error:  # too long, or nothing can be written any more
            return f"error: the command cannot be run: {error.strerror}"
        text = result.stdout
        if len(text) > SHOWN:
            half = SHOWN // 2
            text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
        if result.why or result.code:
            ended = f"killed after {seconds:.3g} s" if result.why else f"exit code {result.code}"
            text = f"{text.rstrip()}\n[{ended}]".lstrip()
        return text or "[no output]"

    async def stop(self) -> dict[str, float]:
        """Runs the task's tests, whose files the policy has not seen; returns the reward they write. If they write none
        it is 0: who has a machine can break all that runs in it."""
        assert self._machine is not None
        env = {**self._task.env, **self._task.tests_env}
        command = f"chmod +x {TESTS}/test.sh; {TESTS}/test.sh > {LOGS}/test-stdout.txt 2>&1"
        try:
            await self._machine.run(
                f"mkdir -p {TESTS} {LOGS}; chmod -R u+rwX {TESTS}/ {LOGS}/; find {TESTS}/ {LOGS}/ -mindepth 1 -delete"
            )
            await self._machine.put(await asyncio.to_thread(self._task.files, "tests", TESTS))
            command = machine.alone(command, self._workdir, env)
            result = await self._machine.run(command, timeout_s=self._task.tests_s)
            for name in ("reward.json", "reward.txt"):
                try:
                    return _rewards((await self._machine.get(f"{LOGS}/{name}")).decode())
                except FileNotFoundError:
                    continue
            late = f" within {self._task.tests_s:g} s" if result.why else ""
            why = f"tests/test.sh wrote no {LOGS}/reward.txt{late}"
        except (machine.Ended, OSError, ValueError) as error:
            why = one_line(error)
        log.warning("harbor: %s: reward 0, because %s", self._task.folder, why)
        return {"reward": 0.0}

    async def close(self) -> None:
        if self._machine:
            await self._machine.aclose()


def _digest(folder: Path) -> str:
    """A hash of all files of a task."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _rewards(text: str) -> dict[str, float]:
    """What a reward file says, a number or an object of numbers: of these "reward" counts, or the only one, others are
    curves. Raises ValueError."""
    try:
        given = json.loads(text)
        given = given if isinstance(given, dict) else {"reward": given}
        if len(given) == 1 and not is_fault(given):
            [given] = ({"reward": value} for value in given.values())
        if all(math.isfinite(value) for value in given.values()):
            return reported(given, "the tests")
    except (ValueError, TypeError, OverflowError):
        pass
    raise ValueError(f'the tests must write a number, or an object of numbers with "reward", got {text!r:.80}')
