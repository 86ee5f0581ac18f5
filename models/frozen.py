"""Scores for distillation: the student's, and its divergence from a frozen teacher."""

import functools

import numpy as np

from ..core import teacher_rows
from ..core.batch import Batch
from ..core.distill import Distill
from ..core.mtp import Trunk
from . import transformer
from .transformer import Run, Scores


def score(
    params, batch: Batch, *teacher, objective: Distill, config, teacher_config=None, run: Run, temperature=1.0,
    common_2K=None, drafts: Trunk | None = None,
) -> Scores:  # fmt: skip
    """`models.score` of the student at learnt tokens; `extra` holds the divergence for `objective.loss`.

    For `step.make_step`: `step(state, batch, teacher_params)` with a local teacher, `step(state, batch)` if the batch
    has the teacher's log-probabilities. Logits of both are held for one chunk of tokens at a time, also in the backward
    pass; the teacher gets no gradients. If the batch has rows of the teacher's own (`core.teacher_rows`), with another
    prompt before the same completion, it reads these.

    Args:
      teacher: parameters of a local teacher, of any family and width; none = its log-probabilities are in the batch, or
        with the student's own `teacher_config` the teacher is the student itself, which gets no gradients as such.
      teacher_config: config of the local teacher. Its vocabulary must equal or start with the student's, unless the
        batch has what a teacher with another tokenizer reads.
      run: used for both models.
      temperature: positive scalar, for `logp_BT` and `entropy_BT`; the divergence uses `objective.temperature`.
      common_2K: ids (numpy) of the tokens that student and teacher have in common, for a batch with spans of two
        tokenizers.
      drafts: as in `models.score`.

    Raises:
      ValueError: the teacher's vocabulary is smaller, or there is neither a local teacher nor its log-probabilities; or
        only one of spans and common tokens is there, or `objective.uld_coef` without them.
    """
    if (common_2K is None) != (teacher_rows.SPAN not in batch.target):
        raise ValueError(
            "frozen.score: a teacher with another tokenizer needs common_2K and a batch with "
            f"{teacher_rows.SPAN}, got only one; see rollout.chat.cross_tokenizer"
        )
    if objective.uld_coef and common_2K is None:
        raise ValueError(f"frozen.score: uld_coef is for a teacher with another tokenizer, got {objective.uld_coef:g}")
    if teacher_config is not None and not teacher and "teacher_ids" not in batch.target:
        teacher = (params,)
    others, beside = tuple((weights, teacher_config) for weights in teacher), None
    if not others:
        names = ("teacher_ids", "teacher_logp")
        if missing := [name for name in names if name not in batch.target]:
            raise ValueError(
                f"frozen.score: the batch must have {' and '.join(names)}, got no {missing[0]}; request top_k from "
                "a teacher server (rollout.workflows.teacher.annotate), or pass a local teacher"
            )
        beside = {name: batch.target[name] for name in names}

    per_token = objective.per_token
    if common_2K is not None:
        sizes = config.vocab, (teacher_config or config).vocab
        known_K = (common_2K < np.array(sizes)[:, None]).all(0)  # a tokenizer may have more tokens than its model
        per_token = functools.partial(objective.per_token, common_2K=common_2K[:, known_K])

    def per_chunk(logits_CV, *given):  # without the temperature, which the teacher's do not have
        return per_token(logits_CV * temperature, *given)

    return transformer.score(
        params, batch, config=config, run=run, temperature=temperature, learnt_only=True,
        per_chunk=per_token if temperature == 1 else per_chunk,
        beside=beside, others=others, drafts=drafts,
    )  # fmt: skip
