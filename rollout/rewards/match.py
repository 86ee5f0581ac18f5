"""Rewards that compare a text with an answer, a regular expression or a format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .answers import without_thoughts

THINK = r"<think>(?:(?!</?think>).)*</think>\s*(?=\S)(?:(?!</?think>).)*"


def exact(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `text` equals `row["answer"]`, or one of them if that is a list; thoughts (`answers.without_thoughts`) and
    surrounding white space are ignored."""
    answers = row["answer"] if isinstance(row["answer"], list | tuple) else [row["answer"]]
    if None in answers:
        raise ValueError(f"match: a row's answer must be a text, or a list of them, got {row['answer']!r:.80}")
    return float(without_thoughts(text).strip() in {str(answer).strip() for answer in answers})


def regex(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `row["pattern"]` matches anywhere in `text`, thoughts included; ^ and $ match the ends of the text, . any
    character.

    Some patterns backtrack for very long; the timeout of the pool ends that.
    """
    return float(_compiled(row, "pattern").search(text) is not None)


def form(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if all of `text`, surrounding white space ignored, matches `row["form"]`, where . is any character.

    The default form is one <think>...</think> followed by an answer.
    """
    pattern = _compiled(row, "form") if row.get("form") is not None else re.compile(THINK, re.DOTALL)
    return float(pattern.fullmatch(text.strip()) is not None)


def _compiled(row: Mapping[str, Any], name: str) -> re.Pattern[str]:
    try:
        return re.compile(row[name], re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(f"match: {name} must be a regular expression, got {row[name]!r:.80} ({error})") from None
