"""GSM8K: the gold solutions, and answers as models write them. AREAX_GSM8K names a folder with the real files."""

import json
import os
from pathlib import Path

import pytest

from areax.rollout import gsm8k

REAL = os.environ.get("AREAX_GSM8K")
FOLDER = Path(REAL or Path(__file__).parent / "data" / "gsm8k")
SIZES = {"train": 7473, "heldout": 1319} if REAL else {"train": 6, "heldout": 4}


@pytest.fixture(scope="module")
def splits():
    return gsm8k.splits(FOLDER)


def test_the_files_are_complete(splits):
    assert {name: len(rows) for name, rows in splits.items()} == SIZES


def test_gold_solutions_score_1_and_those_of_the_next_problem_0(splits):
    rows = splits["train"] + splits["heldout"]
    files = [FOLDER / "train.jsonl", FOLDER / "test.jsonl"]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
    solutions = [json.loads(line)["answer"] for line in lines]
    following = rows[1:] + rows[:1]
    for row, solution, other in zip(rows, solutions, following, strict=True):
        assert gsm8k.reward(solution, row) == gsm8k.reward(row["completion"], row) == 1.0, row
        assert float(row["answer"]) == float(solution.rsplit("####", 1)[1].replace(",", ""))
        if row["answer"] != other["answer"]:
            assert gsm8k.reward(solution, other) == 0.0, row


def test_rows_hold_no_annotations(splits):
    for row in splits["train"]:
        assert "<<" not in row["completion"] and row["question"] in row["prompt"]


@pytest.mark.parametrize(
    "text, answer",
    [
        ("#### 72", "72"),
        ("####72 dollars", "72"),
        ("#### $1,080.00", "1080"),
        ("#### **72**.", "72"),
        ("#### 5 + 3 = 8", "8"),
        ("#### 5\nno:\n#### 6\n", "6"),
        ("#### The answer is 72 eggs", "72"),
        ("#### -7", "-7"),
        ("#### \u22127", "-7"),
        ("#### x = -7", "-7"),
        ("at 3 pm \\boxed{72}. Checked 2 times.", "72"),
        ("\\boxed{72\\text{ eggs}}", "72"),
        ("\\boxed{\\$1{,}080}", "1080"),
        ("\\boxed{25\\ \\text{cm}^{2}}", "25"),
        ("#### Step 2\n\\boxed{72}", "72"),
        ("So it is 1,234,567.", "1234567"),
        ("the area is 25 m2", "25"),
        ("10-5", "5"),
        ("he owes -$5", "-5"),
        ("left over: $-5", "-5"),
        ("In the end:\n- 5 eggs", "5"),
        ("paid $ 10", "10"),
        ("that makes 50%.", "50"),
        (".5 of it", "0.5"),
        ("72.0", "72"),
        ("72.", "72"),
        ("(72)", "72"),
        ("-0", "0"),
    ],
)
def test_answers_as_people_write_them(text, answer):
    assert gsm8k.reward(text, {"answer": answer}) == 1.0
    assert gsm8k.reward(text, {"answer": str(float(answer) + 1)}) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "####",
        "#### five",
        "#### 72 or 5",
        "\\boxed{3/72}",
        "\\boxed{72x+1}",
        "\\boxed{}",
        "version v72",
        "72,1",
    ],
)
def test_no_answer_or_two_score_0(text):
    assert gsm8k.reward(text, {"answer": "72"}) == 0.0


def test_endless_digits_are_read():
    text = "9" * 20_000
    assert gsm8k.reward(text, {"answer": "72"}) == 0.0
    assert gsm8k.reward("1," * 20_000 + "#" * 20_000, {"answer": "72"}) == 0.0


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"question": "Why?", "answer": "so"}\n', "train.jsonl:1: .*ends in ####"),
        ('{"question": "Why?", "answer": "#### so"}\n', "train.jsonl:1: .*no number after ####"),
        ('{"question": "Why?"}\n', "train.jsonl:1: .*got {'question': 'Why\\?'}"),
        ("[1]\n", "train.jsonl:1: 'list' object"),
        ('{"question": "1+1?", "answer": "#### 2"}\n{"quest', "train.jsonl:2: "),
        (None, "no such file, got .*train.jsonl"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        gsm8k.splits(tmp_path)
    assert "\n" not in str(error.value)


def test_an_answer_that_is_no_number_is_the_rows_fault():
    with pytest.raises(ValueError, match="must be a number, got 'many'"):
        gsm8k.reward("#### 1", {"answer": "many"})
