"""The compiled program of decoding: fused steps of all slots.

Its shapes depend only on the number of slots, never on the sequences in them: samples are bit-equal whatever their
neighbours, slot, pages or order of arrival.

A step computes Q consecutive tokens of each slot, its last one and Q - 1 drafted ones, and draws a token behind each,
as far as drafts equal what is drawn, argmax(logits + noise(seed, index)). Unlike in rejection sampling
(arXiv:2211.17192) drafts thus decide how many tokens a step gives, not which.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ....models import transformer as models
from ....models.layer import AnyMixer, Attention, mixers
from ....models.layers import blocked
from .. import grammar
from . import attention, drafts, mtp_drafts, penalties, pool, sampling, states
from .prefill import routed
from .staging import with_adapters

# The state of a slot that the host passes to a dispatch: i32 columns (floats by their bits), then STOPS stop ids, -1 =
# none.
INTEGERS = (
    "token", "position", "end", "least", "active", "top", "seed_high", "seed_low", "top_k", "adapter", "grammar",
    "penalised", "shift", "masked",
)  # fmt: skip
REALS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
COLUMNS = {name: i for i, name in enumerate(INTEGERS + REALS)}


@functools.partial(
    jax.jit,
    static_argnames=("config", "of_layer", "steps", "width"),
    donate_argnames=("held", "tables", "known"),
)
def decode(
    weights, held, state_SW, table_KSX, free, tables, mask_SM, known=None, *, config, of_layer, steps: int,
    width: int = 1,
):  # fmt: skip
    """Decodes up to `steps` steps of Q = `width` tokens for every active slot; stops early when all are done or `free`
    slots are idle.

    Columns of the state: `token` is at `position` and not in the cache yet; the sequence ends when its length reaches
    `end`; no stop id is drawn for an index before `least`; the `top` likeliest tokens are reported; `adapter` is the
    index of the slot's adapter, 0 = none; `grammar` = 1 draws one token, allowed by the slot's row of the mask, and
    waits for the next mask; `penalised` = 1 reads and updates the slot's rows of the tables. Both take no drafts.
    `shift` is added to positions for rope, if the model sees images; `masked` = 1 reports which tokens could be
    drawn.

    Args:
      held: the memory of all layers, see `pool`; donated.
      table_KSX: for each kind of layers, the pages of each slot's sequence, with room for `steps` x Q more tokens.
      of_layer: the kind of each layer.
      tables: `penalties.Tables`, donated.
      mask_SM: as in `grammar.masked`.
      known: what drafts are made of, donated: `drafts.Histories`; the drafts themselves, i32[S, Q - 1], if the weights
        have a layer to predict them with, "mtp"; None if Q is 1.

    Returns:
      held; tables; known; {"token": [steps, S, Q], -1 = none, "logp", "top_logp": [steps, S, Q, K], "top_id",
      "kept", "kept_logp", as `sampling.choose` reports them}, with experts "routed" [steps, S, Q, layers, top_k] of
      each input token, if Q > 1 "drafted" [steps, S], the number of drafts; position_S.
    """
    S, Q, V = len(state_SW), width, config.vocab
    predicts = "mtp" in weights
    column = {name: state_SW[:, i] for name, i in COLUMNS.items()}
    real = lambda name: jax.lax.bitcast_convert_type(column[name], jnp.float32)
    seed_S2 = jnp.stack([column["seed_high"], column["seed_low"]], -1).astype(jnp.uint32)
    controls = sampling.Controls(seed_S2, real("temperature"), column["top_k"], real("top_p"), real("min_p"))
    each = lambda x_S: jnp.repeat(x_S, Q, 0)  # rows R of tokens, Q of each slot
    own_controls, controls = controls, jax.tree.map(each, controls)
    stop_SE = state_SW[:, len(COLUMNS) :]
    weights = {**weights, "layers": with_adapters(weights, column["adapter"])}
    grammar_S, penalised_S = (column["active"] * column[name] > 0 for name in ("grammar", "penalised"))
    waiting = jnp.sum(grammar_S, dtype=jnp.int32)  # after the first step; they are not free
    shift_S = column["shift"] if config.vision else None
    penalty = penalties.Penalties(penalised_S, *(real(f"{name}_penalty") for name in penalties.NAMES))

    def going(carry):
        step, *_, active_S, _ = carry
        idle = S - jnp.sum(active_S, dtype=jnp.int32)
        return (step == 0) | ((step < steps) & (idle < S) & (idle - waiting < free))

    def first(change):
        """Changes the logits of the first token of each slot."""

        def changed(x_RV):
            x_SQV = x_RV.reshape(S, Q, V)
            return jnp.concatenate([change(x_SQV[:, 0])[:, None], x_SQV[:, 1:]], 1).reshape(x_RV.shape)

        return changed

    def one(carry):
        step, held, tables, known, token_S, position_S, active_S, out = carry
        draft_SD = jnp.zeros((S, 0), jnp.int32)
        if Q > 1:
            draft_SD = known if predicts else drafts.draft(known, Q - 1)
            draft_SD = jnp.where((active_S & ~grammar_S & ~penalised_S)[:, None], draft_SD, -1)
        token_SQ = jnp.concatenate([token_S[:, None], jnp.maximum(draft_SD, 0)], 1)
        where = position_S, active_S, table_KSX
        made = forward(blocked.of_rows(weights, each(active_S)), held, token_SQ, *where, config, of_layer, shift_S)
        logits_RV, hidden_SQD, held, after, routed_SQLK = made
        index_SQ = position_S[:, None] + 1 + jnp.arange(Q)[None]
        banned_SQE = jnp.where((index_SQ < column["least"][:, None])[..., None], stop_SE[:, None], V)
        masked_S = grammar_S & active_S
        penalise = lambda x_SV: penalties.penalised(x_SV, tables, penalty)
        mask = lambda x_SV: grammar.masked(x_SV, mask_SM, masked_S)
        same = lambda x_SV: x_SV
        change = lambda x_SV: jax.lax.cond(
            jnp.any(masked_S), mask, same, jax.lax.cond(jnp.any(penalised_S), penalise, same, x_SV)
        )
        needed = jnp.any(masked_S | penalised_S)
        rows = index_SQ.reshape(-1), banned_SQE.reshape(S * Q, -1)
        made_R = sampling.choose(
            logits_RV, *rows, controls, each(column["top"]), (needed, first(change)), each(active_S),
            each(column["masked"] > 0),
        )  # fmt: skip
        names = "token", "logp", "top_logp", "top_id", "kept", "kept_logp"
        made = {name: x_R.reshape(S, Q, *x_R.shape[1:]) for name, x_R in zip(names, made_R, strict=True)}
        new_SQ = made["token"]
        ends_SQ = jnp.any(new_SQ[..., None] == stop_SE[:, None], -1) | (index_SQ + 1 >= column["end"][:, None])
        ends_SQ |= grammar_S[:, None]
        follows_SD = (draft_SD == new_SQ[:, :-1]) & ~ends_SQ[:, :-1]
        valid_SQ = jnp.cumprod(jnp.concatenate([active_S[:, None], follows_SD], 1), 1, dtype=jnp.int32) > 0
        count_S = jnp.sum(valid_SQ, 1, dtype=jnp.int32)
        made |= {"token": jnp.where(valid_SQ, new_SQ, -1), "routed": routed_SQLK, "drafted": jnp.sum(draft_SD >= 0, 1)}
        out = {name: out[name].at[step].set(made[name]) for name in out}
        held = pool.pinned(states.accepted(held, after, count_S))
        tables = penalties.counted(tables, new_SQ[:, 0], active_S & penalised_S)
        if predicts:
            step_SQ = hidden_SQD, new_SQ, count_S, position_S, active_S
            own = table_KSX[of_layer[-1]], own_controls, config, shift_S
            held, known = mtp_drafts.draft(weights, held, *step_SQ, *own)
        elif Q > 1:
            known = drafts.grown(known, new_SQ, count_S)
        last_S1 = jnp.maximum(count_S - 1, 0)[:, None]
        of_last = lambda x_SQ: jnp.take_along_axis(x_SQ, last_S1, 1)[:, 0]
        token_S = jnp.where(active_S, of_last(new_SQ), token_S)
        position_S = position_S + count_S
        return step + 1, held, tables, known, token_S, position_S, active_S & ~of_last(ends_SQ), out

    K = min(sampling.TOP, V)
    out = {
        "token": jnp.full((steps, S, Q), -1, jnp.int32),
        "logp": jnp.zeros((steps, S, Q), jnp.float32),
        "top_logp": jnp.zeros((steps, S, Q, K), jnp.float32),
        "top_id": jnp.zeros((steps, S, Q, K), jnp.int32),
        "kept": jnp.zeros((steps, S, Q, min(sampling.KEPT, V)), jnp.int32),
        "kept_logp": jnp.zeros((steps, S, Q), jnp.float32),
    }
    if any("router" in w for w in weights["layers"]):
        out["routed"] = jnp.zeros((steps, S, Q, len(weights["layers"]), config.top_k), jnp.int32)
    if Q > 1:
        out["drafted"] = jnp.zeros((steps, S), jnp.int32)
    start = jnp.int32(0), held, tables, known, column["token"], column["position"], column["active"] > 0, out
    _, held, tables, known, _, position_S, _, out = jax.lax.while_loop(going, one, start)
    return held, tables, known, *pool.replicated((out, position_S))


def forward(weights, held, token_SQ, position_S, active_S, table_KSX, config, of_layer, shift_S=None):
    """One decoding step: (logits f32[S * Q, V] of the token after each of `token`, which are at `position` and behind
    it, for rope further by `shift`; their hidden states behind the last norm; memory with the keys and values of these
    tokens; {layer: states after each of them, as `states.step`}; their experts [S, Q, layers, top_k] as `routed`)."""
    module = models.family(config)
    position_SQ = position_S[:, None] + jnp.arange(token_SQ.shape[1])[None]
    turned_SQ = position_SQ if shift_S is None else position_SQ + shift_S[:, None]
    # As long as the sequence is with the first token: no draft is kept beyond a length at which rope changes.
    length_SQ = jnp.repeat(position_S[:, None] + 1, token_SQ.shape[1], 1)
    mixer = mixers(config.records, turned_SQ, length_BT=length_SQ, needed=jnp.any(active_S))
    x = module.embed(weights, token_SQ, config, weights["norm"].dtype)
    held = list(held)

    reports, after = [], {}
    own = models.per_layer(module, weights, token_SQ, x, config)
    for i, (w, layer) in enumerate(zip(weights["layers"], config.records, strict=True)):
        mix: AnyMixer
        states_after: dict[str, Any] = {}
        w = w | {name: each[i] for name, each in own.items()}
        if isinstance(layer, Attention):
            table_SX = table_KSX[of_layer[i]]
            mix = mixer(layer, functools.partial(attention.append, held, i, layer, table_SX, position_S, active_S))
        else:
            mix = states.step(layer, held[i][0] if layer.state else {}, states_after)
        x, report = module.block(x, w, mix, config)
        reports.append(report)
        if states_after:
            after[i] = states_after
    hidden_SQD = models.last_norm(x, weights, config)
    logits_RV = mtp_drafts.logits(weights, hidden_SQD, config)
    return logits_RV, hidden_SQD, held, after, routed(reports)
