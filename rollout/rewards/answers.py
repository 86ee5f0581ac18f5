"""What a completion answers: the text outside of its thoughts, and the code blocks in it."""

from __future__ import annotations

import functools
import re
from typing import Any

THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
LANGUAGE = re.compile(r"[a-z+#]+")  # of an info string: python3, Python, {.python}, python:solution.py


def said(text: str) -> str:
    """The text without its thoughts: <think>...</think>, also begun in the prompt, or cut off before its end."""
    return THOUGHT.sub("", text).rpartition("</think>")[2]


def block(text: str, *languages: str) -> str:
    """The content of the last fenced code block in `said(text)` that is marked as one of the languages.

    Without such a block it is the last one without a language, and without any the whole text. Fences are those of
    CommonMark: a block ends at a fence of its own character that is at least as long, else at the end of the text; it
    may stand in a list or quote. Of the info string the first word counts, in any case and without digits. A lone last
    fence ends a block that began in the prompt.
    """
    answer = re.sub("\r\n?", "\n", said(text))
    unmarked = None
    for fence in reversed(_fences(answer)):
        word = LANGUAGE.search(fence.info.lower())
        if word and word[0] in languages:
            return fence.content
        if not word and unmarked is None:
            unmarked = fence
    if unmarked is None:
        return answer
    lines, (first, end) = answer.split("\n"), unmarked.map
    if not "".join(lines[first + 1 : end]).strip():  # nothing follows, not even a closing fence
        before = "\n".join(lines[:first])
        return block(before, *languages) if before.strip() else ""
    return unmarked.content


def _fences(text: str) -> list[Any]:
    return [token for token in _markdown().parse(text) if token.type == "fence"]


@functools.cache
def _markdown() -> Any:
    import markdown_it

    return markdown_it.MarkdownIt("commonmark").disable(["html_block", "inline"])  # tags do not hide fences
