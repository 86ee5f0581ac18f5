"""Scores for distillation: the student's, and its divergence from a frozen teacher."""

from ..core.batch import Batch
from ..core.distill import Distill
from . import transformer
from .transformer import Run, Scores


def score(
    params, batch: Batch, *teacher, objective: Distill, config, teacher_config=None, run: Run, temperature=1.0
) -> Scores:
    """`models.score` of the student at learnt tokens; `extra` holds the divergence for `objective.loss`.

    For `step.make_step`: `step(state, batch, teacher_params)` with a local teacher, `step(state, batch)` if the batch
    has the teacher's log-probabilities. Logits of both are held for one chunk of tokens at a time, also in the backward
    pass; the teacher gets no gradients. If the batch has rows of the teacher's own (`core.teacher_rows`), with another
    prompt before the same completion, it reads these.

    Args:
      teacher: parameters of a local teacher, of any family and width; none = its log-probabilities are in the batch, or
        with the student's own `teacher_config` the teacher is the student itself, which gets no gradients as such.
      teacher_config: config of the local teacher. Its vocabulary must equal or start with the student's.
      run: used for both models.
      temperature: positive scalar, for `logp_BT` and `entropy_BT`; the divergence uses `objective.temperature`.

    Raises:
      ValueError: the teacher's vocabulary is smaller, or there is neither a local teacher nor its log-probabilities.
    """
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

    def per_chunk(logits_CV, *given):  # without the temperature, which the teacher's do not have
        return objective.per_token(logits_CV * temperature, *given)

    return transformer.score(
        params, batch, config=config, run=run, temperature=temperature, learnt_only=True,
        per_chunk=objective.per_token if temperature == 1 else per_chunk,
        beside=beside, others=others,
    )  # fmt: skip
