"""The boxes in which LaTeX marks a final answer."""

from __future__ import annotations

import re
from typing import NamedTuple

_BOX = r"\\(?:boxed|fbox)(?![a-zA-Z])\s*"
# A brace, with the box that it belongs to; a box without a brace; what is skipped, such as \{.
TOKEN = re.compile(rf"(?P<box>{_BOX})?(?P<open>\{{)|{_BOX}(?P<bare>[^\s${{][^\s$]*)|\\.|\}}", re.DOTALL)
PERCENT = re.compile(r"[^\S\n]*+(?:\$[^\S\n]*+)?(?:\\?%|percent|pct)")  # behind a box


class Box(NamedTuple):
    content: str
    at: int  # where the content begins in the text


def boxes(text: str) -> list[Box]:
    """All \\boxed{...} and \\fbox{...} in a text, of nested ones the inner; without a brace, up to the next space.

    A percent sign behind a box is part of its content. A box whose brace is never closed is none.
    """
    found: list[Box] = []
    opened: list[int] = []  # places of contents of boxes, and -1 for other braces
    for token in TOKEN.finditer(text):
        start, end = token.span()
        if token["bare"]:
            found.append(Box(token["bare"], start))
        elif token["open"]:
            opened.append(end if token["box"] else -1)
        elif token[0] == "}" and opened:
            place = opened.pop()
            if place >= 0 and (not found or found[-1].at < place):
                percent = r"\%" if PERCENT.match(text, end) else ""
                found.append(Box(text[place:start].strip() + percent, place))
    return found
