"""Rows that a teacher reads in place of the student's: the same samples, each with a prompt of the teacher's own, or in
the tokens of its own tokenizer.

For self-distillation with privileged text: the teacher sees an answer, feedback or a demonstration that the student
does not (SDPO, arXiv:2601.20802; SDFT, arXiv:2601.19897). For distillation across tokenizers: spans are pieces of a
completion that are whole tokens of both, numbered from 1 in `target[SPAN]`; where `target[EXACT]`, one token of each.
`arrange` makes the rows (numpy), `of`, `aligned` and `of_spans` read them.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .batch import Batch
from .segments import segment_index, to_tokens, total

NAMES = "teacher_token", "teacher_segment", "teacher_mask", "teacher_place"  # of arrays in `Batch.input`
TOKEN, SEGMENT, MASK, PLACE = NAMES
BACK = "teacher_back"  # in `input`, with another tokenizer: 1 + the place in the student's row, 0 = none
SPAN, EXACT = "teacher_span", "teacher_exact"  # in `target`, with another tokenizer


def given(samples: Sequence) -> bool:
    """Whether the teacher has a prompt or tokens of its own in any of the samples."""
    return any(s.teacher_prompt or s.reading for s in samples)


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

    With another tokenizer the place is that of a span's first token, at the student's first; BACK, which is there only
    then, has for each token of the teacher's rows in a span the place of the student's first.

    Args:
      segment_BT: the student's rows.
      row, start: of each sample there; a teacher's row has the same samples in the same order.

    Raises:
      ValueError: some samples have a `reading`, and some none.
    """
    if len({bool(s.reading) for s in samples}) > 1:
        raise ValueError("teacher_rows: all samples need a reading if any has, got some without")
    read = [s.teacher_tokens for s in samples]
    begins = closed_up(row, start, [*map(len, read)])
    token_BT, there_BT, place_BT, back_BT = (np.zeros_like(segment_BT) for _ in range(4))
    mask_BT = np.zeros(segment_BT.shape, bool)
    for s, tokens, b, at, to in zip(samples, read, row, start, begins, strict=True):
        n, more = len(s.tokens), len(tokens) - len(s.tokens)
        token_BT[b, to : to + len(tokens)] = tokens
        there_BT[b, to : to + len(tokens)] = segment_BT[b, at]
        if s.reading:
            span = s.reading[1]
            own, theirs = firsts(s.arrays[SPAN][1]), firsts(span)
            place_BT[b, at : at + n] = to
            place_BT[b, at + own - 1] = to + theirs - 1
            ahead = np.flatnonzero(span[1:])
            mask_BT[b, to + ahead] = True
            back_BT[b, to + ahead] = at + own[span[ahead + 1] - 1]
            continue
        mask_BT[b, to + more + np.flatnonzero(s.mask[1:])] = True
        place_BT[b, at : at + n] = to + np.maximum(np.arange(n) + more, 0)
    made = dict(zip(NAMES, (token_BT, there_BT, mask_BT, place_BT), strict=True))
    return made | ({BACK: back_BT} if samples[0].reading else {})


def firsts(span: np.ndarray) -> np.ndarray:
    """The index of the first token of each span."""
    return np.unique(span, return_index=True)[1][int(0 in span) :]


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


def of_spans(logp_BT, batch: Batch):
    """The teacher's log-probabilities of its tokens, [B, T] at the predictions of `of(batch)`, at those of the batch:
    as `aligned`, or with another tokenizer the sum over each span at its first token, 0 elsewhere."""
    if BACK not in batch.input:
        return aligned(logp_BT, batch)
    return total(logp_BT, batch.input[BACK], logp_BT.shape[-1])


def over_spans(x_BT, batch: Batch, mask_BT):
    """(the sum of x [B, T] over each span, at all its tokens; whether a token is in a span of which all are in the
    mask): the sum is 0 elsewhere."""
    span_BT, T = batch.target[SPAN], x_BT.shape[-1]
    before_BT = jnp.concatenate([jnp.zeros_like(span_BT[..., :1]), span_BT[..., :-1]], -1)
    run_BT = jnp.where(span_BT > 0, jnp.cumsum(span_BT != before_BT, -1, dtype=span_BT.dtype), 0)
    over = lambda x_BT: to_tokens(total(x_BT, run_BT, T), run_BT)
    whole_BT = (run_BT > 0) & (over(jnp.where(mask_BT, 0.0, 1.0)) == 0)
    return jnp.where(whole_BT, over(jnp.where(mask_BT, x_BT, 0)), 0), whole_BT
