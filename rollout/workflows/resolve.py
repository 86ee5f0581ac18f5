"""Resolves the workflow named on the command line."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from .. import object_path
from ..chat import images
from ..types import Sampling, Workflow
from . import agents, areal, regroup, workflow_context
from .failures import line

log = logging.getLogger(__name__)

ONLINE, COMMAND = "online", "exec:"
CLOSE_S = 10.0  # in which an agent's `aclose` must return


@contextlib.asynccontextmanager
async def bind(
    name: str,
    *,
    tokenizer: Any,
    reward: Callable[..., Awaitable[Any]],
    sampling: Sampling,
    processor: images.Processor | None = None,
    options: Mapping[str, Any] | None = None,
    agent: agents.Options | None = None,
) -> AsyncIterator[Workflow]:
    """Yields the workflow `(generate, row)` that `name` refers to, and runs the services it needs. `name` may be

    - `module:function` or `file.py:function` that takes `generate`: a workflow. Of tokenizer, processor, reward and
      sampling it gets those it has parameters for, and all `options`.
    - a function that takes `base_url`, or a class or object with `async run(row, base_url=, api_key=)`: an agent
      (`agents.played`). A class is constructed once with all `options`, and closed at the end if it has `aclose`; or
      once an episode, and entered and left, if it has `__aenter__` and `__aexit__`.
    - a class or object with `arun_episode(engine, data)`: an AReaL workflow (`areal`). A class is constructed with
      those of reward_fn, gconfig, tokenizer, reward and sampling that it takes, and all `options`.
    - `exec:COMMAND`: an agent in a separate process (`agents.command`).
    - `online`: users who open sessions (`agents.online`).

    The workflow has the `regroup` of what `name` refers to, if any (`regroup`).

    Args:
      processor: of a model that reads images; None = a row with images is refused.

    Raises:
      ValueError: the name is none of these, or the workflow does not take one of the options.
    """
    bound: dict[str, Any] = dict(tokenizer=tokenizer, processor=processor, reward=reward, sampling=sampling)
    given, agent = dict(options or {}), agent or agents.Options()
    found = find(name)
    _check_agent(name, found, agent)
    with_regroup = functools.partial(regroup.attached, name=name, seconds=agent.timeout_s)
    if name == ONLINE or name.startswith(COMMAND):
        _taken(name, {}, {}, given)
    if name == ONLINE:
        async with agents.online(
            tokenizer=tokenizer, processor=processor, sampling=sampling, options=agent
        ) as workflow:
            yield workflow
        return
    if _generates(found):
        own = functools.partial(found, **_taken(name, _parameters(found), bound, given))
        async with workflow_context.opened(reward) as shared:
            yield with_regroup(workflow_context.within(shared, own), getattr(found, "regroup", None))
        return
    if name.startswith(COMMAND):
        run = agents.command(name.removeprefix(COMMAND), agent.environment)
        scored = None
    else:
        if inspect.isclass(found):
            offered = {"reward_fn": areal.RunReward(reward), "gconfig": areal.settings(sampling), **bound}
            if hasattr(found, "arun_episode"):
                if "processor" in _parameters(found):
                    raise ValueError(
                        f"--workflow {name}: AReaL's workflows with a processor do not run here, got one; areax's own "
                        "read the images of rows, such as areax.rollout.workflows:single_turn"
                    )
                offered["tokenizer"] = areal.templating(tokenizer)
            taken = _taken(name, _parameters(found), offered, given)
            if missing := [key for key, p in _parameters(found).items() if key not in taken and _required(p)]:
                raise ValueError(
                    f"--workflow: {name} needs {', '.join(missing)}, got none; give it in --workflow-options"
                )
            make: Callable[[], Any] = functools.partial(found, **taken)
            enters = hasattr(found, "__aenter__") and not hasattr(found, "arun_episode")
            scored = getattr(found, "regroup", None) if enters else None  # a static method
            found = agents.entered(make) if enters else make()
        else:
            scored = None
            _taken(name, {}, {}, given)
        scored = scored or getattr(found, "regroup", None)
        if hasattr(found, "arun_episode"):
            async with workflow_context.opened(reward) as shared:
                yield with_regroup(workflow_context.within(shared, areal.workflow(found, tokenizer)), scored)
            return
        run = agents.coroutine(found)
    async with (
        _closed(name, found) if hasattr(found, "aclose") else contextlib.nullcontext(),
        workflow_context.opened(reward) as shared,
        agents.played(run, name, **bound, options=agent) as workflow,
    ):
        yield with_regroup(workflow_context.within(shared, workflow), scored)


@contextlib.asynccontextmanager
async def _closed(name: str, found: Any) -> AsyncIterator[None]:
    """Closes an agent at the end of the block. That it raises then, or hangs, is a warning: the run is complete."""
    try:
        yield
    finally:
        task = asyncio.create_task(_awaited(found.aclose))
        await asyncio.wait({task}, timeout=CLOSE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=agents.CANCEL_S)
            if not task.done():
                agents.abandon(task)
            log.warning("agent %s: aclose must return within %g s, and did not; it is abandoned", name, CLOSE_S)
        elif not task.cancelled() and (error := task.exception()):
            log.warning("agent %s: aclose: %s", name, line(error))


async def _awaited(close: Callable[[], Awaitable[Any]]) -> None:
    try:
        await close()
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the event loop
        raise RuntimeError(f"it exited ({type(error).__name__})") from error


def check(name: str, options: Mapping[str, Any], agent: agents.Options | None = None) -> None:
    """Raises ValueError as `bind` does, for a workflow that does not exist or does not take one of the options."""
    found = find(name)
    _check_agent(name, found, agent or agents.Options())
    if _generates(found):
        _taken(name, _parameters(found), {}, options)


def _check_agent(name: str, found: Any, agent: agents.Options) -> None:
    """Raises ValueError for options of agents that the workflow `found`, named `name`, does not use."""
    plays = name == ONLINE or name.startswith(COMMAND) or not (_generates(found) or hasattr(found, "arun_episode"))
    given = [field.name for field in dataclasses.fields(agent) if getattr(agent, field.name) != field.default]
    if not plays and given:
        named = ", ".join(f"--agent.{key.replace('_', '-')} {getattr(agent, key)}" for key in given)
        raise ValueError(f"--agent.* is for agents, which --workflow {name} is not, got {named}; leave it out")
    if agent.environment and not name.startswith(COMMAND):
        raise ValueError(
            f"--agent.environment: is for programs, --workflow exec:..., got {name}, which shares the run's own"
        )


def find(name: str) -> Any:
    """Loads the object at the path `name`; None for `exec:` and `online`.

    Raises:
      ValueError: it cannot be loaded, or is not a workflow.
    """
    if name.startswith(COMMAND):
        agents.split(name.removeprefix(COMMAND))
    if name == ONLINE or name.startswith(COMMAND):
        return None
    try:
        found = object_path.load_object(name)
    except ValueError as error:
        missing = getattr(error.__cause__, "name", None)
        if not isinstance(missing, str) or missing.partition(".")[0] != "areal":
            raise
        raise ValueError(f"{error}; import AReaL's names from {areal.__name__} (docs/train-an-agent.md)") from None
    takes = {} if inspect.isclass(found) or not callable(found) else _parameters(found)
    if not ({"generate", "base_url"} & takes.keys() or hasattr(found, "run") or hasattr(found, "arun_episode")):
        raise ValueError(
            f"--workflow {name}: must be a function that takes `generate`, or an agent that takes `base_url`, or have "
            f"a method `run` or `arun_episode`; got {type(found).__name__}({', '.join(takes)})"
        )
    return found


def _generates(found: Any) -> bool:
    """Whether it is a native workflow, a function that takes `generate`."""
    return callable(found) and not inspect.isclass(found) and "generate" in _parameters(found)


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _taken(name: str, parameters: Mapping[str, inspect.Parameter], offered: Mapping, options: Mapping) -> dict:
    """The entries of `offered` that a function takes, and all options; raises ValueError for one it does not take."""
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if unknown := [option for option in options if option not in parameters and not anything]:
        raise ValueError(
            f"--workflow-options: {name} takes {', '.join(sorted(parameters)) or 'nothing'}, got {', '.join(unknown)}"
        )
    return {key: value for key, value in offered.items() if key in parameters} | dict(options)
