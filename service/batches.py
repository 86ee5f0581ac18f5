"""Datums to packed batches, and what a pass computes of them back to the datums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core import fitting, packing
from ..core.batch import Batch
from ..rollout.types import Sample
from .codec import Datum


def pack(data: Sequence[Datum], options: Mapping[str, float], context: int) -> Batch:
    """Packs datums into a Batch [M, 1, T] whose targets, weights and the like are theirs: position i predicts
    `target_tokens[i]`, and every token counts once.

    Args:
      options: of the loss, as `scalars`.
      context: most tokens of a row.
    """
    batch = packing.pack([_sample(datum) for datum in data], context, rows=1, shapes=fitting.shapes(context, 1, 1))
    given, mask_BT = dict(batch.input), batch.segment_BT > 0
    target_BT = given.pop("target_tokens")
    logp_BT = given.pop("logprobs", batch.logp_BT)
    batch = batch.replace(
        target_BT=target_BT, logp_BT=logp_BT, mask_BT=mask_BT, weight_BT=mask_BT.astype(np.float32), input={},
        target=given,
    )  # fmt: skip
    return batch.with_scalars(**{name: np.float32(value) for name, value in options.items()})


def _sample(datum: Datum) -> Sample:
    zeros = np.zeros(len(datum.tokens), np.int32)
    arrays: dict[str, Any] = {name: ("input", x) for name, x in datum.inputs.items()}  # in place: nothing is shifted
    return Sample(datum.tokens, zeros > 0, zeros.astype(np.float32), zeros, zeros, arrays=arrays)


def unpack(values: Sequence[np.ndarray], batch: Batch, data: Sequence[Datum]) -> list[np.ndarray]:
    """The values [B, T] of the first microbatches at the tokens of each datum."""
    out: list[np.ndarray] = [np.empty(0)] * len(data)
    for m, b, j in np.argwhere(batch.sample_BJ >= 0):
        out[int(batch.sample_BJ[m, b, j])] = values[m][b, batch.segment_BT[m, b] == j + 1]
    return out
