"""Letters that completions choose."""

import cpu
import numpy as np
import pytest

from areax.rollout.rewards import choice


@pytest.mark.parametrize(
    "text",
    [
        "The answer is option B.",
        "The correct answer is choice (B): Paris.",
        "Answer: Option B",
        "Answer: `B`",
        'The answer is "B".',
        "The answer is \u201cB\u201d.",
        "The answer is 'B'.",
        "Answer - B",
        "Answer = B",
        "Answer\uff1aB",
        "\\boxed{\\text{Option B}}",
        "<answer>Option B</answer>",
        "\\(B\\)",
        "The answer is B and I am sure.",
        "Answer: B. Answer choice A is wrong.",
    ],
)
def test_a_letter(text):
    assert choice.chosen(text) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "The answer is B|C",
        "Answer: **B** and **C**",
        "Answer: \\textbf{B}, \\textbf{C}",
        "\\boxed{\\text{B}, \\text{C}}",
        "The answer is option A or option B",
        "Answer: I'm not sure",
        "Answer: B's",
    ],
)
def test_no_letter(text):
    assert choice.chosen(text) is None


@pytest.mark.parametrize("answer", [1, np.int64(1), "B", "(b)"])
def test_the_answer_of_a_row(answer):
    assert choice.reward("B", {"answer": answer}) == 1.0 and choice.reward("C", {"answer": answer}) == 0.0


@pytest.mark.parametrize("answer", [None, True, 26, -1, 1.0, "", "AB"])
def test_another_answer_of_a_row_is_refused(answer):
    with pytest.raises(ValueError, match="choice: answer must be a letter or the index"):
        choice.reward("B", {"answer": answer})


@pytest.mark.parametrize("piece", ["answer ", "option ", "(", "\\(", "B,", "'"])
def test_long_texts_are_read_quickly(piece):
    with cpu.limit(1):
        choice.chosen("answer " + piece * 20_000)
