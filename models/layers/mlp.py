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
    gate_BTF, up_BTF = (checkpoint_name(y_BTF, "mlp_gate_up") for y_BTF in linears(x_BTD, w, ("gate", "up")))
    # The same with adapters and without: loading one changes no bit of requests that do not use it.
    base = w["gate"].weight if isinstance(w["gate"], MultiLoRAWeight) else w["gate"]
    if isinstance(base, Blocked) and activation.kind == "silu" and x_BTD.dtype in blocked.ROWS:
        return _linear(blocked.silu_product(gate_BTF, up_BTF, base.active), w, "down")
    return _linear(activation(gate_BTF, up_BTF), w, "down")


def mlp(x_BTD, w, activation: Activation):
    """down(activation(up x)), without a gate; with biases if the weights exist."""
    return _linear(activation(checkpoint_name(_linear(x_BTD, w, "up"), "mlp_gate_up")), w, "down")


def _linear(x_BTD, w, name: str):
    return linear(x_BTD, w[name], w.get(f"{name}_bias"))
