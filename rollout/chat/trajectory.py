"""Interactions of an episode to rows of training data, exact to the token.

An interaction is one request to the model and what was sampled for it. Those of an episode form a tree: an
interaction's parent is the one that its conversation goes on from, and it either extends the parent's tokens or, where
the chat template rewrote them, begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..rewards import Score
from ..types import Completion, Sample
from .parsers import Answer

Style = Literal["leaves", "interactions"]


@dataclass(eq=False, kw_only=True)
class Interaction:
    """One request and its answer; what follows `temperature` is known once it is answered.

    Attributes:
      parent: whose conversation it goes on from; None = nobody's.
      extends: its prompt begins with all of the parent's tokens.
      messages, tools, template: what was asked, in the form of OpenAI's chat API; empty for a prompt of tokens.
      before: the text asked with, which the template made of the messages.
      prompt, temperature: the tokens asked with, and how those of the completion are drawn.
      id: unique.
      completion: what was sampled.
      text: of the completion without what ended it; of special tokens only `parsers.MARKERS` have one.
      answer: what the text says.
      score: its own reward, if it was given one.
    """

    parent: Interaction | None = None
    extends: bool = False
    messages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    before: str = field(default="", repr=False)
    prompt: tuple[int, ...]
    temperature: float
    id: str = ""
    completion: Completion = Completion([], [], [], "abort")
    text: str = ""
    answer: Answer = Answer("")
    score: Score | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.completion.tokens)

    @property
    def conversation(self) -> tuple[Any, ...]:
        """The messages with the answer."""
        return (*self.messages, self.answer.message())


def samples(done: Sequence[Interaction], style: Style = "leaves", discount: float = 1.0) -> list[Sample]:
    """The rows of an episode, of which every sampled token is learnt in exactly one.

    "leaves": a row for each interaction that no other extends, which holds those it extends. A turn that several rows
    hold is learnt in the first. A reward stands at the last token of its turn; those of other rows are added at
    the row's last token, so that each row has the episode's reward (`core.advantages.group` wants them to agree).

    "interactions": a row for each, with its own reward and `discount` times the rewards of those that go on from it:
    R = r + discount * sum of R over its children. Its prompt is not learnt. Each is compared with the mean over the
    group's episodes of their mean; what is reported is the episode's reward, the sum of all.

    An episode that was given no reward at all, or an unscorable one, is unscorable: NaN.

    Args:
      done: interactions in the order of their ends; those without a sampled token make no row.

    Raises:
      ValueError: a discount with "leaves", where `Advantage.gamma` is for that.
      AssertionError: an interaction does not begin with the tokens it extends, which would be a fault of this library.
    """
    if style == "leaves" and discount != 1:
        raise ValueError(
            f'samples: a discount needs style "interactions", got {discount}; "leaves" has an objective\'s '
            'advantage.gamma with credit "return"'
        )
    given = [x.score for x in done if x.score]
    total = sum(score.value for score in given) if given else math.nan
    parts = {name: sum(s.components.get(name, 0.0) for s in given) for s in given for name in s.components}
    if style == "interactions":
        worth = returns(done, discount)
        rows = [_row([x], {x}, math.nan if math.isnan(total) else worth[x], False) for x in done if x.completion.tokens]
    else:
        extended = {x.parent for x in done if x.extends}
        rows, taken = [], set()
        for leaf in (x for x in done if x not in extended):
            chain = _chain(leaf)
            learnt = {x for x in chain if x not in taken and x.completion.tokens}
            taken |= learnt
            if learnt:
                rows.append(_row(chain, learnt, total, True))
    return [row.replace(components=parts, info={"episode_reward": total}) for row in rows]


def returns(done: Sequence[Interaction], discount: float) -> dict[Interaction, float]:
    """R = r + discount * sum of R over the interactions that go on from it; r = 0 where none was given."""
    worth = {x: x.score.value if x.score else 0.0 for x in done}
    for x in sorted(done, key=_depth, reverse=True):
        if x.parent:
            worth[x.parent] += discount * worth[x]
    return worth


def _depth(x: Interaction) -> int:
    depth = 0
    while x.parent:
        x, depth = x.parent, depth + 1
    return depth


def _chain(leaf: Interaction) -> list[Interaction]:
    """The interactions whose tokens a leaf holds, the first one first."""
    chain = [leaf]
    while chain[-1].extends:
        assert chain[-1].parent is not None
        chain.append(chain[-1].parent)
    return chain[::-1]


def _row(chain: Sequence[Interaction], learnt: set[Interaction], reward: float, per_turn: bool) -> Sample:
    leaf = chain[-1]
    n = len(leaf.tokens)
    tokens = np.asarray(leaf.tokens, np.int32)
    mask, logp = np.zeros(n, bool), np.zeros(n, np.float32)
    version, turn = np.full(n, -1, np.int32), np.zeros(n, np.int32)
    rewards: dict[int, float] = {}
    end = 0
    for number, x in enumerate(chain):
        start, turn[end:] = len(x.prompt), number
        if not np.array_equal(tokens[: len(x.tokens)], x.tokens):
            raise AssertionError(f"trajectory: interaction {leaf.id} does not begin with the tokens of {x.id}")
        end = len(x.tokens)
        if x in learnt:
            mask[start:end] = True
            logp[start:end], version[start:end] = x.completion.logp, x.completion.version
            if per_turn and x.score and not math.isnan(x.score.value):
                rewards[end - 1] = x.score.value
    rest = reward - sum(rewards.values())
    if rest or not rewards:
        rewards[n - 1] = rewards.get(n - 1, 0.0) + rest
    routed: dict = {} if leaf.completion.routed is None else {"routed_experts": ("input", _routed(chain))}
    return Sample(
        tokens=tokens, mask=mask, logp=logp, version=version, turn=turn, temperature=leaf.temperature,
        rewards=tuple(rewards.items()), finish=leaf.completion.finish, arrays=routed,
    )  # fmt: skip


def _routed(chain: Sequence[Interaction]) -> np.ndarray:
    """Experts of each token, as they were when its successor was sampled; -1 for the last, which nobody has read."""
    leaf = chain[-1].completion.routed
    assert leaf is not None
    routed = np.pad(leaf, ((0, 1), (0, 0), (0, 0)), constant_values=-1)
    for x in reversed(chain[:-1]):
        if x.completion.routed is not None:
            routed[: len(x.completion.routed)] = x.completion.routed
    return routed
