"""Which tokens of an episode are observations: what the environment answered, for objectives that learn it
(`core.observation`).

They are the contents of the messages behind an answer of the policy, without the marks of turns around them. The task,
which no answer precedes, is none.
"""

from __future__ import annotations

import contextvars
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..types import Generate, Sample, Workflow
from . import images, template
from .detokenizer import CONTEXT, UNFINISHED, Text
from .trajectory import Interaction, Span

KINDS = "tool", "error", "user"  # numbered from 1 on, as in `core.observation`
BLOCK = 128  # tokens
ERROR = "error: "  # with which answers of `workflows.tools` begin that report one

wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("observations", default=False)


async def marked(workflow: Workflow, generate: Generate, row: Mapping[str, Any]) -> list[Sample]:
    """A workflow whose samples have the "target" array `observation` i8[n]: the number of each token's kind, 0 = none;
    bind `workflow` with `functools.partial`.

    Raises:
      ValueError: the workflow makes samples without that array.
    """
    return await with_array("observation", "--objective.observation.coef", wanted, workflow, generate, row)


async def with_array(
    name: str, option: str, asked: contextvars.ContextVar[bool], workflow: Workflow, generate: Generate,
    row: Mapping[str, Any],
) -> list[Sample]:  # fmt: skip
    """A workflow's samples, made while an array of that name is asked for; raises ValueError for some without it."""
    token = asked.set(True)
    try:
        made = await workflow(generate, row)
    finally:
        asked.reset(token)
    samples = [] if made is None else made if isinstance(made, list) else [made]
    if any(name not in sample.arrays for sample in samples):
        raise ValueError(
            f"{option}: the workflow must mark {name}s, got samples without the array '{name}'; take one of several "
            "turns, or leave it out"
        )
    return samples


def spans(tokenizer: Any, x: Interaction) -> list[Span]:
    """The observations that an interaction's prompt adds to the conversation that it continues.

    A content that the chat template rewrites, other than by stripping or as JSON, is not found, and so not learnt.
    """
    if x.parent is None:
        return []
    start = len(x.parent.tokens) if x.extends else 0
    tokens = list(x.prompt[start:])
    text, length = tokenizer.decode(tokens), _lengths(tokenizer.decode, tokens)
    history = template.render(tokenizer, x.messages, x.tools, x.template, ask=False)
    asked = len(x.before) - len(history) if x.before.startswith(history) else 0  # characters of the generation prompt
    end = len(text) - asked
    found: list[Span] = []
    for message in reversed(x.messages[len(x.parent.conversation) :]):
        for content in reversed(_texts(message)):
            said = [one for one in (content.strip(), json.dumps(content, ensure_ascii=False)) if one]
            places = [(at, at + len(one)) for one in said if (at := text.rfind(one, 0, end)) >= 0]
            if not content.strip() or not places:
                continue
            end = places[0][0]
            if kind := _kind(message):
                (first, stop), counts = places[0], range(len(tokens) + 1)
                at = bisect_left(counts, first, key=length)
                found.append((start + at - (length(at) > first), start + bisect_left(counts, stop, key=length), kind))
    return found


def _texts(message: Mapping[str, Any]) -> Sequence[str]:
    content = message.get("content")
    return [content] if isinstance(content, str) else [images.words([part]) for part in content or ()]


def _kind(message: Mapping[str, Any]) -> int:
    """The number of the kind of what a message says; 0 = no observation."""
    name = message["role"]
    if name == "tool" and images.words(message.get("content")).startswith(ERROR):
        name = "error"
    return 1 + KINDS.index(name) if name in KINDS else 0


def _lengths(decode: Callable[[list[int]], str], tokens: list[int]) -> Callable[[int], int]:
    """f(count) = whole characters of the text of the first `count` tokens, of which it decodes few again."""
    text, marks = Text(decode), [0]
    for at in range(0, len(tokens), BLOCK):
        text.feed(tokens[at : at + BLOCK])
        marks.append(len(text.text))

    def length(count: int) -> int:
        block = count // BLOCK
        start = max(block * BLOCK - CONTEXT, 0)
        size = lambda end: len(decode(tokens[start:end]).rstrip(UNFINISHED))
        return marks[block] + size(count) - size(block * BLOCK)

    return length
