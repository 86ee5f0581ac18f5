"""The gated MLP."""

import jax
from jax.ad_checkpoint import checkpoint_name

from .linear import linear


def gated_mlp(x_BTD, w):
    """down(silu(gate x) * up x) (SwiGLU, arXiv:2002.05202); with biases if the weights exist."""
    gate = checkpoint_name(linear(x_BTD, w["gate"], w.get("gate_bias")), "mlp_gate_up")
    up = checkpoint_name(linear(x_BTD, w["up"], w.get("up_bias")), "mlp_gate_up")
    return linear(jax.nn.silu(gate) * up, w["down"], w.get("down_bias"))
