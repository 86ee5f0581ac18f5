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

from ..rewards import numbers
from ..rewards.answers import without_thoughts
from ..rewards.boxes import boxes

PROMPT = "{question}\nReason step by step, then write #### and the final answer as a number."

ANNOTATION = re.compile(r"<<[^<>]*>>")  # the calculator's trace, 16-3=<<16-3=13>>13
SENTENCE = re.compile(r"[.!?;](?=\s)")
DIGIT = re.compile("[0-9]")
# Of a word or an equation's side: its number is a part of a root, a power, a product with pi or a fraction of letters.
PART = re.compile(
    r"\\(?:[cdt]?frac|sqrt|pi)(?![A-Za-z])|[\u221a\u03c0]|\^(?!\{?\s*\\circ)|"
    r"[0-9](?:\*\*[0-9(]|[\u00b2\u00b3\u00b9\u2070\u2074-\u207f])"
)


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
    answer, nor is a part of a root or a power, and nothing is calculated.

    Numbers are written in digits, as `rewards.numbers` reads them; 40% is 40, and 18th is no number. Values are
    compared exactly: 72.0 is 72 and 144/2 is 72, 71.999 is not. Thoughts do not count
    (`rewards.answers.without_thoughts`). The row's `answer` may also be a full solution that ends in #### and the
    number.
    """
    gold = number(str(row["answer"]).rsplit("####", 1)[-1])
    if gold is None:
        raise ValueError(f"gsm8k: the answer of a row must be a number, got {row['answer']!r:.80}")
    return float(final(text) == gold)


def final(text: str) -> Decimal | Fraction | None:
    """The final answer in a completion (see `reward`); None if there is none."""
    text = without_thoughts(text)
    hashes, found_boxes = text.rfind("####"), boxes(text)
    if hashes > (found_boxes[-1].at if found_boxes else -1):
        return number(text[hashes + len("####") :].strip().partition("\n")[0])
    if found_boxes:
        return number(found_boxes[-1].content)
    text = numbers.plain(text)
    found = list(numbers.NUMBER.finditer(text))
    if not found or PART.search([word for word in re.split(r"[\s=]", text) if DIGIT.search(word)][-1]):
        return None
    return numbers.value(found[-1])


def number(text: str) -> Decimal | Fraction | None:
    """The value of a short answer: "$1,080.00", "x = -3", "72 eggs", "40%"; None unless there is exactly one."""
    sentences = [part for part in SENTENCE.split(numbers.plain(text)) if numbers.NUMBER.search(part)]
    if not sentences:
        return None
    side = [part for part in sentences[0].split("=") if numbers.NUMBER.search(part)][-1]
    if PART.search(side):
        return None
    side = re.sub(rf"^\s*[{numbers.MINUS}]\s+", "-", numbers.SPACED.sub(lambda m: m[0].replace(" ", ""), side))
    values = {numbers.value(match) for match in numbers.NUMBER.finditer(side)}
    return values.pop() if len(values) == 1 else None
