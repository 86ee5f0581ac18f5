"""Answers that are expressions, compared by mathematical equality."""

import threading

import pytest

from areax.rollout.tasks import competition_math

PAIRS = [
    ("the answer is 0.5", "\\frac{1}{2}", 1),
    ("\\boxed{\\frac12}", "$\\frac{1}{2}$", 1),
    ("thus \\boxed{(x+1)^2}", "x^2+2x+1", 1),
    ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}", 1),
    ("\\boxed{1} and \\boxed{2}", "\\{1,2\\}", 1),
    ("\\boxed{1} or \\boxed{7}", "7", 0),  # two guesses
    ("so \\boxed{8}", "\\boxed{7}", 0),
    ("no idea", "7", 0),
    ("", "7", 0),
]


@pytest.mark.parametrize("text, answer, score", PAIRS)
def test_the_reward_of_an_answer(text, answer, score):
    assert competition_math.reward(text, {"answer": answer}) == score


def test_the_reward_works_in_a_thread():
    scores = []
    thread = threading.Thread(
        target=lambda: scores.extend(competition_math.reward(text, {"answer": answer}) for text, answer, _ in PAIRS)
    )
    thread.start()
    thread.join()
    assert scores == [score for _, _, score in PAIRS]


def test_an_answer_that_takes_too_long_to_compute_is_wrong(monkeypatch):
    monkeypatch.setattr(competition_math, "SECONDS", 1)
    assert competition_math.reward("\\boxed{9^{9^{9^9}}}", {"answer": "9"}) == 0.0


def test_an_unparsable_gold_answer_is_an_error():
    with pytest.raises(ValueError, match="cannot be parsed, got ''"):
        competition_math.reward("7", {"answer": ""})


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\fbox{ x^{2^{3}} }", "x^{2^{3}}"),
        (r"Thus $\boxed 7$ apples", "7"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1)\}}", r"[0, 1)\}"),
        (r"\boxed{\begin{pmatrix}1\\{2}\\\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\\\end{pmatrix}"),
        (r"a \boxedtext{3}", None),
        (r"\boxed{never closed", None),
        ("no box", None),
    ],
)
def test_the_boxed_answer_of_a_solution(text, answer):
    assert competition_math.boxed(text) == answer


def test_a_record_of_math_becomes_a_row():
    record = {"problem": "Find $x$.", "solution": r"It is $\boxed{\frac12}$.", "level": "Level 5", "type": "Algebra"}
    read = competition_math.row(record)
    assert read == {
        "prompt": "Find $x$.\nReason step by step, and put the final answer into \\boxed{}.",
        "answer": r"\frac12", "completion": record["solution"], "problem": "Find $x$.", "level": 5,
        "subject": "Algebra",
    }  # fmt: skip
    assert competition_math.reward(read["completion"], read) == competition_math.reward("It is 0.5", read) == 1.0
    other = competition_math.row({**record, "answer": 8, "level": 3, "subject": "Geometry"})
    assert (other["answer"], other["level"], other["subject"]) == ("8", 3, "Geometry")
    assert competition_math.row({**record, "level": "Level ?"})["level"] is None


@pytest.mark.parametrize(
    "record, message",
    [
        ({"question": "1"}, r"needs strings 'problem' and 'solution', got the fields \['question'\]"),
        ({"problem": "1", "solution": "It is 2."}, r"no .boxed answer in the solution, got ...'It is 2.'"),
        ({"problem": "1", "solution": r"\boxed{}"}, r"no .boxed answer"),
    ],
)
def test_other_records_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        competition_math.row(record)
