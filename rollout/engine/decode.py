"""The compiled programs of the engine: prefill into slots, fused decode steps, prompt scores.

A slot is a row of every layer's cache, see `caches`. The shapes computed for a sequence depend only on its own length
bucket or on the number of slots, never on the other sequences in the batch: samples are bit-equal whatever their
neighbours, slot or order of arrival.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...adapters import hf
from ...core import logprobs, param
from ...models import transformer as models
from ...models.attention import backends, sinks
from ...models.attention.pattern import PLAIN, Pattern
from ...models.attention.segments import segments
from ...models.layer import AnyMixer, Attention, mixers
from ...models.layers.linear import MultiLoRAWeight, Transposed
from . import caches as caching
from . import grammar, penalties, sampling, states

KEPT = "_bias", "_taps"  # ends of names of weights with two axes that multiply nothing from the left
PREFILL_TOKENS, ON_CPUS = 4096, 256  # tokens per prefill: one long prompt or several short ones


def bucket(length: int, context: int) -> int:
    """The padded length of a prefill of `length` tokens: a power of two of at least 16, at most the cache's length."""
    return min(max(16, _power(length)), segments(context)[-1].stop)


def rows(bucket: int, slots: int) -> int:
    """The number of prompts per prefill of this bucket, in an engine with this many slots."""
    tokens = ON_CPUS if jax.default_backend() == "cpu" else PREFILL_TOKENS
    return max(1, min(tokens // bucket, _power(slots)))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


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


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("caches",))
def prefill(weights, caches, token_PT, length_P, adapter_P, row_S, slot_S, count, *, config):
    """Computes P sequences, each with its adapter, and writes row row_S[i] to slot slot_S[i], for i < count.

    Sequences of length_P tokens are padded on the right; the padding is never read.

    Returns:
      caches; hidden_PTD after the last norm; the `routed` experts.
    """
    module = models.family(config)
    P, T = token_PT.shape
    index_PT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (P, T))
    segment_PT = jnp.ones((P, T), jnp.int32)
    mixer = mixers(config.records, index_PT)
    made: list[Any] = []
    x = module.embed(weights, token_PT, config, weights["embed"].dtype)

    def attend(layer, q_PTNH, k_PTKH=None, v_PTKV=None, sinks_N=None, latent=None):
        if layer.source is not None:
            k_PTKH, v_PTKV = reports[layer.source]["keys_values"]
        kept_k, kept_v = latent.cached if latent else (k_PTKH, v_PTKV)
        k_PKHT, v_PKTV = kept_k.transpose(0, 2, 3, 1), kept_v.transpose(0, 2, 1, 3)
        places = [place for place in caching.spans(caches[len(made)]) if place.start < T]
        made.append([(k_PKHT[..., place], v_PKTV[:, :, place]) for place in places])
        rows = q_PTNH, k_PTKH, v_PTKV, segment_PT, index_PT, sinks_N
        return backends.causal(*rows, backend="auto", packing=False, pattern=layer.pattern)

    reports: list[dict] = []
    own = models.per_layer(module, weights, token_PT, x, config)
    for i, (w, layer) in enumerate(zip(with_adapters(weights, adapter_P), config.records, strict=True)):
        mix: AnyMixer
        w = w | {name: each[i] for name, each in own.items()}
        if isinstance(layer, Attention):
            mix = mixer(layer, functools.partial(attend, layer))
        else:
            made.append({})
            mix = states.after_prompts(layer, length_P, segment_PT, made[-1])
        x, report = module.block(x, w, mix, config)
        reports.append(report)
    caches = caching.insert(caches, made, row_S, slot_S, count)
    return caches, models.last_norm(x, weights, config), routed(reports)


def routed(reports):
    """Experts of each token, i32[P, T, layers, top_k], -1 in layers without experts; None if no layer has any."""
    found = [report.get("experts") for report in reports]
    like = next((x for x in found if x is not None), None)
    if like is None:
        return None
    return jnp.stack([jnp.full_like(like, -1) if x is None else x for x in found], 2)


@functools.partial(jax.jit, static_argnames=("config", "top"))
def prompt_scores(weights, hidden_PTD, row, target_T, *, config, top: int):
    """Log-probability (nats, temperature 1) of each target of one row, and the `top` likeliest (logp, id) or None."""
    likeliest = (lambda logits_CV, *_: jax.lax.top_k(logits_CV, min(top, logits_CV.shape[1]))) if top else None
    head_VD = weights["head"].weight.T
    logits = (functools.partial(models.logits, config=config),)
    made = logprobs.from_hidden(hidden_PTD[row], head_VD, target_T, per_chunk=likeliest, logits=logits)
    logp_T, _, lse_T, best = made
    return logp_T, None if best is None else (best[0] - lse_T[:, None], best[1])


# The state of a slot that the host passes to a dispatch: i32 columns (floats by their bits), then STOPS stop ids, -1 =
# none.
INTEGERS = (
    "token", "position", "end", "least", "active", "top", "seed_high", "seed_low", "top_k", "adapter", "grammar",
    "penalised",
)  # fmt: skip
REALS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
COLUMNS = {name: i for i, name in enumerate(INTEGERS + REALS)}


@functools.partial(jax.jit, static_argnames=("config", "steps"), donate_argnames=("caches", "tables"))
def decode(weights, caches, state_SW, free, tables, mask_SM, *, config, steps: int):
    """Decodes up to `steps` tokens for every active slot; stops early when all are done or `free` slots are idle.

    Columns of the state: `token` is at `position` and not in the cache yet; the sequence ends when its length reaches
    `end`; no stop id is drawn for an index before `least`; the `top` likeliest tokens are reported; `adapter` is the
    index of the slot's adapter, 0 = none; `grammar` = 1 draws one token, allowed by the slot's row of the mask, and
    waits for the next mask; `penalised` = 1 reads and updates the slot's rows of the tables.

    Args:
      tables: `penalties.Tables`, donated.
      mask_SM: as in `grammar.masked`.

    Returns:
      caches; tables; {"token": [steps, S], "logp", "top_logp": [steps, S, K], "top_id"}, and with experts "routed"
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
        step, caches, tables, token_S, position_S, active_S, out = carry
        logits_SV, caches, routed_SLK = forward(weights, caches, token_S, position_S, active_S, config)
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
        return step + 1, caches, tables, token_S, position_S, active_S & ~done_S, out

    K = min(sampling.TOP, V)
    out = {
        "token": jnp.zeros((steps, S), jnp.int32),
        "logp": jnp.zeros((steps, S), jnp.float32),
        "top_logp": jnp.zeros((steps, S, K), jnp.float32),
        "top_id": jnp.zeros((steps, S, K), jnp.int32),
    }
    if any("router" in w for w in weights["layers"]):
        out["routed"] = jnp.zeros((steps, S, len(weights["layers"]), config.top_k), jnp.int32)
    start = jnp.int32(0), caches, tables, column["token"], column["position"], column["active"] > 0, out
    _, caches, tables, _, position_S, _, out = jax.lax.while_loop(going, one, start)
    return caches, tables, out, position_S


def forward(weights, caches, token_S, position_S, active_S, config):
    """One decoding step: (logits f32[S, V] of the token after each slot's `token`, caches that include that token, its
    experts [S, layers, top_k] as `routed`)."""
    module = models.family(config)
    mixer = mixers(config.records, position_S[:, None])
    longest = jnp.max(jnp.where(active_S, position_S, 0))
    shortest = jnp.min(jnp.where(active_S, position_S, longest))
    x = module.embed(weights, token_S[:, None], config, weights["embed"].dtype)
    filled: list[Any] = []
    reports = []
    mix: AnyMixer

    def attend(cache, layer, q_S1NH, k_S1KH=None, v_S1KV=None, sinks_N=None, latent=None):
        if latent:
            q_S1NH, (k_S1KH, v_S1KV) = latent.queries(q_S1NH), latent.cached
        if layer.source is None:
            k_SKH, v_SKV = k_S1KH[:, 0], v_S1KV[:, 0]
            cache = [
                caching.write(keys_SKHL, values_SKLV, k_SKH, v_SKV, position_S - place.start)
                for (keys_SKHL, values_SKLV), place in zip(cache, caching.spans(cache), strict=True)
            ]
        filled.append(cache)
        pattern, cache = layer.pattern, cache if layer.source is None else filled[layer.source]
        first = jnp.maximum(pattern.first(shortest), 0)
        out_S1NV = attend_segments(q_S1NH, cache, position_S, first, longest, sinks_N, pattern=pattern)
        return latent.outputs(out_S1NV) if latent else out_S1NV

    own = models.per_layer(module, weights, token_S[:, None], x, config)
    for i, (w, cache, layer) in enumerate(zip(weights["layers"], caches, config.records, strict=True)):
        w = w | {name: each[i] for name, each in own.items()}
        if isinstance(layer, Attention):
            mix = mixer(layer, functools.partial(attend, cache, layer))
        else:
            filled.append({})
            mix = states.step(layer, cache, active_S, filled[-1])
        x, report = module.block(x, w, mix, config)
        reports.append(report)
    x = models.last_norm(x, weights, config)
    product_SV = jnp.dot(x[:, 0], weights["head"].weight, preferred_element_type=jnp.float32)
    experts = routed(reports)
    return models.logits(product_SV, config), filled, None if experts is None else experts[:, 0]


def attend_segments(q_S1NH, layer, position_S, first, last, sinks_N=None, *, pattern: Pattern = PLAIN):
    """Attention of one query per slot over the segments with positions `first` to `last`, by online softmax.

    A query attends to its own position and, as far as the pattern allows, to those before it. A fully masked segment
    adds exact zeros, so the number of segments read changes no bit.

    Returns:
      out_S1NV, in q's dtype.
    """
    S, _, N, H = q_S1NH.shape
    K, V = layer[0][0].shape[1], layer[0][1].shape[3]
    q_SKGH = (q_S1NH * pattern.factor(H)).reshape(S, K, N // K, H)

    def add(keys_SKHL, values_SKLV, place, carry):
        most_SKG1, sum_SKG1, out_SKGV = carry
        at_1L = jnp.arange(place.start, place.stop, dtype=jnp.int32)[None]
        sees_SL = at_1L <= position_S[:, None]
        if pattern.span is not None:
            sees_SL &= at_1L >= pattern.first(position_S)[:, None]
        score_SKGL = jnp.einsum("SKGH,SKHL->SKGL", q_SKGH, keys_SKHL, preferred_element_type=jnp.float32)
        if pattern.softcap is not None:
            score_SKGL = pattern.softcap * jnp.tanh(score_SKGL / pattern.softcap)
        score_SKGL = jnp.where(sees_SL[:, None, None], score_SKGL, -1e30)
        new_SKG1 = jnp.maximum(most_SKG1, jnp.max(score_SKGL, -1, keepdims=True))
        keep_SKG1 = jnp.exp(most_SKG1 - new_SKG1)
        prob_SKGL = jnp.exp(score_SKGL - new_SKG1)
        part_SKGV = jnp.einsum(
            "SKGL,SKLV->SKGV", prob_SKGL.astype(values_SKLV.dtype), values_SKLV, preferred_element_type=jnp.float32
        )
        sum_SKG1 = sum_SKG1 * keep_SKG1 + jnp.sum(prob_SKGL, -1, keepdims=True)
        return new_SKG1, sum_SKG1, out_SKGV * keep_SKG1 + part_SKGV

    zero_SKG1 = jnp.zeros((S, K, N // K, 1), jnp.float32)
    carry = zero_SKG1 - 1e30, zero_SKG1, jnp.zeros((S, K, N // K, V), jnp.float32)
    for (keys_SKHL, values_SKLV), place in zip(layer, caching.spans(layer), strict=True):
        read = functools.partial(add, keys_SKHL, values_SKLV, place)
        if place.start == 0 and pattern.span is None:
            carry = read(carry)
        else:
            needed = (place.start <= last) & (place.stop > first)
            carry = jax.lax.cond(needed, read, lambda carry: carry, carry)
    most_SKG1, sum_SKG1, out_SKGV = carry
    out_S1NV, lse_S1N = (out_SKGV / sum_SKG1).reshape(S, 1, N, V), (most_SKG1 + jnp.log(sum_SKG1)).reshape(S, 1, N)
    return sinks.add(out_S1NV, lse_S1N, sinks_N).astype(q_S1NH.dtype)
