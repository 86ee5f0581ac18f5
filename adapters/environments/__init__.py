"""Environments of other libraries as worlds (`rollout.workflows.environments.World`); `--env KIND:NAME` loads them.

Each file has a class `World` of the environment's name and options. A row is {"seed": n}; a class whose tasks are other
rows has a static method `rows(split, **options)`, which takes the same arguments and may be called again.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def library(name: str, extra: str) -> ModuleType:
    """Imports the library of an extra. Raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} is not installed: pip install 'areax[{extra}]'") from None


def function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool, in OpenAI's format."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call, which the policy wrote; None if they are no JSON object."""
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def is_too_long(said: str, refusal: str) -> bool:
    """Whether an agent ended with the error `said` because the policy's prompt had become too long, which is its own
    doing: the gateway's `refusal` says so, and is what the error repeats, with quotes and escapes of its own."""
    bare = lambda text: re.sub(r"\W+", "", text)
    return "context length" in refusal and bare(refusal) in bare(said)
