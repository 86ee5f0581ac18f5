"""Grade-school mathematics, GSM8K (arXiv:2110.14168): rows and the reward.

The answers are whole numbers, so an exact decimal comparison, which takes microseconds, is enough. For symbolic answers
see `competition_math`.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

PROMPT = "{question}\nReason step by step, then write #### and the final answer as a number."

# A number as people write it: -$1,234.50, 1'234, 3/4, 7.2e1; but not the 2 in m2, nor the minus in 5-3 or of a bullet.
_DIGITS = r"(?:[0-9]{1,3}(?:[,'_\u2019\u00a0\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
NUMBER = re.compile(
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)"
    r"(?P<sign>(?<![\w)\]])[-\u2212\u2013])?(?:[$\u20ac\u00a3\u00a5]\s?)?"
    rf"(?P<digits>{_DIGITS})(?P<power>[eE][-+]?[0-9]{{1,3}}(?![A-Za-z0-9]))?(?:/(?P<under>{_DIGITS}))?"
)
ANNOTATION = re.compile(r"<<[^<>]*>>")  # the calculator's trace, 16-3=<<16-3=13>>13
REWRITE: list[tuple[re.Pattern[str], Any]] = [  # LaTeX and other notations to plain text
    (re.compile(r"\\[,!]|\{,\}"), lambda m: "," if m[0] == "{,}" else ""),  # thin spaces: 1\,234
    (re.compile(r"\\[;: ]"), " "),
    (re.compile(r"\\[dt]?frac(?:\{([0-9.,]+)\}\{([0-9.,]+)\}|([0-9])([0-9]))"), lambda m: _over(*m.groups())),
    (re.compile(r"\s?(?:\\times|\\cdot|[x*\u00d7])\s?10\^\{?([-+]?[0-9]{1,3})\}?"), r"e\1"),  # 7.2 x 10^1
    (re.compile(r"(?<![\w.])10\^\{?([-+]?[0-9]{1,3})\}?"), r"1e\1"),
    (re.compile(r"(?<=[A-Za-z})])\^\{?[0-9]+\}?"), ""),  # the exponent of a unit: cm^2
]
SENTENCE = re.compile(r"[.!?;](?=\s)")
SPACED = re.compile(r"(?<![\w.,])[0-9]{1,3}(?: [0-9]{3})+(?![\w])")  # 1 234
LONGEST = 100  # most characters of a fraction


def row(record: dict) -> dict:
    """Converts a record of the official files to a row `{"prompt", "answer", "completion", "question"}`.

    `answer` is the number after ####, as plain digits; `completion` is the solution without the
    calculator's annotations.
    """
    question, answer = (record.get(name) for name in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
        raise ValueError(
            f"gsm8k: a record needs a question and an answer that ends in #### and a number, got {str(record)[:80]}"
        )
    gold = number(answer.rsplit("####", 1)[1])
    if not isinstance(gold, Decimal):
        raise ValueError(f"gsm8k: no number after #### in {answer[-40:]!r}")
    return {
        "prompt": PROMPT.format(question=question),
        "answer": format(gold, "f"),
        "completion": ANNOTATION.sub("", answer),
        "question": question,
    }


def splits(folder: str | Path) -> dict[str, list[dict]]:
    """Reads `{"train", "heldout"}` from a folder with the official `train.jsonl` and `test.jsonl`."""
    return {
        "train": _rows(Path(folder) / "train.jsonl"),
        "heldout": _rows(Path(folder) / "test.jsonl"),
    }


def _rows(file):
    if not file.is_file():
        raise ValueError(f"gsm8k: no such file, got {file}; name a folder with the official files")
    rows = []
    with file.open(encoding="utf-8") as lines:  # not splitlines(), which also cuts at U+2028
        for count, line in enumerate(lines, 1):
            try:
                rows.append(row(json.loads(line)))
            except (ValueError, AttributeError) as error:  # not JSON, not a record, not an object
                raise ValueError(f"{file}:{count}: {error}") from None
    return rows


def reward(text: str, row: dict) -> float:
    """1.0 if the final answer in `text` equals the row's answer as a number, else 0.0.

    The final answer follows the last marker, #### or \\boxed{...}; without a marker, it is the last number in the text.
    After #### only the first line counts; in either marker, the first sentence with a number, and in an equation its
    last side with a number. It may contain one number besides words and units: two different numbers are not an
    answer, and nothing is calculated.

    Numbers are written in digits, in English notation: 1,234.50, also 1 234, 1'234, -$5, 40% (which is 40), 3/4,
    \\frac{3}{4}, 7.2e1, 7.2 \\times 10^1. Values are compared exactly: 72.0 is 72 and 144/2 is 72, 71.999 is not.
    The row's `answer` may also be a full solution that ends in #### and the number.
    """
    gold = number(str(row["answer"]).rsplit("####", 1)[-1])
    if gold is None:
        raise ValueError(f"gsm8k: the answer of a row must be a number, got {row['answer']!r:.80}")
    return float(final(text) == gold)


def final(text: str) -> Decimal | Fraction | None:
    """The final answer in a completion (see `reward`); None if there is none."""
    hashes, box = text.rfind("####"), text.rfind("\\boxed{")
    if hashes > box:
        return number(text[hashes + len("####") :].strip().partition("\n")[0])
    if box >= 0:
        return number(_braced(text[box + len("\\boxed") :]))
    numbers = list(NUMBER.finditer(_plain(text)))
    return _value(numbers[-1]) if numbers else None


def number(text: str) -> Decimal | Fraction | None:
    """The value of a short answer: "$1,080.00", "x = -3", "72 eggs", "40%"; None unless there is exactly one."""
    sentences = [part for part in SENTENCE.split(_plain(text)) if NUMBER.search(part)]
    if not sentences:
        return None
    side = [part for part in sentences[0].split("=") if NUMBER.search(part)][-1]
    side = re.sub(r"^\s*[-\u2212\u2013]\s+", "-", SPACED.sub(lambda m: m[0].replace(" ", ""), side))
    values = {_value(match) for match in NUMBER.finditer(side)}
    return values.pop() if len(values) == 1 else None


def _plain(text):
    for pattern, by in REWRITE:
        text = pattern.sub(by, text)
    return text


def _over(a, b, digit, other):
    return f"{a}/{b}" if a else f"{digit}/{other}"


def _value(match):
    """The value of a NUMBER; None for a division by zero or a fraction of more than LONGEST characters."""
    value = Decimal(("-" if match["sign"] else "") + _bare(match["digits"]) + (match["power"] or ""))
    if not match["under"]:
        return value
    under = Decimal(_bare(match["under"]))
    return Fraction(value) / Fraction(under) if under and len(match[0]) <= LONGEST else None


def _bare(digits):
    return re.sub("[^0-9.]", "", digits)


def _braced(text):
    """The content of the brace that `text` begins with; up to the end if it is not closed."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:at]
    return text[1:]
