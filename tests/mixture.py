"""A small mixture-of-experts model, and a reference in float64 that computes one expert at a time."""

from functools import partial

import numpy as np
import tiny

from areax import models
from areax.core import step

E, K, L = 6, 2, 2  # experts, experts per token, layers with experts
HF = dict(
    model_type="qwen3_moe", vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=1, head_dim=12, initializer_range=0.4, tie_word_embeddings=True,
    num_experts=E, num_experts_per_tok=K, moe_intermediate_size=20, norm_topk_prob=True, mlp_only_layers=[1],
)  # fmt: skip
CONFIG = models.config_from_hf(HF)
TABLE = models.table(CONFIG)
SCORE = partial(models.score, config=CONFIG)
SCORES = step.make_scores(SCORE)
PARAMS = tiny.weights(TABLE, 0.4, seed=1)


def mlp(x_D, gate_FD, up_FD, down_DF):
    """down (silu(gate x) * up x)."""
    gate_F = gate_FD @ x_D
    return down_DF @ (gate_F / (1 + np.exp(-gate_F)) * (up_FD @ x_D))


def mix(x_D, index_K, weight_K, gate_EFD, up_EFD, down_EDF):
    """The weighted sum over the experts of one token."""
    each = zip(index_K, weight_K, strict=True)
    return sum(weight * mlp(x_D, gate_EFD[e], up_EFD[e], down_EDF[e]) for e, weight in each)
