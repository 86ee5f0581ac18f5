"""Which mesh axis splits which logical axis: one table, from which follows where everything lies."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import param, step
from . import mesh as meshes

Axes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis, several mesh axes, or None for whole on every device.

    The first block names axes of weights, as in `Param.axes`; the second those of batches and activations.
    """

    layers: Axes = None
    vocab: Axes = "tp"
    embed: Axes = ("fsdp", "ep")
    ffn: Axes = "tp"
    shared_ffn: Axes = "tp"
    heads: Axes = "tp"
    kv_heads: Axes = "tp"
    head: Axes = None
    one: Axes = None
    router: Axes = None
    experts: Axes = "ep"
    expert_embed: Axes = "fsdp"
    expert_ffn: Axes = "tp"
    rank: Axes = None

    batch: Axes = meshes.BATCH
    seq: Axes = "cp"
    query_heads: Axes = "tp"
    hidden: Axes = None


RULES = ShardingRules()
GATHERED = dataclasses.replace(RULES, embed=None, expert_embed=None)  # of weights while they are used


def spec(axes: tuple[str, ...], rules: ShardingRules = RULES, *, where: str = "", shape=None, mesh=None):
    """The PartitionSpec of an array with these logical axes; mesh axes of size 1 are left out.

    Args:
      where: name of the array, for messages.
      shape: if given, each dimension must divide by its devices.
      mesh: a mesh; None = the ambient one.

    Raises:
      ValueError: a logical axis that has no rule, two axes on one mesh axis, or a dimension that does not divide.
    """
    sizes = (mesh or jax.sharding.get_abstract_mesh()).shape
    entries: list[Axes] = []
    taken: dict[str, str] = {}
    for i, axis in enumerate(axes):
        if not hasattr(rules, axis):
            raise ValueError(f"{where}: axis {axis} needs a sharding rule, got none; add it to ShardingRules")
        rule = getattr(rules, axis)
        named = [name for name in ((rule,) if isinstance(rule, str) else rule or ()) if sizes.get(name, 1) > 1]
        for name in named:
            if name in taken:
                raise ValueError(
                    f"{where}: {taken[name]} and {axis} cannot both be split over {name}; change a rule of one of them"
                )
            taken[name] = axis
        over = math.prod(sizes[name] for name in named)
        if shape is not None and shape[i] % over:
            raise ValueError(
                f"{where}: {axis} of size {shape[i]} cannot be split over {' x '.join(named)} = {over} devices; "
                "choose a divisor"
            )
        entries.append(tuple(named) if len(named) > 1 else named[0] if named else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def of_params(table: param.Table, mesh, rules: ShardingRules = RULES):
    """The sharding of each weight, as a tree like the parameters. Raises as `spec`."""
    one = lambda leaf: NamedSharding(mesh, spec(leaf.axes, rules, where=leaf.path, shape=leaf.shape, mesh=mesh))
    return param.tree_map(one, table)


def of_state(optimizer: optax.GradientTransformation, table: param.Table, mesh, rules: ShardingRules = RULES):
    """The shardings of a training State: moments lie where their weights lie, counters everywhere.

    A moment that is a mean along an axis has size 1 there, and is not split; frozen weights have no moments.
    """
    params, everywhere = of_params(table, mesh, rules), NamedSharding(mesh, PartitionSpec())
    left_out = lambda x: isinstance(x, optax.MaskedNode)

    def one(moment, its):
        if left_out(moment):
            return moment
        entries = [None if size == 1 else entry for size, entry in zip(moment.shape, its.spec, strict=False)]
        return NamedSharding(mesh, PartitionSpec(*entries))

    opt_state = optax.tree.map_params(
        optimizer, one, jax.eval_shape(optimizer.init, param.abstract(table)), params, is_leaf=left_out,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    return step.State(params, opt_state, everywhere)


def constrain(x, axes: str, rules: ShardingRules = RULES):
    """x, laid out over the ambient mesh as its first logical axes ("batch seq") say; no change without a mesh."""
    if meshes.alone():
        return x
    return jax.lax.with_sharding_constraint(x, spec(tuple(axes.split()), rules, where=axes, shape=x.shape))


def gather(weights: Mapping[str, jax.Array], params: Mapping[str, param.Param]):
    """The weights of one layer while it computes: gathered over fsdp and ep, split over tp; experts stay apart."""
    if meshes.size("fsdp", "ep") == 1:
        return weights
    return {name: _gathered(w, params[name].axes) for name, w in weights.items()}


def _gathered(w, axes: str):
    if not isinstance(w, param.LoRAWeight):
        return constrain(w, axes, GATHERED)
    a, b = (" ".join(its) for its in param.factors(tuple(axes.split()), "rank"))
    return dataclasses.replace(w, weight=_gathered(w.weight, axes), a=_gathered(w.a, a), b=_gathered(w.b, b))


def explain(table: param.Table, mesh, rules: ShardingRules = RULES, dtype="float32") -> str:
    """A line a weight: path, shape, how it is split, bytes a device; then the sum."""
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
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}} bytes a device" for a, b, c, d in rows
    )
