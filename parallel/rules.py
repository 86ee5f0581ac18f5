"""Sharding rules: one table from logical axes to mesh axes, from which all shardings are derived."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import moments, param, step
from ..core.quantised import QuantisedWeight
from . import mesh as meshes

Axes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis, several mesh axes, or None for replicated.

    The first block has axes of weights, as in `Param.axes`; the second those of batches and activations.
    """

    layers: Axes = None
    vocab: Axes = "tp"
    embed: Axes = ("fsdp", "ep")
    ffn: Axes = "tp"
    shared_ffn: Axes = "tp"
    heads: Axes = "tp"
    kv_heads: Axes = "tp"
    key_channels: Axes = "tp"
    value_channels: Axes = "tp"
    value_heads: Axes = "tp"
    taps: Axes = None
    value_dim: Axes = None
    head: Axes = None
    keys_values: Axes = "tp"
    values: Axes = "tp"
    q_latent: Axes = None
    q_rank: Axes = ("fsdp", "ep")
    kv_latent: Axes = None
    kv_rank: Axes = ("fsdp", "ep")
    wide_heads: Axes = "tp"
    wide_kv_heads: Axes = "tp"
    wide_head: Axes = None
    wide_ffn: Axes = "tp"
    per_layer: Axes = None
    per_layers: Axes = None
    per_layer_vocab: Axes = "tp"
    per_layer_columns: Axes = ("fsdp", "ep")
    mtp_inputs: Axes = None
    one: Axes = None
    labels: Axes = None
    score_hidden: Axes = None
    router: Axes = None
    experts: Axes = "ep"
    expert_embed: Axes = "fsdp"
    expert_ffn: Axes = "tp"
    expert_latent: Axes = None
    rank: Axes = None
    vision_embed: Axes = ("fsdp", "ep")
    vision_merged: Axes = ("fsdp", "ep")
    vision_heads: Axes = "tp"
    vision_hidden: Axes = None
    vision_ffn: Axes = None
    vision_channel: Axes = None
    vision_frame: Axes = None
    vision_row: Axes = None
    vision_column: Axes = None
    place_vocab: Axes = None

    batch: Axes = meshes.BATCH
    seq: Axes = "cp"
    row: Axes = None
    channels: Axes = ("tp", "cp")
    query_heads: Axes = "tp"
    hidden: Axes = None


RULES = ShardingRules()
GATHERED = dataclasses.replace(
    RULES, embed=None, expert_embed=None, q_rank=None, kv_rank=None, vision_embed=None, vision_merged=None
)  # rules for weights while in use
GENERATING = dataclasses.replace(GATHERED, experts=meshes.EXPERTS)  # and on `mesh.generating`


def spec(axes: tuple[str, ...], rules: ShardingRules = RULES, *, where: str = "", shape=None, mesh=None):
    """The PartitionSpec of an array with these logical axes; mesh axes of size 1 are omitted.

    By `RULES` a vector, such as the scale of a norm, is not split over fsdp and ep: it is small, and each gather of it
    would have its latency.

    Args:
      where: name of the array, for error messages.
      shape: if given, each dimension must be divisible by its devices.
      mesh: a mesh; None = the ambient one.

    Raises:
      ValueError: a logical axis has no rule, two axes share a mesh axis, or a dimension is not divisible.
    """
    sizes = (mesh or jax.sharding.get_abstract_mesh()).shape
    if rules is RULES and sum(axis != "layers" for axis in axes) == 1:
        rules = GATHERED
    entries: list[Axes] = []
    used: dict[str, str] = {}
    for i, axis in enumerate(axes):
        if not hasattr(rules, axis):
            raise ValueError(f"{where}: axis {axis} needs a sharding rule, got none; add it to ShardingRules")
        rule = getattr(rules, axis)
        named = [name for name in ((rule,) if isinstance(rule, str) else rule or ()) if sizes.get(name, 1) > 1]
        for name in named:
            if name in used:
                raise ValueError(
                    f"{where}: {used[name]} and {axis} cannot both be split over {name}; change one of their rules"
                )
            used[name] = axis
        over = math.prod(sizes[name] for name in named)
        if shape is not None and shape[i] % over:
            raise ValueError(
                f"{where}: {axis} of size {shape[i]} cannot be split over {' x '.join(named)} = {over} devices; "
                "use a divisor"
            )
        entries.append(tuple(named) if len(named) > 1 else named[0] if named else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def of_params(table: param.Table, mesh, rules: ShardingRules = RULES):
    """The sharding of each weight, as a tree with the parameters' structure. Raises as `spec`."""
    one = lambda leaf: NamedSharding(mesh, spec(leaf.axes, rules, where=leaf.path, shape=leaf.shape, mesh=mesh))
    return param.tree_map(one, table)


def of_state(optimizer: optax.GradientTransformation, table: param.Table, mesh, rules: ShardingRules = RULES):
    """The shardings of a training State: moments are sharded like their weights, counters replicated.

    Axes along which a moment was averaged have size 1 and are not split, nor are blocks of 8-bit moments whose number
    their devices do not divide; frozen weights have no moments.
    """
    params, everywhere = of_params(table, mesh, rules), NamedSharding(mesh, PartitionSpec())
    left_out = lambda x: isinstance(x, optax.MaskedNode | moments.Blocks)

    def one(moment, sharding):
        if isinstance(moment, optax.MaskedNode):
            return moment
        if isinstance(moment, moments.Blocks):
            return moments.Blocks(sharding, one(moment.scale, sharding))
        return _fitting(moment.shape, sharding)

    opt_state = optax.tree.map_params(
        optimizer, one, jax.eval_shape(optimizer.init, param.abstract(table)), params, is_leaf=left_out,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    return step.State(params, opt_state, everywhere)


def _fitting(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """The sharding, with axes that the devices do not divide left whole."""
    split = []
    for size, entry in zip(shape, sharding.spec, strict=False):
        over = math.prod(sharding.mesh.shape[name] for name in ((entry,) if isinstance(entry, str) else entry or ()))
        split.append(None if size % over else entry)
    return NamedSharding(sharding.mesh, PartitionSpec(*split))


def of_quantised(shapes, table: param.Table, mesh, rules: ShardingRules = RULES):
    """The shardings of weights of which some are quantised; `shapes` is their tree, or their shapes."""

    def one(sharding, x):
        if not isinstance(x, QuantisedWeight):
            return sharding
        return dataclasses.replace(x, code=_fitting(x.code.shape, sharding), scale=_fitting(x.scale.shape, sharding))

    return jax.tree.map(one, of_params(table, mesh, rules), shapes)


def constrain(x, axes: str, rules: ShardingRules = RULES):
    """Constrains x's sharding on the ambient mesh by its leading logical axes ("batch seq"); a no-op without a mesh."""
    if meshes.one_device():
        return x
    return jax.lax.with_sharding_constraint(x, spec(tuple(axes.split()), rules, where=axes, shape=x.shape))


def gather(weights: Mapping[str, jax.Array], params: Mapping[str, param.Param], dtype=None):
    """Gathers one layer's weights over fsdp and ep for computation; they stay sharded over tp, experts over ep.

    Those that layers cast to `dtype` before use are cast first, and sent in it; so are their gradients, which are
    reduced and scattered at once: no device has the whole gradient (arXiv:1910.02054).
    """
    if meshes.size("fsdp", "ep") == 1:
        return weights
    return {name: _gathered(w, params[name].axes, dtype if params[name].cast else None) for name, w in weights.items()}


def _gathered(w, axes: str, dtype=None):
    if isinstance(w, QuantisedWeight):
        blocks = " ".join([*axes.split()[:-1], "one"])  # scales of a row are few, and not always divisible
        return dataclasses.replace(
            w, code=constrain(w.code, axes, GATHERED), scale=constrain(w.scale, blocks, GATHERED)
        )
    if not isinstance(w, param.LoRAWeight):
        narrower = dtype is not None and jnp.dtype(dtype).itemsize < w.dtype.itemsize
        return _used(w, axes, jnp.dtype(dtype if narrower else w.dtype), w.dtype)
    a, b = (" ".join(names) for names in param.factors(tuple(axes.split()), "rank"))
    return dataclasses.replace(w, weight=_gathered(w.weight, axes, dtype), a=_gathered(w.a, a), b=_gathered(w.b, b))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _used(w, axes: str, dtype, stored):
    """The whole weight in `dtype`. Its gradient is scattered by a rule of its own: that of a constraint would have it
    whole on every device."""
    return constrain(constrain(w.astype(dtype), axes), axes, GATHERED)


def _scattered(axes: str, dtype, stored, _, gradient):
    return (constrain(gradient, axes).astype(stored),)


_used.defvjp(lambda w, *how: (_used(w, *how), None), _scattered)


def explain(table: param.Table, mesh, rules: ShardingRules = RULES, dtype="float32") -> str:
    """Describes shardings, one line per weight: path, shape, split, bytes per device; then the total."""
    shardings = jax.tree.leaves(of_params(table, mesh, rules))
    rows, total = [], 0
    for leaf, sharding in zip(param.leaf_list(table), shardings, strict=True):
        local = math.prod(sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.param.dtype or dtype).itemsize
        total += local
        names = ", ".join(
            f"{axis}/{'x'.join((entry,) if isinstance(entry, str) else entry)}" if entry else axis
            for axis, entry in zip(leaf.axes, (*sharding.spec, *[None] * len(leaf.shape)), strict=False)
        )
        rows.append((leaf.path, str(list(leaf.shape)), names, f"{local:,}"))
    rows.append(("all", "", "", f"{total:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}} bytes/device" for a, b, c, d in rows
    )
