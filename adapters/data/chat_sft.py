"""Demonstrations: token ids of a row's conversation, with a loss mask of the assistant's turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...rollout import types
from ...rollout.chat import demonstration as demonstrations
from ...rollout.chat import images
from ...rollout.chat.conversation import tried
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
    [made] = samples(tokenizer, [row], learn, processor)
    if isinstance(made, ValueError):
        raise made
    return made


def samples(
    tokenizer: Any, rows: Sequence[Mapping[str, Any]], learn: Learn = "last", processor: images.Processor | None = None
) -> list[types.Sample | ValueError]:
    """What `sample` returns or raises for each row; the texts of all are tokenised at once, which takes all cores."""
    end = tokenizers.end_of_turn(tokenizer)
    found = demonstrations.encoded_together(tokenizer, rows, learn, end, processor)
    return [made if isinstance(made, ValueError) else tried(_sample, made, processor) for made in found]


def _sample(made: demonstrations.Demonstration, processor: images.Processor | None) -> types.Sample:
    ids, mask, seen, _ = made.whole()
    if processor is None:
        return types.demonstration(ids, mask)
    images.refuse([id for id, wanted in zip(ids, mask, strict=True) if wanted], processor)
    tokens = processor.expanded(ids, seen)
    kept = iter(wanted for id, wanted in zip(ids, mask, strict=True) if id != processor.token)
    return types.demonstration(tokens, [id != processor.token and next(kept) for id in tokens], images=seen)
