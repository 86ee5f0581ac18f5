"""The layout of weights for decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ...adapters import hf
from ...core import param
from ...models import transformer as models
from ...models.layers.linear import MultiLoRAWeight, Transposed

KEPT = "_bias", "_taps"  # ends of names of weights with two axes that multiply nothing from the left


def stage(params, table: param.Table, device):
    """Copies weights to the layout for decoding: a list of layers, with matrices transposed (a tied head too).

    Copies one tensor at a time, so that decoding on the device is never blocked for long. Leaves may be arrays or
    `hf.Mapped`; those in host memory are read in place.
    """
    here = lambda w: w if isinstance(w, hf.Mapped) else np.asarray(w) if hf.on_host(w) else jax.device_put(w, device)
    ready = lambda w, turned: jax.block_until_ready(_copied(jax.device_put(w, device), turned=turned))
    turned = lambda w: Transposed(ready(w, True))
    one = lambda name, w: turned(w) if w.ndim == 2 and not name.endswith(KEPT) else ready(w, False)
    top = {name: here(w) for name, w in params.items() if name != "stacks"}
    stacks = [jax.tree.map(here, stack) for stack in params["stacks"]]
    layer = lambda i, place: {name: one(name, w[place]) for name, w in stacks[i].items()}
    return {
        "embed": ready(top["embed"], False),
        "norm": ready(top["norm"], False),
        "head": turned(models.head(top)),
        **{name: ready(w, False) for name, w in top.items() if name.startswith("per_layer_")},
        "layers": [layer(i, place) for i, place in table.layers],
    }


@functools.partial(jax.jit, static_argnames=("turned",))
def _copied(w, *, turned: bool):
    return w.T if turned else jnp.copy(w)


def with_adapters(weights, index_B):
    """The layers, with adapter index_B[i] applied to row i of a batch; unchanged while no adapter is loaded."""
    if "adapters" not in weights:
        return weights["layers"]
    choose = lambda layer, factors: {
        name: MultiLoRAWeight(layer[name], a, b, index_B) for name, (a, b) in factors.items()
    }
    each = zip(weights["layers"], weights["adapters"], strict=True)
    return [{**layer, **choose(layer, factors)} for layer, factors in each]
