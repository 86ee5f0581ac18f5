"""Runs existing agents as workflows: they use the gateway as they would OpenAI's or Anthropic's API.

An agent is a coroutine in this process, a command in a separate process, or a user who opens a session. Each gets an
address and a key, and its requests and their answers become the samples.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import inspect
import json
import os
import secrets
import shlex
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from ..chat import formats, images
from ..chat.session import Session
from ..chat.trajectory import Style
from ..gateway import server
from ..gateway.sessions import Limits
from ..processes import guard, json_rows, keys, orphan_guard
from ..processes.environment import passed
from ..processes.printable import printable
from ..rewards.signatures import reported, reported_number
from ..types import Generate, Sample, Sampling, Workflow
from . import tools
from .failures import Failures, line

ALWAYS = "base_url", "api_key"  # what an agent that takes any arguments gets
TAIL = 4000  # bytes read from the end of a command's errors
RESULT = 2**20  # and of its output, whose last line is its result
CANCEL_S = 5.0  # in which a cancelled agent must end
LONGEST = 500  # characters of what a program printed, in an error


@dataclass(frozen=True)
class Options:
    """How agents are served.

    Attributes:
      style: the model's format of reasoning and tool calls, plain = none; None = that of its chat template.
      reasoning: treat text between <think> and </think> as reasoning, not as part of the answer.
      rows: make a row of training data per leaf of the conversation tree ("leaves"), or per request ("interactions").
      discount: discount of rewards along a conversation, with "interactions".
      timeout_s: time limit in seconds of an episode, which is then unscorable, or of a user's session, which then ends.
      environment: names of environment variables that a program (`exec:`) gets in addition to PATH, HOME, LANG and the
        like (`processes.environment.PASSED`).
      host: address that the gateway listens on, for users who open sessions.
      port: port of the gateway, for users who open sessions; 0 = any free port.
    """

    style: formats.Name | None = None
    reasoning: bool = True
    rows: Style = "leaves"
    discount: float = 1.0
    timeout_s: float = 600.0
    environment: tuple[str, ...] = ()
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
    processor: images.Processor | None = None,
    reward: Callable[..., Awaitable[Any]],
    sampling: Sampling,
    options: Options = Options(),
) -> AsyncIterator[Workflow]:
    """Yields a workflow whose episodes are `await run(row, base_url=, api_key=, session_id=, admin_key=, refusal=)`,
    and serves the gateway they use. The admin key, with the session's id in the header X-Session-ID, is for clients of
    many episodes; `refusal()` is the session's.

    `run` returns the reward: a number or a dict of named components, for the last interaction; or a dict of numbers by
    interaction id (the ids in the API's answers); or None: then `reward` scores the last answer, unless the agent sent
    rewards over HTTP. Samples have what it returns in their info, as "result". An episode that raises or exceeds the
    timeout is logged and unscorable; `failures.MOST` in a row end the run with the last error. Failures of generation
    servers are raised as ServerError.
    """
    admin_key = secrets.token_urlsafe(32)
    served = server.serve(
        tokenizer, processor, admin_key=admin_key, style=options.style or "", reasoning=options.reasoning
    )
    failures = Failures(f"agent {name}")

    async with served as gateway:

        async def episode(generate: Generate, row: Mapping[str, Any]) -> list[Sample] | None:
            session = Session(generate, tokenizer, processor, sampling=sampling, style=options.style or "")
            key, result = gateway.open(session), None
            try:
                own = copy.deepcopy(dict(row))  # the reward must not see what the agent writes into it
                named = dict(api_key=key, session_id=session.id, admin_key=admin_key, refusal=lambda: session.refusal)
                result = await _within(options.timeout_s, run(own, base_url=f"{gateway.url}/v1", **named))
                await settle(session, result, reward, row)
                failures.clear()
            except Exception as error:  # an agent may raise anything, often because of the policy's output
                if session.failure:
                    raise session.failure from error
                failures.add(line(error), row, error)
                if not session.interactions:
                    return None
                session.set_reward(None)
            finally:
                await gateway.close(key)
            return session.samples(style=options.rows, discount=options.discount, row=row, result=result) or None

        yield episode


_abandoned: list[asyncio.Task[Any]] = []  # kept, for Python would throw into them to remove them


def abandon(task: asyncio.Task[Any]) -> None:
    """Has `asyncio.run` not wait, for ever, for a task that ignores its cancellation."""
    asyncio.tasks._unregister_task(task)
    _abandoned.append(task)


@dataclass(frozen=True)
class _Exited:
    error: BaseException


async def _within(seconds: float, work: Awaitable[Any]) -> Any:
    """What `work` returns. Raises TimeoutError; RuntimeError if it ignores its cancellation, and is abandoned."""

    async def contained() -> Any:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the event loop
            return _Exited(error)

    task = asyncio.create_task(contained())
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=CANCEL_S)
            if not done:
                abandon(task)
                raise RuntimeError(f"did not end within --agent.timeout-s, {seconds:g} s, and ignores its cancellation")
            if task.cancelled() or not task.exception():
                raise TimeoutError
    except asyncio.CancelledError:
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CANCEL_S)
        if not done:
            abandon(task)
        raise
    if isinstance(result := task.result(), _Exited):
        raise result.error
    return result


async def settle(session: Session, result: Any, reward: Callable[..., Awaitable[Any]], row: Mapping[str, Any]) -> None:
    """Sets the rewards of a session to those the agent returned, else scores its last answer with `reward`."""
    ids = {x.id for x in session.interactions}
    if isinstance(result, Mapping) and result.keys() & ids:
        for id, value in result.items():  # unknown ids are refused
            session.set_reward(value, id)
    elif result is not None:
        session.set_reward(result)
    elif session.interactions and not any(x.score for x in session.interactions):
        last = session.interactions[-1]
        session.set_reward(await reward(last.answer.content, row, **session.context(last)))


def coroutine(made: Any) -> Callable[..., Awaitable[Any]]:
    """Wraps `made`, or its method `run`, as a coroutine function; passes `base_url`, `api_key`, and what else `played`
    has, if it takes them: the first two also if it takes any.

    A plain function runs in a thread. A coroutine must not block: it shares the event loop with the gateway.
    """
    run = getattr(made, "run", made)
    parameters = inspect.signature(run).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def called(row: Mapping[str, Any], **given) -> Any:
        return await tools.called(
            run, row, **{n: value for n, value in given.items() if n in parameters or anything and n in ALWAYS}
        )

    return called


def entered(make: Callable[[], contextlib.AbstractAsyncContextManager[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wraps a class with `__aenter__` and `__aexit__`: each episode runs the agent that one of its objects gives."""

    async def called(row: Mapping[str, Any], **given) -> Any:
        async with make() as agent:
            return await coroutine(agent)(row, **given)

    return called


def session_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Environment variables that point the SDKs of OpenAI and Anthropic to a session."""
    return {
        "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key,
    }  # fmt: skip


def split(words: str) -> list[str]:
    """The words of a command, as a shell reads them. Raises ValueError if there is none, or its quotes do not end."""
    try:
        found = shlex.split(words)
    except ValueError as error:
        raise ValueError(f"exec: must be words as a shell reads them, got {words!r} ({str(error).lower()})") from error
    if not found:
        raise ValueError("exec: must be followed by a command, got nothing")
    return found


def command(words: str, names: Sequence[str] = ()) -> Callable[..., Awaitable[Any]]:
    """Wraps a program as an agent. It gets the row as JSON on standard input, images as data URLs; address and key in
    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. If the last line it prints is a JSON
    object, that is its result: {"reward": 0.5}, with other numbers as components, or rewards by interaction id. An
    object without either, such as {"error": 503}, is an error.

    Args:
      names: environment variables that it gets too, besides `environment.PASSED`.

    Raises:
      ValueError: as `split`, or a variable in `names` is not set.
    """
    arguments = split(words)
    environ = passed(names, "--agent.environment")

    async def run(row: Mapping[str, Any], *, base_url: str, api_key: str, session_id: str = "", **_: Any) -> Any:
        mark = secrets.token_hex(8)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=errors,
                env=environ | session_variables(base_url, api_key) | {orphan_guard.MARK: mark},
                start_new_session=True,
            )  # fmt: skip
            guard.process(process.pid, mark=mark)
            try:
                given = json.dumps(json_rows.json_row(row)).encode()
                await process.communicate(given)  # output goes to files: children may keep it open
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the children in its session
                await process.wait()
                await asyncio.to_thread(orphan_guard.kill_marked, mark)  # and in others
                guard.process_ended(process.pid)
            if process.returncode:
                message = printable(" ".join(_tail(errors).split())[-LONGEST:])
                raise RuntimeError(f"{words} exited with code {process.returncode}: {message}")
            said, all_of_it = _tail(out, RESULT).rstrip(), out.tell() <= RESULT
        last = said.rpartition("\n")[2].strip()
        if "\n" not in said and not all_of_it:
            raise RuntimeError(f"{words}: the last line, its result, must have less than {RESULT} bytes")
        try:
            result = json.loads(last) if last.startswith("{") else None
        except (ValueError, RecursionError) as error:
            raise RuntimeError(f"{words}: the last line begins like its result, a JSON object: {error}") from error
        if result and session_id and all(id.startswith(f"{session_id}-") for id in result):
            return {id: reported_number(value, words) for id, value in result.items()}
        return None if result is None else reported(result, words)

    return run


def _tail(file: IO[bytes], most: int = TAIL) -> str:
    """The last bytes of a file as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return file.read().decode(errors="replace")


@contextlib.asynccontextmanager
async def online(
    *,
    tokenizer: Any,
    processor: images.Processor | None = None,
    sampling: Sampling,
    options: Options = Options(),
    say: Callable[[str], None] = print,
) -> AsyncIterator[Workflow]:
    """Yields a workflow whose episodes are sessions that users open at the gateway; each is trained on once it ends.

    Each episode waits for a user; a user for whom no episode waits gets a 503. The content of rows is ignored: their
    number in flight limits the open sessions. A session without a reward is unscorable, and it ends after
    `options.timeout_s`. The sessions of a group share no prompt, so comparing their rewards means nothing.

    Raises:
      ValueError: the key that opens sessions is neither in AREAX_ADMIN_KEY nor in the file that AREAX_ADMIN_KEY_FILE
        names.
    """
    if not (admin_key := keys.read("AREAX_ADMIN_KEY")):
        raise ValueError("--workflow online: opening sessions needs an admin key; set AREAX_ADMIN_KEY")
    waiting: collections.deque[tuple[Generate, asyncio.Future[Session]]] = collections.deque()
    ended: dict[str, asyncio.Event] = {}

    async def on_start(body: Mapping[str, Any]) -> Session:
        while waiting:
            generate, turn = waiting.popleft()
            if not turn.done():
                session = Session(generate, tokenizer, processor, sampling=sampling, style=options.style or "")
                ended[session.id] = asyncio.Event()
                turn.set_result(session)
                return session
        raise RuntimeError("no episode is waiting for a session; try again in a moment")

    async def on_end(session: Session) -> None:
        ended[session.id].set()

    served = server.serve(
        tokenizer, processor, host=options.host, port=options.port, admin_key=admin_key, style=options.style or "",
        reasoning=options.reasoning, on_start=on_start, on_end=on_end, limits=Limits(total_s=options.timeout_s),
    )  # fmt: skip
    async with served as gateway:
        say(f"{gateway.url} is waiting for sessions: POST /sessions")

        async def episode(generate: Generate, row: Mapping[str, Any]) -> list[Sample] | None:
            turn: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
            waiting.append((generate, turn))
            session = await turn
            await ended[session.id].wait()
            del ended[session.id]
            return session.samples(style=options.rows, discount=options.discount, row=row) or None

        yield episode
