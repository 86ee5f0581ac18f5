"""Competition mathematics (MATH, arXiv:2103.03874): rows, and a reward for symbolic answers."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ..rewards import equality, formulas, numbers
from ..rewards.answers import without_thoughts
from ..rewards.boxes import boxes

PROMPT = "{problem}\nReason step by step, and put the final answer into \\boxed{{}}."
# Words, at least one of which is too long for a product of variables.
WORDS = re.compile(
    r"(?:\\(?:text|textbf|textit|mathrm|mathbf)\{)?\s*+"
    r"((?=[^}]*[A-Za-z]{4})(?!inf)[A-Za-z](?:[A-Za-z ',-]*[A-Za-z',-])?)[\s.]*\}?"
)
AND = re.compile(r"(?<=[0-9]) and (?=[0-9]+/[0-9])")  # 2 and 3/4
SYMBOLS = {"\u221e": r"\infty ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2205": r"\emptyset ", "\u00b0": r"^\circ "}
CHARACTERS = str.maketrans({**SYMBOLS, "\u00b2": "^2", "\u00b3": "^3", "~": " "})
REWRITE = [  # other notations that math-verify does not read
    (re.compile(r"\\(?:boldsymbol|bm|bf|underline)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\A\s*\\text\s*\{\s*([0-9][^{}]*)\}\s*\Z"), r"\1"),  # \text{5 units}
    (re.compile(r"(?<=[0-9])\s*[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+\s*\Z"), ""),  # units in Chinese
    (re.compile(r"(?<![A-Za-z\\])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\u221a\s*(?:\(([^()]*)\)|([0-9]+|[A-Za-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![A-Za-z\\{])(pi|ln|log|sin|cos|tan)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(=\s*-?\$?[0-9]{1,3}),([0-9]{3})(?:,([0-9]{3}))?\s*\Z"), r"\1\2\3"),  # x = 1,234
    (re.compile(r"\\mathrm\s*\{\s*e\s*\}"), " e "),  # Euler's number
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"(?:\\degree|\^\s*\{?\\circ\s*\}?)(?:\s*[CF])?(?![A-Za-z])"), r"^\\circ "),
]
POINT = re.compile(r"(?<![\w.)])\.(?=[0-9])")  # .5
BASE = re.compile(r"[0-9A-Fa-f]_\{?([0-9]+)\}?$")  # 101_2
COMMAND = re.compile(r"\\[A-Za-z]+")
SPACE = re.compile(r"\s+|\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|\$")
SECONDS = 3  # each for parsing and for comparing an answer
LONGEST = 1000  # characters of a formula without a box: longer ones are no answer, and parsing them takes seconds
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

    The final answer is the \\boxed{...} one, else what the text calls its answer, else its last formula
    (`rewards.formulas`), of at most `LONGEST` characters. Boxes with different values, wherever they are, count as a
    set of answers, so guessing twice does not pay; more than `BOXES` different ones are no answer. Thoughts do not
    count (`rewards.answers.without_thoughts`).

    Rational numbers are compared exactly, in the notations of `rewards.numbers`; how, and what else is equal, says
    `rewards.equality.equal`. If both answers name a base, as 101_2 does, they need the same one. A number that
    is a part of more, such as the 2 of 2π, is no answer.

    An answer that takes longer than `SECONDS` to parse or compare counts as wrong. The timeout uses an alarm signal,
    which works only in the main thread, where workers of a reward pool run their rewards; in other threads only the
    caller's timeout applies.
    """
    gold = "" if row["answer"] is None else str(row["answer"])
    wanted = _answer(gold if boxes(gold) else f"\\boxed{{{gold}}}")
    if not wanted:
        raise ValueError(f"competition_math: the answer of a row cannot be parsed, got {row['answer']!r}")
    given = _answer(without_thoughts(text))
    bases = _bases(wanted), _bases(given)
    return float(_equal(wanted, given) and (bases[0] == bases[1] or not all(bases)))


def _answer(text: str) -> list[Any]:
    """The final answer of a text, as math-verify's `parse` returns it: [an expression, its text], or less."""
    from latex2sympy2_extended.sets import FiniteSet

    contents = dict.fromkeys(box.content for box in boxes(text))
    if not contents:
        formula = formulas.final(numbers.as_latex(AND.sub(" ", text)))
        return _boxed_answer(formula) if 0 < len(formula) <= LONGEST else []
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


def _bases(answer: Sequence[Any]) -> set[str]:
    """The bases that an answer's texts name."""
    return {found[1] for part in answer if isinstance(part, str) and (found := BASE.search(part))}


def _boxed_answer(content: str) -> list[Any]:
    """`_answer` of the content of a box."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import convert_to_pct
    from math_verify import parse

    *others, last = content.split("=")
    if others and re.search("[0-9]", others[-1]) and not re.search("[A-Za-z]", COMMAND.sub("", others[-1])):
        content = last  # 6 / 1.5 = 4
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
    text = POINT.sub("0.", numbers.as_latex(text)).translate(CHARACTERS)
    for pattern, by in REWRITE:
        text = pattern.sub(by, text)
    return text


def _equal(gold: Sequence[Any], given: Sequence[Any]) -> bool:
    return any(equality.equal(a, b, _seconds()) for a in gold for b in given)


def _seconds() -> int | None:
    return SECONDS if threading.current_thread() is threading.main_thread() else None
