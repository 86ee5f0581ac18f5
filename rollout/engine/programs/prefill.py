"""The compiled programs of prompts: chunks into pages, and scores of their tokens."""

import functools

import jax
import jax.numpy as jnp

from ....core import hardware, logprobs
from ....models import mtp, vision
from ....models import transformer as models
from ....models.layer import AnyMixer, Attention, mixers
from ....models.layers import blocked
from ....models.layers.blocked import Blocked
from . import attention, mtp_drafts, pool, sampling, states
from .staging import with_adapters

TOKENS, ON_CPUS = 4096, 256  # tokens per program


def width(length: int, C: int) -> int:
    """The padded length of a chunk of `length` tokens: a power of two of at least 16, or C."""
    return min(C, max(16, 1 << (length - 1).bit_length()))


def rows(width: int, most: int | None) -> int:
    """The number of chunks per program of this width, if there are never more than `most` at a time."""
    fit = max(1, (ON_CPUS if hardware.platform() == "cpu" else TOKENS) // width)
    return fit if most is None else min(fit, 1 << (most - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("config", "of_layer"), donate_argnames=("held",))
def prefill(
    weights, held, token_RT, next_R, start_R, length_R, total_R, adapter_R, slot_R, table_KRX, seen=None, *, config,
    of_layer,
):  # fmt: skip
    """Computes R chunks of sequences, each with its adapter, and writes them to their pages. Chunks of one sequence may
    stand together, unless the model has recurrent layers.

    A chunk has the tokens from position start, a multiple of the page size; it is padded on the right to T, at most a
    page. Rows of length 0 that start at a slot beyond the last are not used. The bits of a chunk depend on T and R, not
    on other rows.

    Args:
      held: the memory of all layers, see `pool`.
      next_R: the token after each chunk, which multi-token prediction reads (`mtp_drafts`).
      total_R: the length of each chunk's whole sequence, on which rotary embeddings may depend.
      slot_R: where states are kept between chunks.
      table_KRX: for each kind of layers, the pages of each row's sequence.
      seen: `images.Seen`, if tokens stand for features of images; None = text alone.
      of_layer: the kind of each layer.

    Returns:
      held; hidden_RTD after the last norm; the `routed` experts.
    """
    module = models.family(config)
    R, T = token_RT.shape
    weights = blocked.of_rows(weights, (jnp.arange(T)[None] < length_R[:, None]).reshape(-1))
    position_RT = start_R[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    active_R = length_R > 0
    total_RT = jnp.repeat(total_R[:, None], T, 1)
    mixer = mixers(config.records, position_RT, seen and seen.position_3RT, total_RT, needed=jnp.any(active_R))
    x = module.embed(weights, token_RT, config, weights["norm"].dtype)
    x = vision.replaced(x, seen.feature_NRTD[0], seen.feature_RT) if seen else x
    held = list(held)

    def attend(i, layer, q_RTNH, k_RTKH=None, v_RTKV=None, sinks_N=None, latent=None):
        table_RX = table_KRX[of_layer[i]]
        if latent:
            q_RTNH, (k_RTKH, v_RTKV) = latent.queries(q_RTNH), latent.cached
        if layer.source is None:
            size = held[i][1].shape[2]
            page_R = jnp.take_along_axis(table_RX, (start_R // size)[:, None], 1)[:, 0]
            held[i] = pool.write_chunks(held[i], k_RTKH, v_RTKV, page_R)
        pages = held[i if layer.source is None else layer.source]
        out_RTNV = attention.attend(q_RTNH, pages, table_RX, start_R, active_R, sinks_N, pattern=layer.pattern)
        return latent.outputs(out_RTNV) if latent else out_RTNV

    reports: list[dict] = []
    own = models.per_layer(module, weights, token_RT, x, config)
    for i, (w, layer) in enumerate(zip(with_adapters(weights, adapter_R), config.records, strict=True)):
        mix: AnyMixer
        after: dict = {}
        w = w | {name: each[i] for name, each in own.items()}
        if isinstance(layer, Attention):
            mix = mixer(layer, functools.partial(attend, i, layer))
        else:
            before = {name: _begun(x_S[slot_R], start_R) for name, x_S in held[i][0].items()} if layer.state else {}
            mix = states.chunk(layer, before, length_R, after)
        x, report = module.block(x, w, mix, config)
        reports.append(report)
        if seen and isinstance(layer, Attention) and layer.deepstack:
            x = vision.added(x, seen.feature_NRTD[1 + i], seen.feature_RT)
        if after:
            now, kept = held[i]
            held[i] = {name: now[name].at[slot_R].set(after[name], mode="drop") for name in now}, kept
    hidden_RTD = models.last_norm(x, weights, config)
    if "mtp" in weights:  # of which all but the keys and values is unused, and not computed
        last_RT = jnp.arange(T)[None] == length_R[:, None] - 1
        next_RT = jnp.where(last_RT, next_R[:, None], jnp.roll(token_RT, -1, 1))
        record = mtp.record(config)
        mix = mixer(record, functools.partial(attend, len(config.records), record))
        mtp.forward(weights, weights["mtp"], hidden_RTD, next_RT, mix, config)
    return pool.pinned(held), hidden_RTD, pool.replicated(routed(reports))


def _begun(state_R, start_R):
    return jnp.where(start_R.reshape(-1, *[1] * (state_R.ndim - 1)) > 0, state_R, 0)


def routed(reports):
    """Experts of each token, i32[R, T, layers, top_k], -1 in layers without experts; None if no layer has any."""
    found = [report.get("experts") for report in reports]
    like = next((x for x in found if x is not None), None)
    if like is None:
        return None
    return jnp.stack([jnp.full_like(like, -1) if x is None else x for x in found], 2)


@functools.partial(jax.jit, static_argnames=("config", "top"))
def scores(weights, hidden_RTD, row, target_T, *, config, top: int):
    """Log-probability (nats, temperature 1) of each target of one row, and the `top` likeliest (logp, id) or None."""
    likeliest = (lambda logits_CV, *_: sampling.likeliest(logits_CV, min(top, logits_CV.shape[1]))) if top else None
    if isinstance(weights["head"], Blocked):
        logits_TV = mtp_drafts.logits(weights, hidden_RTD[row], config)
        logp_T, _, lse_T = logprobs.from_logits(logits_TV, target_T)
        best = likeliest(logits_TV) if likeliest else None
    else:
        head_VD = weights["head"].weight.T
        logits = (functools.partial(models.logits, config=config),)
        made = logprobs.from_hidden(hidden_RTD[row], head_VD, target_T, per_chunk=likeliest, logits=logits)
        logp_T, _, lse_T, best = made
    return pool.replicated((logp_T, None if best is None else (best[0] - lse_T[:, None], best[1])))
