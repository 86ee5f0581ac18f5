"""Pages of a decoding cache: which of them each layer's tokens need, and how many there are.

Layers that see equally far back are of one kind, and share page numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .layer import Attention, Layer, Recurrent

TOKENS = 1 << 17  # of all slots, as long as there are at least 16
KV_CACHE_DTYPES = "auto", "float8"
STEPS = 8  # of decoding that are compiled together, for which a sequence has pages ahead


@dataclass(frozen=True, eq=False)
class Kind:
    """Layers that need the same pages.

    Attributes:
      layers: indices of those that have pages of their own.
      limited: they see only some tokens before a query, and need only the last pages.
      states: they are recurrent: "pages" are rows with a state after a whole prefix.
      bytes: of a page in all layers, on each device.
      first_of: i32[context + 1], the first page that a token at this position needs.
    """

    layers: tuple[int, ...]
    limited: bool
    states: bool
    bytes: int
    first_of: np.ndarray

    def first(self, position: int) -> int:
        """The first page that a token at this position needs."""
        return int(self.first_of[position])


def kinds(layers: Sequence[Layer], context: int, C: int, itemsize: int, tp: int = 1) -> list[Kind]:
    """The kinds of a model's layers, those without limits first, those with states last.

    Args:
      tp: devices that share the heads.
    """
    position = np.arange(context + 1)
    attending = {i: layer for i, layer in enumerate(layers) if isinstance(layer, Attention) and layer.source is None}
    made = []
    for limits in sorted({_limits(layer) for layer in attending.values()}):
        alike = tuple(i for i, layer in attending.items() if _limits(layer) == limits)
        first = np.maximum(np.asarray(attending[alike[0]].pattern.first(position)), 0) // C
        size = sum(heads(K, tp) // tp * (H + V) * C * itemsize for K, H, V in (attending[i].cached for i in alike))
        made.append(Kind(alike, limits != (0, 0), False, size, first))
    recurrent = {i: layer.state for i, layer in enumerate(layers) if isinstance(layer, Recurrent) and layer.state}
    if recurrent:
        last = np.maximum(position - 1, 0) // C
        own = lambda shape: math.prod(shape) // (1 if shape[0] % tp else tp)
        size = 4 * sum(own(shape) for state in recurrent.values() for _, shape in state)
        made.append(Kind(tuple(recurrent), True, True, size, last))
    return made


def heads(K: int, tp: int) -> int:
    """Heads of keys and values in the cache: K, repeated until the devices that share them divide their number."""
    return math.lcm(K, tp)


def _limits(layer: Attention) -> tuple[int, int]:
    return layer.pattern.window or 0, layer.pattern.chunk or 0


def of_layers(kinds: Sequence[Kind], layers: Sequence[Layer]) -> tuple[int, ...]:
    """The index of each layer's kind; -1 = none."""
    own = {i: number for number, kind in enumerate(kinds) for i in kind.layers}
    source = lambda layer: layer.source if isinstance(layer, Attention) else None
    return tuple(own.get(i if source(layer) is None else source(layer), -1) for i, layer in enumerate(layers))


def counts(kinds: Sequence[Kind], slots: int, context: int, C: int, steps: int, memory: float | None) -> list[int]:
    """The number of pages of each kind: enough for every slot, or what fits into `memory` bytes.

    Args:
      steps: positions ahead of the last token for which a sequence has pages.

    Raises:
      ValueError: the memory does not suffice for one sequence.
    """
    each = [most(kind, context, C, steps) for kind in kinds]
    # Windows are as good as always full, so each slot has its own; so have states.
    made = [slots * n for n in each]
    if memory is None or size_of(kinds, made, slots) <= memory:
        return made
    limited = size_of(kinds, [n * kind.limited for n, kind in zip(made, kinds, strict=True)], slots)
    whole = next((i for i, kind in enumerate(kinds) if not kind.limited), None)  # there is one such kind at most
    least = limited if whole is None else limited + max(slots, each[whole]) * kinds[whole].bytes
    if whole is None or least > memory:
        raise ValueError(
            f"caches must hold one sequence of {context} tokens, and {C} tokens of each of {slots} slots, "
            f"{least / 1e9:,.3g} GB, got {max(memory, 0) / 1e9:,.3g} GB of memory; lower slots or context, or raise it"
        )
    made[whole] = int((memory - limited) // kinds[whole].bytes)
    return made


def most(kind: Kind, context: int, C: int, steps: int) -> int:
    """The most pages of this kind that a sequence needs at a time; for states, rows of prefixes."""
    if kind.states:
        return 1
    position = np.arange(context)
    return int(np.max(np.minimum(position + steps, context - 1) // C - kind.first_of[:context] + 1))


def size_of(kinds: Sequence[Kind], counts: Sequence[int], slots: int) -> int:
    """Bytes of a cache with so many pages of each kind, the states of its slots, and what is never read."""
    return sum((n + 1 + slots * kind.states) * kind.bytes for n, kind in zip(counts, kinds, strict=True))


def check_draft(option: str, draft: int, context: int) -> None:
    """Raises ValueError if a step would compute more tokens of a sequence than its context has."""
    if draft > context:
        raise ValueError(f"{option} must be at most the context, {context} tokens, got {draft}; lower it")


def kv_dtype(weights, kv_cache_dtype: str) -> np.dtype:
    """The dtype of keys and values in pages: "auto" is that of the weights, "float8" e4m3, whose numbers reach 448.

    Raises:
      ValueError: another name.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}")
    return np.dtype(weights if kv_cache_dtype == "auto" else ml_dtypes.float8_e4m3fn)


def default_slots(platform: str, context: int) -> int:
    """The number of sequences of at most `context` tokens to decode at a time. On accelerators, where a step takes
    hardly longer for more of them: as many as have 131,072 tokens together, but from 16 to 128."""
    return 16 if platform == "cpu" else max(16, min(128, TOKENS // context))


def default_page(context: int) -> int:
    """Tokens of a page in a cache for sequences of this length."""
    return 128 if context > 512 else max(16, (1 << (context - 1).bit_length()) // 4)
