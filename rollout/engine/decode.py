"""The compiled program of decoding: fused steps of all slots.

Its shapes depend only on the number of slots, never on the sequences in them: samples are bit-equal whatever their
neighbours, slot, pages or order of arrival.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...models import transformer as models
from ...models.layer import AnyMixer, Attention, mixers
from . import attention, grammar, penalties, pool, sampling, states
from .prefill import routed
from .staging import with_adapters

# The state of a slot that the host passes to a dispatch: i32 columns (floats by their bits), then STOPS stop ids, -1 =
# none.
INTEGERS = (
    "token", "position", "end", "least", "active", "top", "seed_high", "seed_low", "top_k", "adapter", "grammar",
    "penalised",
)  # fmt: skip
REALS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
COLUMNS = {name: i for i, name in enumerate(INTEGERS + REALS)}


@functools.partial(jax.jit, static_argnames=("config", "of_layer", "steps"), donate_argnames=("held", "tables"))
def decode(weights, held, state_SW, table_KSX, free, tables, mask_SM, *, config, of_layer, steps: int):
    """Decodes up to `steps` tokens for every active slot; stops early when all are done or `free` slots are idle.

    Columns of the state: `token` is at `position` and not in the cache yet; the sequence ends when its length reaches
    `end`; no stop id is drawn for an index before `least`; the `top` likeliest tokens are reported; `adapter` is the
    index of the slot's adapter, 0 = none; `grammar` = 1 draws one token, allowed by the slot's row of the mask, and
    waits for the next mask; `penalised` = 1 reads and updates the slot's rows of the tables.

    Args:
      held: the memory of all layers, see `pool`; donated.
      table_KSX: for each kind of layers, the pages of each slot's sequence, with room for `steps` more tokens.
      of_layer: the kind of each layer.
      tables: `penalties.Tables`, donated.
      mask_SM: as in `grammar.masked`.

    Returns:
      held; tables; {"token": [steps, S], "logp", "top_logp": [steps, S, K], "top_id"}, and with experts "routed"
      [steps, S, layers, top_k] of each step's input token, valid for the first `position - old position` steps of each
      slot; position_S.
    """
    S, V = len(state_SW), config.vocab
    column = {name: state_SW[:, i] for name, i in COLUMNS.items()}
    real = lambda name: jax.lax.bitcast_convert_type(column[name], jnp.float32)
    seed_S2 = jnp.stack([column["seed_high"], column["seed_low"]], -1).astype(jnp.uint32)
    controls = sampling.Controls(seed_S2, real("temperature"), column["top_k"], real("top_p"), real("min_p"))
    stop_SE = state_SW[:, len(COLUMNS) :]
    weights = {**weights, "layers": with_adapters(weights, column["adapter"])}
    grammar_S, penalised_S = (column["active"] * column[name] > 0 for name in ("grammar", "penalised"))
    waiting = jnp.sum(grammar_S, dtype=jnp.int32)  # after the first step; they are not free
    penalty = penalties.Penalties(penalised_S, *(real(f"{name}_penalty") for name in penalties.NAMES))

    def going(carry):
        step, *_, active_S, _ = carry
        idle = S - jnp.sum(active_S, dtype=jnp.int32)
        return (step == 0) | ((step < steps) & (idle < S) & (idle - waiting < free))

    def one(carry):
        step, held, tables, token_S, position_S, active_S, out = carry
        where = position_S, active_S, table_KSX
        logits_SV, held, routed_SLK = forward(weights, held, token_S, *where, config, of_layer)
        index_S = position_S + 1
        banned_SE = jnp.where((index_S < column["least"])[:, None], stop_SE, V)
        masked_S = grammar_S & active_S
        penalise = lambda x_SV: penalties.penalised(x_SV, tables, penalty)
        mask = lambda x_SV: grammar.masked(x_SV, mask_SM, masked_S)
        same = lambda x_SV: x_SV
        change = lambda x_SV: jax.lax.cond(
            jnp.any(masked_S), mask, same, jax.lax.cond(jnp.any(penalised_S), penalise, same, x_SV)
        )
        needed = jnp.any(masked_S | penalised_S)
        made = sampling.choose(logits_SV, index_S, banned_SE, controls, column["top"], (needed, change))
        made = dict(zip(("token", "logp", "top_logp", "top_id"), made, strict=True)) | {"routed": routed_SLK}
        out = {name: out[name].at[step].set(made[name]) for name in out}
        tables = penalties.counted(tables, made["token"], active_S & penalised_S)
        done_S = jnp.any(made["token"][:, None] == stop_SE, -1) | (index_S + 1 >= column["end"]) | grammar_S
        token_S = jnp.where(active_S, made["token"], token_S)
        position_S = position_S + active_S
        return step + 1, held, tables, token_S, position_S, active_S & ~done_S, out

    K = min(sampling.TOP, V)
    out = {
        "token": jnp.zeros((steps, S), jnp.int32),
        "logp": jnp.zeros((steps, S), jnp.float32),
        "top_logp": jnp.zeros((steps, S, K), jnp.float32),
        "top_id": jnp.zeros((steps, S, K), jnp.int32),
    }
    if any("router" in w for w in weights["layers"]):
        out["routed"] = jnp.zeros((steps, S, len(weights["layers"]), config.top_k), jnp.int32)
    start = jnp.int32(0), held, tables, column["token"], column["position"], column["active"] > 0, out
    _, held, tables, _, position_S, _, out = jax.lax.while_loop(going, one, start)
    return held, tables, out, position_S


def forward(weights, held, token_S, position_S, active_S, table_KSX, config, of_layer):
    """One decoding step: (logits f32[S, V] of the token after each slot's `token`, memory that includes that token, its
    experts [S, layers, top_k] as `routed`)."""
    module = models.family(config)
    mixer = mixers(config.records, position_S[:, None])
    x = module.embed(weights, token_S[:, None], config, weights["embed"].dtype)
    held = list(held)

    def attend(i, layer, q_S1NH, k_S1KH=None, v_S1KV=None, sinks_N=None, latent=None):
        table_SX = table_KSX[of_layer[i]]
        if latent:
            q_S1NH, (k_S1KH, v_S1KV) = latent.queries(q_S1NH), latent.cached
        if layer.source is None:
            C = held[i][1].shape[2]
            page_S = jnp.take_along_axis(table_SX, (position_S // C)[:, None], 1)[:, 0]
            page_S = jnp.where(active_S, page_S, 0)
            held[i] = pool.write_tokens(held[i], k_S1KH[:, 0], v_S1KV[:, 0], page_S, position_S % C)
        pages = held[i if layer.source is None else layer.source]
        out_S1NV = attention.attend(q_S1NH, pages, table_SX, position_S, active_S, sinks_N, pattern=layer.pattern)
        return latent.outputs(out_S1NV) if latent else out_S1NV

    reports = []
    own = models.per_layer(module, weights, token_S[:, None], x, config)
    for i, (w, layer) in enumerate(zip(weights["layers"], config.records, strict=True)):
        mix: AnyMixer
        after: dict[str, Any] = {}
        w = w | {name: each[i] for name, each in own.items()}
        if isinstance(layer, Attention):
            mix = mixer(layer, functools.partial(attend, i, layer))
        else:
            mix = states.step(layer, held[i][0] if layer.state else {}, active_S, after)
        x, report = module.block(x, w, mix, config)
        reports.append(report)
        if after:
            held[i] = after, held[i][1]
    x = models.last_norm(x, weights, config)
    product_SV = jnp.dot(x[:, 0], weights["head"].weight, preferred_element_type=jnp.float32)
    experts = routed(reports)
    return models.logits(product_SV, config), pool.pinned(held), None if experts is None else experts[:, 0]
