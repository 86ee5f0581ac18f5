"""Types shared by everything that handles generation servers: versions, answers, states, the probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from ..types import Finish

# Only healthy servers receive requests. weights_unknown: a push failed half-way; stale: it serves other weights.
State = Literal["healthy", "offloaded", "suspect", "weights_unknown", "stale", "dead", "restarting", "leaving"]

SOUND: tuple[State, ...] = ("healthy", "offloaded")  # the states in which a server receives pushes


@dataclass(frozen=True)
class Part:
    """One answer of a server; a completion that was interrupted has several.

    Attributes:
      tokens, logp: generated ids and their log-probabilities in nats.
      labels: weight label of each generated token.
      info: the rest of the server's report.
      routed: i32[tokens read, layers, experts a token], the experts of each token, if requested.
      inputs: [logp, id, text] of each prompt token, if requested; the first has no logp.
      input_top: the most likely tokens at each prompt position, if requested.
      adapter: the adapter that the server reports; "" if it reports none.
      masks: the ids of the tokens that each token was drawn from, ascending, if requested.
      top: (ids, log-probabilities) of the likeliest tokens at each token's place, if requested.
      preemptions: how often the server discarded the request's cache and recomputed it.
    """

    tokens: list[int]
    logp: list[float]
    labels: list[str]
    finish: Finish
    text: str
    info: Mapping[str, Any]
    routed: np.ndarray | None = None
    inputs: Sequence = ()
    input_top: Sequence = ()
    adapter: str = ""
    preemptions: int = 0
    masks: Sequence[np.ndarray] = ()
    top: Sequence[tuple[list[int], list[float]]] = ()


@dataclass(frozen=True)
class Probe:
    """A prompt with the log-probabilities that the trainer computes for it under one version of the weights.

    Attributes:
      tokens: the prompt.
      logp: log-probability of each token but the first, at temperature 1, in nats.
      tolerance: largest accepted mean absolute difference from the server's, in nats per token. A different dtype alone
        causes 0.01 to 0.05.
      dtype: the coarsest of the trainer's computation and of the weights that servers get, a key of `canary.ROUNDING`.
    """

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    tolerance: float = 0.2
    dtype: str = "BF16"

    def __post_init__(self):
        if len(self.tokens) < 2 or len(self.logp) != len(self.tokens) - 1:
            raise ValueError(
                f"Probe: needs two tokens or more, and a log-probability of each but the first, got {len(self.tokens)} "
                f"and {len(self.logp)}"
            )


@dataclass(frozen=True)
class Published:
    """A published version of the weights.

    Attributes:
      directory: path as servers see it; "" if no files were written.
      label: its weight label.
      base: for adapters, the version of the base weights they belong to.
      arrays: the weights in memory, for servers with a `handover`; None = servers read the directory.
      probe: verifies what a server loaded.
      canaries: probes that servers are compared with again while they serve (fleet/canary.py); () = not this version.
      checksums: those reported by the first verified server of each weight layout.
    """

    directory: str
    label: str
    base: Published | None = None
    arrays: Any = field(default=None, compare=False, repr=False)
    probe: Probe | None = field(default=None, compare=False, repr=False)
    canaries: tuple[Probe, ...] = field(default=(), compare=False, repr=False)
    checksums: dict[str, list] = field(default_factory=dict, compare=False, repr=False)


class Reported(NamedTuple):
    """What a server says of its weights: their label, and the folder that it loaded them from, "" = unknown."""

    label: str
    source: str


@dataclass(frozen=True)
class Description:
    """What a server reports about itself.

    Attributes:
      weights: those it serves.
      seeded: it honours sampling seeds.
      stages: it can read new weights while it serves the current ones.
      ranks: processes that share the weights; each is sent them.
      layout: dtype, quantisation and parallelism as text: servers with the same layout have the same checksums.
      released: it has released its memory.
      capacity: tokens whose keys and values fit into its cache; 0 = unknown.
      slots: sequences it generates at a time; 0 = unknown.
      context: tokens of its longest sequence, by its limits and by its cache; 0 = unknown.
    """

    weights: Reported
    seeded: bool
    stages: bool
    ranks: int
    layout: str
    released: bool
    capacity: int
    slots: int
    context: int


@dataclass(frozen=True)
class Staged:
    """A version where a server can read it: the directory, and the bytes fetched to bring it there."""

    directory: str
    bytes: int = 0


class Loaded(NamedTuple):
    """Timing of a load: seconds of paused generation, of those the load itself, then the verification; and the mean
    absolute difference on the probe, in nats per token."""

    pause_s: float
    load_s: float
    prove_s: float
    probe_diff: float | None
