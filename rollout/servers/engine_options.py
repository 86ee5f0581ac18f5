"""The options of areax's generation engine (imports nothing heavy: the command line shows them)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal

from .engine_mesh import ONE_DEVICE, EngineMesh, check_whole


@dataclass(frozen=True)
class EngineOptions:
    """Options of `areax serve`; of recipes as `--serve.*`, of `areax launch` as `--server.*`, and in Python as keyword
    arguments of `Engine`.

    Attributes:
      slots: maximum number of sequences that the engine, or each of its replicas (`mesh.dp`), generates concurrently
        (SGLang's max-running-requests); further requests wait. 0 = 16 on a CPU; on accelerators as many as have 131,072
        tokens together, from 16 to 128.
      context: maximum sequence length in tokens, prompt plus completion (SGLang's context-length); the model's limit if
        that is lower.
      memory: GB of keys, values and states on each device; 0 = as much as all slots may need, or what a device has
        beside weights. With less, requests wait; no sample changes.
      mesh: how the first devices of this machine are used, or all devices of several processes (docs/serve.md).
      draft: speculative decoding: tokens of a sequence that a step computes, its last one and drafts of the next, which
        are accepted where they equal what is sampled; they are made by multi-token prediction where the checkpoint has
        a layer for it, else found in texts (docs/serve.md). 1 = off.
      kv_cache_dtype: dtype of keys and values: auto = that of the weights; float8 (e4m3, of scale 1) takes half of
        bfloat16's memory, and moves log-probabilities away from the trainer's (docs/serve.md).
      weights: how matrices are kept: auto = in their dtype; int8, or nf4 (4 bits), with a scale per 64 entries, on one
        device. They are widened where they are multiplied; log-probabilities are then those of the rounded model.
    """

    slots: int = 0
    context: int = 2048
    memory: float = 0
    mesh: EngineMesh = ONE_DEVICE
    draft: int = 1
    kv_cache_dtype: Literal["auto", "float8"] = "auto"
    weights: Literal["auto", "int8", "nf4"] = "auto"

    def __post_init__(self):
        for name in ("slots", "context", "draft"):
            check_whole(f"Engine: {name}", getattr(self, name))
        if not isinstance(self.mesh, EngineMesh):
            raise ValueError(f"Engine: mesh must be an EngineMesh, such as EngineMesh(tp=2), got {self.mesh!r:.80}")
        if self.slots < 0:
            raise ValueError(f"Engine: slots must be at least 1, or 0 = by device, got {self.slots}")
        if self.context < 0:
            raise ValueError(f"Engine: context must be at least 1, got {self.context}")
        if not isinstance(self.memory, Real) or not 0 <= self.memory < math.inf:
            raise ValueError(f"Engine: memory must be a number of GB, or 0, got {self.memory!r:.80}")
        if self.weights not in ("auto", "int8", "nf4"):
            raise ValueError(f"Engine: weights must be auto, int8 or nf4, got {self.weights!r:.80}")
        if self.weights != "auto" and self.mesh.replica.devices > 1:
            raise ValueError(f"Engine: weights in {self.weights} are for one device, got {self.mesh}; use weights=auto")
        if self.draft < 1:
            raise ValueError(f"Engine: draft must be at least 1, got {self.draft}")

    @property
    def engine(self) -> EngineOptions:
        """These options alone, without those of a subclass."""
        return EngineOptions(**{field.name: getattr(self, field.name) for field in fields(EngineOptions)})

    @property
    def words(self) -> list[str]:
        """The options of `areax serve` that ask for these, as far as its defaults differ; a context of 0 is none."""
        words = []
        for field in fields(EngineOptions):
            value = getattr(self, field.name)
            if value == field.default or value == 0:
                continue
            words += value.words if isinstance(value, EngineMesh) else [f"--{field.name.replace('_', '-')}", str(value)]
        return words


DEFAULTS = EngineOptions()
