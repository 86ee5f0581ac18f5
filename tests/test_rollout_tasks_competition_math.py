"""Answers that are expressions, compared by mathematical equality."""

import threading

import cpu
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
    # boxes, wherever they are
    ("\\boxed{1}, as 2 - 1 = 1. The other one is much farther away: \\boxed{2}", "\\{1,2\\}", 1),
    ("\\boxed{1}, as 2 - 1 = 1. The other one is much farther away: \\boxed{7}", "7", 0),
    ("\\boxed{0.5}, as 2 - 1 = 1. Once more, to be clear about it: \\boxed{\\frac12}", "1/2", 1),
    ("\\boxed{\\{1,2\\}} and \\fbox{3}", "1, 2, 3", 1),
    ("\\boxed{1} and \\boxed{234}", "1234", 0),
    ("\\boxed{\\boxed{7}}", "7", 1),
    ("\\boxed{}", "7", 0),
    # thoughts
    ("<think>\\boxed{7}</think> It is 8.", "8", 1),
    ("<think>\\boxed{7}</think>\\boxed{8}", "8", 1),
    ("so \\boxed{7}.</think> The answer is 8.", "8", 1),
    ("<think>\\boxed{8}", "8", 0),
    # mixed numbers, separators, powers of ten
    ("The answer is 2 2/3.", "2", 0),
    ("The answer is 2 and 3/4.", "2", 0),
    ("The answer is 2 and 3/4.", "11/4", 1),
    ("The answer is 5\\frac{1}{2}.", "\\frac{1}{2}", 0),
    ("The answer is 5\\frac{1}{2}.", "5.5", 1),
    ("\\boxed{3\\frac12\\pi}", "\\frac{3\\pi}{2}", 0),
    ("\\boxed{3\\frac12\\pi}", "\\frac{7\\pi}{2}", 1),
    ("The answer is 1.38 × 10⁻²³.", "1.38", 0),
    ("The answer is 1.38 × 10^-23.", "10", 0),
    ("The answer is 1.38 \\times 10^{-23}", "1.38\\times 10^{-23}", 1),
    ("The answer is 1.38*10^(-23).", "1.38\\times 10^{-23}", 1),
    ("The answer is 5⁄8.", "5", 0),
    ("The answer is 5 / 8.", "\\frac58", 1),
    ("The answer is -.5", "-0.5", 1),
    ("The answer is - 1/2", "\\frac12", 0),
    ("The answer is 2π.", "2", 0),
    # formulas outside of $...$
    ("It takes 4 steps.\n<answer>5</answer>", "4", 0),
    ("It takes 4 steps.\n<answer>5</answer>", "5", 1),
    ("The answer is 2x + 3.", "2x+3", 1),
    ("The answer is (1, 2).", "(1,2)", 1),
    ("The answer is 2\u221a3.", "2\\sqrt3", 1),
    ("The answer is 2 pi.", "2\\pi", 1),
    ("So x = 1 or x = 2.", "1, 2", 1),
    ("The answer is x + 2.", "2", 0),
    ("The answer is 1 - x.", "1", 0),
    ("The answer is 4(x+1).", "4", 0),
    ("The answer is 4 to 5.", "4", 0),
    ("She pays $17/$8.50 = 2", "2", 1),
    ("We get h = 8,000", "8000", 1),
    # beside other words it is a number
    ("The answer: 15 - 10 = 5", "5", 1),
    ("So the answer is 6 a day", "6", 1),
    ("The answer is 6 e.g. six", "6", 1),
    ("The answer is 6, i.e. six", "6", 1),
    ("The answer is 12 x's", "12", 1),
    ("The answer is 5 and it holds", "5", 1),
    ("The answer is 2√3.", "2", 0),
    ("The answer is 5 - 3i.", "5", 0),
    ("The answer is (2, 3).", "3", 0),
    ("The answer is 2, 3", "2", 0),
    ("The answer is 2 or 3.", "2", 0),
    ("The answer is x > 2.", "2", 0),
    ("The answer is 3:4.", "3", 0),
    ("The answer is 2^(10).", "2", 0),
    ("The answer is 2×3.", "2", 0),
    ("The answer is 1'234.", "1", 0),
    ("The answer is 10²", "10", 0),
    ("The answer is \\pm 5.", "5", 0),
    ("The answer is 5 1/2 - 3 1/4.", "5.5", 0),
    ("The answer is **12**.", "12", 1),
    ("Since 3 * 4 = 12, the answer is: 12 cm", "12", 1),
    ("The answer is $12$, as 3 * 4 = 12", "12", 1),
    ("3 + 4 = 7", "7", 1),
    ("\\boxed{101_2}", "101_3", 0),
    ("\\boxed{101_{2}}", "101_2", 1),
    ("\\boxed{101}", "101_2", 1),
    ("The answer is 2 2/3.", "\\frac{8}{3}", 1),
    ("So we need 4 10/3 cups.", "10", 0),
    ("So we need $3 1/2$ cups.", "\\frac{7}{2}", 1),
    ("So it is -3\u00bd.", "-3.5", 1),
    ("\\boxed{11 5/6}", "\\frac{71}{6}", 1),
    ("\\boxed{11\\frac{5}{6}}", "11 5/6", 1),
    ("\\boxed{1 234}", "1234", 1),
    ("\\boxed{1,234}", "1234", 1),
    ("\\boxed{1e-3}", "0.001", 1),
    ("The answer is 1e-3.", "0.001", 1),
    ("\\boxed{1.38\\times 10^{-23}}", "1.38e-23", 1),
    ("\\boxed{1.38\\times 10^{-22}}", "1.38\\times 10^{-23}", 0),
    # percent
    ("\\boxed{50\\%}", "0.5", 1),
    ("\\boxed{50}", "50\\%", 1),
    ("\\boxed{12.5\\%}", "12.5", 1),
    ("\\boxed{5000\\%}", "50\\%", 0),
    ("\\boxed{0.5\\%}", "50", 0),
    # small differences
    ("\\boxed{\\frac{1}{21!}}", "\\frac{1}{20!}", 0),
    ("\\boxed{\\frac{1}{2006!}}", "\\frac{1}{2004!}", 0),
    ("\\boxed{\\frac{1}{2^{100}}}", "\\frac{2^{99}+1}{2^{100}}", 0),
    ("\\boxed{\\frac{2^{100}+1}{3\\cdot 2^{99}}}", "\\frac{2^{100}-1}{3\\cdot 2^{99}}", 0),
    ("\\boxed{\\frac{2^{99}+1}{2^{100}}}", "\\frac12 + 2^{-100}", 1),
    ("\\boxed{\\frac{\\pi}{21!}}", "\\frac{\\pi}{20!}", 0),
    ("\\boxed{x + \\frac{1}{2^{60}}}", "x + \\frac{1}{2^{61}}", 0),
    ("\\boxed{\\left(0, \\frac{1}{2^{60}}\\right)}", "(0, 0)", 0),
    ("\\boxed{x = \\frac{1}{2^{60}}}", "\\frac{1}{2^{61}}", 0),
    ("\\boxed{0.00000001}", "0.00000002", 0),
    ("\\boxed{\\{0.00000001\\}}", "\\{0.00000002\\}", 0),
    ("\\boxed{1.0000001}", "1", 0),
    ("\\boxed{0.333333}", "\\frac13", 0),
    ("\\boxed{0.1 + 0.2}", "0.3", 1),
    ("\\boxed{0.12345678901234567891}", "0.12345678901234567892", 0),
    ("\\boxed{(0.1, \\frac12)}", "(\\frac{1}{10}, 0.5)", 1),
    ("\\boxed{\\begin{pmatrix}0.5\\\\2\\end{pmatrix}}", "\\begin{pmatrix}\\frac12\\\\2\\end{pmatrix}", 1),
    ("\\boxed{0.5\\pi}", "\\frac{\\pi}{2}", 1),
    ("\\boxed{2^{0.5}}", "\\sqrt{2}", 1),
    ("\\boxed{\\sqrt2\\sqrt3}", "\\sqrt6", 1),
    # decimals of irrational numbers
    ("\\boxed{4.123105625617661}", "\\sqrt{17}", 1),
    ("The answer is 3.141593.", "\\pi", 1),
    ("\\boxed{\\sqrt{17}}", "4.123106", 1),
    ("\\boxed{4.123107}", "\\sqrt{17}", 0),
    ("\\boxed{3.14}", "\\pi", 0),
    ("\\boxed{0.0}", "\\frac{\\pi}{10^{20}}", 0),
    ("\\boxed{262537412640768744.0}", "e^{\\pi\\sqrt{163}}", 0),
    ("\\boxed{4.0000001}", "\\sqrt{16}", 0),
    # words are no products of letters, and formulas that cannot be parsed are texts
    ("\\boxed{seat}", "\\text{east}", 0),
    ("\\boxed{\\text{No solution.}}", "no solution", 1),
    ("\\boxed{yx}", "xy", 1),
    ("\\boxed{infinity}", "\\infty", 1),
    ("\\boxed{\\frac{1}{\\mathrm{\\pi}}}", "\\frac{1}{\\mathrm{e}}", 0),
    ("\\boxed{1 - \\frac{1}{ \\mathrm{e} }}", "1-\\frac{1}{e}", 1),
    ("so $1 + \\frac{1}{\\mathrm{e}}$", "1-\\frac{1}{\\mathrm{e}}", 0),
    ("\\boxed{\\text{Evelyn}}", "$\\text{Evelyn}$", 1),
    ("\\boxed{0.1\\overline{6}}", "\\frac16", 1),
    # units, and characters that LaTeX has commands for
    ("\\boxed{\\text{5 units}}", "5", 1),
    ("\\boxed{5~\\text{kg}}", "5", 1),
    ("\\boxed{5\u5143}", "5", 1),
    ("\\boxed{\uff15}", "5", 1),
    ("\\boxed{\uff0d5}", "5", 0),
    ("\\boxed{90\u00b0}", "90^\\circ", 1),
    ("The answer is 17\u00b0C.", "17", 1),
    ("\\boxed{\\boldsymbol{5}}", "5", 1),
    ("\\boxed{2\u221a3}", "2\\sqrt3", 1),
    ("\\boxed{x\u00b2+1}", "x^2+1", 1),
    ("\\boxed{\\varnothing}", "\\emptyset", 1),
    ("\\boxed{(-\u221e,2)\u222a(3,\u221e)}", "(-\\infty,2)\\cup(3,\\infty)", 1),
    ("\\boxed{6 / 1.5 = 4}", "4", 1),
    ("\\boxed{6 / 1.5 = 4}", "6", 0),
    # percent behind a box
    ("$\\boxed{28}$ %", "0.28", 1),
    ("\\boxed{28}\\%", "0.28", 1),
    ("\\boxed{28\\%}$$ Final Answer: $28\\%$", "28\\%", 1),
]


@pytest.mark.parametrize("text, answer, score", PAIRS)
def test_the_reward_of_an_answer(text, answer, score):
    assert competition_math.reward(text, {"answer": answer}) == score


def test_the_reward_works_in_a_thread():
    scores = []
    thread = threading.Thread(
        target=lambda: scores.extend(competition_math.reward(text, {"answer": answer}) for text, answer, _ in PAIRS[:9])
    )
    thread.start()
    thread.join()
    assert scores == [score for _, _, score in PAIRS[:9]]


@pytest.mark.slow
def test_an_answer_that_takes_too_long_to_compute_is_wrong(monkeypatch):
    monkeypatch.setattr(competition_math, "SECONDS", 1)
    assert competition_math.reward("\\boxed{9^{9^{9^9}}}", {"answer": "9"}) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"\\boxed{{{i}}} " for i in range(3000)),
        "\\boxed{east" + " " * 60_000 + "1}",
        "\\boxed{7}" + " " * 60_000,
        "1" + ",234" * 60_000 + " 1/2",
        "answer is " * 20_000 + "(" * 20_000 + "\\(1" * 20_000,
    ],
)
def test_very_long_answers_are_scored_quickly(text):
    with cpu.limit(2 * competition_math.SECONDS):  # math-verify may take all of its time
        assert competition_math.reward(text, {"answer": "8"}) == 0.0


@pytest.mark.parametrize(("terms", "score"), [(100, 1.0), (500, 0.0)])
def test_a_formula_of_a_thousand_characters_is_no_answer(terms, score):
    assert competition_math.reward("0+" * terms + "8", {"answer": "8"}) == score


def test_an_unparsable_gold_answer_is_an_error():
    with pytest.raises(ValueError, match="cannot be parsed, got ''"):
        competition_math.reward("7", {"answer": ""})
    with pytest.raises(ValueError, match="cannot be parsed, got None"):
        competition_math.reward("\\boxed{none}", {"answer": None})


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
        (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{7}, {\boxed{never closed", "7"),
        ("\\boxed{" * 20_000, None),
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
