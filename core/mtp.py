"""Multi-token prediction: the loss that trains a model's layer for it, with which the engine drafts."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from . import metrics
from .batch import Batch
from .checks import validate
from .segments import divisor

Trunk = Literal["detached", "trained"]
WEIGHT = "mtp_weight_BT"


@dataclass(frozen=True)
class MTP:
    """Options of the loss of multi-token prediction (DeepSeek-V3, arXiv:2412.19437 section 2.2).

    Attributes:
      coef: coefficient of the drafts' cross entropy in nats, the mean over the `drafted` tokens of the batch; the paper
        has 0.3, then 0.1. 0 = the layer is not trained, and exports have it as it was.
      trunk: what the loss does to the rest of the model: "detached" = nothing, no gradient flows into hidden states,
        embeddings and output head; "trained" = gradients flow into all of them, as in the paper's pre-training.
    """

    coef: float = 0.0
    trunk: Trunk = "detached"

    def __post_init__(self):
        rules = (
            ("coef", 0 <= self.coef < float("inf"), "at least 0 and finite"),
            ("trunk", self.trunk in ("detached", "trained"), "detached or trained"),
            ("trunk", self.trunk == "detached" or self.coef != 0, "left out without a coef"),
        )
        validate(self, rules)


def drafted(batch: Batch):
    """Whether a draft learns each prediction, bool[B, T]: the predicted token is learnt, and two tokens of its own
    sequence come before it, of which the draft reads the hidden state of the first and the embedding of the second."""
    return batch.mask_BT & (batch.index_BT > 0)


@dataclass(frozen=True)
class Drafting:
    """An objective plus `mtp.coef` times the mean cross entropy of drafts over the `drafted` tokens of the batch.

    The mask is that of the prepared batch: what the objective takes out of it, drafts do not learn either. Tokens that
    a correction gives weight 0 stay in it.
    """

    objective: Any
    mtp: MTP

    @property
    def needs_scores(self) -> bool:
        return self.objective.needs_scores

    def __str__(self):
        draft = "-log draft(y_t | h_t-2, y_t-1), mean over drafted tokens"
        return f"{self.objective}\nbeside it {self.mtp.coef:g} times what is minimised here: {draft}"

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Prepares the batch for the objective and sets the weights of drafts; they are 0 if none is learnt."""
        batch = self.objective.prepare(batch, scores)
        one_BT = jnp.where(drafted(batch), 1.0, 0.0).astype(batch.weight_BT.dtype)
        weight_BT = self.mtp.coef * one_BT / divisor(jnp.sum(one_BT))
        return batch.replace(target={**batch.target, WEIGHT: weight_BT})

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics `mtp_loss` and `mtp_accuracy` beside the objective's); gradients flow as in
        the objective, and into `out.draft_logp_BT`."""
        total, report = self.objective.loss(out, batch)
        drafted_BT = drafted(batch)
        nll_BT = jnp.where(drafted_BT, -out.draft_logp_BT, 0)
        report |= {
            "mtp_loss": metrics.of(nll_BT, drafted_BT),
            "mtp_accuracy": metrics.of(out.draft_right_BT, drafted_BT),
        }
        return total + jnp.sum(nll_BT * batch.target[WEIGHT]), report


def wrap(objective, mtp: MTP):
    """Adds the loss to an objective; returns it unchanged if the coefficient is 0."""
    return Drafting(objective, mtp) if mtp.coef else objective
