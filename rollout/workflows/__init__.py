"""Workflows: coroutines `workflow(generate, row)` that turn one row of data into a sample, several, or None.

`generate(tokens, images=(), **sampling)` continues a list of tokens and returns a `types.Completion`; anything else
that an episode needs (a tokenizer, a reward, tools) is bound with `functools.partial`. None rejects the episode.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .. import object_path, rewards
from ..chat import answers, conversation, images, template
from ..types import Generate, Sample, Sampling, sampled


async def single_turn(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    processor: images.Processor | None = None,
    reward: Callable[..., Awaitable[Any]],
    sampling: Sampling,
) -> Sample:
    """Samples one completion of the row's prompt, with its reward at the last token, or those of steps at theirs.

    Args:
      row: has "prompt" (a user's message) or "messages" (a list of {"role", "content"}), and any "images".
      tokenizer: a Hugging Face tokenizer; without a chat template it continues "prompt" as plain text.
      processor: of a model that reads images; None = a row with images is refused.
      reward: from `rewards.pool`, or any coroutine function of (text, row, **context); text has no special tokens; in
        a format with channels it is what is said to the user, and if the limit of tokens cut a thought that the prompt
        had opened, it begins with <think> (`answers.text`). The context is prompt (as templated), prompt_ids and
        completion_ids. A list of (end, reward) pairs gives the rewards of steps: each is at
        the token that completes the first `end` characters of text, at the last token if these are all.

    Returns:
      A sample whose info holds the row and the texts `prompt` and `text`.

    Raises:
      ValueError: the row has no prompt, or the server refuses it (for example, too long for the context).
    """
    talk = conversation.prompt(row)
    try:
        if images.within(talk.messages):
            prompt = await asyncio.to_thread(template.prompted, tokenizer, row, processor)
        else:
            prompt = _templated(tokenizer, processor, conversation.json_text("a row", conversation.prompt_fields(row)))
        seen = {"images": prompt.images} if prompt.images else {}
        done = await generate(list(prompt.tokens), **seen, **sampling.arguments())
    except ValueError as error:
        raise ValueError(f"single_turn: {error}; {object_path.row(row)}") from error
    asked = prompt.text, done.finish == "length"
    text = answers.text(tokenizer, done.tokens, *asked)
    context = {"prompt": prompt.text, "prompt_ids": list(prompt.tokens), "completion_ids": list(done.tokens)}
    score = rewards.score(await reward(text, row, **context))
    sample = sampled(
        prompt.tokens,
        done,
        temperature=sampling.temperature,
        reward=score.value,
        components=score.components,
        images=prompt.images,
        info={"row": row, "prompt": prompt.text, "text": text},
    )
    if not (score.steps and done.tokens):
        return sample
    places = answers.completing(tokenizer, done.tokens, [end for end, _ in score.steps], *asked)
    pairs = zip(places, score.steps, strict=True)
    return sample.replace(rewards=tuple((len(prompt.tokens) + place, value) for place, (_, value) in pairs))


@functools.lru_cache(maxsize=4096)  # the episodes of a group share a prompt, and templates are slow
def _templated(tokenizer: Any, processor: Any, row: str) -> template.Prompt:
    return template.prompted(tokenizer, json.loads(row), processor)
