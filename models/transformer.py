"""From tokens to hidden states, logits and scores, for every family."""

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ..core.batch import Batch
from ..core.segments import segment_index
from ..core.shapes import shaped
from ..parallel import context, experts, rules, vocab
from . import remat
from .attention import backends
from .families import FAMILIES
from .layers import grouped, moe, rope
from .layers.linear import linear
from .layers.norm import rms_norm
from .remat import Keep


@dataclass(frozen=True)
class Run:
    """How to compute, not what: hashable, and none of it changes the mathematics.

    Attributes:
      dtype: of activations and matmuls; None = that of the weights. Norms, softmax and the head stay in fp32.
      remat: what the backward pass computes again: "full" each layer from its input, "dots" all but attention and the
        matmuls with weights, "none" nothing. In this order they take more memory; "dots" is the fastest on a CPU.
        "offload" keeps what "dots" keeps in the host's memory; pairs of a name and "save" or "offload" say it singly:
        `models.remat` has the names.
      attention: what computes attention, as `models.backends` lists; "auto" = a kernel of the platform that honours all
        that the model asks for, else "chunked".
      query_chunk: queries a chunk of chunked attention, which "auto" then takes; None = 64 to 128 on a CPU, else 512.
      cp: how attention works over rows that are split over cp: `parallel.context` says what each way costs.
      head_chunk: tokens a chunk of logits; None = by the size of the vocabulary.
      dispatch: how tokens reach experts on other devices: `parallel.experts` says what each way costs.
      expert_kernel: how the matmuls of experts are computed: `models.grouped`; "auto" = by the platform.
    """

    dtype: str | None = None
    remat: Keep = "full"
    attention: backends.Name = "auto"
    query_chunk: int | None = None
    cp: context.Method = "gather"
    head_chunk: int | None = None
    dispatch: experts.Method = "gather"
    expert_kernel: grouped.Kernel = "auto"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """What `score` says of each target: log-probability, entropy and log-sum-exp (nats), value, and extras.

    Attributes:
      value_BT: the scalar head's output, or None without one.
      extra: what `per_chunk` returned, [B, T, ...].
      aux: sums over the batch's tokens that layers report, by name, stacked over those layers that do: with experts
        those of `moe.statistics`. They add up over microbatches.
    """

    logp_BT: Any
    entropy_BT: Any
    lse_BT: Any
    value_BT: Any = None
    extra: Any = None
    aux: dict[str, Any] = field(default_factory=dict)


def family(config):
    """The module of a config's family."""
    return FAMILIES[config.family]


@shaped
def backbone(
    params, token_BT, position_BT, segment_BT, index_BT, chosen_BTLK=None, *, config, run: Run = Run(), packing=True
):
    """Embedding, a scan over each stack of layers, final norm.

    Args:
      chosen_BTLK: experts that the tokens go to, for `moe.Routing`, in each layer that has experts, or in every layer,
        of which the others are passed over; None = they choose.
      packing: False = each row is one sequence from end to end.

    Returns:
      hidden_BTD; the `aux` of `Scores`.

    Raises:
      ValueError: choices for other layers, or other numbers of experts, than the model has.
    """
    module = family(config)
    table = module.table(config)
    sparse = ["router" in stack.params for stack in table.stacks]
    chosen = _by_stack(chosen_BTLK, sparse, table, config)
    reports = []
    x_BTD = module.embed(params, token_BT, run.dtype or params["embed"].dtype)
    cos_BTP, sin_BTP = rope.tables(position_BT, config.rope, config.head_dim)

    def attend(window, q_BTNH, k_BTKH, v_BTKH):
        how = dict(backend=run.attention, window=window, chunk=run.query_chunk)
        causal, ring = partial(backends.causal, packing=packing, **how), partial(backends.ring, axis="cp", **how)
        rows = q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT
        return context.attention(causal, ring, *rows, method=run.cp, window=window)

    for weights, stack, chosen_LBTK in zip(params["stacks"], table.stacks, chosen, strict=True):
        within = partial(attend, config.windows[stack.layers[0]])

        def layer(x_BTD, each, stack=stack, within=within):
            w, chosen_BTK = each
            x_BTD = checkpoint_name(x_BTD, "layer_input")
            w = rules.gather(w, stack.params)
            routing = moe.Routing(segment_BT > 0, chosen_BTK, run.dispatch, run.expert_kernel)
            x_BTD, report = module.block(x_BTD, w, cos_BTP, sin_BTP, within, config, routing)
            sums = {name: x for name, x in report.items() if name != "experts"}
            return rules.constrain(x_BTD, "batch seq hidden"), sums

        x_BTD, sums = jax.lax.scan(remat.checkpoint(run.remat)(layer), x_BTD, (weights, chosen_LBTK))
        reports += [sums] if sums else []
    aux = jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports) if reports else {}
    return rms_norm(x_BTD, params["norm"], config.norm_eps), aux


def _by_stack(chosen_BTLK, sparse, table, config):
    """Each stack's part of the choices, [L, B, T, K], None where it has no experts."""
    if chosen_BTLK is None:
        return [None] * len(sparse)
    counts = [len(stack.layers) * has for stack, has in zip(table.stacks, sparse, strict=True)]
    wanted = sum(counts), getattr(config, "top_k", 0)
    if chosen_BTLK.shape[2] == config.layers != wanted[0]:  # recorded of all layers, as servers do
        own = [i for stack, has in zip(table.stacks, sparse, strict=True) if has for i in stack.layers]
        chosen_BTLK = chosen_BTLK[:, :, np.array(own, int)]
    if chosen_BTLK.shape[2:] != wanted:
        raise ValueError(
            f"routed_experts: choices must be [..., {wanted[0]} layers with experts, {wanted[1]} experts a token], "
            f"got {list(chosen_BTLK.shape[2:])}; were they recorded with another model?"
        )
    starts = itertools.accumulate(counts, initial=0)
    part = lambda start, count: jnp.moveaxis(chosen_BTLK[:, :, start : start + count], 2, 0) if count else None
    return [part(start, count) for start, count in zip(starts, counts, strict=False)]


def head(params):
    """The output matrix [V, D]: the embedding's where they are tied."""
    return params.get("head", params["embed"])


def forward(params, token_BT, *, config, position_BT=None, segment_BT=None, run: Run = Run()):
    """Next-token logits, f32[B, T, V].

    Args:
      position_BT: rope positions; None = order inside the segment.
      segment_BT: equal numbers side by side share a sequence; 0 = padding; None = each row is one sequence.
    """
    packing = segment_BT is not None
    segment_BT = segment_BT if packing else jnp.ones(token_BT.shape, jnp.int32)
    index_BT = segment_index(segment_BT)
    position_BT = index_BT if position_BT is None else position_BT
    into, back = context.arrange(run.cp, token_BT.shape[1])
    rows = map(into, (token_BT, position_BT, segment_BT, index_BT))
    hidden_BTD = back(backbone(params, *rows, config=config, run=run, packing=packing)[0])
    wide = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    w = head(params).astype(hidden_BTD.dtype)
    return jnp.einsum("BTD,VD->BTV", hidden_BTD, w, preferred_element_type=wide)


def score(params, batch: Batch, *, config, run: Run = Run(), temperature=1.0, per_chunk=None, beside=None, others=()):
    """Log-probability, entropy and log-sum-exp of `batch.target_BT` under softmax(logits / temperature), as Scores.

    Works in chunks of tokens: no [T, V] array is held, forward or backward. Where the batch brings
    `input["routed_experts"]` [B, T, L, K] or [B, T, L x K], tokens go to these experts (replay, see `moe.Routing`).

    Args:
      temperature: positive scalar, or one a token, [B, T].
      per_chunk: optional `f(logits_CV, target_C, given, *others_CV) -> pytree of [C, ...]`, returned in `extra` as
        [B, T, ...]; `given` is the chunk's part of `beside`.
      beside: pytree of [B, T, ...].
      others: pairs (params, config) of models over the same vocabulary, which read the batch too; `per_chunk` gets
        their logits, at temperature 1 and without gradients. Of a larger vocabulary they get the first V.

    Raises:
      ValueError: one of the others has a smaller vocabulary.
    """
    hidden_BTD, aux, into, back = _hidden(params, batch, config, run)
    frozen = [_frozen(weights, its, batch, config.vocab, run) for weights, its in others]
    temperature_BT = jnp.broadcast_to(jnp.asarray(temperature), batch.target_BT.shape)
    made = vocab.score(
        hidden_BTD, head(params), into(batch.target_BT),
        temperature_BT=into(temperature_BT), chunk=run.head_chunk, per_chunk=per_chunk,
        beside=jax.tree.map(into, beside), others=tuple(frozen),
    )  # fmt: skip
    logp, entropy, lse, extra = jax.tree.map(back, made)
    value = _value(params, hidden_BTD, back) if "score" in params else None
    return Scores(logp, entropy, lse, value, extra, aux)


def value(params, batch: Batch, *, config, run: Run = Run()):
    """The scalar head's output at each token, as Scores without log-probabilities: what a critic is asked for."""
    hidden_BTD, aux, _, back = _hidden(params, batch, config, run)
    return Scores(None, None, None, _value(params, hidden_BTD, back), aux=aux)


def _value(params, hidden_BTD, back):
    wide = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    return back(linear(hidden_BTD.astype(wide), params["score"])[..., 0])


def _hidden(params, batch: Batch, config, run: Run):
    """Last hidden states in the order of `run.cp`, the `aux` of `Scores`, and the ways into that order and back."""
    into, back = context.arrange(run.cp, batch.token_BT.shape[1])
    rows = map(into, (batch.token_BT, batch.position_BT, batch.segment_BT, batch.index_BT))
    chosen_BTLK = jax.tree.map(into, _chosen(batch, config))
    return *backbone(params, *rows, chosen_BTLK, config=config, run=run), into, back


def _frozen(params, config, batch: Batch, vocabulary: int, run: Run):
    """(hidden_BTE, head_VE) of a model that does not learn, its head cut to the vocabulary."""
    if config.vocab < vocabulary:
        raise ValueError(f"score: other models need a vocabulary of at least {vocabulary} entries, got {config.vocab}")
    params = jax.lax.stop_gradient(params)
    hidden_BTE = _hidden(params, batch.replace(input={}), config, run)[0]  # choices of experts are not its own
    return jax.lax.stop_gradient(hidden_BTE), head(params)[:vocabulary]


def _chosen(batch: Batch, config):
    """The batch's recorded choices of experts or None; padding chooses for itself."""
    chosen = batch.input.get("routed_experts")
    if chosen is None:
        return None
    if chosen.ndim == 3:  # as clients get them
        K = getattr(config, "top_k", 1)
        chosen = chosen.reshape(*chosen.shape[:2], -1, K if chosen.shape[2] % K == 0 else chosen.shape[2])
    return jnp.where(batch.segment_BT[..., None, None] > 0, chosen, -1)
