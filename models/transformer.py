"""From tokens to hidden states, logits and scores, for every family."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..core.batch import Batch
from ..core.shapes import shaped
from ..parallel import context, rules, vocab
from . import attention, layers, rope


@dataclass(frozen=True)
class Run:
    """How to compute, not what: hashable, and none of it changes the mathematics.

    Attributes:
      dtype: of activations and matmuls; None = that of the weights. Norms, softmax and the head stay in fp32.
      remat: what the backward pass computes again: "full" each layer from its input, "dots" all but the matmuls with
        weights and attention, "none" nothing. In this order they take more memory; "dots" is the fastest on a CPU.
      query_chunk: queries a chunk of attention; None = by the length of a row.
      cp: how attention works over rows that are split over cp: `parallel.context` says what each way costs.
      head_chunk: tokens a chunk of logits; None = by the size of the vocabulary.
    """

    dtype: str | None = None
    remat: Literal["full", "dots", "none"] = "full"
    query_chunk: int | None = None
    cp: context.Method = "gather"
    head_chunk: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """What `score` says of each target: log-probability, entropy and log-sum-exp (nats), value, and extras.

    Attributes:
      value_BT: the scalar head's output, or None without one.
      extra: what `per_chunk` returned, [B, T, ...].
      aux: what layers report beside their output, by name; no family reports anything so far.
    """

    logp_BT: Any
    entropy_BT: Any
    lse_BT: Any
    value_BT: Any = None
    extra: Any = None
    aux: dict[str, Any] = field(default_factory=dict)


DOTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(attention.OUTPUT),
)
REMAT: dict[str, Callable] = {
    "full": jax.checkpoint,
    "dots": partial(jax.checkpoint, policy=DOTS),
    "none": lambda layer: layer,
}


def family(config):
    """The module of a config's family."""
    return importlib.import_module(f".{config.family}", __package__)


@shaped
def backbone(params, token_BT, position_BT, segment_BT, index_BT, *, config, run: Run = Run()):
    """Hidden states after the last norm, [B, T, D]: embedding, a scan over each stack of layers, final norm."""
    module = family(config)
    table = module.table(config)
    x_BTD = module.embed(params, token_BT, run.dtype or params["embed"].dtype)
    cos_BTP, sin_BTP = rope.tables(position_BT, config.rope, config.head_dim)

    def attend(q_BTNH, k_BTKH, v_BTKH):
        causal = partial(attention.causal, chunk=run.query_chunk)
        ring = partial(attention.ring, chunk=run.query_chunk, axis="cp")
        return context.attention(causal, ring, q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT, method=run.cp)

    for weights, stack in zip(params["stacks"], table.stacks, strict=True):

        def layer(x_BTD, w, stack=stack):
            w = rules.gather(w, stack.params)
            x_BTD = module.block(x_BTD, w, cos_BTP, sin_BTP, attend, config)
            return rules.constrain(x_BTD, "batch seq hidden"), None

        x_BTD, _ = jax.lax.scan(REMAT[run.remat](layer), x_BTD, weights)
    return layers.rms_norm(x_BTD, params["norm"], config.norm_eps)


def head(params):
    """The output matrix [V, D]: the embedding's where they are tied."""
    return params.get("head", params["embed"])


def forward(params, token_BT, *, config, position_BT=None, segment_BT=None, run: Run = Run()):
    """Next-token logits, f32[B, T, V].

    Args:
      position_BT: rope positions; None = order inside the segment.
      segment_BT: equal numbers side by side share a sequence; 0 = padding; None = each row is one sequence.
    """
    segment_BT = jnp.ones(token_BT.shape, jnp.int32) if segment_BT is None else segment_BT
    index_BT = layers.segment_index(segment_BT)
    position_BT = index_BT if position_BT is None else position_BT
    into, back = context.arrange(run.cp, token_BT.shape[1])
    rows = map(into, (token_BT, position_BT, segment_BT, index_BT))
    hidden_BTD = back(backbone(params, *rows, config=config, run=run))
    wide = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
    w = head(params).astype(hidden_BTD.dtype)
    return jnp.einsum("BTD,VD->BTV", hidden_BTD, w, preferred_element_type=wide)


def score(params, batch: Batch, *, config, run: Run = Run(), temperature=1.0, per_chunk=None):
    """Log-probability, entropy and log-sum-exp of `batch.target_BT` under softmax(logits / temperature), as Scores.

    Works in chunks of tokens: no [T, V] array is held, forward or backward.

    Args:
      temperature: positive scalar, or one a token, [B, T].
      per_chunk: optional `f(logits_CV, target_C) -> pytree of [C, ...]`, returned in `extra` as [B, T, ...].
    """
    into, back = context.arrange(run.cp, batch.token_BT.shape[1])
    rows = map(into, (batch.token_BT, batch.position_BT, batch.segment_BT, batch.index_BT))
    hidden_BTD = backbone(params, *rows, config=config, run=run)
    temperature_BT = jnp.broadcast_to(jnp.asarray(temperature), batch.target_BT.shape)
    made = vocab.score(
        hidden_BTD, head(params), into(batch.target_BT),
        temperature_BT=into(temperature_BT), chunk=run.head_chunk, per_chunk=per_chunk,
    )  # fmt: skip
    logp, entropy, lse, extra = jax.tree.map(back, made)
    value = None
    if "score" in params:
        value = back(layers.linear(hidden_BTD, params["score"])[..., 0].astype(jnp.float32))
    return Scores(logp, entropy, lse, value, extra)
