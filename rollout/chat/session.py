"""An episode's conversations with the policy, which record every token exactly as it was sampled.

`Session.ask` takes complete conversations, as chat APIs do, and finds which earlier answer a conversation continues.
Sampled tokens are never retokenised: only new messages are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from .. import rewards
from ..errors import ServerError
from ..types import Completion, Generate, Image, Sample, Sampling
from . import conversation, images, observations, states, template, trajectory
from .detokenizer import Reader
from .parsers import Answer, decoder, opened, said, style_for
from .parsers import parse as parsed
from .template import check_length
from .trajectory import Interaction

LONG = 2**18  # characters of a conversation that is encoded in a thread, because it takes a quarter of a second
Parse = Callable[..., Answer]  # parse(text, cut=...)


def _content(text: str, cut: bool) -> Answer:
    return Answer(text)


class Session:
    """One episode. Calls may overlap: agents that work in parallel share a session.

    Attributes:
      id: unique, not secret.
      interactions: requests and answers so far, in the order of the answers.
      failure: the last error of a generation server, which the agent may have handled or masked.
      refusal: why the last request was refused, as one whose prompt is longer than the context; "" = it was not.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: Any,
        processor: images.Processor | None = None,
        *,
        sampling: Sampling | None = None,
        style: str = "",
    ):
        """
        Args:
          generate: as `Fleet.generate`; the tokens it returns are those trained on.
          tokenizer: a Hugging Face tokenizer.
          processor: of a model that reads images; None = messages with images are refused.
          sampling: sampling parameters that override the agent's, who may only lower max_new_tokens and add stop
            strings or a json_schema; None = the agent's.
          style: as `parsers.style_for`.
        """
        self.id = secrets.token_hex(8)
        self.interactions: list[Interaction] = []
        self.failure: ServerError | None = None
        self.refusal = ""
        self._generate, self._tokenizer, self._sampling = generate, tokenizer, sampling
        self._processor = processor
        self._style = style_for(tokenizer, style)
        self._decode = decoder(tokenizer, self._style)
        self._ends: dict[str, list[Interaction]] = {}  # by key of the conversation that they end, newest first

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        parse: Parse | None = None,
        calls: bool = False,
        ends: Callable[[Sequence[int]], int | None] | None = None,
        on_prompt: Callable[[int], None] | None = None,
        on_text: Callable[[str], None] | None = None,
        **sampling,
    ) -> Interaction:
        """Samples the policy's next answer in a conversation.

        Args:
          messages, tools: in OpenAI's format; contents are texts, or lists of parts with images (`chat/images.py`).
          template: variables of the chat template, such as `enable_thinking`.
          parse: parse(text, cut=...) parses the answer's text, which the limit of tokens may have cut; None =
            `parsers.said`, or with `calls` `parsers.parse`, which reads calls of the tools, and reasoning.
          ends: of the sampled tokens how many are the answer; None = all. It must depend on these alone: then what
            remains has the policy's distribution.
          on_prompt: called with the number of the prompt's tokens before one is sampled.
          on_text: called with pieces of the text as they are sampled.
          sampling: as for `Fleet.generate`; `stop` strings are not part of the text.

        Raises:
          ValueError: the template refuses the messages, an image cannot be read, or the server refuses the request.
          ServerError: the server failed.
        """
        check_length(self._tokenizer, messages)
        given = messages, tools, dict(template or {}), self._temperature(sampling)
        long = images.within(messages) or sum(len(str(message.get("content"))) + 100 for message in messages) > LONG
        interaction = await asyncio.to_thread(self._asked, *given) if long else self._asked(*given)
        if on_prompt:
            on_prompt(len(interaction.prompt))
        before, style = interaction.before, self._style
        spoken = lambda text, cut: said(text, style, cut, before)
        called = lambda text, cut: parsed(text, style, cut=cut, tools=list(tools), opened=opened(before, style))
        await self._sample(interaction, parse or (called if calls else spoken), on_text, sampling, ends)
        self._ends.setdefault(_keys(interaction.conversation)[-1], []).insert(0, interaction)
        return interaction

    async def complete(
        self, prompt: Sequence[int], *, on_text: Callable[[str], None] | None = None, **sampling
    ) -> Interaction:
        """Samples a continuation of a list of tokens, independent of any conversation."""
        if self._processor:
            self._processor.expanded(prompt, ())  # refuses the image token
        interaction = Interaction(prompt=tuple(prompt), written=tuple(prompt), temperature=self._temperature(sampling))
        await self._sample(interaction, _content, on_text, sampling)
        return interaction

    def set_reward(self, value: Any, interaction: str = "") -> None:
        """Sets the reward of an interaction, by default the last one; replaces an earlier reward.

        Args:
          value: a number, a mapping of named components (`rewards.whole`), or None = unscorable.

        Raises:
          ValueError: there is no such interaction, or the value is invalid.
        """
        found = [x for x in self.interactions if not interaction or x.id == interaction]
        if not found:
            what = f"no interaction {interaction!r:.80}" if interaction else "no interaction yet"
            raise ValueError(f"set_reward: there is {what} in this session")
        found[-1].score = rewards.whole(value)

    def samples(self, *, style: trajectory.Style = "leaves", discount: float = 1.0, **fields) -> list[Sample]:
        """Converts the episode to rows of training data (`trajectory.samples`), each with `fields` in its info."""
        observed = functools.partial(observations.spans, self._tokenizer) if observations.wanted.get() else None
        state = states.number if states.wanted.get() else None
        decode = lambda tokens: self._tokenizer.decode(self._shown(tokens.tolist()))
        return [
            row.replace(
                info={**row.info, **fields, "prompt": decode(row.tokens[:start]), "text": decode(row.tokens[start:])}
            )
            for row in trajectory.samples(self.interactions, style, discount, observed, state)
            for start in [int(row.mask.argmax())]
        ]

    def _shown(self, tokens: list[int]) -> list[int]:
        """Tokens with one for each image."""
        image = self._processor.token if self._processor else None
        return [
            token for before, token in zip([None, *tokens], tokens, strict=False) if token != image or before != image
        ]

    def _asked(self, messages, tools, options, temperature) -> Interaction:
        """Makes the interaction to be sampled, linked to the one that it continues."""
        messages = list(map(conversation.spoken, images.read(messages, self._processor)))
        messages = template.ended(self._tokenizer, messages)
        parent, rest = None, messages
        keys = _keys(messages)
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1].get("role") == "assistant" and keys[end - 1] in self._ends:
                parent = max(self._ends[keys[end - 1]], key=lambda x: _likeness(x.answer, messages[end - 1]))
                # Restores what agents do not send back, such as reasoning.
                rest = [*parent.conversation, *messages[end:]]
                break
        now = template.render(self._tokenizer, rest, tools, options, ask=True)
        added = self._added(parent, now, temperature) if parent else None
        begun = parent if added is not None else None
        new = written = template.encode(self._tokenizer, now) if added is None else added
        seen = images.of(rest)
        if self._processor:
            new = self._processor.expanded(written, seen[len(begun.images) if begun else 0 :])
        return Interaction(
            parent=parent, extends=begun is not None, messages=tuple(rest), tools=tuple(tools), template=options,
            before=now, prompt=(*(begun.tokens if begun else ()), *new),
            written=(*(begun.spoken if begun else ()), *written), images=seen, temperature=temperature,
        )  # fmt: skip

    def _added(self, parent: Interaction, now: str, temperature: float) -> list[int] | None:
        """The tokens of the text that `now` appends to the parent's, an image each one; None if it does not extend
        them."""
        tokens = list(parent.spoken)
        if parent.temperature != temperature or not parent.completion.tokens:  # a row has one temperature
            return None
        if self._processor and self._processor.token in parent.completion.tokens:  # it would stand for a feature
            return None
        answer, tokenizer, end = parent.answer, self._tokenizer, template.closing(self._tokenizer)
        stopped = parent.completion.finish == "stop" and parent.closed
        closing = template.after(tokenizer, tokens[-1], end) if stopped else end
        seen = tokenizer.decode(tokens) + closing
        if now.startswith(seen):  # identical text
            added: str | None = now[len(seen) :]
        else:  # or as the template renders the answer, for example with other white space in a call
            spoken = template.render(tokenizer, parent.conversation, parent.tools, parent.template, ask=False)
            parts = (answer.reasoning, answer.content)
            if stopped and spoken.endswith(stop := tokenizer.decode(tokens[-1:])):  # one behind calls, such as <|call|>
                end = stop
            added = template.continuation(parent.before, spoken, now, texts=parts, closing=end)
        return None if added is None else template.encode(tokenizer, closing + added)

    def context(self, x: Interaction) -> dict[str, Any]:
        """The context of an answer that a reward may use, besides its text and the row (`rewards.Pool`)."""
        prompt = x.before or self._tokenizer.decode(list(x.prompt))
        return {"prompt": prompt, "prompt_ids": list(x.prompt), "completion_ids": list(x.completion.tokens)}

    def _temperature(self, sampling: Mapping[str, Any]) -> float:
        return self._sampling.temperature if self._sampling else sampling.get("temperature", 1.0)

    async def _sample(self, x: Interaction, parse: Parse, on_text, given, ends=None) -> None:
        sampling = {name: value for name, value in given.items() if value is not None}
        if fixed := self._sampling:
            budget = min(sampling.get("max_new_tokens", fixed.max_new_tokens), fixed.max_new_tokens)
            sampling = fixed.arguments() | {
                "max_new_tokens": budget,
                "min_new_tokens": min(fixed.min_new_tokens, budget),
                "stop": (*fixed.stop, *sampling.get("stop", ())),
                **{name: sampling[name] for name in ("json_schema",) if name in sampling},
            }
        reader = _Reader(self._decode, sampling.get("stop", ()), on_text)
        more: dict[str, Any] = {"on_tokens": reader.sampled} if on_text else {}
        more |= {"images": x.images} if x.images else {}
        try:
            x.completion = await self._generate(list(x.prompt), **sampling, **more)
        except ServerError as error:
            self.failure = error
            raise
        except ValueError as error:
            self.refusal = str(error)
            raise
        self.refusal = ""
        end = ends(x.completion.tokens) if ends else None
        if end is not None:
            x.completion, x.closed = _first(x.completion, end), False
        x.text = reader.finish(x.completion.tokens, x.closed and x.completion.finish == "stop")
        x.answer = parse(x.text, cut=x.completion.finish == "length")
        x.id = f"{self.id}-{len(self.interactions)}"
        self.interactions.append(x)


def _first(completion: Completion, end: int) -> Completion:
    """The first `end` tokens of a completion, as if it had stopped there."""
    routed, rest, mask = completion.routed, len(completion.tokens) - end, completion.sampling_mask
    top = completion.top
    return dataclasses.replace(
        completion, tokens=completion.tokens[:end], logp=completion.logp[:end], version=completion.version[:end],
        finish="stop", text="", routed=routed if routed is None else routed[: len(routed) - rest],
        sampling_mask=mask if mask is None else mask[:end], top=top and (top[0][:end], top[1][:end]),
    )  # fmt: skip


def _keys(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each message a key of the conversation up to it; equal keys mean the same conversation.

    Keys ignore reasoning, ids of calls, text next to calls and the formatting of arguments, because SDKs drop or
    rewrite these. Images count by their hash.
    """
    digest, keys = xxhash.xxh3_128(), []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        content = [[call["name"], _canonical(call["arguments"])] for call in calls] or message.get("content") or ""
        digest.update(json.dumps([message.get("role"), content], default=_hash).encode() + b"\n")
        keys.append(digest.hexdigest())
    return keys


def _hash(image: Image) -> str:
    return image.hash


def _canonical(arguments: Any) -> str:
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
    except (TypeError, ValueError):
        return str(arguments)


def _likeness(answer: Answer, sent: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """How well a message sent back by an agent matches an earlier answer, as a sort key."""
    ids = [call.get("id") for call in sent.get("tool_calls") or ()]
    return (
        ids == [call.id for call in answer.tool_calls],
        conversation.reasoning(sent) == answer.reasoning,
        (sent.get("content") or "") == answer.content,
    )


class _Reader:
    """Passes on the text of a completion while it grows; holds back the last token, which may be the stop token."""

    def __init__(self, decode: Callable, stops: Sequence[str], on_text: Callable[[str], None] | None):
        self._reader, self._on_text = Reader(decode, stops), on_text
        self._read: list[int] = []

    def sampled(self, tokens: list[int]) -> None:
        """Takes the tokens so far. Raises ServerError if they differ from those of the last call."""
        if tokens[: len(self._read)] != self._read:
            raise ServerError("tokens were resampled after their text had been sent")
        new = tokens[len(self._read) : -1]
        self._read += new
        self._show("".join(map(self._reader.push, new)))

    def finish(self, tokens: Sequence[int], stopped: bool) -> str:
        """The complete text; `stopped` as for `detokenizer.Reader.finish`."""
        text, rest = self._reader.finish(tokens, stopped)
        self._show(rest)
        return text

    def _show(self, text: str) -> None:
        if self._on_text and text:
            self._on_text(text)
