"""Workflows of several turns: second attempts after feedback, tools, environments, a judge.

Each takes what `workflows.single_turn` takes, and options of its own, which the command line gives as JSON:
`--workflow areax.rollout.workflows.multi_turn:multi_turn --workflow-options '{"turns": 4}'`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from .. import object_path, rewards
from ..chat import parsers, template
from ..chat.session import Session
from ..chat.template import conversation
from ..chat.trajectory import Interaction
from ..types import Generate, Sample, Sampling
from . import tools as toolbox

log = logging.getLogger(__name__)

Reward = Callable[..., Awaitable[Any]]
FEEDBACK = "That is not right. Look at the question again, find the mistake, and give another answer."
PYTHON = toolbox.python_tool()
VERDICT = (
    "Question:\n{question}\n\nAnswer:\n{answer}\n\nHow good is the answer, from 0 (wrong) to 10 (perfect)? "
    "Say why in a sentence, then write the number alone on the last line."
)


async def multi_turn(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    reward: Reward,
    sampling: Sampling,
    turns: int = 3,
    discount: float = 1.0,
    feedback: str = FEEDBACK,
) -> list[Sample]:
    """Answers until one is rewarded: each that is not is followed by `feedback`, up to `turns` of them.

    Args:
      row: has "prompt" or "messages"; "feedback", if there, takes the place of `feedback`.
      discount: the episode's reward is that of its last answer times discount to the power of the turns before it.
    """
    session, messages = Session(generate, tokenizer, sampling=sampling), conversation(row)
    worth: dict[str, float] | None = None
    for turn in range(_counted(turns)):
        if not (said := await _next(session, messages)):
            break
        score = rewards.score(await reward(said.answer.content, row, **session.context(said)))
        worth = {**score.components, "reward": score.value * discount**turn}
        if score.value > 0:
            break
        messages += [said.answer.message(), {"role": "user", "content": row.get("feedback", feedback)}]
    session.set_reward(worth)
    return session.samples(row=row)


async def tool_loop(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    reward: Reward,
    sampling: Sampling,
    tools: Sequence[str] = ("areax.rollout.workflows.multi_turn:PYTHON",),
    turns: int = 8,
    style: str = "qwen",
) -> list[Sample]:
    """Answers with tools: what the policy calls is called and told, until it calls nothing or `turns` are over.

    The reward is that of the last answer.

    Args:
      tools: names of functions with type hints, or of `tools.Tool` objects.
      style: how the model writes calls: one of `parsers.STYLES`.
    """
    session, messages = Session(generate, tokenizer, sampling=sampling), conversation(row)
    kit = _kit(tuple(tools))
    schemas = [toolbox.schema(tool) for tool in kit]
    parse = functools.partial(parsers.parse, style=style, opened=template.opens(tokenizer))
    for _ in range(_counted(turns)):
        said = await _next(session, messages, tools=schemas, parse=parse)
        if not said or not said.answer.tool_calls:
            break
        messages.append(said.answer.message())
        for call in said.answer.tool_calls:
            told = await toolbox.call(kit, call.name, call.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": told})
    last = session.interactions[-1]
    session.set_reward(await reward(last.answer.content, row, **session.context(last)))
    return session.samples(row=row)


@functools.cache
def _kit(named: tuple[str, ...]) -> tuple[toolbox.Tool, ...]:
    found = map(object_path.load_object, named)
    return tuple(one if isinstance(one, toolbox.Tool) else toolbox.tool(one) for one in found)


class Environment(Protocol):
    """What `environment` plays with; the methods may be coroutines."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begins an episode; returns what the policy is told first."""

    def step(self, action: str) -> tuple[str, float, bool]:
        """(what the policy is told next, the reward of its action, whether the episode is over)."""


async def environment(
    generate: Generate, row: Mapping[str, Any], *, tokenizer: Any, sampling: Sampling, make: str, turns: int = 16
) -> list[Sample]:
    """An episode in an environment: each answer is an action, with a reward of its own.

    Args:
      make: `module:function` or a class that makes an `Environment`, a new one for each episode; one that has a `close`
        is closed.
    """
    session, world = Session(generate, tokenizer, sampling=sampling), object_path.resolve(make)()
    try:
        told = await _finished(world.reset(row))
        messages = [{"role": "user", "content": told}]
        for _ in range(_counted(turns)):
            if not (said := await _next(session, messages)):
                break
            told, value, over = await _finished(world.step(said.answer.content))
            session.set_reward(value, said.id)
            if over:
                break
            messages += [said.answer.message(), {"role": "user", "content": told}]
    finally:
        if close := getattr(world, "close", None):
            await _finished(close())
    return session.samples(row=row)


async def judged(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    sampling: Sampling,
    question: str = VERDICT,
    best: float = 10.0,
) -> list[Sample]:
    """An answer that the policy itself judges in a second conversation, which is not trained on (arXiv:2401.10020).

    A judge of its own, on a server or as a reward model, is a reward: `areax.rollout.rewards.judge`.

    Args:
      question: put to the judge, with {question} and {answer}.
      best: the number that counts as a reward of 1; without a number at its end the verdict is unscorable.
    """
    session, messages = Session(generate, tokenizer, sampling=sampling), conversation(row)
    answer = (await session.ask(messages)).answer.content
    put = question.format(question=messages[-1]["content"], answer=answer)
    verdict = (await Session(generate, tokenizer, sampling=sampling).ask([{"role": "user", "content": put}])).answer
    found = re.search(r"(-?\d+(?:\.\d+)?)\W*$", verdict.content)
    session.set_reward(min(max(float(found[1]) / best, 0.0), 1.0) if found else None)
    return session.samples(row=row, verdict=verdict.content)


async def _next(session: Session, messages: Sequence[Mapping[str, Any]], **how) -> Interaction | None:
    """The next answer; None where a conversation that has begun cannot go on: it has outgrown the model's context, or
    the template has no way to write what was said."""
    try:
        return await session.ask(messages, **how)
    except ValueError as error:
        if not session.interactions:
            raise
        log.info("an episode ends early: %s", error)
        return None


def _counted(turns: int) -> int:
    if not isinstance(turns, int) or turns < 1:
        raise ValueError(f"turns: must be a number from 1 on, got {turns!r}")
    return turns


async def _finished(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
