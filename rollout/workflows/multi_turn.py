"""Multi-turn workflows: retries after feedback, tool use, self-judging; `environments` has those of worlds.

Each takes the arguments of `workflows.single_turn` and further options, given on the command line as JSON:
`--workflow areax.rollout.workflows.multi_turn:multi_turn --workflow-options '{"turns": 4}'`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from .. import object_path, rewards
from ..chat import conversation, images, parsers, template
from ..chat.session import Session
from ..chat.trajectory import Interaction
from ..rewards import judge
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
VERDICT_NUMBER = re.compile(judge.LAST)


async def multi_turn(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    processor: images.Processor | None = None,
    reward: Reward,
    sampling: Sampling,
    turns: int = 3,
    discount: float = 1.0,
    feedback: str = FEEDBACK,
) -> list[Sample]:
    """Asks until an answer is rewarded, with `feedback` after each one that is not, for at most `turns` answers.

    Args:
      row: has "prompt" or "messages"; its "feedback", if any, replaces `feedback`.
      discount: the episode's reward is that of its last answer times discount^(turns before it).
    """
    session = Session(generate, tokenizer, processor, sampling=sampling)
    messages, shown = _begun(tokenizer, row)
    final: dict[str, float] | None = None
    for turn in range(counted(turns)):
        if not (x := await following(session, messages, **shown)):
            break
        score = rewards.whole(await reward(x.answer.content, row, **session.context(x)))
        final = {**score.components, "reward": score.value * discount**turn}
        if score.value > 0:
            break
        told = feedback if row.get("feedback") is None else row["feedback"]
        messages += [x.answer.message(), {"role": "user", "content": told}]
    session.set_reward(final)
    return session.samples(row=row)


async def tool_loop(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    processor: images.Processor | None = None,
    reward: Reward,
    sampling: Sampling,
    tools: Sequence[str] = ("areax.rollout.workflows.multi_turn:PYTHON",),
    turns: int = 8,
    style: str = "",
) -> list[Sample]:
    """Runs a tool-use loop: executes the policy's tool calls until it makes none, for at most `turns` answers.

    The reward is that of the last answer.

    Args:
      tools: object paths of functions with type hints, or of `tools.Tool` objects.
      style: the format of answers, one of `formats.NAMES`; "" = that of the model's chat template.

    Raises:
      ValueError: calls of this format are not read, or the row has no prompt.
    """
    style = style_of_calls("tool_loop", tokenizer, style)
    session = Session(generate, tokenizer, processor, sampling=sampling, style=style)
    messages, shown = _begun(tokenizer, row)
    if shown["tools"]:
        raise ValueError(
            f"tool_loop: calls the tools of --workflow-options, got a row with 'tools'; {object_path.row(row)}"
        )
    kit = _kit(tuple(tools))
    shown["tools"] = [toolbox.schema(tool) for tool in kit]
    for _ in range(counted(turns)):
        x = await following(session, messages, calls=True, **shown)
        if not x or not x.answer.tool_calls or x.answer.tool_calls[-1].cut:
            break
        messages.append(x.answer.message())
        for call in x.answer.tool_calls:
            result = await toolbox.call(kit, call.name, call.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
    last = session.interactions[-1]
    session.set_reward(await reward(last.answer.content, row, **session.context(last)))
    return session.samples(row=row)


@functools.cache
def _kit(named: tuple[str, ...]) -> tuple[toolbox.Tool, ...]:
    found = map(object_path.load_object, named)
    return tuple(one if isinstance(one, toolbox.Tool) else toolbox.tool(one) for one in found)


async def judged(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    processor: images.Processor | None = None,
    sampling: Sampling,
    question: str = VERDICT,
    best: float = 10.0,
) -> list[Sample]:
    """Self-rewarding: the policy judges its answer in a second conversation, not trained on (arXiv:2401.10020).

    For a separate judge model use the reward `areax.rollout.rewards.judge`.

    Args:
      question: the judge's prompt, a template with {question} and {answer}.
      best: the number that maps to a reward of 1; a verdict that does not end in a number from 0 to it, as "8",
        "8/10" or "8 out of 10", is unscorable.
    """
    session = Session(generate, tokenizer, processor, sampling=sampling)
    messages, shown = _begun(tokenizer, row)
    answer = (await session.ask(messages, **shown)).answer.content
    put = question.format(question=images.words(messages[-1]["content"]), answer=answer)
    critic = Session(generate, tokenizer, processor, sampling=sampling)
    asked = [*images.found(messages), {"type": "text", "text": put}] if images.within(messages) else put
    verdict = (await critic.ask([{"role": "user", "content": asked}], template=shown["template"])).answer
    session.set_reward(judge.grade(verdict.content, VERDICT_NUMBER, best))
    return session.samples(row=row, verdict=verdict.content)


def _begun(tokenizer: Any, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a row's prompt, and what else `Session.ask` needs of it."""
    talk = template.readable(tokenizer, conversation.prompt(row))
    return talk.messages, {"tools": talk.tools, "template": talk.variables}


async def following(session: Session, messages: Sequence[Mapping[str, Any]], **how) -> Interaction | None:
    """The next answer; None if the conversation cannot continue after its first answer, because it exceeds the model's
    context or the template cannot render it."""
    try:
        return await session.ask(messages, **how)
    except ValueError as error:
        if not session.interactions:
            raise
        log.info("an episode ends early: %s", error)
        return None


def style_of_calls(where: str, tokenizer: Any, style: str) -> str:
    """The format of calls called `style`, or that of the chat template; raises ValueError if its calls are not read."""
    named, style = style, parsers.style_for(tokenizer, style)
    if style not in parsers.STYLES or not parsers.STYLES[style].calls:
        known = ", ".join(name for name in parsers.NAMES if parsers.STYLES[name].calls)
        raise ValueError(
            f"{where}: style must be a format of calls, {known}, got {style}"
            f"{'' if named else ', by the chat template'}; name the model's as style in the workflow's options"
        )
    return style


def counted(turns: int) -> int:
    """`turns`, which must be at least 1."""
    if not isinstance(turns, int) or turns < 1:
        raise ValueError(f"turns: must be an integer of at least 1, got {turns!r}")
    return turns
