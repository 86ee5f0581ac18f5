"""Demonstrations: token ids of a row's conversation, with a loss mask of the assistant's turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...rollout import types
from ...rollout.chat import demonstration as demonstrations
from ...rollout.chat import images
from ...rollout.chat.demonstration import Learn as Learn
from .. import tokenizer as tokenizers


def demonstration(tokenizer: Any, row: Mapping[str, Any], learn: Learn = "last") -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of a row without images, as `sample`."""
    made = sample(tokenizer, row, learn)
    return made.tokens.tolist(), made.mask.tolist()


def sample(
    tokenizer: Any, row: Mapping[str, Any], learn: Learn = "last", processor: images.Processor | None = None
) -> types.Sample:
    """The sample of a row with "messages" or a "prompt", optionally followed by a "completion".

    Args:
      learn: as in `rollout.chat.demonstration.encoded`.
      processor: as in `template.prompted`.

    Raises:
      ValueError: as there, or the template leaves out some of the last turn.
    """
    end = tokenizers.end_of_turn(tokenizer)
    ids, mask, seen, _ = demonstrations.encoded(tokenizer, row, learn, end, processor).whole()
    if processor is None:
        return types.demonstration(ids, mask)
    images.refuse([id for id, wanted in zip(ids, mask, strict=True) if wanted], processor)
    tokens = processor.expanded(ids, seen)
    kept = iter(wanted for id, wanted in zip(ids, mask, strict=True) if id != processor.token)
    return types.demonstration(tokens, [id != processor.token and next(kept) for id in tokens], images=seen)
