"""How areax's generation engine is split over devices (imports nothing heavy: the command line shows its options)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Any


def check_whole(option: str, value: Any) -> None:
    """Raises ValueError, naming the option, unless a value is a whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{option} must be a whole number, got {value!r:.80}")


@dataclass(frozen=True)
class EngineMesh:
    """The devices of a generation engine, the first ones of its process, or all those of a job of several processes.

    Attributes:
      dp: replicas, each with its own devices (ep x tp), weights, caches and slots, behind one queue of requests.
      ep: devices that share each layer's experts, and compute theirs for all tokens; all else, caches included, is
        replicated over them.
      tp: devices that share each sequence: heads, MLP and vocabulary are split over them (arXiv:1909.08053).
    """

    dp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self):
        for name, count in asdict(self).items():
            check_whole(name, count)
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")

    def __str__(self):
        return " x ".join(f"{name} {count}" for name, count in asdict(self).items() if count > 1) or "one device"

    def check(self, config) -> None:
        """Raises ValueError if a model's experts or heads, or its vision tower's, cannot be split so; `rules.of_params`
        does for the rest."""
        experts = getattr(config, "experts", 0)
        if self.ep > 1 and (not experts or experts % self.ep):
            raise ValueError(
                f"mesh: ep must divide the model's experts, {experts} in this {config.family}, got {self.ep}; use a "
                "divisor, or tp"
            )
        heads = {layer.heads for layer in config.records if hasattr(layer, "heads")}  # others are recurrent
        if any(N % self.tp for N in heads):
            raise ValueError(
                f"mesh: tp must divide the query heads of each layer, {', '.join(map(str, sorted(heads)))} in this "
                f"{config.family}, got {self.tp}; use a divisor"
            )
        if config.vision and (N := config.vision.heads) % self.tp:
            raise ValueError(f"mesh: tp must divide the heads of the vision tower, {N}, got {self.tp}; use a divisor")

    @property
    def replica(self) -> EngineMesh:
        """Of one replica."""
        return replace(self, dp=1)

    @property
    def words(self) -> list[str]:
        """The options of `areax serve` that ask for it."""
        return [word for name, count in asdict(self).items() for word in (f"--mesh.{name}", str(count))]

    @property
    def devices(self) -> int:
        return math.prod(asdict(self).values())


ONE_DEVICE = EngineMesh()
