"""What a specification refuses, in one line: rule, value received."""

from collections.abc import Iterable
from typing import Any


def must(spec, rules: Iterable[tuple[str, Any, str]], *, name: str = "") -> None:
    """Raises ValueError for the first (field, holds, rule) that does not hold.

    Args:
      name: of the specification in the message; "" = that of its class.
    """
    for field, holds, rule in rules:
        if not holds:
            raise ValueError(f"{name or type(spec).__name__}: {field} must be {rule}, got {getattr(spec, field)}")
