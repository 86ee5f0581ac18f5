"""The score that distillation trains with: a student's, and how far it is from a teacher that does not learn."""

from ..core.batch import Batch
from ..core.distill import Distill
from . import transformer
from .transformer import Run, Scores


def score(
    params, batch: Batch, *teacher, objective: Distill, config, teacher_config=None, run: Run, temperature=1.0
) -> Scores:
    """`models.score` of the student, whose `extra` is what `objective.loss` reads.

    For `step.make_step`: `step(state, batch, teacher_params)` with a local teacher, `step(state, batch)` with one whose
    log-probabilities the batch brings. Neither's logits are held for more than a chunk of tokens, forward or backward,
    and of the teacher there are no gradients.

    Args:
      teacher: the parameters of a local teacher, of any family and width; none = it came with the batch.
      teacher_config: of a local teacher. Its vocabulary is the student's, or starts with it.
      run: of both.
      temperature: of `logp_BT` and `entropy_BT`, as in `models.score`; the objective's own is of the divergence.

    Raises:
      ValueError: the teacher's vocabulary is smaller; neither a local teacher nor arrays of one.
    """
    others, beside = tuple((weights, teacher_config) for weights in teacher), None
    if not others:
        names = ("teacher_ids", "teacher_logp")
        if missing := [name for name in names if name not in batch.target]:
            raise ValueError(
                f"teacher.score: the batch must bring {' and '.join(names)}, got no {missing[0]}; "
                "ask a served teacher for its top_k (rollout.workflows.teacher.annotate), or pass a local one"
            )
        beside = {name: batch.target[name] for name in names}
    return transformer.score(
        params, batch, config=config, run=run, temperature=temperature, per_chunk=objective.per_token, beside=beside,
        others=others,
    )  # fmt: skip
