"""Workflows: coroutines `workflow(generate, row)` that turn one row of data into a sample, several, or None.

`generate(tokens, **sampling)` continues a list of tokens and returns a `types.Completion`; anything else that an
episode needs (a tokenizer, a reward, tools) is bound with `functools.partial`. None rejects the episode.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .. import object_path, rewards
from ..chat import detokenizer, template
from ..types import Generate, Sample, Sampling, sampled


async def single_turn(
    generate: Generate,
    row: Mapping[str, Any],
    *,
    tokenizer: Any,
    reward: Callable[..., Awaitable[Any]],
    sampling: Sampling,
) -> Sample:
    """Samples one completion of the row's prompt, with its reward at the last token, or those of steps at theirs.

    Args:
      row: has "prompt" (a user's message) or "messages" (a list of {"role", "content"}).
      tokenizer: a Hugging Face tokenizer; without a chat template it continues "prompt" as plain text.
      reward: from `rewards.pool`, or any coroutine function of (text, row, **context); text has no special tokens,
        and the context is prompt (as templated), prompt_ids and completion_ids. A list of (end, reward) pairs
        gives the rewards of steps: each is at the token that completes the first `end` characters of text, at the
        last token if these are all.

    Returns:
      A sample whose info holds the row and the texts `prompt` and `text`.

    Raises:
      ValueError: the row has no prompt, or the server refuses it (for example, too long for the context).
    """
    template.conversation(row)
    asked = {name: row[name] for name in ("prompt", "messages") if row.get(name) is not None}
    try:
        prompt, shown = _templated(tokenizer, json.dumps(asked))
        done = await generate(list(prompt), **sampling.arguments())
    except ValueError as error:
        raise ValueError(f"single_turn: {error}; {object_path.row(row)}") from error
    text = tokenizer.decode(done.tokens, skip_special_tokens=True)
    context = {"prompt": shown, "prompt_ids": list(prompt), "completion_ids": list(done.tokens)}
    score = rewards.score(await reward(text, row, **context))
    sample = sampled(
        prompt,
        done,
        temperature=sampling.temperature,
        reward=score.value,
        components=score.components,
        info={"row": row, "prompt": shown, "text": text},
    )
    if not (score.steps and done.tokens):
        return sample
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    places = detokenizer.completing(decode, done.tokens, [end for end, _ in score.steps])
    pairs = zip(places, score.steps, strict=True)
    return sample.replace(rewards=tuple((len(prompt) + place, value) for place, (_, value) in pairs))


@functools.lru_cache(maxsize=4096)  # the episodes of a group share a prompt, and templates are slow
def _templated(tokenizer: Any, row: str) -> tuple[tuple[int, ...], str]:
    prompt = template.prompt(tokenizer, json.loads(row))
    return tuple(prompt), tokenizer.decode(prompt)
