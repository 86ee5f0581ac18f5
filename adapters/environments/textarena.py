"""Games of TextArena for one player."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import library
from .randomness import Randomness


class World:
    """One game.

    Args:
      name: of the game, such as GuessTheNumber-v0.
      options: arguments of the game, such as max_turns.
    """

    def __init__(self, name: str, **options: Any):
        self._arena, self._name, self._options = library("textarena", "textarena"), name, options
        self._told = ""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begins the game of the row's "seed".

        Raises:
          ValueError: the game needs several players, each of which would have a reward of its own.
        """
        self._randomness = Randomness(row["seed"])
        with self._randomness.drawn():
            self._game = self._arena.make(self._name, **self._options)
            try:
                self._game.reset(num_players=1, seed=row["seed"])
            except AssertionError as error:
                raise ValueError(f"{self._name} must be a game for one player ({error}); choose another") from error
            return self._news()

    def step(self, message: Mapping[str, Any]) -> tuple[str, dict[str, float] | None, bool]:
        """Plays the message; the reward comes at the end, and whether an invalid move ended the game."""
        with self._randomness.drawn():
            done, _ = self._game.step(action=message["content"])
            if not done:
                return self._news(), None, False
            rewards, infos = self._game.close()
        return "", {"reward": rewards[0], "invalid_move": float(infos[0].get("invalid_move", False))}, True

    def _news(self) -> str:
        """What the player sees that was not told: the usual wrapper repeats the whole game at each turn."""
        _, seen = self._game.get_observation()
        if not isinstance(seen, str):  # of games without a wrapper: (from, message, kind) of each
            seen = "\n".join(message for _, message, _ in seen)
        told, self._told = self._told, seen
        return seen.removeprefix(told).strip() or seen
