"""Exact values of expressions as math-verify parses them, against Python's fractions."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse

from areax.rollout.rewards import equality

LEAVES = st.integers(0, 99).map(lambda n: (str(n), Fraction(n))) | st.integers(1, 9999).map(
    lambda n: (f"{n / 1000:.3f}", Fraction(n, 1000))
)


def _sum(a, b):
    return f"({a[0]} + {b[0]})", a[1] + b[1]


def _difference(a, b):
    return f"({a[0]} - {b[0]})", a[1] - b[1]


def _product(a, b):
    return rf"({a[0]} \cdot {b[0]})", a[1] * b[1]


def _quotient(a, b):
    return (rf"\frac{{{a[0]}}}{{{b[0]}}}", a[1] / b[1]) if b[1] else a


def _power(a, n):
    return (f"({a[0]})^{{{n}}}", a[1] ** n) if a[1] else a


def _tree(inner):
    both = (inner, inner)
    return (
        st.builds(_sum, *both) | st.builds(_difference, *both) | st.builds(_product, *both)
        | st.builds(_quotient, *both) | st.builds(_power, inner, st.integers(-3, 3))
    )  # fmt: skip


@settings(max_examples=12)  # math-verify takes its time to parse
@given(st.recursive(LEAVES, _tree, max_leaves=5))
def test_the_value_of_an_expression_is_exact(pair):
    latex, value = pair
    parsed = parse(rf"\boxed{{{latex}}}")
    assert equality.rational(parsed[0]) == value


@pytest.mark.parametrize(
    "latex",
    [r"\pi", "x", r"\sqrt{2}", "2^{2^{30}}", "9^{9^{9^9}}", "0^{-1}", r"\frac{1}{0}", "(10^9)!", r"(\frac12)!", "x+1"],
)
def test_other_expressions_and_numbers_that_are_too_large_have_no_exact_value(latex):
    assert equality.rational(parse(rf"\boxed{{{latex}}}")[0]) is None


def test_texts_are_equal_only_to_texts():
    assert equality.equal(" a", "a ", None) and not equality.equal("a", "b", None)
    assert not equality.equal("1", parse("1")[0], None)
