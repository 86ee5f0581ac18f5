"""Distillation: trains a student on the next-token distributions of a frozen teacher."""

from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from . import divergence as divergences
from . import metrics, teacher_rows
from .batch import Batch
from .checks import validate
from .divergence import Divergence


@dataclass(frozen=True)
class Distill:
    """Divergence from the teacher's distributions, mean over the batch's learnt tokens (weighted by `weight_BT`).

    Distillation on a data set, on-policy distillation on the student's samples (GKD, arXiv:2306.13649; MiniLLM,
    arXiv:2306.08543). `loss` reads the output of `models.frozen.score`. The teacher is a local model that reads the
    same microbatch, or its log-probabilities come with the batch: `target["teacher_ids"]` and `target["teacher_logp"]`
    [B, T, top_k].

    A teacher with another tokenizer is compared where a token of the completion is one token for both, the same bytes:
    over the tokens that both have, all others as one outcome. Elsewhere the divergence counts as 0 in the mean.

    Attributes:
      divergence: what is minimised: "forward" = KL(teacher || student), mode-covering; "reverse" = KL(student ||
        teacher), mode-seeking; "js" = the Jensen-Shannon divergence weighted by `beta` (`core.divergence`).
      beta: weight of the teacher in the mixture of "js", in (0, 1).
      top_k: the teacher's likeliest tokens that are compared individually, all others as one outcome; 0 = the whole
        vocabulary.
      temperature: both distributions are softmax(logits / temperature). Log-probabilities that come with the batch must
        be of this temperature; servers return those of 1.
      sft_coef: coefficient of the negative log-likelihood of the batch's tokens, at temperature 1, added to the loss.
      uld_coef: for a teacher with another tokenizer: coefficient of the distance between sorted probabilities of the
        tokens that only one of both has, added to the divergence (ULD, arXiv:2402.12030; `divergence.unmatched`).
    """

    divergence: Divergence = "reverse"
    beta: float = 0.5
    top_k: int = 0
    temperature: float = 1.0
    sft_coef: float = 0.0
    uld_coef: float = 0.0
    needs_scores = False

    def __post_init__(self):
        known = get_args(Divergence)
        rules = {
            "divergence": (self.divergence in known, f"one of {', '.join(known)}"),
            "beta": (0 < self.beta < 1, 'between 0 and 1; for the ends use "forward" or "reverse"'),
            "top_k": (self.top_k >= 0, "at least 0"),
            "temperature": (self.temperature > 0, "above 0"),
            "uld_coef": (self.uld_coef >= 0, "at least 0"),
            "sft_coef": (self.sft_coef >= 0, "at least 0"),
        }
        mixture = (
            "beta",
            self.divergence == "js" or self.beta == Distill.beta,
            f"{Distill.beta} unless divergence is js",
        )
        whole = ("top_k", not (self.top_k and self.uld_coef), "0 with uld_coef, which compares the whole vocabulary")
        validate(self, [*((field, *rule) for field, rule in rules.items()), mixture, whole])

    def __str__(self):
        b = f"{self.beta:g}"
        formula = {
            "forward": "KL(teacher || pi)",
            "reverse": "KL(pi || teacher)",
            "js": f"{b} KL(teacher || m) + (1 - {b}) KL(pi || m), m = {b} teacher + (1 - {b}) pi",
        }[self.divergence]
        lines = [f"Distill: minimise sum_t w_t D_t / sum_t w_t, D = {formula}"]
        if self.top_k:
            lines.append(f"  over the teacher's {self.top_k} likeliest tokens, all others as one outcome")
        if self.uld_coef:
            lines.append(f"  + {self.uld_coef:g} sum_i |p_i - q_i|, of tokens that only one of both has, sorted")
        if self.temperature != 1:
            lines.append(f"  both at temperature {self.temperature:g}")
        return "\n".join(lines + [f"  - {self.sft_coef:g} log pi(y_t | y_<t)"] * bool(self.sft_coef))

    def per_token(self, logits_CV, target_C, given, *teacher_CV, common_2K=None) -> dict:
        """Returns {"divergence", "usable"} [C], for `models.score(per_chunk=)`.

        A token is unusable if any of the teacher's numbers is not finite; its divergence is finite but meaningless.

        Args:
          given: {"teacher_ids", "teacher_logp"} [C, K], or None if the teacher's logits follow. Of a teacher with
            another vocabulary the ids are the student's, -1 where it lacks the token.
          common_2K: ids (numpy) of the tokens that student and teacher have in common, if the teacher's vocabulary is
            another; None = it is the same.

        Raises:
          ValueError: the log-probabilities are not of `top_k` tokens.
        """
        how = dict(kind=self.divergence, beta=self.beta, temperature=self.temperature)
        if teacher_CV:
            usable_C = jnp.isfinite(teacher_CV[0]).all(-1)
            logits_of_teacher_CV = jnp.where(usable_C[:, None], teacher_CV[0], 0)
            if not self.top_k:
                made_C = self._whole(logits_CV, logits_of_teacher_CV, common_2K, how)
                return {"divergence": made_C, "usable": usable_C}
            ids_CK, logp_CK = divergences.teacher_top(logits_of_teacher_CV, self.top_k, self.temperature)
            if common_2K is not None:
                to_own_W = np.full(logits_of_teacher_CV.shape[1], -1, np.int32)
                to_own_W[common_2K[1]] = common_2K[0]
                ids_CK = jnp.asarray(to_own_W)[ids_CK]
        else:
            ids_CK, logp_CK = given["teacher_ids"], given["teacher_logp"]
            if ids_CK.shape[1] != self.top_k:
                raise ValueError(
                    f"Distill: top_k must be the number of tokens in teacher_ids, {ids_CK.shape[1]}, got {self.top_k}"
                )
            usable_C = jnp.isfinite(logp_CK).all(-1)
            logp_CK = jnp.where(usable_C[:, None], logp_CK, 0)
        top = divergences.top if common_2K is None else divergences.top_common
        return {"divergence": top(logits_CV, ids_CK, logp_CK, **how), "usable": usable_C}

    def _whole(self, logits_CV, teacher_CV, common_2K, how: dict):
        """The divergence [C] over whole vocabularies."""
        if common_2K is None:
            return divergences.full(logits_CV, teacher_CV, **how)
        made_C = divergences.common(logits_CV, teacher_CV, common_2K, **how)
        if self.uld_coef:
            made_C += self.uld_coef * divergences.unmatched(logits_CV, teacher_CV, common_2K, self.temperature)
        return made_C

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Folds 1 / (sum of weights) into the weights; they stay 0 in a batch without learnt tokens.

        If the teacher's log-probabilities came with the batch, tokens where they are not finite do not count. A local
        teacher's are not known yet: such tokens stay in the sum, and `loss` skips them.
        """
        counts_BT = batch.mask_BT
        if "teacher_logp" in batch.target:
            counts_BT &= jnp.isfinite(batch.target["teacher_logp"]).all(-1)
        weight_BT = jnp.where(counts_BT, batch.weight_BT, 0)
        total = jnp.sum(weight_BT)
        return batch.replace(weight_BT=weight_BT / jnp.where(total > 0, total, 1))

    def loss(self, out, batch: Batch):
        """(weighted sum in nats, metrics); gradients flow into `out.extra["divergence"]` and `out.logp_BT`."""
        usable_BT = jax.lax.stop_gradient(out.extra["usable"])
        mask_BT = batch.mask_BT & usable_BT
        compared_BT = mask_BT & batch.target[teacher_rows.EXACT] if teacher_rows.EXACT in batch.target else mask_BT
        divergence_BT = jnp.where(compared_BT, out.extra["divergence"], 0)
        nll_BT = jnp.where(mask_BT, -out.logp_BT, 0)
        report = {
            "divergence": metrics.of(divergence_BT, compared_BT),
            "nll": metrics.of(nll_BT, mask_BT),
            "entropy": metrics.of(out.entropy_BT, mask_BT),
            "unusable_fraction": metrics.of(~usable_BT, batch.mask_BT),
        }
        if teacher_rows.SPAN in batch.target:
            report["unaligned_fraction"] = metrics.of(batch.target[teacher_rows.SPAN] == 0, batch.mask_BT)
            report["compared_fraction"] = metrics.of(compared_BT, batch.mask_BT)
        loss_BT = divergence_BT + self.sft_coef * nll_BT if self.sft_coef else divergence_BT
        return jnp.sum(loss_BT * batch.weight_BT), report


@dataclass(frozen=True)
class Taught:
    """An objective plus `coef` times the divergence from a teacher, mean over the objective's learnt tokens: on the
    student's samples, on-policy distillation (GKD, arXiv:2306.13649) combined with rewards."""

    objective: Any
    distill: Distill
    coef: float

    @property
    def needs_scores(self) -> bool:
        return self.objective.needs_scores

    def __str__(self):
        return f"{self.objective}\nminus {self.coef:g} times what is minimised here:\n{self.distill}"

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Prepares the batch for the objective and sets the divergence's weights, `target["taught_BT"]`."""
        ready = self.objective.prepare(batch, scores)
        weight_BT = self.distill.prepare(ready.replace(weight_BT=batch.weight_BT)).weight_BT
        return ready.replace(target={**ready.target, "taught_BT": weight_BT})

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow as in both losses."""
        total, report = self.objective.loss(out, batch)
        distilled, more = self.distill.loss(out, batch.replace(weight_BT=batch.target["taught_BT"]))
        report |= {"divergence": more["divergence"], "unusable_teacher": more["unusable_fraction"]}
        report |= {name: more[name] for name in ("unaligned_fraction", "compared_fraction") if name in more}
        return total + self.coef * distilled, report
