"""Wrong choices and unprepared batches are refused where a user makes them, not silently taken for another choice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax import models
from areax.core import advantages, denominators, divergence, losses, optim, packing, quantised
from areax.rollout.types import supervised

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
ONES = jnp.ones((1, 2))
IDS = jnp.array([[0, 1]])
BATCH = packing.pack([supervised([1, 2], [3])], 4, rows=1)
ROW = jax.tree.map(lambda x: x[0], BATCH)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: divergence.full(ONES, ONES, kind="fwd"), "kind must be one of forward, reverse, js, got fwd"),
        (lambda: denominators.share(ROW, ROW.mask_BT, "seq"), "share: kind must be one of token, sequence,"),
        (
            lambda: advantages.group(ONES, IDS, IDS, std="groups"),
            "group: std must be one of group, batch, none, mean, got",
        ),
        (lambda: advantages.group(ONES, IDS, IDS, mean="greedy"), "group: mean must be one of group, batch, none, got"),
        (lambda: quantised.quantise(ONES, "int4"), "quantise: kind must be one of int8, nf4, got int4"),
        (lambda: optim.Optimizer(schedule="cosin"), "schedule must be one of constant, cosine, linear, got 'cosin'"),
        (lambda: losses.GRPO().prepare(BATCH), "needs scores of the current weights, from step.make_scores, got None"),
        (lambda: losses.KTO().prepare(BATCH), "needs scores of the current weights, from step.make_scores, got None"),
        (
            lambda: losses.GRPO().loss(None, ROW.replace(adv_BT=np.zeros_like(ROW.logp_BT))),
            "GRPO: the batch must come from GRPO.prepare",
        ),
    ],
)
def test_a_wrong_argument_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_models_say_which_axes_they_need():
    config, params = models.config_from_hf(QWEN3), None  # refused before a weight is read
    with pytest.raises(ValueError, match=r"score: the batch must be one microbatch \[B, T\], got .* \(1, 1, 4\); take"):
        models.score(params, BATCH, config=config)
    with pytest.raises(ValueError, match=r"forward: token_BT needs axes BT, got shape \(3,\)"):
        models.forward(params, jnp.array([1, 2, 3]), config=config)
