"""A reward for structured output: whether it is JSON that satisfies the row's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

BLOCK = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)


def reward(text: str, row: Mapping[str, Any]) -> float:
    """1.0 if `text` is JSON that satisfies `row["schema"]` (JSON Schema, an object or its text), else 0.0.

    The last ```json block counts, or the whole text if there is none. NaN and Infinity are not JSON. External
    references in the schema are not followed.

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
    blocks = BLOCK.findall(text)
    try:
        value = json.loads(blocks[-1] if blocks else text, parse_constant=_refuse)
        return float(kind(schema, registry=referencing.Registry()).is_valid(value))
    except (ValueError, RecursionError):  # invalid JSON, or nested too deeply
        return 0.0
    except Unresolvable as error:
        raise ValueError(f"json_schema: the schema of a row has an unresolvable reference: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
