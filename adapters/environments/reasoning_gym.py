"""Data sets of reasoning-gym: a task for each seed, answered in one turn."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from . import library
from .randomness import Randomness

log = logging.getLogger(__name__)


class World:
    """One task.

    Args:
      name: of the data set, such as chain_sum; composite takes `datasets`, a list of {"name", "weight", "config"}.
      system: the system prompt, one of reasoning_gym.utils.SYSTEM_PROMPTS; it asks for the answer between <answer> and
        </answer>.
      options: of the data set's configuration, such as max_terms.
    """

    def __init__(self, name: str, *, system: str = "default", **options: Any):
        self._gym, self._utils = library("reasoning_gym", "reasoning-gym"), library("reasoning_gym.utils", "")
        if name == "composite":
            spec = library("reasoning_gym.composite", "").DatasetSpec
            options["datasets"] = [spec(**{"weight": 1, "config": {}, **one}) for one in options.get("datasets", ())]
        if system not in self._utils.SYSTEM_PROMPTS:
            raise ValueError(f"system must be one of {', '.join(self._utils.SYSTEM_PROMPTS)}, got {system!r}")
        self._system, self._options = self._utils.SYSTEM_PROMPTS[system], {"name": name, **options}

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """The task of the row's "seed". It stays a Python object: through JSON some would score otherwise."""
        with Randomness(row["seed"]).drawn():  # one set draws from the process's
            self._set = self._gym.create_dataset(**self._options, seed=row["seed"], size=1)
            self._task = self._set[0]
        return [{"role": "system", "content": self._system}, {"role": "user", "content": self._task["question"]}]

    def step(self, message: Mapping[str, Any]) -> tuple[str, float, bool]:
        """The data set's score of the answer, from 0 to 1; 0 for an answer that its scorer cannot read."""
        answer = self._utils.extract_answer(message["content"])
        try:
            return "", float(self._set.score_answer(answer, self._task)), True
        except Exception as error:  # some scorers raise for nonsense, which is the policy's
            log.info("reasoning_gym %s: %r scores 0: %s", self._options["name"], answer, error)
            return "", 0.0, True
