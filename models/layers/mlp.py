"""MLPs with and without a gate, and their activations."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import blocked
from .blocked import Blocked
from .linear import MultiLoRAWeight, linear, linears


@dataclass(frozen=True)
class Activation:
    """The hidden layer of an MLP, from its two halves: f(gate) * up; without a gate f(up).

    Attributes:
      kind: f: "silu"; "gelu_tanh", GELU by its tanh approximation (transformers' gelu_pytorch_tanh); "relu2", the
        square of relu (arXiv:2109.08668). "clamped" (GPT-OSS) is (clip(up, -limit, limit) + 1) * g * sigmoid(alpha * g)
        with g = min(gate, limit).
      limit, alpha: of "clamped" (swiglu_limit and swiglu_alpha in config.json).
    """

    kind: Literal["silu", "gelu_tanh", "relu2", "clamped"] = "silu"
    limit: float = 7.0
    alpha: float = 1.702

    def __call__(self, *halves):
        first, *up = halves
        match self.kind:
            case "silu":
                hidden = jax.nn.silu(first)
            case "gelu_tanh":
                hidden = jax.nn.gelu(first, approximate=True)
            case "relu2":
                hidden = jnp.square(jax.nn.relu(first))
            case "clamped":
                first, up = jnp.minimum(first, self.limit), [jnp.clip(up[0], -self.limit, self.limit) + 1]
                hidden = first * jax.nn.sigmoid(self.alpha * first)
        return hidden * up[0] if up else hidden


SILU = Activation()


def gated_mlp(x_BTD, w, activation: Activation = SILU):
    """down(activation(gate x, up x)), by default SwiGLU (arXiv:2002.05202); with biases if the weights exist."""
    if blocks := _in_blocks(x_BTD, w, activation):
        gate, up = (y.reshape(-1, y.shape[-1]) for y in linears(x_BTD, w, ("gate", "up")))
        hidden = blocked.silu_product(gate, up, blocks.active)
        return _linear(hidden.reshape(*x_BTD.shape[:-1], -1), w, "down")
    halves = (checkpoint_name(half_BTF, "mlp_gate_up") for half_BTF in linears(x_BTD, w, ("gate", "up")))
    return _linear(activation(*halves), w, "down")


def _in_blocks(x_BTD, w, activation: Activation) -> Blocked | None:
    """The weight of the gate if `blocked.silu_product` computes the hidden layer, adapters or not."""
    gate, up = (each.weight if isinstance(each, MultiLoRAWeight) else each for each in (w["gate"], w["up"]))
    known = activation.kind == "silu" and x_BTD.dtype in blocked.ROWS
    return gate if known and isinstance(gate, Blocked) and isinstance(up, Blocked) else None


def mlp(x_BTD, w, activation: Activation):
    """down(activation(up x)), without a gate; with biases if the weights exist."""
    return _linear(activation(checkpoint_name(_linear(x_BTD, w, "up"), "mlp_gate_up")), w, "down")


def _linear(x_BTD, w, name: str):
    return linear(x_BTD, w[name], w.get(f"{name}_bias"))
