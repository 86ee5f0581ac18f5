"""Attention over the rows of a batch, packed or of tries, on one device or a mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ...core import trie as tries
from ...parallel import context
from . import backends
from .pattern import Pattern


def over(
    segment_BT, index_BT, trie: tries.Trie | None = None, *, backend: backends.Name, query_chunk: int | None,
    method: context.Method, packing: bool = True,
) -> Callable:  # fmt: skip
    """Returns `attend(pattern, q_BTNH, k_BTKH, v_BTKV, sinks_N=None) -> out_BTNV` for rows at these places.

    Args:
      trie: the layout of rows of tries, whose indices count from their roots; None = rows of sequences.
      backend, query_chunk, method: `attention`, `query_chunk` and `cp` of `models.Run`.
      packing: False = each row is one sequence without padding.
    """

    def attend(pattern: Pattern, q_BTNH, k_BTKH, v_BTKV, sinks_N=None):
        how: dict[str, Any] = dict(backend=backend, pattern=pattern, query_chunk=query_chunk)
        if trie is not None:
            keys = k_BTKH, v_BTKV, trie.until_BT, index_BT, sinks_N
            return context.tree_attention(partial(backends.tree, **how), q_BTNH, *keys, method=method)
        causal, ring = partial(backends.causal, packing=packing, **how), partial(backends.ring, axis="cp", **how)
        rows = q_BTNH, k_BTKH, v_BTKV, segment_BT, index_BT, sinks_N
        return context.attention(causal, ring, *rows, method=method, pattern=pattern)

    return attend
