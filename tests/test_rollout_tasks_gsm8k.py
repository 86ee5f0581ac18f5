"""GSM8K: gold solutions, and answers as models write them. AREAX_GSM8K names a folder with the full data set."""

import json
import os
from pathlib import Path

import cpu
import pytest

from areax.rollout.tasks import gsm8k

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


def test_rows_contain_no_calculator_annotations(splits):
    for row in splits["train"]:
        assert "<<" not in row["completion"] and row["question"] in row["prompt"]


# The rule: the answer is the number, among words and units, at the last marker, #### or \\boxed{}; after ####, in the
# first line, the first sentence with a number, the last side of an equation. Without a marker it is the last number.
RIGHT = [
    # markers and where they end
    ("#### 72", "72"),
    ("####72 dollars", "72"),
    ("####\n72", "72"),
    ("#### 72\nI checked it with 3 methods.", "72"),
    ("#### 72. Checked 2 times.", "72"),
    ("#### 72! That is 5 more than 67.", "72"),
    ("#### **72**.", "72"),
    ("#### `72`", "72"),
    ("#### The answer is 72 eggs", "72"),
    ("#### Rs. 72", "72"),
    ("#### Rs.72", "72"),
    ("#### 5\nno:\n#### 6\n", "6"),
    ("#### Step 2\n\\boxed{72}", "72"),
    ("\\boxed{5} no\n#### 72", "72"),
    ("#### $\\boxed{72}$", "72"),
    ("at 3 pm \\boxed{72}. Checked 2 times.", "72"),
    ("\\boxed{5} or rather \\boxed{72}", "72"),
    ("\\boxed{\\boxed{72}}", "72"),
    ("\\boxed{72", "72"),
    # several numbers
    ("#### 5 + 3 = 8", "8"),
    ("#### 72 = x", "72"),
    ("#### 72 (that is 72 eggs)", "72"),
    ("2 and 3 make 5, so 72", "72"),
    ("So it is 1,234,567.", "1234567"),
    # signs
    ("#### -7", "-7"),
    ("#### \u22127", "-7"),
    ("#### \u20137", "-7"),
    ("#### - 7", "-7"),
    ("#### x = -7", "-7"),
    ("#### +7", "7"),
    ("he owes -$5", "-5"),
    ("left over: $-5", "-5"),
    ("In the end:\n- 5 eggs", "5"),
    ("10-5", "5"),
    ("pages 3\u20135", "5"),
    ("-0", "0"),
    # currency, percent, units, words
    ("#### $1,080.00", "1080"),
    ("paid $ 10", "10"),
    ("#### \u20ac72", "72"),
    ("#### 72\u20ac", "72"),
    ("#### US$72", "72"),
    ("#### $72$", "72"),
    ("that makes 50%.", "50"),
    ("\\boxed{50\\%}", "50"),
    ("\\boxed{72\\text{ eggs}}", "72"),
    ("\\boxed{\\text{72}}", "72"),
    ("\\boxed{25\\ \\text{cm}^{2}}", "25"),
    ("the area is 25 m2", "25"),
    ("the area is 25 cm^2", "25"),
    ("#### 25 m\u00b2", "25"),
    ("#### 90^{\\circ}", "90"),
    ("#### 72eggs", "72"),
    # thousands
    ("\\boxed{\\$1{,}080}", "1080"),
    ("\\boxed{1\\,080}", "1080"),
    ("\\boxed{1\\;080}", "1080"),
    ("#### 1 234", "1234"),
    ("#### 1 234 567 eggs", "1234567"),
    ("it is 1\u00a0234", "1234"),
    ("it is 1\u202f234", "1234"),
    ("#### 1'234", "1234"),
    ("#### 1_234", "1234"),
    ("#### 1,234.0", "1234"),
    # decimals, fractions, powers of ten
    (".5 of it", "0.5"),
    ("72.0", "72"),
    ("72.", "72"),
    ("(72)", "72"),
    ("#### 072", "72"),
    ("#### 3/4", "0.75"),
    ("#### 144/2", "72"),
    ("#### 1,440/20", "72"),
    ("\\boxed{\\frac{144}{2}}", "72"),
    ("\\boxed{-\\dfrac{3}{4}}", "-0.75"),
    ("\\boxed{\\frac12}", "0.5"),
    ("#### 7.2e1", "72"),
    ("#### 1.2E+3", "1200"),
    ("\\boxed{7.2 \\times 10^{1}}", "72"),
    ("#### 7.2 \u00d7 10^1", "72"),
    ("#### 7.2 x 10^1", "72"),
    ("#### 10^3", "1000"),
    # mixed numbers
    ("2 1/2", "2.5"),
    ("#### 2 1/2", "2.5"),
    ("#### -2 1/2 hours", "-2.5"),
    ("\\boxed{2\\frac{1}{2}}", "2.5"),
    ("\\boxed{2 \\frac12\\text{ cups}}", "2.5"),
    ("#### 2\u00bd", "2.5"),
    ("#### 2 and 1/2 hours", "2.5"),
    ("it is 5 / 2", "2.5"),
    ("it is 5\u20442", "2.5"),
    ("#### 1/8th", "0.125"),
    # other characters, Markdown, equations
    ("#### _72_", "72"),
    ("__72__", "72"),
    ("#### \uff17\uff12", "72"),
    ("#### \uff0d7", "-7"),
    ("#### \u20117", "-7"),
    ("\\boxed{-\\$7}", "-7"),
    ("so 2^3*9=72", "72"),
    ("$\\sqrt{5184}=72$", "72"),
    # thoughts
    ("<think>#### 7</think>8", "8"),
    ("<think>\\boxed{7}</think>\n#### 8", "8"),
    ("7\n</think>\n8", "8"),
]
WRONG = [  # none of them is 72
    "#### 72²",
    "#### 72^2",
    "#### \u221a72",
    "it is 3^72",
    "it is 5\\sqrt{72}.",
    "it is 72\u03c0",
    "\\boxed{\\frac{72}{x}}",
    "it is 1 / 72",
    "it is 72 / 5",
    "it is 1\u204472",
    "it is 72 and 1/2",
    "#### 1 and 72/73",
    "it is - 72",
    "#### \uff0d72",
    "#### \u201172",
    "72=8^2+8",
    "it is 3*10^(72)",
    "",
    "none",
    "seventy-two",
    "####",
    "72 ####",
    "#### five",
    "#### \nfive",
    "\\boxed{}",
    "\\boxed{72} and \\boxed{}",
    "#### 72 or 5",
    "#### 5, 72",
    "#### 72 5",
    "#### 72 and 50 cents",
    "#### 72\n#### 5",
    "72, I am sure. #### 5",
    "#### 70 + 2",
    "#### 8*9",
    "#### 72-5",
    "#### 72 = 5",
    "#### -72",
    "#### 72,1",
    "72,1",
    "#### 7,2",
    "#### 0,72",
    "#### 1,72",
    "#### 72.5",
    "#### 71.9999999999999999999",
    "#### 7272",
    "#### 72:00",
    "#### 72/0",
    "#### 1/72",
    "\\boxed{3/72}",
    "#### 72e1",
    "#### 72 x 10^2",
    "\\boxed{72x+1}",
    "\\boxed{72, 5}",
    "version v72",
    "x_72",
    "#### 0x72",
    "#### 1.72",
    "#### 72.72.72",
    "#### nan",
    "the 72nd",
    "#### 72nd",
    "#### 72^{nd}",
    "\\boxed{72^{\\text{nd}}}",
    "#### 1 72/2",
    "<think>#### 72",
    "<think>72</think>",
]


def test_the_table_has_enough_distinct_cases():
    assert len(set(RIGHT)) + len(set(WRONG)) == len(RIGHT) + len(WRONG) >= 60


@pytest.mark.parametrize("text, answer", RIGHT)
def test_answers_in_many_formats_score_1(text, answer):
    assert gsm8k.reward(text, {"answer": answer}) == 1.0
    assert gsm8k.reward(text, {"answer": str(float(answer) + 1)}) == 0.0


@pytest.mark.parametrize("text", WRONG)
def test_missing_ambiguous_and_wrong_answers_score_0(text):
    assert gsm8k.reward(text, {"answer": "72"}) == 0.0


@pytest.mark.parametrize("answer", [72, 72.0, "72", "1+71 = <<1+71=72>>72 eggs.\n#### 72", "$72"])
def test_the_answer_of_a_row_may_be_a_number_or_a_solution(answer):
    assert gsm8k.reward("#### 72", {"answer": answer}) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "9" * 20_000,
        "1," * 20_000 + "#" * 20_000,
        "#### " + "1 234 " * 20_000,
        "#### 1/" + "9" * 20_000,
        "#### 9e999",
        "\\boxed{" * 20_000,
        "\\frac{" + "1" * 20_000,
        "1'234" * 20_000,
        "1" + " 234" * 30_000,
        "\\boxed{1}" + " " * 50_000,
        "=" * 20_000,
    ],
)
def test_very_long_texts_are_scored_quickly(text):
    with cpu.limit(1):
        assert gsm8k.reward(text, {"answer": "72"}) == 0.0


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"question": "Why?", "answer": "so"}\n', "train.jsonl:1: .*ends in ####"),
        ('{"question": "Why?", "answer": "#### so"}\n', "train.jsonl:1: .*no number after ####"),
        ('{"question": "Why?", "answer": "#### 1/2"}\n', "train.jsonl:1: .*no number after ####"),
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


def test_a_gold_answer_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="must be a number, got 'many'"):
        gsm8k.reward("#### 1", {"answer": "many"})
