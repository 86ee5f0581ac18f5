"""Games of TextArena, for one player or of the policy against itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import library
from .randomness import Randomness


class World:
    """One game.

    Args:
      name: of the game, such as GuessTheNumber-v0.
      players: all of them are the policy, each with a conversation and a reward of its own.
      options: arguments of the game, such as max_turns.
    """

    def __init__(self, name: str, *, players: int = 1, **options: Any):
        self._arena, self._name, self._options = library("textarena", "textarena"), name, options
        self.seats, self.seat = players, 0
        self._told: dict[int, str] = {}

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begins the game of the row's "seed". Raises ValueError if it is not for as many players."""
        self._randomness = Randomness(row["seed"])
        with self._randomness.drawn():
            self._game = self._arena.make(self._name, **self._options)
            try:
                self._game.reset(num_players=self.seats, seed=row["seed"])
            except AssertionError as error:
                raise ValueError(
                    f"{self._name} must be playable with players = {self.seats} ({error}); set the option, as in "
                    """--env-options '{"players": 2}', or choose another game"""
                ) from error
            return self._news()

    def step(self, message: Mapping[str, Any]) -> tuple[str, Any, bool]:
        """Plays the message; rewards come at the end, and whether an invalid move ended the game."""
        with self._randomness.drawn():
            done, _ = self._game.step(action=message["content"])
            if not done:
                return self._news(), None, False
            rewards, infos = self._game.close()
        one = lambda i: {"reward": rewards[i], "invalid_move": float(infos.get(i, {}).get("invalid_move", False))}
        return "", one(0) if self.seats == 1 else [one(i) for i in range(self.seats)], True

    def _news(self) -> str:
        """What the player whose turn it is sees that it was not told: the usual wrapper repeats the whole game."""
        self.seat, seen = self._game.get_observation()
        if not isinstance(seen, str):  # of games without a wrapper: (from, message, kind) of each
            seen = "\n".join(message for _, message, _ in seen)
        told, self._told[self.seat] = self._told.get(self.seat, ""), seen
        return seen.removeprefix(told).strip() or seen
