"""Letters that completions choose."""

import cpu
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


@pytest.mark.parametrize("piece", ["answer ", "option ", "(", "\\(", "B,", "'"])
def test_long_texts_are_read_quickly(piece):
    with cpu.limit(1):
        choice.chosen("answer " + piece * 20_000)
