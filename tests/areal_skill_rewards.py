"""Rewards as AReaL's contributor guides have their readers write them: with AReaL's import, which a test replaces."""

import os
import re
import time
from typing import Any

from areal.utils import logging

logger = logging.getLogger("Rewards")


def boxed(prompt: str, completions: str, prompt_ids, completion_ids, answer: str | None = None, **kwargs: Any):
    """The add-reward guide's: 1 for the boxed answer, or for the answer alone."""
    try:
        found = re.search(r"\\boxed\{([^}]+)\}", completions)
        said = found[1] if found else completions
        return 1.0 if answer is not None and said.strip() == str(answer) else 0.0
    except Exception:
        logger.warning("a reward failed", exc_info=True)
        return 0.0


def in_brackets(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    """As geometry's: whatever is in the last brackets, as an int."""
    found = re.findall(r"\[([^\]]+)\]", completions)
    return int(bool(found) and found[-1].replace(" ", "") == answer.replace(" ", ""))


def counted(prompt, completions, prompt_ids, completion_ids, answer, **kwargs) -> float:
    """As counting's: a number in brackets."""
    found = re.findall(r"\[([0-9.]+)\]", completions)
    return float(bool(found) and found[-1].strip() == answer.strip())


def two_arguments(prompt, completions, answer, **kwargs):
    """For a wrapper that is called with the two texts alone."""
    return float(completions == answer)


def hangs(prompt, completions, prompt_ids, completion_ids, **kwargs):
    return os.getpid() if completions == "pid" else time.sleep(3600)


def raises(*texts, **data):
    raise KeyError("answer")
