"""Competition mathematics (MATH, arXiv:2103.03874): rows, and a reward for symbolic answers."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ..rewards import equality, numbers
from ..rewards.answers import without_thoughts
from ..rewards.boxes import boxes

PROMPT = "{problem}\nReason step by step, and put the final answer into \\boxed{{}}."
# Words, at least one of which is too long for a product of variables.
WORDS = re.compile(
    r"(?:\\(?:text|textbf|textit|mathrm|mathbf)\{)?\s*+"
    r"((?=[^}]*[A-Za-z]{4})(?!inf)[A-Za-z](?:[A-Za-z ',-]*[A-Za-z',-])?)[\s.]*\}?"
)
ROMAN_E = re.compile(r"\\mathrm\s*\{\s*e\s*\}")  # Euler's number
AND = re.compile(r"(?<=[0-9]) and (?=[0-9]+/[0-9])")  # 2 and 3/4
POINT = re.compile(r"(?<![\w.)])\.(?=[0-9])")  # .5
BASE = re.compile(r"[0-9A-Fa-f]_\{?([0-9]+)\}?$")  # 101_2
NUMBER = re.compile(r"-?[0-9.]+|\\frac\{[0-9]+\}\{[0-9]+\}")
# Behind a number, or before it: what makes it a part of more, of which math-verify reads only the number. Letters
# count right behind the number (2x, not "6 a day"), and i also behind a sign (5 - i, not "5, i.e. five").
MORE = re.compile(
    r"\s*(?:(?:\*{1,2}|[/^:×÷·⋅])\s*[\\({0-9a-z√π]|[√π±²³¹⁰-⁻]|\\(?:pi|sqrt|times|cdot|frac|pm)|"
    r"(?:[-+,−–]|or\b|and\b)\s*(?:[\\0-9.√π]|i\b(?!\.)))|[aeinxyz](?![A-Za-z])|['’_.][0-9]"
)
LESS = re.compile(r"(?:[0-9)]\s*(?:\*{1,2}|[-+,−–/^:×÷·⋅])|[<>√±≤≥≠]|\\(?:sqrt\{?|times|cdot|pm|leq?|geq?))\s*\Z")
SPACE = re.compile(r"\s+|\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|\$")
SECONDS = 3  # each for parsing and for comparing an answer
BOXES = 16  # most different boxes of an answer: each is compared with all


def row(record: dict) -> dict:
    """Converts a record of MATH to a row `{"prompt", "answer", "completion", "problem", "level", "subject"}`.

    The answer is the record's "answer", else the last box of its "solution"; `level` is 1 (easy) to 5, parsed from
    "Level 5" or 5, None for the few without one; `subject` is the record's, or its "type".
    """
    problem, solution, answer = (record.get(name) for name in ("problem", "solution", "answer"))
    if not isinstance(problem, str) or not isinstance(solution, str):
        raise ValueError(
            f"competition_math: a record needs strings 'problem' and 'solution', got the fields {sorted(record)}"
        )
    answer = boxed(solution) if answer is None else str(answer)
    if not answer:
        raise ValueError(f"competition_math: no \\boxed answer in the solution, got ...{solution[-60:]!r}")
    level = re.search(r"\d+", str(record.get("level")))
    return {
        "prompt": PROMPT.format(problem=problem),
        "answer": answer,
        "completion": solution,
        "problem": problem,
        "level": int(level[0]) if level else None,
        "subject": record.get("subject", record.get("type")),
    }


def boxed(text: str) -> str | None:
    """The content of the last of the `boxes` of a text; None if there is none."""
    found = boxes(text)
    return found[-1].content if found else None


def reward(text: str, row: dict) -> float:
    """1.0 if the final answer in `text` is equivalent to `row["answer"]`, else 0.0.

    The final answer is the \\boxed{...} one, else what the text calls its answer, else its last expression. Boxes with
    different values, wherever they are, count as a set of answers, so guessing twice does not pay; more than `BOXES`
    different ones are no answer. Thoughts do not count (`rewards.answers.without_thoughts`).

    Rational numbers are compared exactly, in the notations of `rewards.numbers`; how, and what else is equal, says
    `rewards.equality.equal`. If both answers name a base, as 101_2 does, they need the same one. Without a box a number
    that is a part of an expression outside of $...$, such as the 2 of 2π, is no answer.

    An answer that takes longer than `SECONDS` to parse or compare counts as wrong. The timeout uses an alarm signal,
    which works only in the main thread, where workers of a reward pool run their rewards; in other threads only the
    caller's timeout applies.
    """
    gold = str(row["answer"])
    wanted = _answer(gold if boxes(gold) else f"\\boxed{{{gold}}}")
    if not wanted:
        raise ValueError(f"competition_math: the answer of a row cannot be parsed, got {gold!r}")
    given = _answer(without_thoughts(text))
    bases = _bases(wanted), _bases(given)
    return float(_equal(wanted, given) and (bases[0] == bases[1] or not all(bases)))


def _answer(text: str) -> list[Any]:
    """The final answer of a text, as math-verify's `parse` returns it: [an expression, its text], or less."""
    from latex2sympy2_extended.sets import FiniteSet
    from math_verify import parse

    contents = dict.fromkeys(box.content for box in boxes(text))
    if not contents:
        text = _latex(POINT.sub("0.", AND.sub(" ", text)))
        single = parse(text, parsing_timeout=_seconds())
        return [] if _half(text, single) else single
    if len(contents) > BOXES:
        return []
    found: list[list[Any]] = []
    for answer in map(_boxed_answer, contents):
        if answer and not any(_equal(other, answer) for other in found):
            found.append(answer)
    if len(found) < 2:
        return found[0] if found else []
    values = [part for answer in found for part in (answer[0].args if isinstance(answer[0], FiniteSet) else answer[:1])]
    return [", ".join(map(str, values)) if any(isinstance(part, str) for part in values) else FiniteSet(*values)]


def _half(text: str, found: Sequence[Any]) -> bool:
    """Whether what math-verify found in a text is a number that is a part of more."""
    import sympy

    value, number = found if len(found) == 2 else (None, "")
    number = str(number).strip(" .()*")
    if not NUMBER.fullmatch(number):  # an expression, which failed if its value is a number alone
        return isinstance(value, sympy.Integer | sympy.Float) and re.search("[*^×÷]", number) is not None
    anchor = max(text.lower().rfind("answer"), 0)
    places = [found.span() for found in re.finditer(rf"(?<![0-9.]){re.escape(number)}(?![0-9])", text[anchor:])]
    if not places:
        return False
    start, end = places[0 if anchor else -1]
    before = text[max(anchor + start - 9, 0) : anchor + start]
    return bool(MORE.match(text, anchor + end) or LESS.search(before))


def _bases(answer: Sequence[Any]) -> set[str]:
    """The bases that an answer's texts name."""
    return {found[1] for part in answer if isinstance(part, str) and (found := BASE.search(part))}


def _boxed_answer(content: str) -> list[Any]:
    """`_answer` of the content of a box."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import convert_to_pct
    from math_verify import parse

    if number := numbers.read(content):
        size, percent = number
        decimal = isinstance(size, Decimal) and "." in str(size)
        value = sympy.Float(str(size)) if decimal else sympy.Rational(*size.as_integer_ratio())
        return [convert_to_pct(value) if percent else value, content]
    if word := WORDS.fullmatch(content.strip(" $")):  # math-verify takes words for products of letters: east is seat
        return [word[1].casefold()]
    parsed = parse(f"\\boxed{{{_latex(content)}}}", parsing_timeout=_seconds())
    text = SPACE.sub("", content)
    return [*(part for part in parsed if not isinstance(part, str)), *[text] * bool(text)]


def _latex(text: str) -> str:
    """The text with notations that math-verify does not read written as others."""
    return ROMAN_E.sub(" e ", numbers.as_latex(text))


def _equal(gold: Sequence[Any], given: Sequence[Any]) -> bool:
    return any(equality.equal(a, b, _seconds()) for a in gold for b in given)


def _seconds() -> int | None:
    return SECONDS if threading.current_thread() is threading.main_thread() else None
