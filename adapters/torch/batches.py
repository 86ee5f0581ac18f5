"""Packed batches for torch's DataLoader and transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core import packing
from ...rollout.types import Sample
from .rows import IGNORED

if TYPE_CHECKING:
    from torch import Tensor


def collate(samples: Sequence[Sample], length: int) -> dict[str, Tensor]:
    """Packs samples into rows of `length` tokens, as arguments of `module.Model`: a `collate_fn` for a DataLoader, and
    a `data_collator` for a Trainer.

    The number of rows is rounded up to 2^k or 3 * 2^k, by padding, so that few shapes compile.

    Returns:
      int64 [rows, length] each: input_ids, position_ids, segment_ids (0 = padding), and labels, which are the tokens
      that `Sample.mask` learns at their own places, -100 elsewhere.

    Raises:
      ValueError: as `packing.pack`; or a sample has a weight, which the loss of the module does not have.
    """
    import torch

    if weights := {sample.weight for sample in samples} - {1.0}:
        raise ValueError(f"collate: samples must have weight 1, since the module's loss has none, got {min(weights)}")
    batch = packing.pack(samples, length, rows=1)
    flat = lambda x_MBT: np.asarray(x_MBT)[:, 0]
    token_BT = flat(batch.token_BT)
    label_BT = np.full_like(token_BT, IGNORED)
    label_BT[:, 1:] = np.where(flat(batch.mask_BT)[:, :-1], token_BT[:, 1:], IGNORED)
    arrays = dict(
        input_ids=token_BT, position_ids=flat(batch.position_BT), segment_ids=flat(batch.segment_BT), labels=label_BT
    )  # fmt: skip
    return {name: torch.from_numpy(x.astype(np.int64)) for name, x in arrays.items()}
