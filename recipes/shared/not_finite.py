"""Where the numbers of a step first were not finite: weights, or which quantity of which token of which sample.

Looked for only after such a step, by another forward pass over its batch, and where all of that is finite by gradients
of parts of it. All processes of a job look for it together and find the same.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from areax import models
from areax.core import metrics, param, step
from areax.core.batch import Batch
from areax.core.policy import VALUED
from areax.core.segments import to_tokens
from areax.models import lora
from areax.parallel import batches as placement
from areax.recipes.shared import learner
from areax.recipes.shared.learner import Learner
from areax.rollout.types import Sample

SKIPPED = "skipped", "critic_skipped"  # above 0 if an update was
LOST = (
    "unusable_fraction",
    "unusable_teacher",
    "left_out",
)  # above 0 if tokens or sequences were, perhaps for this reason
NAMES = 3  # weights to name
WORDS = 60  # characters of a sample to show


@dataclass(frozen=True)
class Origin:
    """The first number that is not finite.

    Attributes:
      what: the quantity, or whose weights.
      value: of the quantity.
      minibatch, sample: index of the minibatch, and of the sample in its packed list; -1 = of no sample.
      token: index in the sample's tokens; -1 = of no token.
      more: what else is known.
    """

    what: str
    value: float = math.nan
    minibatch: int = -1
    sample: int = -1
    token: int = -1
    more: str = ""

    def said(self, samples: Sequence[Sequence[Sample]], tokens: Any, ordinals: Sequence[int] = ()) -> str:
        """The origin in words.

        Args:
          samples: of each minibatch, in the order in which they were packed.
          tokens: the tokenizer.
          ordinals: of the rows that the samples are made of, in that order; () = the samples know.
        """
        if self.sample < 0:
            return f"not finite first: {self.what} ({self.more})"
        sample = samples[self.minibatch][self.sample]
        row = sample.pair if sample.pair >= 0 else self.sample
        where = [f"row {ordinals[row % len(ordinals)]}"] if len(ordinals) else []
        where = where or [f"prompt {sample.prompt}, group {sample.group}, sample {sample.sample}"]
        if "id" in (given := sample.info.get("row") or {}):
            where.append(f"id {given['id']!r}")
        begin = " ".join(tokens.decode(sample.tokens[: 4 * WORDS].tolist()).split())[:WORDS]
        token = ""
        if self.token >= 0:
            ids = sample.tokens[[self.token]].tolist()
            token = f", {self.value:g}, of token {self.token} (id {ids[0]}, {tokens.decode(ids)!r})"
        return f"not finite first: {self.what}{token} of {', '.join(where)}, which begins {begin!r} ({self.more})"


def seen(report: Mapping[str, Any]) -> bool:
    """Whether a step's metrics, on the devices, are not finite, or say that something was lost to that."""
    return any(_seen(report))


def _seen(report: Mapping[str, Any]) -> list[bool]:
    """Whether metrics are not finite or updates were skipped, and whether something was lost."""
    whole = lambda name, m: isinstance(m, metrics.Metric) and not name.endswith("update_ratio")  # of weights too large
    return [bool(x) for x in _flags({name: m for name, m in report.items() if whole(name, m)})]


@jax.jit
def _flags(report):
    above = lambda names: [report[name].sum > 0 for name in names if name in report]
    wrong = [~jnp.isfinite(m.sum) for m in report.values()] + above(SKIPPED)
    return jnp.stack(wrong).any(), jnp.stack([jnp.zeros((), bool), *above(LOST)]).any()


def find(
    report: Mapping[str, Any], own: Learner, raw: Sequence[Batch], ready: Sequence[Batch], critic: Learner | None = None
) -> Origin | None:
    """The first number of a step that is not finite, at the weights that the step has left; None if all are finite.

    Args:
      report: its metrics: if these are finite, gradients are, too, and are not computed.
      raw: minibatches [M, B, T] on the devices, as they were before what is not finite was left out.
      ready: the same, prepared.
    """
    trained = [("the model", own, ready)]
    if critic:
        trained.append(("the critic", critic, [critic.prepare(batch) for batch in ready]))
    for name, model, _ in trained:
        finite = jax.jit(_finite, static_argnums=0, out_shardings=_replicated(raw[0]))
        if more := _named(model, finite(_layered(model), model.state.params)):
            return Origin(f"weights of {name}", more=more)
    columns = [_quantities(own, *both, critic) for both in zip(raw, ready, strict=True)]
    for column in zip(*columns, strict=True):
        wrong = [_wrong(batch, *cell) for batch, cell in zip(raw, column, strict=True)]
        if at := [(k, first) for k, (first, _, _) in enumerate(wrong) if first]:
            k, (sample, token, value) = at[0]
            count, owners = sum(one[1] for one in wrong), sum(one[2] for one in wrong)
            return Origin(column[k][0], value, k, sample, token, f"{count} tokens of {owners} samples")
    for name, model, prepared in trained if _seen(report)[0] else ():
        compute = _gradients(model, raw[0])
        for k, batch in enumerate(prepared):
            if (found := _by_gradient(model, batch, compute)) is not None:
                return Origin(f"{found[0]} of {name}", minibatch=k, sample=found[1], more=found[2])
    return None


def _quantities(own: Learner, raw: Batch, ready: Batch, critic: Learner | None) -> Iterator[tuple[str, Any, Any, int]]:
    """(what, values, where they count, tokens ahead) in the order in which a step computes them."""
    learnt_BT, token_BT = raw.mask_BT, raw.segment_BT > 0
    yield "the sampler's log-probability", raw.logp_BT, learnt_BT, 1
    yield "the reward", jnp.where(jnp.isnan(raw.reward_BT), 0, raw.reward_BT), token_BT, 1  # nan: there is none
    if ready.ref_BT is not None:
        yield "the reference's log-probability", ready.ref_BT, learnt_BT, 1
    for name, x in sorted({**raw.target, **{n: ready.target[n] for n in ("teacher",) if n in ready.target}}.items()):
        if jnp.issubdtype(x.dtype, jnp.floating):
            what = "the teacher's log-probability" if name.startswith("teacher") else f"the sample's array {name}"
            yield what, x, learnt_BT, 1
    if critic:
        yield "the critic's value", learner.scored(critic, raw).value_BT, learnt_BT, 1
    out = jax.block_until_ready(step.make_scores(own.score)(own.state.params, raw, *own.beside))
    if "usable" in (out.extra or {}):
        yield "the teacher's scores", jnp.where(out.extra["usable"], 0, jnp.nan), learnt_BT, 1
    yield "the model's log-probability", out.logp_BT, learnt_BT, 1
    for what, x in (("the model's score", out.value_BT), ("the model's score of a label", out.label_BTY)):
        if x is not None:
            yield what, x, token_BT, 0
    for what, x in (("the advantage", ready.adv_BT), ("the return", ready.return_BT)):
        if x is not None:
            yield what, x, ready.mask_BT, 1
    yield "the weight in the loss, with the importance weight", ready.weight_BT, ready.mask_BT, 1


def _wrong(batch: Batch, what: str, x: Any, where_BT: Any, ahead: int) -> tuple[tuple | None, int, int]:
    """((sample, token, value) of the first that is not finite, their number, that of their samples)."""
    x, where, segment, index = (np.asarray(placement.host(y)) for y in (x, where_BT, batch.segment_BT, batch.index_BT))
    bad = where & ~(np.abs(x) < VALUED).reshape(*where.shape, -1).all(-1)
    if not bad.any():
        return None, 0, 0
    owner = np.take_along_axis(np.asarray(placement.host(batch.sample_BJ)), np.maximum(segment - 1, 0), -1)
    first = min(map(tuple, np.argwhere(bad)), key=lambda at: (owner[at], index[at]))
    values = np.ravel(x[first])
    value = float(values[~(np.abs(values) < VALUED)][0])
    return (int(owner[first]), int(index[first]) + ahead, value), int(bad.sum()), len(np.unique(owner[bad]))


# -- gradients -----------------------------------------------------------------------------------


def _gradients(own: Learner, like: Batch) -> Callable:
    """f(params, prepared batch, m, keep_BJ, *frozen) -> (whether the loss of these samples of microbatch m is finite,
    the same of their gradients, as `_finite`)."""
    layered, whole = _layered(own), step.whole_gradient(own.score, own.objective)

    def parts(params, batch: Batch, m, keep_BJ, *frozen):
        gradient, _, _ = whole(params, _only(batch, m, keep_BJ), *frozen)
        return jnp.isfinite(gradient.loss), _finite(layered, gradient.params)

    return jax.jit(parts, out_shardings=_replicated(like))


def _by_gradient(own: Learner, batch: Batch, compute: Callable) -> tuple[str, int, str] | None:
    """("the loss" or "the gradient", the first sample that makes it not finite, by itself if one does, whose gradients
    these are), of a prepared batch; None if all are finite."""
    sample_MBJ, pair_MBJ = (np.asarray(placement.host(x)) for x in (batch.sample_BJ, batch.pair_BJ))
    for m in np.flatnonzero((sample_MBJ >= 0).any((1, 2))).tolist():
        rows = any(x.shape[:3] != batch.token_BT.shape for x in batch.input.values())  # images are cut by rows
        units: dict[tuple, list[tuple[int, int]]] = {}
        for b, j in map(tuple, np.argwhere(sample_MBJ[m] >= 0)):
            pair = int(pair_MBJ[m, b, j])
            units.setdefault((b,) if rows else (0, pair) if pair >= 0 else (1, b, j), []).append((b, j))

        def computed(chosen: Sequence[Sequence[tuple[int, int]]], m: int = m) -> tuple[bool, str]:
            keep_BJ = np.zeros(sample_MBJ.shape[1:], bool)
            keep_BJ[tuple(np.array([place for unit in chosen for place in unit]).T)] = True
            loss, gradients = compute(own.state.params, batch, m, keep_BJ, *own.beside)
            return bool(loss), _named(own, gradients, backwards=True)

        wrong, left = lambda result: not result[0] or result[1], [*units.values()]
        if not wrong(result := computed(left)):
            continue
        while len(left) > 1:
            halves = left[: len(left) // 2], left[len(left) // 2 :]
            results = [(half, r) for half in halves if wrong(r := computed(half))][:1]
            if not results:
                break  # together alone
            left, result = results[0]
        first = min(int(sample_MBJ[m][place]) for unit in left for place in unit)
        together = f"; with {len(left) - 1} other samples" if len(left) > 1 else ""
        return "the gradient" if result[0] else "the loss", first, (result[1] or "no gradient") + together
    return None


def _only(batch: Batch, m, keep_BJ) -> Batch:
    """Microbatch m [1, B, T] of a prepared batch with these of its samples; the others' places are as padding is."""
    one: Batch = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, m, 1), batch.replace(trie=None))
    keep_BT = to_tokens(jnp.where(keep_BJ, 1, 0)[None], one.segment_BT) > 0

    def kept(x, keep, fill: Any = 0):
        if x is None or x.shape[:3] != keep.shape:
            return x
        return jnp.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 3)), x, jnp.asarray(fill, x.dtype))

    empty = {"pair_BJ": -1, "sample_BJ": -1, "label_BJ": jnp.nan, "reward_BJ": jnp.nan, "weight_BJ": 0, "length_BJ": 0}
    changes: dict[str, Any] = {name: kept(getattr(one, name), keep_BJ[None], fill) for name, fill in empty.items()}
    for field in dataclasses.fields(one):
        if field.name.endswith("_BT"):
            changes[field.name] = kept(getattr(one, field.name), keep_BT)
        elif field.name in ("input", "target"):
            changes[field.name] = {name: kept(x, keep_BT) for name, x in getattr(one, field.name).items()}
    return one.replace(**changes)


# -- weights -------------------------------------------------------------------------------------


def _leaves(own: Learner) -> list[param.Leaf]:
    table = models.table(own.written)
    return param.leaf_list(lora.table(table, own.adapters) if own.adapters else table)


def _layered(own: Learner) -> tuple[bool, ...]:
    """For each array of a learner's weights whether it is of a stack of layers."""
    return tuple(leaf.layers is not None for leaf in _leaves(own))


def _finite(layered: tuple[bool, ...], tree: Any) -> list:
    """For each array whether it is finite, of stacks for each layer."""
    arrays = jax.tree.leaves(tree)
    return [jnp.isfinite(x).all(range(int(apart), x.ndim)) for x, apart in zip(arrays, layered, strict=True)]


def _named(own: Learner, finite: Sequence[Any], backwards: bool = False) -> str:
    """The names of weights that are not finite, or whose gradients are not, of the first layer that is computed; ""
    without any."""
    wrong: list[tuple[int, str]] = []
    for leaf, flags in zip(_leaves(own), finite, strict=True):
        keys: Mapping[tuple, tuple[str, ...]] = leaf.keys(own.settings.prefix)
        names = {index[:1] if leaf.layers else (): own_keys[0] for index, own_keys in reversed([*keys.items()])}
        for place in zip(*np.nonzero(~np.atleast_1d(np.asarray(flags))), strict=True):
            layer = leaf.layers[place[0]] if leaf.layers else -1 if "embed" in leaf.path else 1 << 30
            wrong.append((layer, names[(int(place[0]),) if leaf.layers else ()]))
    if not wrong:
        return ""
    layer = (max if backwards else min)(layer for layer, _ in wrong)
    first = sorted(name for at, name in wrong if at == layer)
    others = len(wrong) - len(first[:NAMES])
    return ", ".join(first[:NAMES]) + (f" and {others} others" if others else "")


def _replicated(batch: Batch) -> Any:
    """The sharding of results that every process reads."""
    sharding = batch.token_BT.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
