"""Formulas that texts without a box end in."""

import cpu
import pytest

from areax.rollout.rewards import formulas


@pytest.mark.parametrize(
    "text, formula",
    [
        ("The answer is 42.", "42"),
        ("The answer is **42**, as 6 * 7 = 42", "42"),
        ("The answer to question 3 is 42 when x = 3.", "42"),
        ("Answer:\n\n$x = 42$ apples", "x = 42"),
        ("2 tries. <answer> 42 </answer>", "42"),
        ("The answer is not 41 but 42", "42"),
        ("Divide the answer by 7 days: 28 / 7 = 4", "28 / 7 = 4"),
        ("So `42` it is", "42"),
        ("- 42 eggs", "42"),
        ("It costs $5 - $3 = $2.", "5 -  3 =  2"),
        ("The answer is $\\frac{1}{2}$ and $3$", "\\frac{1}{2}  and  3"),
        # units and words are not part of it
        ("it is 42 m^2", "42"),
        ("it is 42 km/h", "42"),
        ("it is 42 m/s^2 and g = 9 m/s\u00b2", "g = 9"),
        ("it is 42 miles/hour in 3 cm\u00b3.", "3"),
        ("it is 42 x^2 + 1", "42 x^2 + 1"),
        ("the answer is 6 a day", "6"),
        ("the answer is 42 x's", "42"),
        ("the answer is 42, i.e. six sevens", "42"),
        ("the answer is 42 and i am sure", "42"),
        ("the answer is 42 (forty-two)", "42"),
        ("the answer is 42, not 41", "42"),
        ("the answer is 42: done", "42"),
        ("the answer is (42).", "(42)"),
        # letters, signs and what is joined are
        ("the answer is 2x + 3.", "2x + 3"),
        ("the answer is 42 x + 1", "42 x + 1"),
        ("the answer is x^2 - y", "x^2 - y"),
        ("the answer is x\u00b2 - y.", "x\u00b2 - y"),
        ("the answer is n(n+1)/2.", "n(n+1)/2"),
        ("the answer is [0, 1).", "[0, 1)"),
        ("so (x, y) = (1, 2)", "(x, y) = (1, 2)"),
        ("so it is 1 and 2", "1 and 2"),
        ("so x = 1 or x = 2.", "x = 1 or x = 2"),
        ("so it is 42, or 43", "42, or 43"),
        ("so it is 42; 43", "42; 43"),
        ("so it is between 2 and 3.", "2 and 3"),
        ("so it is 3 : 4", "3 : 4"),
        ("so it is \u00b12\u03c0", "\u00b12\u03c0"),
        ("so it is \\{1, 2\\}.", "\\{1, 2\\}"),
        ("so it is 12 345 678 %", "12 345 678 %"),
        ("", ""),
        ("no idea", ""),
        ("( = )", ""),
        ("so it is v7", ""),
        ("\u517142", "42"),
        ("so it is x23 + 1", "x23 + 1"),
    ],
)
def test_the_formula_of_a_text(text, formula):
    assert formulas.final(text) == formula


@pytest.mark.parametrize(
    "piece", ["(", ")", "=", "$1", "\\(1", "answer is ", "1 ", "x ", " ", "1 and ", "\\text{", "'"]
)
def test_long_texts_are_read_quickly(piece):
    with cpu.limit(2):
        formulas.final(piece * 20_000)
