"""Process reward models: a classifier that judges a completion step by step."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from . import metrics
from .batch import Batch
from .checks import validate
from .segments import divisor, to_tokens

LABEL = "step_label"  # of `Batch.input`: the label plus 1 at the last token of a step that has one, else 0


@dataclass(frozen=True)
class ProcessReward:
    """Cross-entropy of the labels of steps, mean over the labelled steps of the batch (arXiv:2211.14275,
    arXiv:2305.20050; TRL's PRMTrainer).

    Attributes:
      labels: number of labels a step may have: 0, 1, ...; with two, 1 is a correct step.
    """

    labels: int = 2

    needs_scores = False

    def __post_init__(self):
        validate(self, [("labels", 2 <= self.labels <= 10_000, "from 2 to 10,000")])

    def __str__(self):
        return "ProcessReward: minimise -sum_s log softmax(scores at the end of s)[label of s] / labelled steps"

    def prepare(self, batch: Batch, scores=None) -> Batch:
        """Sets `weight_BT` to each labelled step's share of the mean, at the step's last token."""
        weight_BT = jnp.where(_labelled(batch), to_tokens(batch.weight_BJ, batch.segment_BT), 0)
        return batch.replace(weight_BT=weight_BT / divisor(jnp.sum(weight_BT)))

    def loss(self, out, batch: Batch):
        """(sum over the microbatch, metrics); gradients flow into `out.label_BTY`, as `models.classify` gives it.

        Metrics per labelled step: step_nll, step_accuracy (the likeliest label is the step's).
        """
        known_BT, label_BT = _labelled(batch), jnp.maximum(batch.input[LABEL] - 1, 0)
        logp_BTY = jax.nn.log_softmax(out.label_BTY)
        nll_BT = -jnp.take_along_axis(logp_BTY, label_BT[..., None], axis=-1)[..., 0]
        report = {
            "step_nll": metrics.of(nll_BT, known_BT),
            "step_accuracy": metrics.of(jnp.argmax(logp_BTY, -1) == label_BT, known_BT),
        }
        return jnp.sum(batch.weight_BT * jnp.where(known_BT, nll_BT, 0)), report


def _labelled(batch: Batch):
    """Whether each token is the last of a step with a label."""
    return (batch.input[LABEL] > 0) & (batch.segment_BT > 0)
