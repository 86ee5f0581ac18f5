"""What a completion answers: the text outside of its thoughts, and the code blocks in it."""

from __future__ import annotations

import functools
import re
from typing import Any

THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
# Of an info string: python3, Python, {.python}, python:solution.py; python-repl and json_schema are others.
LANGUAGE = re.compile(r"[a-z+#]+(?:[-_][a-z]+)*")


def without_thoughts(text: str) -> str:
    """The text without its thoughts: <think>...</think>, also begun in the prompt, or cut off before its end."""
    return THOUGHT.sub("", text).rpartition("</think>")[2]


def block(text: str, *languages: str) -> str:
    """The content of the last fenced code block in `without_thoughts(text)` that is marked as one of the languages.

    Without such a block it is the last one without a language, and without any the whole text. Fences are those of
    CommonMark: a block ends at a fence of its own character that is at least as long, else at the end of the text; it
    may stand in a list or quote. Of the info string the first word counts, in any case and without digits. Beyond
    CommonMark, a fence with one of the languages may follow a text in its line (<answer>```python), a block that does
    not end otherwise ends at a fence within a line (```</answer>), and a lone last fence ends a block that began in the
    prompt.
    """
    answer = re.sub("\r\n?", "\n", without_thoughts(text))
    late = rf"(?mi)(?<!`)`{{3,}}[ \t]*(?:{'|'.join(languages)})[0-9.]*[ \t]*$"
    answer = re.sub(late, _in_a_line_of_its_own, answer)
    fences = [token for token in _markdown().parse(answer) if token.type == "fence"]
    unmarked = None
    for fence in reversed(fences):
        word = LANGUAGE.search(fence.info.lower())
        if word and word[0] in languages:
            return _content(fence)
        if not word and unmarked is None:
            unmarked = fence
    if unmarked is None:
        return answer
    lines, (first, end) = answer.split("\n"), unmarked.map
    if not "".join(lines[first + 1 : end]).strip():  # nothing follows, not even a closing fence
        before = "\n".join(lines[:first])
        return block(before, *languages) if before.strip() else ""
    return _content(unmarked)


def _in_a_line_of_its_own(fence: re.Match[str]) -> str:
    """An opening fence, below the text before it in its line unless that only marks a list or a quote."""
    before = fence.string[fence.string.rfind("\n", 0, fence.start()) + 1 : fence.start()]
    return "\n" * ("`" not in before and any(map(str.isalpha, before))) + fence[0]


def _content(fence: Any) -> str:
    """The content of a block; of one that does not end, that before the first fence within a line."""
    (first, end), lines = fence.map, fence.content.split("\n")
    closed = end - first == len(lines) + (lines[-1] != "") + 1
    late = None if closed else re.search(rf"(?m){re.escape(fence.markup)}[^\n`]*$", fence.content)
    return fence.content[: late.start()] if late else fence.content


@functools.cache
def _markdown() -> Any:
    import markdown_it

    return markdown_it.MarkdownIt("commonmark").disable(["html_block", "inline"])  # tags do not hide fences
