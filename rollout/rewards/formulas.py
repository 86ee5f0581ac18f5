"""The formula that a text without a box ends in."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence

# What an answer follows: "The answer to question 3 is", "Answer:", <answer>.
ANSWER = re.compile(r"(?i)(?<!/)\banswers?(?:>|\b[\s*_]*[:=\uff1a]|\b[^.:\n]{0,60}?\b(?:is|are|be)\b(?! +not\b))")
TOKEN = re.compile(
    r"""(?P<formula>\$\$[^$]+\$\$|\$(?=\S)[^$\n]*(?<=\S)\$(?![0-9])|\\\(.{1,500}?\\\)|\\\[.{1,500}?\\\])
    |(?P<number>(?:[0-9]+(?:[.,'\u2019:][0-9]+|[ \u00a0\u202f][0-9]{3}(?![0-9]))*|\.[0-9]+)(?:[ ]?\\?%)?)
    |(?P<name>\\(?:text|mathrm|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+
        |(?:sqrt|pi|ln|log|sin|cos|tan|exp)(?![A-Za-z])|[\u03c0\u221e])
    |(?P<joint>,?[ ]*\b(?:and|or|to|choose)\b|[,;]|[ ]:(?=[ ][0-9]))
    |(?P<unit>(?<=[0-9][ ])[A-Za-z]+(?:/[A-Za-z]+|\^\{?-?[0-9]\}?|[\u00b2\u00b3])+(?![ ]*[-+*=(]))
    |(?P<word>[^\W\d_\u00b2\u00b3\u00b9\u2070-\u2079]{2,}(?:/[A-Za-z]+)?
        |(?<![0-9)}\]\\])[A-Za-z]+[0-9]\w*+(?![ ]*[-+*/^=])|[AaIi](?=[ ][a-z]{2})|[A-Za-z](?=['\u2019.]\w))
    |(?P<letter>[^\W\d_\u00b2\u00b3\u00b9\u2070-\u2079])
    |(?P<open>[(\[{])
    |(?P<close>[)\]}])
    |(?P<raised>[\u00b2\u00b3\u00b9\u2070-\u207b\u00b0]|!(?=[ ]*[-+*/=)]))
    |(?P<sign>[-+\u2212\u2013*/^_=<>|\u2264\u2265\u2260\u00b1\u00d7\u00f7\u00b7\u22c5\u221a\u222a\u2229&]
        |\\[^A-Za-z]|\$(?=[0-9.]))
    |(?P<space>[^\S\n]+)
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
DELIMITER = re.compile(r"\$|(?<!\\)\\[()\[\]]")
PREFIX = re.compile(r"[-+\u2212\u2013\u00b1\u221a|](?=\S)|\\[{|]")


def final(text: str) -> str:
    """The formula that a text calls its answer, else its last one; empty if there is none.

    A formula is what stands in $...$, or else numbers, names and signs side by side. A letter is part of it beside a
    sign (x + 1) or right behind a number (2x), not as a word (6 a day) or unit (6 m^2); a comma, "and", "or" and "to"
    are if more follows.
    """
    marks = [found.end() for found in ANSWER.finditer(text)]
    answers = _formulas(text, marks[-1]) if marks else iter(())
    return next(answers, None) or ([*_formulas(text, 0)] or [""])[-1]


def _formulas(text: str, start: int) -> Iterator[str]:
    tokens = [token for token in TOKEN.finditer(text, start) if token.lastgroup != "space"]
    run: list[re.Match[str]] = []
    for at, token in enumerate(tokens):
        before = tokens[at - 1 : at]
        apart = not before or before[0].end() < token.start()
        if not _belongs(before, apart, token, tokens[at + 1 : at + 3]):
            yield from _trimmed(run)
            run = []
            if token.lastgroup not in ("number", "open"):
                continue
        run.append(token)
    yield from _trimmed(run)


def _belongs(before: Sequence, apart: bool, token: re.Match[str], after: Sequence) -> bool:
    """Whether a token goes on with a formula that the token before it is part of, or begins one."""
    kinds = [one.lastgroup for one in after] + [None] * 2
    behind_number = apart and bool(before) and before[0].lastgroup == "number"
    more = kinds[0] in ("formula", "number", "name", "open") or (kinds[0] == "sign" and _prefix(after[0]))
    match token.lastgroup:
        case "number" | "open":
            return not behind_number
        case "joint":
            return bool(more) or (kinds[0] == "letter" and kinds[1] in ("sign", "close", "joint"))
        case "letter" if behind_number:  # a unit, or the 42 x of 42 x + 1
            return kinds[0] == "sign" and kinds[1] in ("number", "letter", "open", "name")
        case "letter":
            value = ("number", "open", "close", "raised", "name")
            return (
                (bool(before) and before[0].lastgroup in (("sign", "joint") if apart else ("sign", "joint", *value)))
                or kinds[0] in ("sign", "raised", "open")
                or (kinds[0] == "number" and token[0].isascii() and token.end() == after[0].start())
            )
        case kind:
            return kind in ("formula", "name", "close", "raised", "sign")
    return False


def _trimmed(run: Sequence[re.Match[str]]) -> Iterator[str]:
    """The formula of a run without the punctuation around it, if there is one."""
    left = collections.deque(run)
    unclosed = sum((token.lastgroup == "open") - (token.lastgroup == "close") for token in left)
    while left:
        first, last = left[0], left[-1]
        kind, begins = last.lastgroup, first.lastgroup
        if kind == "open" or (kind == "close" and unclosed < 0) or (kind == "sign" and last[0] not in ("\\}", "|")):
            unclosed += (kind == "close") - (kind == "open")
            left.pop()
        elif begins == "joint" or (begins == "open" and unclosed > 0) or (begins == "sign" and not _prefix(first)):
            unclosed -= begins == "open"
            left.popleft()
        else:
            break
    if {token.lastgroup for token in left} & {"formula", "number", "name", "letter"}:
        yield DELIMITER.sub(" ", left[0].string[left[0].start() : left[-1].end()]).strip()


def _prefix(sign: re.Match[str]) -> bool:
    return PREFIX.match(sign.string, sign.start()) is not None
