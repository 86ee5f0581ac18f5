"""Numbers in the notations of people and models, against Python's fractions."""

from decimal import Decimal
from fractions import Fraction

import cpu
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.rollout.rewards import numbers

HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    "text, value",
    [
        ("72", 72),
        ("-72", -72),
        ("\u221272", -72),
        ("- 72", -72),
        ("+72", 72),
        ("072.", 72),
        (".5", HALF),
        ("1,234.50", Decimal("1234.5")),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        ("1 234 567", 1234567),
        ("1'234", 1234),
        ("$1,080$", 1080),
        ("\\$5", 5),
        ("3/4", Fraction(3, 4)),
        ("3 / 4", Fraction(3, 4)),
        ("3\u20444", Fraction(3, 4)),
        ("1,000/3", Fraction(1000, 3)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\dfrac34", Fraction(-3, 4)),
        ("\\frac{-3}{4}", Fraction(-3, 4)),
        ("\\frac 3 {4}", Fraction(3, 4)),
        ("\u00be", Fraction(3, 4)),
        ("2 1/2", 2 + HALF),
        ("-2 1/2", -2 - HALF),
        ("11 5/6", Fraction(71, 6)),
        ("4 10/3", Fraction(22, 3)),
        ("2\\frac12", 2 + HALF),
        ("2 \\tfrac{1}{2}", 2 + HALF),
        ("2\\,\\frac{1}{2}", 2 + HALF),
        ("2~\\frac{1}{2}", 2 + HALF),
        ("2\u00bd", 2 + HALF),
        ("2 \u00bd", 2 + HALF),
        ("0.\\overline{3}", Fraction(1, 3)),
        ("-2.1\\overline{6}", Fraction(-13, 6)),
        ("7.2e1", 72),
        ("1e-3", Fraction(1, 1000)),
        ("1.38\\times 10^{-23}", Fraction(138, 10**25)),
        ("1.38 \u00d7 10\u207b\u00b2\u00b3", Fraction(138, 10**25)),
        ("6.02 x 10^23", 602 * 10**21),
        ("6.02*10^(23)", 602 * 10**21),
        ("5\\cdot10^3", 5000),
        ("10^{-3}", Fraction(1, 1000)),
        ("1e-999", Fraction(1, 10**999)),
        ("9" * 5000, None),  # compared below
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert numbers.read(text) == (Decimal(text) if value is None else value, False)


def test_percent():
    assert numbers.read("12.5\\%") == numbers.read("12.5 percent") == numbers.read("$12.5%$") == (Decimal("12.5"), True)
    assert numbers.read("2 1/2 %") == (Fraction(5, 2), True)


@pytest.mark.parametrize(
    "text",
    ["", "x", "2x", "2 3", "18th", "1/0", "1/2/3", "1 2/3/4", "(5)", "2^3", "\\frac{1}{2}^2", "1,23", "12:30", "0x10",
     "2\\sqrt{2}", "1.2.3", "5 cm", "1/2 1/2", "\\frac{a}{2}", "10!", "%", "-", "2-1/2", "max 10^3", "nan", "1_2",
     "2 and 3/4"],
)  # fmt: skip
def test_other_texts_are_no_numbers(text):
    assert numbers.read(text) is None


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(1, 10**4), st.booleans())
def test_a_mixed_number_is_the_sum_of_its_parts(whole, over, under, negative):
    value = (whole + Fraction(over, under)) * (-1) ** negative
    sign = "-" * negative
    for text in (
        f"{whole} {over}/{under}",
        rf"{whole}\frac{{{over}}}{{{under}}}",
        rf"{whole} \dfrac{{{over}}}{{{under}}}",
    ):
        assert numbers.read(sign + text) == (value, False)
    if not negative:
        written = numbers.as_latex(f"is {whole} {over}/{under}.")
        assert Fraction(*map(int, written[len(r"is \frac{") : -len("}.")].split("}{"))) == value


@pytest.mark.parametrize(
    "text, latex",
    [
        ("The answer is 2 2/3.", r"The answer is \frac{8}{3}."),
        ("$x = -2 1/2$ cups", r"$x = -\frac{5}{2}$ cups"),
        ("2\u00bd or 1e-3 or \u22125.", r"\frac{5}{2} or 0.001 or -5."),
        ("in 2024 1/2/2024", "in 2024 1/2/2024"),
        ("x^2 1/2 and a_1 2/3 and 1.5 1/2 and (1) 1/2", "x^2 1/2 and a_1 2/3 and 1.5 1/2 and (1) 1/2"),
        ("4 4/0 of 1 000 4/9 or 4 4/9 2", r"\frac{4}{0} of \frac{9004}{9} or \frac{40}{9} 2"),
        ("Step 3\n1/2", "Step 3\n1/2"),
        ("5\\frac{1}{2} x + 3 \\tfrac12, 2^3\\frac12", r"\frac{11}{2} x + \frac{7}{2}, 2^3\frac12"),
        ("is 1.5 \u00d7 10\u207b\u00b2 or 2*10^(3), 2^3*10^2, 3*10^2!", "is 0.015 or 2000, 2^3*10^2, 3*10^2!"),
        ("is - 5, = \u2212 2\n- 3", "is -5, = -2\n- 3"),
        ("2e, 1e5x, 3e2^x", "2e, 1e5x, 3e2^x"),
    ],
)
def test_numbers_in_a_text_become_latex(text, latex):
    assert numbers.as_latex(text) == latex


@pytest.mark.parametrize(
    "piece", ["9", "1,", "1 ", "1 2/3 ", "\\frac", "\\frac{1", "10^", "e-3", " ", "\u00bd", "1'234", "123 "]
)
def test_long_texts_are_read_quickly(piece):
    with cpu.limit(2):
        numbers.read(piece * 20_000)
        numbers.as_latex(piece * 20_000)
