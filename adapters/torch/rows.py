"""Rows of tokens as torch users give them, in the terms of `models`: segments, positions and targets (numpy)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # the label of tokens that are not learnt, as in torch and transformers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The arrays that `models` reads.

    Attributes:
      position_BT: rope positions; None = index within the segment.
      segment_BT: 0 = padding; None = each row is one sequence.
      target_BT, mask_BT: the next token, and whether it is learnt; None without labels.
    """

    token_BT: Any
    position_BT: Any = None
    segment_BT: Any = None
    target_BT: Any = None
    mask_BT: Any = None


def read(
    vocabulary: int,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    segment_ids: Tensor | None = None,
    labels: Tensor | None = None,
) -> Rows:
    """The rows of a call of `module.Model`, whose arguments these are.

    Raises:
      ValueError: shapes differ; there is no token; a number does not fit in 32 bits; a token is not in the vocabulary;
        a mask is not padding on one side; there are both a mask and segments; labels of padding are not -100.
    """
    token_BT = _array("input_ids", input_ids, None)
    if token_BT.ndim != 2:
        raise ValueError(f"input_ids: must be [rows, tokens], got {list(token_BT.shape)}")
    if not token_BT.size:
        raise ValueError(f"input_ids: must have a row and a token, got {list(token_BT.shape)}")
    _check_vocabulary("input_ids", token_BT, vocabulary)
    position_BT = _array("position_ids", position_ids, token_BT.shape)
    segment_BT = _array("segment_ids", segment_ids, token_BT.shape)
    if segment_BT is not None and segment_BT.size and segment_BT.min() < 0:
        raise ValueError(f"segment_ids: must be at least 0, which is padding, got {segment_BT.min()}")
    mask_BT = _array("attention_mask", attention_mask, token_BT.shape)
    if mask_BT is not None and segment_BT is not None:
        raise ValueError("attention_mask: must be left out with segment_ids, where 0 is padding, got both")
    if mask_BT is not None:
        segment_BT = _from_padding(mask_BT)
    elif segment_BT is None and position_BT is not None:
        segment_BT = _from_positions(position_BT)
    if labels is None:
        return Rows(token_BT, position_BT, segment_BT)
    return Rows(token_BT, position_BT, segment_BT, *_targets(labels, token_BT, segment_BT, vocabulary))


def _array(name: str, tensor: Tensor | None, shape: tuple[int, ...] | None) -> Any:
    if tensor is None:
        return None
    x = tensor.detach().cpu().numpy()
    if name == "position_ids" and x.ndim == 2 and shape is not None and len(x) == 1:
        x = np.broadcast_to(x, shape)
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name}: must be {list(shape)} as input_ids, got {list(x.shape)}")
    if x.dtype.kind not in "iub":
        raise ValueError(f"{name}: must hold integers, got {tensor.dtype}")
    made = x.astype(np.int32)
    if (wrong := made != x).any():
        raise ValueError(f"{name}: must be 32-bit integers, got {x[wrong][0]}")
    return made


def _check_vocabulary(name: str, x: np.ndarray, vocabulary: int) -> None:
    if x.size and not 0 <= x.min() <= x.max() < vocabulary:
        bad = x.min() if x.min() < 0 else x.max()
        raise ValueError(f"{name}: tokens must be in the vocabulary of {vocabulary}, got {bad}")


def _from_padding(mask_BT: np.ndarray) -> np.ndarray | None:
    """Segments of rows with padding at one end; None if there is none."""
    if mask_BT.all():
        return None
    segment_BT = (mask_BT != 0).astype(np.int32)
    if (np.abs(np.diff(segment_BT)).sum(-1) > 1).any():
        raise ValueError(
            "attention_mask: zeros must be padding at one end of a row, got some between tokens; give segment_ids for "
            "packed rows"
        )
    return segment_BT


def _from_positions(position_BT: np.ndarray) -> np.ndarray | None:
    """Segments of rows where a sequence begins wherever positions do not count on, as in transformers; None if there
    is one in each row."""
    begins_BT = np.diff(position_BT, axis=-1, prepend=position_BT[:, :1] - 1) != 1
    return np.cumsum(begins_BT, -1, dtype=np.int32) + 1 if begins_BT.any() else None


def _targets(labels: Tensor, token_BT: np.ndarray, segment_BT: np.ndarray | None, vocabulary: int):
    """(target_BT, mask_BT): labels shifted by one. The first token of a sequence is not predicted."""
    label_BT = _array("labels", labels, token_BT.shape)
    learnt_BT = label_BT != IGNORED
    _check_vocabulary("labels", label_BT[learnt_BT], vocabulary)
    segment_BT = np.ones_like(token_BT) if segment_BT is None else segment_BT
    if (found := (learnt_BT & (segment_BT == 0)).sum()) > 0:
        raise ValueError(f"labels: must be {IGNORED} at padding, got {found} other labels there")
    target_BT, mask_BT = np.zeros_like(token_BT), np.zeros(token_BT.shape, bool)
    mask_BT[:, :-1] = learnt_BT[:, 1:] & (segment_BT[:, 1:] == segment_BT[:, :-1])
    target_BT[:, :-1] = np.where(mask_BT[:, :-1], label_BT[:, 1:], 0)
    return target_BT, mask_BT
