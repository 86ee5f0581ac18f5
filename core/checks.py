"""Validation of option dataclasses: one line with the rule and the value received."""

from collections.abc import Iterable
from typing import Any, get_args


def validate(spec, rules: Iterable[tuple[str, Any, str]], *, name: str = "") -> None:
    """Raises ValueError for the first (field, holds, rule) that does not hold.

    Args:
      name: name of the specification in the message; "" = its class name.
    """
    for field, holds, rule in rules:
        if not holds:
            raise ValueError(f"{name or type(spec).__name__}: {field} must be {rule}, got {getattr(spec, field)}")


def one_of(name: str, value, literal) -> None:
    """Raises ValueError for a value that is not one of a Literal's.

    Args:
      name: function and argument, such as "group: std".
    """
    if value not in get_args(literal):
        raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(literal)))}, got {value}")
