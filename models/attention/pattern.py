"""Which keys a query attends to, and how scores are computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
