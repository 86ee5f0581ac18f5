"""Environments that the trainer steps: games, puzzles, simulators, whichever library they are from.

`--env my_env.py:MyWorld` is short for `--workflow areax.rollout.workflows.environments:play` with the option "world".
Environments that call the model themselves are agents (`agents`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .. import object_path
from ..chat import conversation, formats, images, parsers, template
from ..chat.session import Session
from ..chat.trajectory import Interaction
from ..errors import ServerError
from ..processes.printable import one_line, shown
from ..sandbox import turns as sandbox_turns
from ..types import SEATS, Generate, Sample, Sampling
from . import environment_workers, tools, workflow_context
from .failures import Failures, line
from .multi_turn import counted, following, style_of_calls

log = logging.getLogger(__name__)

WORLD = "areax_environment"  # of a row of a mixture: its environment, which does not see this field
MOST_MESSAGES = 10_000  # that an environment may show at once
Seen = str | Sequence[Mapping[str, Any]]  # a user's message, or messages in OpenAI's format


class World(Protocol):
    """One episode of an environment. Methods may be coroutines, which must not block; plain ones run in threads.

    Attributes, any of which may be missing:
      tools: what the policy may call, in OpenAI's format, read before each of its answers.
      seats: number of players, each of whom is the policy; read once. Each has a conversation and rewards of its own.
      seat: number of the player whose turn it is, from 0 on, read before each answer; with several seats.
    """

    tools: Sequence[Mapping[str, Any]]
    seats: int
    seat: int

    def reset(self, row: Mapping[str, Any]) -> Seen:
        """Begins the episode of a row; returns what the policy, or the player whose turn it is, sees."""

    def step(self, message: Mapping[str, Any]) -> tuple[Seen, Any, bool]:
        """Takes the policy's message, in OpenAI's format: {"role": "assistant", "content": ...}, and any "tool_calls";
        reasoning is not content, but "reasoning_content".

        Returns (what it sees next, the message's reward, whether the episode is done). A reward is a number, a dict of
        named components, or None = none; an episode without any has reward 0. NaN makes it unscorable. With several
        seats: (what the player sees whose turn it is then, since its last turn; None, or a list of each player's reward
        for its last message; whether it is done).
        """

    def stop(self) -> Any:
        """The episode ends before `step` says so, as by `turns`; returns the last message's reward, or None = what it
        has; may be missing."""

    def close(self) -> None:
        """Ends the episode in any case; may be missing."""


class Failed(Exception):
    """The code of an environment raised, hung or returned something wrong; the message says which, in one line."""


async def play(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    processor: images.Processor | None = None,
    sampling: Sampling,
    world: str,
    options: Mapping[str, Any] | None = None,
    name: str = "",
    turns: int = 16,
    step_timeout_s: float = 60.0,
    style: str = "",
    workers: int = 0,
    environment: Sequence[str] = (),
) -> list[Sample] | None:
    """Plays an episode in a world; each answer has its own reward.

    Of the row only "chat_template_kwargs" is read here, all else by the world. An episode ends when the world says so,
    after `turns` answers (of a player), or when the conversation no longer fits the model's context.

    Args:
      world: object path of a class or function that makes a `World` of `options`, called for each episode.
      name: what errors call it; "" = `world`.
      step_timeout_s: seconds in which `reset`, `step` and `close` must return; a thread that hangs is abandoned.
      style: the format of tool calls, one of `formats.NAMES`; "" = that of the model's chat template.
      workers: number of processes for worlds; 0 = they are in this one.
      environment: names of environment variables that these get (`environment_workers.workers`).

    Returns:
      The samples, with their seat's number; unscorable, or None before the first answer, if the world failed, which is
      logged in one line.

    Raises:
      ServerError: the world could not begin, or what it depends on failed; the episode is retried.
      ValueError: `failures.MOST` episodes in a row failed; or no such world, variable or format of calls.
    """
    variables, name = conversation.variables(row), name or world
    template.check_variables(tokenizer, variables)
    async with workflow_context.current() as shared:
        failures = await shared.get(("failures", name), lambda: contextlib.nullcontext(Failures(f"environment {name}")))
        make = functools.partial(await _maker(shared, world, workers, environment), **(options or {}))
        begin_s = _begin_s(step_timeout_s, workers)

        async def call(what: str, *asked: Any, seconds: float = step_timeout_s) -> Any:
            try:
                return await _called(what, *asked, seconds=seconds)
            except ServerError as error:
                raise ServerError(f"environment {name}: {what}: {error}; {object_path.row(row)}") from error

        own: Any = None
        sessions: list[Session] = []
        try:
            try:
                own = await call("its constructor", make, seconds=begin_s)
                count = await call("seats", _seats, own)
                seen = _messages("reset", await call("reset", _method(own, "reset"), row))
            except Failed as error:
                raise ServerError(f"environment {name} cannot begin: {error}; {object_path.row(row)}") from error
            sessions = [Session(generate, tokenizer, processor, sampling=sampling, style=style) for _ in range(count)]
            told: list[list[dict[str, Any]]] = [[] for _ in sessions]
            done = False
            while not done:
                seat = await call("seat", _seat, own, count)
                session, messages = sessions[seat], told[seat]
                messages += seen
                if len(session.interactions) == counted(turns):
                    break
                if kit := await call("tools", _tools, own):
                    style_of_calls(f"environment {name} has tools", tokenizer, style)
                x = await _answer(session, tokenizer, messages, tools=kit, calls=bool(kit), template=variables)
                if not x:
                    break
                messages.append(x.answer.message())
                step = _method(own, "step")
                after, value, done = _stepped(await call("step", step, _said(x, tokenizer, style, bool(kit))))
                _reward(sessions, value, done)
                seen = [] if done else _messages("step", after)
            if not done and (stop := _method(own, "stop", optional=True)):
                _reward(sessions, await call("stop", stop), True)
            for session in _begun(sessions):
                if not any(x.score for x in session.interactions):
                    session.set_reward(0.0)
            failures.clear()
        except Failed as error:
            failures.add(str(error), row, error)
            for session in _begun(sessions):
                session.set_reward(None)
        finally:
            await _close(own, call, name)
        made = [s.replace(seat=i) for i, one in enumerate(sessions) if one.interactions for s in one.samples(row=row)]
        return made or None


def _begin_s(step_timeout_s: float, workers: int) -> float:
    """Seconds in which a world must be made, of workers with their start."""
    return max(step_timeout_s, environment_workers.START_S) if workers else step_timeout_s


async def _maker(shared: workflow_context.Shared, world: str, count: int, environment: Sequence[str]) -> Callable:
    """The class or function that makes a world, here or in a process."""
    if not environment_workers.counted(count, environment):
        return object_path.resolve(world)
    made = await shared.get(
        ("worlds", world, count, *environment), lambda: environment_workers.workers(world, count, environment)
    )
    return made.begin


def _begun(sessions: Sequence[Session]) -> list[Session]:
    """Those with an answer."""
    return [session for session in sessions if session.interactions]


def _seats(own: Any) -> int:
    count = getattr(own, "seats", 1)
    if type(count) is not int or not 0 < count <= SEATS:
        raise TypeError(f"must be a number from 1 to {SEATS}, got {shown(count)}")
    return count


def _seat(own: Any, count: int) -> int:
    seat = own.seat if count > 1 else 0
    if type(seat) is not int or not 0 <= seat < count:
        raise TypeError(f"must be the number of a player, below {count}, got {shown(seat)}")
    return seat


async def play_one_of(
    generate: Generate, row: Mapping[str, Any], *, tokenizer: Any, processor: images.Processor | None = None,
    sampling: Sampling, worlds: Mapping[str, Mapping[str, Any]],
) -> list[Sample] | None:  # fmt: skip
    """`play` in the world that the row's field WORLD names; `worlds` is {name: arguments of `play`}."""
    own = dict(row)
    how = worlds[own.pop(WORLD)]
    return await play(generate, own, tokenizer=tokenizer, processor=processor, sampling=sampling, **how)


def check_options(*, step_timeout_s: Any = 60.0, style: str = "", turns: Any = 16, **_: Any) -> None:
    """Raises ValueError for values that these arguments of `play` cannot have."""
    counted(turns)
    formats.style_for(None, style)
    if type(step_timeout_s) not in (int, float) or not 0 < step_timeout_s < math.inf:
        raise ValueError(f"step_timeout_s: must be a number of seconds above 0, got {step_timeout_s!r:.80}")


async def check(
    world: str, row: Mapping[str, Any], *, tokenizer: Any, options: Mapping[str, Any] | None = None, name: str = "",
    step_timeout_s: float = 60.0, style: str = "", turns: int = 16, workers: int = 0, environment: Sequence[str] = (),
    longest: int = 0,
) -> None:  # fmt: skip
    """Begins and ends an episode, arguments as of `play`. Raises ValueError, in one line, if it cannot begin.

    Args:
      longest: tokens of a training row, 0 = any number; a first observation that leaves no room for an answer is told.
    """
    check_options(step_timeout_s=step_timeout_s, style=style, turns=turns)
    async with workflow_context.opened() as shared:
        make = functools.partial(await _maker(shared, world, min(1, workers), environment), **(options or {}))
        begin_s = _begin_s(step_timeout_s, workers)
        talk = await _check(make, row, tokenizer, name or world, style, step_timeout_s, begin_s)
    text = template.render(tokenizer, talk.messages, talk.tools, talk.variables, ask=True)
    if longest and (length := len(template.encode(tokenizer, text))) >= longest:
        log.warning(
            "environment %s: the first observation has %d tokens, and rows at most %d: such episodes are left out; "
            "raise --length; %s", name or world, length, longest, object_path.row(row),
        )  # fmt: skip


async def _check(
    make: Callable, row: Mapping[str, Any], tokenizer: Any, name: str, style: str, step_timeout_s: float, begin_s: float
) -> conversation.Conversation:
    """The conversation that an episode begins with."""
    call, own = functools.partial(_called, seconds=step_timeout_s), None
    try:
        own = await _called("its constructor", make, seconds=begin_s)
        await call("seats", _seats, own)
        messages = _messages("reset", await call("reset", _method(own, "reset"), row))
        if kit := await call("tools", _tools, own):
            style_of_calls(f"environment {name} has tools", tokenizer, style)
        talk = conversation.Conversation(messages, tuple(kit), conversation.variables(row))
        return template.readable(tokenizer, talk)
    except (Failed, ServerError) as error:
        raise ValueError(f"environment {name} cannot begin: {error}; {object_path.row(row)}") from error
    finally:
        await _close(own, call, name)


async def _close(own: Any, call: Callable[..., Any], name: str) -> None:
    if own is not None:
        try:
            if close := _method(own, "close", optional=True):
                await call("close", close)
        except (Failed, ServerError) as error:
            log.warning("environment %s: %s", name, error)


async def _called(what: str, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """What a world's function returns. Raises Failed, but ServerError as it is."""
    try:
        async with asyncio.timeout(seconds) as limit:
            sandbox_turns.CLOCK.set(sandbox_turns.Clock(limit))  # time in which it waits for the sandbox does not count
            return await tools.called(function, *arguments)
    except ServerError:
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        raise Failed(f"{what}: it exited ({getattr(error, 'code', type(error).__name__)!r:.80})") from error
    except GeneratorExit:
        raise
    except BaseException as error:  # a stranger's code may raise anything
        if isinstance(error, asyncio.CancelledError) and cancelled():
            raise
        if isinstance(error, TimeoutError) and limit.expired():
            told = f"must return within step_timeout_s, {seconds:g} s, and did not; raise it in --env-options"
            raise Failed(f"{what} {told}") from error
        raise Failed(f"{what}: {line(error)}") from error


def cancelled() -> bool:
    """Whether this task is being cancelled; otherwise a CancelledError is raised by a stranger's code."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _answer(session: Session, tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> Interaction | None:
    """As `multi_turn.following`. Raises Failed if there can be no first answer."""
    try:
        if not session.interactions:
            template.readable(tokenizer, conversation.Conversation(messages, how["tools"], how["template"]))
        return await following(session, messages, **how)
    except ValueError as error:
        raise Failed(f"its first observation cannot be a prompt: {error}") from error


def _said(x: Interaction, tokenizer: Any, style: str, calls: bool) -> dict[str, Any]:
    """An answer as a world reads it. Without tools its conversation holds the reasoning as it was written."""
    if calls:
        return x.answer.message()
    style = parsers.style_for(tokenizer, style)
    opened, cut = parsers.opened(x.before, style), x.completion.finish == "length"
    return parsers.parse(x.text, style, cut=cut, tools=False, opened=opened).message()


def _tools(own: Any) -> list[Mapping[str, Any]]:
    kit = list(getattr(own, "tools", ()))
    for one in kit:
        if not (isinstance(one, Mapping) and isinstance((one.get("function") or {}).get("name"), str)):
            raise TypeError(f"must be functions in OpenAI's format, with names, got {shown(one)}")
    conversation.json_text("tools", kit)
    return kit


def _messages(what: str, seen: Any) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
    try:
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError("it is neither")
        if len(messages) > MOST_MESSAGES:
            raise ValueError(f"it has {len(messages):,} messages, of at most {MOST_MESSAGES:,}")
        conversation.check(messages)
        return [copy.deepcopy(dict(one)) for one in messages]  # the world may change them later
    except Exception as error:  # a stranger's classes may raise anything
        told = f"must return a text, or a list of messages, got {shown(seen)}; {one_line(error)}"
        raise Failed(f"{what} {told}") from error


def _method(own: Any, name: str, *, optional: bool = False) -> Any:
    """A method of a world; None if it may be missing, and is."""
    try:
        return getattr(own, name, None) if optional else getattr(own, name)
    except Exception as error:  # a stranger's code may raise anything
        raise Failed(f"{name}: {line(error)}") from error


def _entries(value: Any) -> tuple[Any, ...]:
    """Those of a list or tuple; () of anything else, or of one whose code fails."""
    try:
        return tuple(value) if isinstance(value, list | tuple) else ()
    except Exception:  # a stranger's code may raise anything
        return ()


def _stepped(result: Any) -> tuple[Any, Any, bool]:
    entries = _entries(result)
    if len(entries) == 3 and isinstance(entries[2], bool | np.bool_):
        return entries[0], entries[1], bool(entries[2])
    raise Failed(f"step must return (observation, reward, whether it is done), got {shown(result)}")


def _reward(sessions: Sequence[Session], value: Any, done: bool) -> None:
    """Gives rewards for the last answers: of the only player, or a list with one for each; None = none. At the end that
    of a player who never answered is left out."""
    values = (value,) if len(sessions) == 1 else (None,) * len(sessions) if value is None else _entries(value)
    if len(values) != len(sessions):
        raise Failed(f"step: rewards of {len(sessions)} players must be a list of as many, got {shown(value)}")
    try:
        for i, (session, own) in enumerate(zip(sessions, values, strict=True)):
            if own is not None and session.interactions:
                session.set_reward(own)
            elif own is not None and not done:
                raise Failed(f"step: player {i} has a reward, {shown(own)}, and no answer yet; give None")
    except ValueError as error:
        raise Failed(f"step: {error}") from error
