"""The loss of process reward models against TRL's definition, in float64, token by token."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import packing
from areax.core.process_reward import LABEL, ProcessReward
from areax.rollout.types import demonstration

IGNORED = -100  # of torch's cross-entropy
LABELS = [  # of each token, as TRL's PRMTrainer makes them: that of a step at its last token
    [IGNORED, IGNORED, 1, IGNORED, 0, 2],
    [IGNORED, IGNORED, IGNORED, IGNORED],
    [IGNORED, 2],
    [IGNORED, IGNORED, IGNORED, 0, IGNORED, IGNORED, IGNORED, 1],
]
Y = 3


def batch():
    """The sequences in microbatches of one row."""
    made = []
    for i, labels in enumerate(LABELS):
        label = np.array([0 if x == IGNORED else x + 1 for x in labels], np.int32)
        tokens = np.arange(len(labels)) + i
        made.append(demonstration(tokens, (label > 0).tolist(), rollout=i, group=i, arrays={LABEL: ("input", label)}))
    return packing.pack(made, 9, rows=1)


def trl(scores):
    """(cross-entropy of logits[t] to labels[t], nothing shifted, mean over all labels that are not ignored; the share
    of them that are the likeliest)."""
    losses, right = [], []
    for x_TY, labels in zip(scores, LABELS, strict=True):
        for x_Y, label in zip(x_TY, labels, strict=True):
            if label != IGNORED:
                losses.append(math.log(sum(math.exp(x) for x in x_Y)) - x_Y[label])
                right.append(max(range(Y), key=lambda i, x_Y=x_Y: x_Y[i]) == label)
    return sum(losses) / len(losses), sum(right) / len(right)


@pytest.mark.slow
def test_the_loss_is_that_of_trl_however_it_is_packed():
    packed, spec = batch(), ProcessReward(labels=Y)
    M = packed.token_BT.shape[0]
    assert M > 2
    x_MBTY = jnp.asarray(np.random.default_rng(0).standard_normal((*packed.token_BT.shape, Y)), jnp.float32)
    ready = spec.prepare(packed)

    def loss(x_MBTY):
        parts = [
            spec.loss(SimpleNamespace(label_BTY=x_MBTY[m]), jax.tree.map(lambda x, m=m: x[m], ready)) for m in range(M)
        ]
        report = [part[1]["step_accuracy"] for part in parts]
        return sum(part[0] for part in parts), sum(r.sum for r in report) / sum(r.count for r in report)

    (got, accuracy), gradient = jax.value_and_grad(loss, has_aux=True)(x_MBTY)
    where = {}
    for m, b, j in zip(*np.nonzero(packed.sample_BJ >= 0), strict=True):
        where[int(packed.sample_BJ[m, b, j])] = m, b, np.flatnonzero(packed.segment_BT[m, b] == j + 1)
    apart = lambda x: [np.asarray(x, np.float64)[m, b, t] for m, b, t in (where[i] for i in range(len(LABELS)))]
    scores = apart(x_MBTY)
    wanted, right = trl(scores)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(accuracy, right, rtol=1e-6)
    count = sum(x != IGNORED for labels in LABELS for x in labels)
    for g_TY, x_TY, labels in zip(apart(gradient), scores, LABELS, strict=True):
        p_TY = np.exp(x_TY) / np.exp(x_TY).sum(-1, keepdims=True)
        for g_Y, p_Y, label in zip(g_TY, p_TY, labels, strict=True):
            slope = np.zeros(Y) if label == IGNORED else (p_Y - np.eye(Y)[label]) / count
            np.testing.assert_allclose(g_Y, slope, atol=1e-7)
    assert not np.any(np.where(packed.segment_BT[..., None] == 0, gradient, 0))


def test_a_batch_without_labels_teaches_nothing():
    packed = batch()
    none = packed.replace(input={LABEL: np.zeros_like(packed.input[LABEL])})
    ready = ProcessReward(labels=Y).prepare(none)
    assert not np.any(ready.weight_BT)


@pytest.mark.parametrize("labels", [1, 0, 10_001])
def test_a_number_of_labels_that_cannot_be_is_refused(labels):
    with pytest.raises(ValueError, match=f"ProcessReward: labels must be from 2 to 10,000, got {labels}"):
        ProcessReward(labels)
