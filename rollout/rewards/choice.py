"""A reward for multiple-choice questions, whose answer is a letter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .answers import without_thoughts
from .boxes import boxes

_MARKS = "\\s*_$`\"'\u2018\u2019\u201c\u201d"  # of Markdown and LaTeX, and quotes
_BEFORE = rf"(?:[{_MARKS}:\uff1a=\u2013(\[{{-]|\\(?:text|textbf|mathrm|mathbf|(?=[(\[]))|(?i:option|choice)\b)*"
_AFTER = r"(?![A-Za-z0-9]|['\u2019][a-z])"
LETTER = re.compile(rf"{_BEFORE}([A-Za-z]){_AFTER}")  # at the beginning of a box
MARKED = [  # the first of these that occurs in the text decides, by its last occurrence
    re.compile(rf"<answer>{_BEFORE}([A-Za-z]){_AFTER}"),
    re.compile(
        rf"(?i:\b(?:answer(?!\s+(?:option|choice)\b)|correct (?:choice|option))(?:\s+is)?\b){_BEFORE}([A-Z]){_AFTER}"
    ),
]
BARE = re.compile(rf"(?:[{_MARKS}(\[]|\\[(\[])*([A-Za-z])(?:[{_MARKS})\].:]|\\[)\]])*")
ANOTHER = re.compile(rf"[{_MARKS})\]}}]*(?:[,;+/&|]|\bor\b|\band\b){_BEFORE}(?!I\s+[a-z])[A-Z]{_AFTER}")


def reward(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `text` chooses the row's letter, else 0.0.

    The choice is the letter in the last \\boxed{...}, else in the last <answer>, else after the last "answer" or
    "correct option" ("The answer is (B)", "Answer: **B**"; a capital only), else the last line if it is a single
    letter. Two letters in that place ("A or B") count as no choice. Thoughts do not count (`answers.without_thoughts`).

    Args:
      row: `answer` is the letter, or the zero-based index of the right choice.

    Raises:
      ValueError: the row's answer is neither.
    """
    answer = row["answer"]
    index = hasattr(type(answer), "__index__") and not isinstance(answer, bool) and 0 <= answer < 26
    letter = chr(ord("A") + int(answer)) if index else str(answer).strip("() ").upper()
    if not re.fullmatch("[A-Z]", letter):
        raise ValueError(f"choice: answer must be a letter or the index of a choice, got {answer!r:.80}")
    return float(chosen(text) == letter)


def chosen(text: str) -> str | None:
    """The letter that a completion chooses (see `reward`), in upper case; None if there is none."""
    text = without_thoughts(text)
    boxed = [match for box in boxes(text) if (match := LETTER.match(box.content))]
    for found in (boxed, *(list(pattern.finditer(text)) for pattern in MARKED)):
        if found:
            return None if ANOTHER.match(found[-1].string, found[-1].end()) else found[-1][1].upper()
    bare = BARE.fullmatch(text.strip().rpartition("\n")[2])
    return bare[1].upper() if bare else None
