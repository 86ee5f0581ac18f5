"""Environments of other libraries as worlds (`rollout.workflows.environments.World`); `--env KIND:NAME` loads them.

Each file has a class `World` of the environment's name and options. A row is {"seed": n}; a class whose tasks are other
rows has a static method `rows(split, **options)`, which takes the same arguments and may be called again.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def library(name: str, extra: str) -> ModuleType:
    """Imports the library of an extra. Raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} is not installed: pip install 'areax[{extra}]'") from None
