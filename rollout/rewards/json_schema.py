"""A reward for structured output: whether it is JSON that satisfies the row's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .answers import block


def reward(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `text` is JSON that satisfies `row["schema"]` (JSON Schema, an object or its text), else 0.0.

    The last ```json block outside of thoughts counts, else the last block without a language, or the whole text if
    there is none (`answers.block`). NaN and Infinity are not JSON. External references in the schema are not followed.

    Raises:
      ValueError: the row's schema is invalid.
    """
    import jsonschema
    import referencing
    from referencing.exceptions import Unresolvable

    schema = json.loads(row["schema"]) if isinstance(row["schema"], str) else row["schema"]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"json_schema: the schema of a row is invalid: {error.message}") from None
    try:
        value = json.loads(block(text, "json"), parse_constant=_refuse)
        return float(kind(schema, registry=referencing.Registry()).is_valid(value))
    except (ValueError, RecursionError):  # invalid JSON, or nested too deeply
        return 0.0
    except Unresolvable as error:
        raise ValueError(f"json_schema: the schema of a row has an unresolvable reference: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
