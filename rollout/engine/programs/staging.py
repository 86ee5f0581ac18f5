"""The layout of weights for decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ....adapters import hf
from ....core import param, quantised
from ....models.layers import blocked, native
from ....models.layers.blocked import Blocked
from ....models.layers.linear import MultiLoRAWeight, Transposed
from ....parallel import rules, transfer, turns

KEPT = "_bias", "_taps"  # ends of names of weights with two axes that multiply nothing from the left
EXACT = "router", "shared_router"  # weights that are not rounded
HEAD = {"nf4": "int8"}  # how heads are kept, which 4 bits harm most
LEAST = 1 << 14  # entries of a matrix for blocks; XLA multiplies smaller ones sooner, as they stay in a cache
WIDENED = np.float32, jnp.bfloat16  # dtypes of matrices in blocks
APART = "kv_up"  # whose parts are multiplied by themselves (`latent`)


def stage(params, table: param.Table, mesh, weights: str = "auto"):
    """Copies weights to the layout for decoding: a list of layers, with matrices transposed (a tied head too), split
    over tp by the rules of training, experts over ep; on one CPU matrices are in `blocked.blocks`, as `weights` says
    (`EngineOptions`), and a tied head that is not rounded is the only copy: there is no "embed".

    Copies one tensor at a time, so that decoding on the device is never blocked for long. Leaves may be arrays,
    `hf.Mapped` or `hf.Cast`; those in host memory are read in place, others go from device to device. On a mesh that
    spans processes they must be in host memory, and each process copies its parts, whatever the others do. Of shapes it
    gives the shapes and shardings of the layout.
    """
    split = rules.of_params(table, mesh, rules.GENERATING)
    name = "head" if "head" in params else "embed"
    top = lambda name: _ready(_read(params[name])[()], split[name])
    head = _matrix(_read(params[name])[()], split[name], "head", weights)
    both = name == "embed" and isinstance(head, Blocked) and head.scale is None
    return {
        **({} if both else {"embed": top("embed")}),
        "norm": top("norm"),
        "head": head,
        **{name: top(name) for name in params if name.startswith("per_layer_")},
        "layers": layers(params, table, mesh, weights),
    }


def layers(params, table: param.Table, mesh, weights: str = "auto") -> list[dict]:
    """`stage` of the layers alone."""
    split = rules.of_params(table, mesh, rules.GENERATING)

    def one(name, w, sharding):
        turned = w.ndim == 2 and not name.endswith(KEPT)
        return _matrix(w, sharding, name, weights) if turned else _ready(w, sharding)

    def each(w, name, sharding):
        w, of_layer = _read(w), NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))
        return [one(name, w[place], of_layer) for place in range(w.shape[0])]

    stacks = [
        {name: each(w, name, split["stacks"][i][name]) for name, w in stack.items()}
        for i, stack in enumerate(params["stacks"])
    ]
    return [{name: each[place] for name, each in stacks[i].items()} for i, place in table.layers]


def sums_alike(weights) -> bool:
    """Whether products with these weights give a token the same bits whatever the number of others."""
    is_leaf = lambda x: isinstance(x, Blocked | Transposed)
    of_layers = jax.tree.leaves((weights["layers"], weights["head"]), is_leaf=is_leaf)
    matrices = [w for w in of_layers if not isinstance(w, Blocked) and (is_leaf(w) or w.ndim > 2)]
    return not matrices and not any(name.startswith("per_layer_") for name in weights)


def whole(params, table: param.Table, mesh):
    """Copies weights of a part as they are, split over tp by the rules of training."""
    read = lambda w: w.read() if isinstance(w, hf.Mapped) else _read(w)[()]
    return jax.tree.map(
        lambda w, sharding: _ready(read(w), sharding), params, rules.of_params(table, mesh, rules.GENERATING)
    )


class _Shape(jax.ShapeDtypeStruct):
    """The shape and dtype of a weight, from which layers are taken as from the weight."""

    def __getitem__(self, place):
        return self if place == () else _Shape(self.shape[1:], self.dtype)


def _read(w):
    if isinstance(w, jax.ShapeDtypeStruct):
        return _Shape(w.shape, w.dtype)
    w = hf.Cast(w, w.shape, w.dtype, w.dtype) if isinstance(w, jax.Array) else w
    return w.merged() if isinstance(w, hf.Cast) else w


def _ready(w, sharding, turned=False):
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (w.ndim - len(sharding.spec)))
    there = NamedSharding(mesh, PartitionSpec(*reversed(spec))) if turned else sharding
    if isinstance(w, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(w.shape[::-1] if turned else w.shape, w.dtype, sharding=there)
    if mesh.is_multi_process:
        return jax.block_until_ready(transfer.from_host(w, sharding, _turned if turned else _copy, there))
    with turns.taken(mesh):
        w = transfer.between(w, sharding) if isinstance(w, jax.Array) else w
        return jax.block_until_ready(_copied(sharding, there, turned)(w))


def _matrix(w, sharding, name: str, weights: str):
    """A matrix in the layout in which it decodes fastest, or smallest."""
    kind = "auto" if name in EXACT else HEAD.get(weights, weights) if name == "head" else weights
    exact = kind == "auto"
    small = w.shape[0] * w.shape[1] < LEAST
    if name == APART or (exact and (small or sharding.mesh.size > 1 or w.dtype not in WIDENED or not native.ready())):
        return Transposed(_ready(w, sharding, True))
    if isinstance(w, jax.ShapeDtypeStruct):
        on = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(on, jax.eval_shape(functools.partial(_rounded, kind=kind), w))
    with turns.taken(sharding.mesh):
        w = jax.device_put(w, sharding)
        if exact:
            narrow = w.dtype == np.float32 and _is_bf16(w)
            return jax.block_until_ready(_in_blocks(w.astype(jnp.bfloat16) if narrow else w))
        return jax.block_until_ready(_rounded(w, kind))


_rounded = jax.jit(lambda w, kind: blocked.blocks(quantised.quantise(w, kind)), static_argnames="kind")


@jax.jit
def _is_bf16(w):
    """Whether bf16 has all of these numbers: checkpoints in bf16 are kept as they are, at half the size of fp32."""
    return jnp.all(jax.lax.bitcast_convert_type(w, jnp.uint32) & 0xFFFF == 0)


_in_blocks = jax.jit(blocked.blocks)


@functools.cache
def _copied(here, there, turned: bool):
    return jax.jit(lambda w: w.T if turned else jnp.copy(w), in_shardings=here, out_shardings=there)


_turned, _copy = jax.jit(jnp.transpose), jax.jit(jnp.copy)


def with_adapters(weights, index_B):
    """The layers, with adapter index_B[i] applied to row i of a batch; unchanged while no adapter is loaded."""
    if "adapters" not in weights:
        return weights["layers"]
    choose = lambda layer, factors: {
        name: MultiLoRAWeight(layer[name], a, b, index_B) for name, (a, b) in factors.items()
    }
    each = zip(weights["layers"], weights["adapters"], strict=True)
    return [{**layer, **choose(layer, factors)} for layer, factors in each]
