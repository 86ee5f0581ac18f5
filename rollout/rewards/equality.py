"""Equality of mathematical expressions: exact for rational numbers, by math-verify for all others."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

BITS = 1 << 20  # most of a number that is computed exactly
DIGITS = 300  # to which math-verify compares other numbers: it takes what is below 10^-DIGITS for 0
LONGEST = 4000  # characters of a decimal; Python refuses to convert longer ones
SHOWN = 7  # least significant digits of a decimal that stands for an irrational number


def equal(gold: Any, given: Any, timeout_s: int | None) -> bool:
    """Whether two answers, expressions or texts as math-verify's `parse` returns them, are equal.

    Rational numbers are equal if their values are: 0.333333 is not 1/3. x% is both x / 100 and x. A decimal of at least
    SHOWN significant digits is an irrational number from which it differs by less than one unit of its last digit.
    """
    import math_verify
    import sympy

    if isinstance(gold, str) or isinstance(given, str):
        return isinstance(gold, str) and isinstance(given, str) and gold.strip() == given.strip()
    (a, a_percent), (b, b_percent) = map(_number, (gold, given))
    if a is not None and b is not None:
        one_percent = (a_percent is None) != (b_percent is None)
        return a == b or (one_percent and (a_percent == b or a == b_percent))
    if _shows(gold, given) or _shows(given, gold):
        return True
    sums = any(one.has(sympy.Sum, sympy.Product, sympy.Integral) for one in (gold, given))  # take for ever
    digits = 15 if sums else DIGITS
    return math_verify.verify(_exact(gold), _exact(given), numeric_precision=digits, timeout_seconds=timeout_s)


def rational(expression: Any) -> Fraction | None:
    """The value of an expression of integers, decimals, + - * /, whole powers and factorials; None of others."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return Fraction(int(expression.p), int(expression.q))
    if isinstance(expression, sympy.Float):
        return Fraction(text) if len(text := str(expression)) < LONGEST else None
    if not isinstance(expression, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.UnevaluatedExpr):
        return None
    parts = [part for part in map(rational, expression.args) if part is not None]
    if len(parts) < len(expression.args):
        return None
    value, *others = parts
    if isinstance(expression, sympy.factorial):
        whole = value.denominator == 1 and 0 <= value and value * math.log2(value + 1) < BITS
        return Fraction(math.factorial(value.numerator)) if whole else None
    for other in others:
        if isinstance(expression, sympy.Pow):
            if other.denominator != 1 or abs(other) * _bits(value) > BITS or (other < 0 and not value):
                return None
            value = Fraction(value**other.numerator)
        else:
            value = value + other if isinstance(expression, sympy.Add) else value * other
        if _bits(value) > BITS:
            return None
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _number(expression: Any) -> tuple[Fraction | None, Fraction | None]:
    """(value, number before the percent sign) of an expression, as far as it has them."""
    import sympy

    value = rational(expression)
    if value is None or sympy.UnevaluatedExpr(sympy.Rational(1, 100)) not in expression.args:
        return value, None
    return value, 100 * value


def _shows(decimal: Any, number: Any) -> bool:
    """Whether a decimal stands for an irrational number."""
    import sympy

    value = rational(decimal) if isinstance(decimal, sympy.Float) else None
    if value is None or not getattr(number, "is_number", False):
        return False
    shown = Decimal(str(decimal)).normalize()
    digits = len(shown.as_tuple().digits)
    last = shown.adjusted() - digits + 1  # power of ten of the last digit
    if digits < SHOWN or last >= 0:
        return False
    difference = abs(number.evalf(digits + 10) - sympy.Rational(value.numerator, value.denominator))
    return bool(difference.is_extended_real and difference < sympy.Rational(10) ** last)


def _exact(expression: Any) -> Any:
    """The expression with each decimal as a fraction."""
    import sympy

    values = {one: rational(one) for one in expression.atoms(sympy.Float)}
    exact = {
        one: sympy.Rational(value.numerator, value.denominator) for one, value in values.items() if value is not None
    }
    return expression.xreplace(exact) if exact else expression
