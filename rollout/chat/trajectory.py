"""Converts the interactions of an episode to rows of training data, token by token.

An interaction is one request to the model and its completion. Those of an episode form a tree: an interaction's parent
is the one whose conversation it continues. It either extends the parent's tokens or, if the chat template rewrote them,
begins a new sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..rewards import Score
from ..types import Completion, Image, Sample
from .parsers import Answer

Style = Literal["leaves", "interactions"]


@dataclass(eq=False, kw_only=True)
class Interaction:
    """One request and its answer; the fields after `temperature` are set once it is answered.

    Attributes:
      parent: the interaction whose conversation it continues; None = a new conversation.
      extends: its prompt begins with all of the parent's tokens.
      messages, tools, template: the request, in OpenAI's format; empty for a prompt of tokens.
      before: the prompt as text, rendered by the template.
      prompt, temperature: the prompt's tokens, an image as many as it has features, and the sampling temperature.
      written: the prompt's tokens as the template writes them, an image one.
      images: those of the prompt, in order.
      id: unique.
      completion: the sampled completion.
      closed: if it has stopped, a stop token or string ended it.
      text: the completion's text without its stop token or string; of special tokens only those of
        `parsers.Style.markers` are kept.
      answer: the parsed text.
      score: its own reward, if one was set.
    """

    parent: Interaction | None = None
    extends: bool = False
    messages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    before: str = field(default="", repr=False)
    prompt: tuple[int, ...]
    written: tuple[int, ...] = field(default=(), repr=False)
    images: tuple[Image, ...] = ()
    temperature: float
    id: str = ""
    completion: Completion = Completion([], [], [], "abort")
    closed: bool = True
    text: str = ""
    answer: Answer = Answer("")
    score: Score | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.completion.tokens)

    @property
    def spoken(self) -> tuple[int, ...]:
        """As `tokens`, but of an image one."""
        return (*self.written, *self.completion.tokens)

    @property
    def conversation(self) -> tuple[Any, ...]:
        """The messages with the answer."""
        return (*self.messages, self.answer.message())


Span = tuple[int, int, int]  # tokens [start, end) of a prompt, and the number of their kind of observation
Observed = Callable[[Interaction], Sequence[Span]]
State = Callable[[Interaction], int]


def samples(
    done: Sequence[Interaction], style: Style = "leaves", discount: float = 1.0, observed: Observed | None = None,
    state: State | None = None,
) -> list[Sample]:  # fmt: skip
    """Converts an episode to rows; every sampled token is trained on in exactly one of them.

    "leaves": one row per interaction that no other extends, containing those it extends. A turn that is in several rows
    is trained on in the first. A reward is placed at the last token of its turn; rewards from other rows are added at
    the row's last token, so that each row has the episode's reward (`core.advantages.group` requires them to agree).

    "interactions": one row per interaction, with its own reward plus `discount` times the return of those that continue
    it: R = r + discount * sum of R over its children. Its prompt is not trained on. Each is compared with the mean over
    the group's episodes of their mean; the reported reward is the episode's, the sum of all.

    An episode without any reward, or with an unscorable one, is unscorable: NaN.

    Args:
      done: interactions in the order in which they ended; those without a sampled token make no row.
      observed: gives the observations in an interaction's prompt; those of the turns that a row trains on become its
        array `observation`. None = rows have no such array.
      state: gives the number of the state in which an interaction began, for the array `state`, likewise.

    Raises:
      ValueError: a discount with "leaves"; use `Advantage.gamma` there.
      AssertionError: an interaction does not begin with the tokens it extends: a bug in this library.
    """
    if style == "leaves" and discount != 1:
        raise ValueError(
            f'samples: a discount needs style "interactions", got {discount}; with "leaves" use the objective\'s '
            'advantage.gamma with credit "return"'
        )
    given = [x.score for x in done if x.score]
    total = sum(score.value for score in given) if given else math.nan
    parts = {name: sum(s.components.get(name, 0.0) for s in given) for s in given for name in s.components}
    if style == "interactions":
        values = returns(done, discount)
        rows = [
            _row([x], {x}, math.nan if math.isnan(total) else values[x], False, observed, state)
            for x in done
            if x.completion.tokens
        ]
    else:
        extended = {x.parent for x in done if x.extends}
        rows, seen = [], set()
        for leaf in (x for x in done if x not in extended):
            chain = _chain(leaf)
            trained = {x for x in chain if x not in seen and x.completion.tokens}
            seen |= trained
            if trained:
                rows.append(_row(chain, trained, total, True, observed, state))
    return [row.replace(components=parts, info={"episode_reward": total}) for row in rows]


def returns(done: Sequence[Interaction], discount: float) -> dict[Interaction, float]:
    """The return of each interaction: R = r + discount * sum of R over its children; r = 0 without a reward."""
    values = {x: x.score.value if x.score else 0.0 for x in done}
    for x in sorted(done, key=_depth, reverse=True):
        if x.parent:
            values[x.parent] += discount * values[x]
    return values


def _depth(x: Interaction) -> int:
    depth = 0
    while x.parent:
        x, depth = x.parent, depth + 1
    return depth


def _chain(leaf: Interaction) -> list[Interaction]:
    """The interactions whose tokens a leaf contains, oldest first."""
    chain = [leaf]
    while chain[-1].extends:
        assert chain[-1].parent is not None
        chain.append(chain[-1].parent)
    return chain[::-1]


def _row(
    chain: Sequence[Interaction], trained: set[Interaction], reward: float, per_turn: bool, observed: Observed | None,
    state: State | None,
) -> Sample:  # fmt: skip
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
        if x in trained:
            mask[start:end] = True
            logp[start:end], version[start:end] = x.completion.logp, x.completion.version
            if per_turn and x.score and not math.isnan(x.score.value):
                rewards[end - 1] = x.score.value
    rest = reward - sum(rewards.values())
    if rest or not rewards:
        rewards[n - 1] = rewards.get(n - 1, 0.0) + rest
    arrays: dict = {} if leaf.completion.routed is None else {"routed_experts": ("input", _routed(chain))}
    if observed:
        observation = np.zeros(n, np.int8)
        for first, stop, kind in (span for x in chain if x in trained for span in observed(x)):
            observation[first:stop] = kind
        arrays["observation"] = "target", observation
    if state:
        states = np.zeros(n, np.int32)
        for x in trained:
            states[len(x.prompt) : len(x.tokens)] = state(x)
        arrays["state"] = "target", states
    if leaf.completion.sampling_mask is not None:
        arrays["sampling_mask"] = "target", _of_sampled(chain, lambda x: x.sampling_mask, -1)
    if leaf.completion.top is not None:
        arrays["sampler_ids"] = "target", _of_sampled(chain, lambda x: x.top and x.top[0], 0)
        arrays["sampler_logp"] = "target", _of_sampled(chain, lambda x: x.top and x.top[1], 0)
    return Sample(
        tokens=tokens, mask=mask, logp=logp, version=version, turn=turn, temperature=leaf.temperature,
        rewards=tuple(rewards.items()), finish=leaf.completion.finish, arrays=arrays,
        images=leaf.images,
    )  # fmt: skip


def _of_sampled(chain: Sequence[Interaction], of: Callable[[Completion], np.ndarray | None], rest: int) -> np.ndarray:
    """An array of the completions, [tokens, ...]; `rest` at the tokens of prompts."""
    leaf = of(chain[-1].completion)
    assert leaf is not None
    made = np.full((len(chain[-1].tokens), *leaf.shape[1:]), rest, leaf.dtype)
    for x in chain:
        if (own := of(x.completion)) is not None:
            made[len(x.prompt) : len(x.tokens)] = own
    return made


def _routed(chain: Sequence[Interaction]) -> np.ndarray:
    """Experts of each token when its successor was sampled; -1 for the last token, which the sampler never read."""
    leaf = chain[-1].completion.routed
    assert leaf is not None
    routed = np.pad(leaf, ((0, 1), (0, 0), (0, 0)), constant_values=-1)
    for x in reversed(chain[:-1]):
        if x.completion.routed is not None:
            routed[: len(x.completion.routed)] = x.completion.routed
    return routed
