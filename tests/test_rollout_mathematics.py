"""Answers that are expressions, compared by what they mean."""

import threading

import pytest

from areax.rollout import mathematics

PAIRS = [
    ("the answer is 0.5", "\\frac{1}{2}", 1),
    ("\\boxed{\\frac12}", "$\\frac{1}{2}$", 1),
    ("thus \\boxed{(x+1)^2}", "x^2+2x+1", 1),
    ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}", 1),
    ("\\boxed{1} and \\boxed{2}", "\\{1,2\\}", 1),
    ("\\boxed{1} or \\boxed{7}", "7", 0),  # guessing twice
    ("so \\boxed{8}", "\\boxed{7}", 0),
    ("no idea", "7", 0),
    ("", "7", 0),
]


@pytest.mark.parametrize("text, answer, score", PAIRS)
def test_the_reward_of_an_answer(text, answer, score):
    assert mathematics.reward(text, {"answer": answer}) == score


def test_it_works_in_a_thread():
    scores = []
    thread = threading.Thread(
        target=lambda: scores.extend(mathematics.reward(text, {"answer": answer}) for text, answer, _ in PAIRS)
    )
    thread.start()
    thread.join()
    assert scores == [score for _, _, score in PAIRS]


def test_an_answer_beyond_computing_is_wrong(monkeypatch):
    monkeypatch.setattr(mathematics, "SECONDS", 1)
    assert mathematics.reward("\\boxed{9^{9^{9^9}}}", {"answer": "9"}) == 0.0


def test_an_unreadable_gold_answer_is_the_rows_fault():
    with pytest.raises(ValueError, match="cannot be read, got ''"):
        mathematics.reward("7", {"answer": ""})
