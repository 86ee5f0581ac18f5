"""Rewards for texts: equal to an answer, matching the row's pattern, or of a given form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

THINK = r"<think>(?:(?!</?think>).)*</think>\s*(?=\S)(?:(?!</?think>).)*"


def exact(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `text` is `row["answer"]`, or one of them if that is a list; white space around either does not count."""
    answers = row["answer"] if isinstance(row["answer"], list | tuple) else [row["answer"]]
    return float(text.strip() in {str(answer).strip() for answer in answers})


def regex(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `row["pattern"]` is found anywhere in `text`; ^ and $ are the ends of the text, and . is any character.

    A pattern may take very long on an unlucky text; the time limit of the pool ends that.
    """
    return float(_compiled(row, "pattern").search(text) is not None)


def form(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if the whole of `text`, but for white space around it, matches `row["form"]`, where . is any character.

    Without that field: one <think>...</think> and then an answer.
    """
    pattern = _compiled(row, "form") if "form" in row else re.compile(THINK, re.DOTALL)
    return float(pattern.fullmatch(text.strip()) is not None)


def _compiled(row: Mapping[str, Any], name: str) -> re.Pattern[str]:
    try:
        return re.compile(row[name], re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(f"match: {name} must be a regular expression, got {row[name]!r:.80} ({error})") from None
