"""The options of the service (imports nothing heavy: the command line shows them)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of the service.

    Attributes:
      out: folder of sessions, saved states and weights; a server that starts again there goes on.
      rank: highest rank of adapters.
      save_every: updates of a model after which its state is saved; a killed server repeats at most as many.
    """

    out: str = "runs/tinker"
    rank: int = 32
    save_every: int = 10

    def __post_init__(self):
        for name in ("rank", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"tinker: {name} must be at least 1, got {getattr(self, name)}")


DEFAULTS = Options()
