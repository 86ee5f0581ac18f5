"""A penalty for long completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def reward(text: str, row: Mapping[str, Any], *, completion_ids: Sequence[int] | None = None) -> float:
    """0.0 up to the row's limit, then linear to -1.0 at twice the limit, and constant beyond.

    Args:
      row: has `max_tokens` or `max_characters`.
      completion_ids: the completion's tokens, needed for `max_tokens`.

    Raises:
      ValueError: the row does not have exactly one of the two, above 0, or the tokens are missing.
    """
    limits = [(name, row[name]) for name in ("max_tokens", "max_characters") if row.get(name) is not None]
    if len(limits) != 1 or isinstance(limits[0][1], str) or not limits[0][1] > 0:
        raise ValueError(f"length: a row needs either max_tokens or max_characters, above 0, got {dict(limits)}")
    [(name, limit)] = limits
    if name == "max_tokens" and completion_ids is None:
        raise ValueError("length: max_tokens needs completion_ids; the workflow must pass them to the reward")
    length = len(text) if completion_ids is None or name == "max_characters" else len(completion_ids)
    return -min(1.0, max(0.0, (length - limit) / limit))
