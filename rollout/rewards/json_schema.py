"""A reward for structured output: whether it is JSON that satisfies the row's schema."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .answers import block

LONGEST = 4000  # digits of a number, or zeros before or behind them


def reward(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `text` is JSON that satisfies `row["schema"]` (JSON Schema, an object or its text), else 0.0.

    The last ```json block outside of thoughts counts, else the last block without a language, or the whole text if
    there is none (`answers.block`). Numbers are compared exactly: 0.3 is a multiple of 0.1. NaN, Infinity and numbers
    longer than LONGEST are not JSON here. External references in the schema are not followed.

    Raises:
      ValueError: the row's schema is invalid.
    """
    import jsonschema
    import referencing
    from referencing.exceptions import Unresolvable

    try:
        schema = json.loads(row["schema"]) if isinstance(row["schema"], str) else row["schema"]
    except ValueError as error:
        raise ValueError(f"json_schema: the schema of a row is not JSON: {error}, got {row['schema']!r:.80}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"json_schema: the schema of a row must be an object or its text, got {schema!r:.80}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"json_schema: the schema of a row is invalid: {error.message}") from None
    try:
        value = json.loads(block(text, "json"), parse_constant=_refuse, parse_float=_exact)
    except (ValueError, RecursionError):  # invalid JSON, or nested too deeply
        return 0.0
    try:
        schema = json.loads(json.dumps(schema), parse_float=_exact)
        return float(_exactly(kind)(schema, registry=referencing.Registry()).is_valid(value))
    except RecursionError:
        return 0.0
    except Unresolvable as error:
        raise ValueError(f"json_schema: the schema of a row has an unresolvable reference: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _exact(number: str) -> Fraction:
    value = Decimal(number)
    if abs(value.adjusted()) + len(value.as_tuple().digits) > LONGEST:  # slow to compute with
        raise ValueError(f"{number[:80]} has too many digits")
    return Fraction(value)


@functools.cache
def _exactly(kind: Any) -> Any:
    """A validator that takes fractions for the decimals that they are."""
    import jsonschema

    checker = kind.TYPE_CHECKER
    if not checker.is_type(1.0, "integer"):  # of drafts to which 1.0 is no integer
        return kind
    whole = lambda _, x: checker.is_type(x, "integer") or (isinstance(x, Fraction) and x.denominator == 1)
    return jsonschema.validators.extend(kind, type_checker=checker.redefine("integer", whole))
