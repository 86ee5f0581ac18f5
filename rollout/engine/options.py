"""The options of an engine as it uses them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import jax

from ...models import paging
from ..servers.engine_mesh import check_whole
from ..servers.engine_options import EngineOptions

CONTEXT = 1 << 26  # most tokens; `paging.kinds` has an entry for each position


@dataclass(frozen=True)
class Options(EngineOptions):
    """The keyword arguments of `Engine`: the options of the command line, and two that do not change any sample. Here a
    `context` above the model's limit is taken as it is.

    Attributes:
      page: tokens of a page, a power of two of at least 16; 0 = by context.
      steps: decoding steps per dispatch.
    """

    page: int = 0
    steps: int = paging.STEPS

    def __post_init__(self):
        super().__post_init__()
        for name in ("context", "steps", "page"):
            check_whole(f"Engine: {name}", getattr(self, name))
        for name in ("context", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"Engine: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("context", "page"):
            if getattr(self, name) > CONTEXT:
                raise ValueError(f"Engine: {name} must be at most {CONTEXT:,} tokens, got {getattr(self, name):,}")
        if self.page and (self.page < 16 or self.page & (self.page - 1)):
            raise ValueError(f"Engine: page must be a power of two of at least 16, got {self.page}")
        paging.check_draft("Engine: draft", self.draft, self.context)

    def resolved(self, platform: str = "") -> Self:
        """With sizes instead of those that are 0, except for `memory` (`budget`); `platform` is JAX's default."""
        slots = self.slots or paging.default_slots(platform or jax.default_backend(), self.context)
        return replace(self, slots=slots, page=self.page or paging.default_page(self.context))
