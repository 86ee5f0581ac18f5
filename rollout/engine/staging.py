"""The layout of weights for decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...adapters import hf
from ...core import param
from ...models import transformer as models
from ...models.layers.linear import MultiLoRAWeight, Transposed
from ...parallel import rules

KEPT = "_bias", "_taps"  # ends of names of weights with two axes that multiply nothing from the left


def stage(params, table: param.Table, mesh):
    """Copies weights to the layout for decoding: a list of layers, with matrices transposed (a tied head too), split
    over tp by the rules of training, experts over ep.

    Copies one tensor at a time, so that decoding on the device is never blocked for long. Leaves may be arrays or
    `hf.Mapped`; those in host memory are read in place.
    """
    first, split = mesh.devices.flat[0], rules.of_params(table, mesh, rules.GENERATING)
    host = lambda w: w if isinstance(w, hf.Mapped) else np.asarray(w) if hf.on_host(w) else jax.device_put(w, first)
    top = {name: host(w) for name, w in params.items() if name != "stacks"}
    stacks = [jax.tree.map(host, stack) for stack in params["stacks"]]

    def ready(w, sharding, turned=False):
        spec = (*sharding.spec, *[None] * (w.ndim - len(sharding.spec)))
        there = NamedSharding(mesh, PartitionSpec(*reversed(spec))) if turned else sharding
        return jax.block_until_ready(_copied(there, turned)(jax.device_put(w, sharding)))

    def one(name, w, sharding):
        turned = w.ndim == 2 and not name.endswith(KEPT)
        return Transposed(ready(w, sharding, True)) if turned else ready(w, sharding)

    def layer(i, place):
        of_layer = lambda sharding: NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))
        return {name: one(name, w[place], of_layer(split["stacks"][i][name])) for name, w in stacks[i].items()}

    return {
        "embed": ready(top["embed"], split["embed"]),
        "norm": ready(top["norm"], split["norm"]),
        "head": Transposed(ready(models.head(top), models.head(split), True)),
        **{name: ready(w, split[name]) for name, w in top.items() if name.startswith("per_layer_")},
        "layers": [layer(i, place) for i, place in table.layers],
    }


@functools.cache
def _copied(sharding, turned: bool):
    return jax.jit(lambda w: w.T if turned else jnp.copy(w), out_shardings=sharding)


def with_adapters(weights, index_B):
    """The layers, with adapter index_B[i] applied to row i of a batch; unchanged while no adapter is loaded."""
    if "adapters" not in weights:
        return weights["layers"]
    choose = lambda layer, factors: {
        name: MultiLoRAWeight(layer[name], a, b, index_B) for name, (a, b) in factors.items()
    }
    each = zip(weights["layers"], weights["adapters"], strict=True)
    return [{**layer, **choose(layer, factors)} for layer, factors in each]
