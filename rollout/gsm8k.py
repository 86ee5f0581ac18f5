"""Grade-school mathematics, GSM8K (arXiv:2110.14168): rows and the reward.

The answers are whole numbers, so that an exact decimal comparison is all that is needed: it takes
microseconds and parses no language. For symbolic answers see `mathematics`.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

PROMPT = "{question}\nReason step by step, then write #### and the final answer as a number."

# A number as people write it: -$1,234.50; not the 2 of m2; no minus between operands or before a list item.
NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])"
    r"(?P<sign>(?<![\w)\]])[-\u2212])?(?:[$\u20ac\u00a3]\s?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
ANNOTATION = re.compile(r"<<[^<>]*>>")  # the calculator's trace, 16-3=<<16-3=13>>13
POWER = re.compile(r"\^\{?[0-9]+\}?")  # of a unit: cm^2
SPACING = re.compile(r"\\[,!;: ]|\{,\}")


def row(record: dict) -> dict:
    """A row from a record of the official files: `{"prompt", "answer", "completion", "question"}`.

    `answer` is the number after ####, as plain digits; `completion` is the solution without the
    calculator's annotations.
    """
    question, answer = (record.get(name) for name in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
        raise ValueError(
            f"gsm8k: a record needs a question and an answer that ends in #### and a number, got {str(record)[:80]}"
        )
    gold = number(answer.rsplit("####", 1)[1])
    if gold is None:
        raise ValueError(f"gsm8k: no number after #### in {answer[-40:]!r}")
    return {
        "prompt": PROMPT.format(question=question),
        "answer": format(gold, "f"),
        "completion": ANNOTATION.sub("", answer),
        "question": question,
    }


def splits(folder: str | Path) -> dict[str, list[dict]]:
    """`{"train", "heldout"}` from a folder with the official `train.jsonl` and `test.jsonl`."""
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
            except (ValueError, AttributeError) as error:  # no JSON, no record, no object
                raise ValueError(f"{file}:{count}: {error}") from None
    return rows


def reward(text: str, row: dict) -> float:
    """1.0 if the final answer in `text` equals the row's as a number, else 0.0.

    The final answer is what the last marker names, be it #### or \\boxed{...}; without a marker, the
    last number of the text. A marker must name one number and nothing else but words and units.
    """
    gold = number(str(row["answer"]))
    if gold is None:
        raise ValueError(f"gsm8k: the answer of a row must be a number, got {row['answer']!r}")
    return float(final(text) == gold)


def final(text: str) -> Decimal | None:
    """The final answer in a completion (see `reward`); None if there is none."""
    hashes, box = text.rfind("####"), text.rfind("\\boxed{")
    if hashes > box:
        return number(text[hashes + len("####") :].strip().partition("\n")[0])
    if box >= 0:
        return number(_braced(text[box + len("\\boxed") :]))
    numbers = list(NUMBER.finditer(SPACING.sub(_spacing, text)))
    return _value(numbers[-1]) if numbers else None


def number(text: str) -> Decimal | None:
    """The value of a short answer: "$1,080.00", "x = -3", "72 eggs", "40%"; None unless one number."""
    text = SPACING.sub(_spacing, text).rsplit("=", 1)[-1]
    found = list(NUMBER.finditer(POWER.sub("", text)))
    return _value(found[0]) if len(found) == 1 else None


def _value(match):
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] else value


def _spacing(match):
    return "," if match[0] == "{,}" else ""


def _braced(text):
    """What stands in the bracket that `text` opens with; to the end if nothing closes it."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:at]
    return text[1:]
