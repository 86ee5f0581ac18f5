"""Environments of gymnasium whose actions are numbers or texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import library

COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)


class World:
    """One episode. The policy sees the observation if that is a number or a text, and below it the environment's
    drawing in text, if it has one, with coloured places in brackets.

    Args:
      name: of the environment, such as FrozenLake-v1, or MODULE:NAME of a module that registers it.
      system: the system prompt; the environment itself does not say what its actions mean.
      options: arguments of `gymnasium.make`, such as max_episode_steps, and of the environment, such as map_name.

    Raises:
      ValueError: actions or observations are of another space; or a render_mode, which is chosen here.
    """

    def __init__(self, name: str, *, system: str = "", **options: Any):
        gym, spaces = library("gymnasium", "gymnasium"), library("gymnasium.spaces", "")
        if "render_mode" in options:
            raise ValueError(f"render_mode is chosen here, got {options['render_mode']!r}; leave it out")
        self._env, self._system = gym.make(name, **options), system
        self._drawn = "ansi" in self._env.metadata.get("render_modes", ())
        self._space, seen = self._env.action_space, self._env.observation_space
        texts = spaces.Discrete, spaces.Text
        self._told = isinstance(seen, texts)
        if not isinstance(self._space, texts):
            raise ValueError(f"{name} must have actions of a space Discrete or Text, got {self._space}; choose another")
        if not (self._told or self._drawn):
            raise ValueError(f"{name} must have observations of a space Discrete or Text, or the render mode ansi, got "
                             f"{seen}; choose another")  # fmt: skip
        if self._drawn:
            self._env.close()
            self._env = gym.make(name, render_mode="ansi", **options)
        self._numbers = isinstance(self._space, spaces.Discrete)

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Begins the episode of the row's "seed"."""
        seen, _ = self._env.reset(seed=row["seed"])
        user = {"role": "user", "content": f"{self._text(seen)}\n\n{self._asked()}"}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    def step(self, message: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Takes the message as an action: its last number, or its text. One outside the space is told, and no step."""
        action: Any = message["content"]
        if self._numbers:
            found = re.findall(r"-?\d{1,18}", action)
            action = int(found[-1]) if found else None
        if not self._space.contains(action):
            return f"error: not an action. {self._asked()}", None, False
        seen, reward, terminated, truncated, _ = self._env.step(action)
        return self._text(seen), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._env.close()

    def _asked(self) -> str:
        if self._numbers:
            first = int(self._space.start)
            return f"Answer with an action, a number from {first} to {first + int(self._space.n) - 1}."
        return f"Answer with an action, a text of {self._space.min_length} to {self._space.max_length} characters."

    def _text(self, seen: Any) -> str:
        drawing = COLOURED.sub(r"[\1]", self._env.render()).strip("\n") if self._drawn else ""
        return "\n".join([*([str(seen)] if self._told else []), *([drawing] if drawing else [])])
