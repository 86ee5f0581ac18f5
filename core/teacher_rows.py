"""Rows that a teacher reads in place of the student's: the same samples, each with a prompt of the teacher's own.

For self-distillation with privileged text: the teacher sees an answer, feedback or a demonstration that the student
does not (SDPO, arXiv:2601.20802; SDFT, arXiv:2601.19897). `arrange` makes the rows (numpy), `of` and `aligned` read
them.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .batch import Batch
from .segments import segment_index

NAMES = "teacher_token", "teacher_segment", "teacher_mask", "teacher_place"  # of arrays in `Batch.input`
TOKEN, SEGMENT, MASK, PLACE = NAMES


def given(samples: Sequence) -> bool:
    """Whether the teacher has a prompt of its own in any of the samples."""
    return any(s.teacher_prompt for s in samples)


def closed_up(row: np.ndarray, start: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Starts of samples of these sizes without a gap, in the order in which they stand in their rows."""
    begins, filled = np.zeros(len(row), int), np.zeros(int(row.max()) + 1, int)
    for i in np.lexsort((start, row)):
        begins[i] = filled[row[i]]
        filled[row[i]] += sizes[i]
    return begins


def arrange(samples: Sequence, segment_BT: np.ndarray, row: np.ndarray, start: np.ndarray) -> dict[str, np.ndarray]:
    """{name: [B, T]} of what the teacher reads: token, segment, and the mask of predictions that are learnt; and for
    each token of the student's rows its place in the teacher's row, which from the one before the first learnt token on
    predicts the same.

    Args:
      segment_BT: the student's rows.
      row, start: of each sample there; a teacher's row has the same samples in the same order.
    """
    read = [s.teacher_tokens for s in samples]
    begins = closed_up(row, start, [*map(len, read)])
    token_BT, there_BT, place_BT = (np.zeros_like(segment_BT) for _ in range(3))
    mask_BT = np.zeros(segment_BT.shape, bool)
    for s, tokens, b, at, to in zip(samples, read, row, start, begins, strict=True):
        n, more = len(s.tokens), len(tokens) - len(s.tokens)
        token_BT[b, to : to + len(tokens)] = tokens
        there_BT[b, to : to + len(tokens)] = segment_BT[b, at]
        mask_BT[b, to + more + np.flatnonzero(s.mask[1:])] = True
        place_BT[b, at : at + n] = to + np.maximum(np.arange(n) + more, 0)
    return dict(zip(NAMES, (token_BT, there_BT, mask_BT, place_BT), strict=True))


def of(batch: Batch) -> Batch:
    """The batch as a teacher reads it, whose predictions `aligned` moves to the student's; the batch itself if the
    teacher has no prompts of its own. Experts that the student's tokens were routed to are not those of the teacher's.
    """
    batch = batch.without("routed_experts")
    if TOKEN not in batch.input:
        return batch
    token_BT, segment_BT = batch.input[TOKEN], batch.input[SEGMENT]
    index_BT = segment_index(segment_BT)
    next_BT = jnp.concatenate([token_BT[..., 1:], jnp.zeros_like(token_BT[..., :1])], -1)
    return batch.replace(
        token_BT=token_BT, position_BT=index_BT, index_BT=index_BT, segment_BT=segment_BT, target_BT=next_BT,
        mask_BT=batch.input[MASK], input={},
    )  # fmt: skip


def aligned(x_BT, batch: Batch):
    """Values [..., B, T, ...] at the predictions of `of(batch)`, at those of the batch; others have no meaning."""
    if TOKEN not in batch.input:
        return x_BT
    place_BT = batch.input[PLACE]
    index = place_BT.reshape(place_BT.shape + (1,) * (x_BT.ndim - place_BT.ndim))
    return jnp.take_along_axis(x_BT, index, axis=place_BT.ndim - 1)
