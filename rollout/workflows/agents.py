"""Agents that were not written for training, as workflows: they talk to a gateway as to OpenAI or Anthropic.

Three ways: a coroutine in this process, a command in a process of its own, or users who come by themselves. In each the
agent is given an address and a key, and what it asked and was answered becomes the samples.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import inspect
import json
import logging
import os
import shlex
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal

from .. import object_path
from ..chat.session import Session
from ..chat.trajectory import Style
from ..gateway import server
from ..gateway.sessions import Limits
from ..types import Generate, Sample, Sampling, Workflow
from . import tools

log = logging.getLogger(__name__)

FAILED = 16  # episodes in a row that end the run: then it is the agent, not what the policy said
SAID = 4000  # bytes at the end of what a command prints that are looked at


@dataclass(frozen=True)
class Options:
    """How agents are served.

    Attributes:
      style: how the model writes calls of tools.
      reasoning: text between <think> and </think> is the model's reasoning, not its answer.
      rows: a row of training data for each "leaves" of the conversations, or for all "interactions".
      discount: of rewards along the conversations, with "interactions".
      timeout_s: of an episode, or of a user's session; one that takes longer is unscorable, or ends.
      host, port: of the gateway, for agents that come by themselves; 0 = any port that is free.
    """

    style: Literal["qwen", "hermes", "llama", "deepseek"] = "qwen"
    reasoning: bool = True
    rows: Style = "leaves"
    discount: float = 1.0
    timeout_s: float = 600.0
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self):
        if self.discount != 1 and self.rows != "interactions":
            raise ValueError(f"--agent.discount needs --agent.rows interactions, got {self.discount}")
        if not self.timeout_s > 0:
            raise ValueError(f"--agent.timeout-s must be above 0, got {self.timeout_s}")


@contextlib.asynccontextmanager
async def played(
    run: Callable[..., Awaitable[Any]],
    name: str,
    *,
    tokenizer: Any,
    reward: Callable[..., Awaitable[Any]],
    sampling: Sampling,
    options: Options = Options(),
) -> AsyncIterator[Workflow]:
    """A workflow whose episodes are `await run(row, base_url=, api_key=)`, and the gateway they talk to.

    What it returns is the reward: a number or a dict of named components, of the last interaction; a dict of numbers by
    the ids of interactions (those of the API's answers); or None, and unless it gave rewards over HTTP, `reward` says
    what the last answer is worth. One that raises or is late is unscorable, and counted in the log; FAILED in a row
    end the run with the last one's error. What went wrong with a generation server is raised as such.
    """
    served = server.serve(tokenizer, style=options.style, reasoning=options.reasoning)
    failures: list[str] = []

    async with served as gateway:

        async def episode(generate: Generate, row: Mapping[str, Any]) -> list[Sample] | None:
            session = Session(generate, tokenizer, sampling=sampling)
            key = gateway.open(session)
            try:
                async with asyncio.timeout(options.timeout_s):
                    result = await run(dict(row), base_url=f"{gateway.url}/v1", api_key=key)
                await settle(session, result, reward, row)
                failures.clear()
            except Exception as error:  # an agent may raise anything, often for what the policy said
                if session.failure:
                    raise session.failure from error
                line = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
                failures.append(line)
                log.warning("agent %s failed: %s; %s", name, line, object_path.row(row))
                if len(failures) >= FAILED:
                    raise ValueError(f"agent {name}: failed {FAILED} times in a row; the last time: {line}") from error
                if not session.interactions:
                    return None
                session.set_reward(None)
            finally:
                await gateway.close(key)
            return session.samples(style=options.rows, discount=options.discount, row=row) or None

        yield episode


async def settle(session: Session, result: Any, reward: Callable[..., Awaitable[Any]], row: Mapping[str, Any]) -> None:
    """Gives a session the rewards that an agent returned, or else the one that `reward` gives its last answer."""
    ids = {x.id for x in session.interactions}
    if isinstance(result, Mapping) and result.keys() & ids:
        for id, value in result.items():  # an id that is none is refused
            session.set_reward(value, id)
    elif result is not None:
        session.set_reward(result)
    elif session.interactions and not any(x.score for x in session.interactions):
        last = session.interactions[-1]
        session.set_reward(await reward(last.answer.content, row, **session.context(last)))


def coroutine(made: Any) -> Callable[..., Awaitable[Any]]:
    """`made`, or its method `run`, called with those of `base_url` and `api_key` that it takes.

    A plain function runs in a thread of its own. A coroutine must not block: it shares the loop with the gateway.
    """
    run = getattr(made, "run", made)
    parameters = inspect.signature(run).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def called(row: Mapping[str, Any], **given) -> Any:
        taken = {name: value for name, value in given.items() if anything or name in parameters}
        if inspect.iscoroutinefunction(run):
            return await run(row, **taken)
        result = await tools.in_thread(functools.partial(run, row, **taken))
        return await result if inspect.isawaitable(result) else result

    return called


def environment(base_url: str, api_key: str) -> dict[str, str]:
    """The variables by which the SDKs of OpenAI and Anthropic find a session."""
    return {
        "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key,
    }  # fmt: skip


def command(words: str) -> Callable[..., Awaitable[Any]]:
    """A program that plays an episode: the row comes as JSON on its standard input, address and key in OPENAI_BASE_URL,
    OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. If the last line it prints is a JSON object, that is its
    result: {"reward": 0.5}, or rewards by the ids of interactions."""
    arguments = shlex.split(words)
    if not arguments:
        raise ValueError("exec: must be followed by a command, got nothing")

    async def run(row: Mapping[str, Any], *, base_url: str, api_key: str) -> Any:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaints:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=complaints,
                env=os.environ | environment(base_url, api_key),
                start_new_session=True,
            )  # fmt: skip
            try:
                await process.communicate(json.dumps(row).encode())  # files, so it does not wait for what was started
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started in its session, too
                await process.wait()
            if process.returncode:
                said = " ".join(_end(complaints).split())
                raise RuntimeError(f"{words} ended with code {process.returncode}: {said}")
            lines = _end(out).split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        try:
            result = json.loads(last)
        except ValueError:
            return None
        return result if isinstance(result, dict) else None

    return run


def _end(file: IO[bytes]) -> str:
    """The last SAID bytes of a file as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - SAID))
    return file.read().decode(errors="replace")


@contextlib.asynccontextmanager
async def online(
    *,
    tokenizer: Any,
    sampling: Sampling,
    options: Options = Options(),
    say: Callable[[str], None] = print,
) -> AsyncIterator[Workflow]:
    """A workflow whose episodes are the sessions that users open at the gateway, each of them trained on once it ends.

    An episode waits for a user; users who come while none waits are told to come again (503). Rows are not used but as
    turns: as many sessions are open as the run keeps in flight. A session without a reward is unscorable; one that is
    open for longer than `options.timeout_s` ends. A group's sessions have nothing in common to be compared by.

    Raises:
      ValueError: AREAX_ADMIN_KEY, the key that opens sessions, is not in the environment.
    """
    if not (admin_key := os.environ.get("AREAX_ADMIN_KEY", "")):
        raise ValueError("--workflow online: sessions are opened with a key; put one into AREAX_ADMIN_KEY")
    waiting: collections.deque[tuple[Generate, asyncio.Future[Session]]] = collections.deque()
    ended: dict[str, asyncio.Event] = {}

    async def on_start(body: Mapping[str, Any]) -> Session:
        while waiting:
            generate, turn = waiting.popleft()
            if not turn.done():
                session = Session(generate, tokenizer, sampling=sampling)
                ended[session.id] = asyncio.Event()
                turn.set_result(session)
                return session
        raise RuntimeError("no episode waits for a session; try again in a moment")

    async def on_end(session: Session) -> None:
        ended[session.id].set()

    served = server.serve(
        tokenizer, host=options.host, port=options.port, admin_key=admin_key, style=options.style,
        reasoning=options.reasoning, on_start=on_start, on_end=on_end, limits=Limits(total_s=options.timeout_s),
    )  # fmt: skip
    async with served as gateway:
        say(f"{gateway.url} waits for sessions: POST /sessions")

        async def episode(generate: Generate, row: Mapping[str, Any]) -> list[Sample] | None:
            turn: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
            waiting.append((generate, turn))
            session = await turn
            await ended[session.id].wait()
            del ended[session.id]
            return session.samples(style=options.rows, discount=options.discount, row=row) or None

        yield episode
