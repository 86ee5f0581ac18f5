"""Causal attention over packed rows: query chunks over only the keys they may see; no [T, T] array is held."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..core.shapes import shaped

OUTPUT = "attention"  # name of what the backward pass needs of the forward pass, for rematerialisation policies


@shaped
def causal(
    q_BTNH, k_BSKH, v_BSKH, segment_BT, index_BT, *, key_segment_BS=None, key_index_BS=None, chunk: int | None = None
):
    """Grouped-query attention in which a token sees the tokens of its own segment up to itself.

    Tokens of a segment stand next to each other in order, so a chunk of queries needs no key behind it. Memory is
    linear in T: the backward pass computes the scores of a chunk again from the log-sum-exp of each row
    (FlashAttention-2, arXiv:2307.08691). Padding (segment 0) attends to padding. Softmax in fp32 or wider; scores are
    scaled by H^-1/2. Differentiable once, in reverse mode.

    Args:
      key_segment_BS, key_index_BS: of keys that are not the queries' own; every query must find itself among them.
      chunk: queries a chunk; None = 64, or more in rows that would have over 32 chunks, each of which is compiled.

    Returns:
      out_BTNH, in q's dtype.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    chunk = chunk or max(64, T // 32)
    own = key_index_BS is None
    where = (segment_BT, index_BT) + ((segment_BT, index_BT) if own else (key_segment_BS, key_index_BS))
    chunks = tuple((t, min(t + chunk, T), min(t + chunk, T) if own else S) for t in range(0, T, chunk))
    # (batch, head)-major operands make plain batched matmuls.
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * H**-0.5
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    out_BKGTH = _attend(q_BKGTH, k_BKSH, v_BKSH, where, chunks)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q_BKGTH, k_BKSH, v_BKSH, where, chunks):
    return _forward(q_BKGTH, k_BKSH, v_BKSH, where, chunks)[0]


def _forward(q_BKGTH, k_BKSH, v_BKSH, where, chunks):
    out, lse = [], []
    for start, stop, seen in chunks:
        score_BKGCS = _scores(q_BKGTH, k_BKSH, where, start, stop, seen)
        top_BKGC1 = score_BKGCS.max(-1, keepdims=True)
        weight_BKGCS = jnp.exp(score_BKGCS - top_BKGC1)
        sum_BKGC1 = weight_BKGCS.sum(-1, keepdims=True)
        mean_BKRH = _rows(weight_BKGCS).astype(v_BKSH.dtype) @ v_BKSH[:, :, :seen]
        out.append((mean_BKRH.reshape(*score_BKGCS.shape[:-1], -1) / sum_BKGC1).astype(v_BKSH.dtype))
        lse.append(top_BKGC1 + jnp.log(sum_BKGC1))
    out_BKGTH, lse_BKGT1 = (checkpoint_name(jnp.concatenate(x, 3), OUTPUT) for x in (out, lse))
    return out_BKGTH, (q_BKGTH, k_BKSH, v_BKSH, where, out_BKGTH, lse_BKGT1)


def _backward(chunks, kept, dout_BKGTH):
    q_BKGTH, k_BKSH, v_BKSH, where, out_BKGTH, lse_BKGT1 = kept
    wide, narrow = lse_BKGT1.dtype, q_BKGTH.dtype
    product = partial(jnp.einsum, preferred_element_type=wide)
    inner_BKGT1 = jnp.sum(dout_BKGTH.astype(wide) * out_BKGTH, -1, keepdims=True)
    dq = []
    dk_BKSH, dv_BKSH = jnp.zeros(k_BKSH.shape, wide), jnp.zeros(v_BKSH.shape, wide)
    for start, stop, seen in chunks:
        here = (slice(None),) * 3 + (slice(start, stop),)
        q_BKRH, dout_BKRH = _rows(q_BKGTH[here]), _rows(dout_BKGTH[here])
        score_BKGCS = _scores(q_BKGTH, k_BKSH, where, start, stop, seen)
        prob_BKRS = _rows(jnp.exp(score_BKGCS - lse_BKGT1[here]))
        dprob_BKRS = product("BKRH,BKSH->BKRS", dout_BKRH, v_BKSH[:, :, :seen])
        dscore_BKRS = (prob_BKRS * (dprob_BKRS - _rows(inner_BKGT1[here]))).astype(narrow)
        dv_BKSH = dv_BKSH.at[:, :, :seen].add(product("BKRS,BKRH->BKSH", prob_BKRS.astype(narrow), dout_BKRH))
        dk_BKSH = dk_BKSH.at[:, :, :seen].add(product("BKRS,BKRH->BKSH", dscore_BKRS, q_BKRH))
        dq.append((dscore_BKRS @ k_BKSH[:, :, :seen]).reshape(q_BKGTH[here].shape))
    return jnp.concatenate(dq, 3), dk_BKSH.astype(k_BKSH.dtype), dv_BKSH.astype(v_BKSH.dtype), None


_attend.defvjp(_forward, _backward)


def _rows(x_BKGCX):
    """Query heads of one kv head are further rows of the same matmul."""
    B, K, G, C, X = x_BKGCX.shape
    return x_BKGCX.reshape(B, K, G * C, X)


def _scores(q_BKGTH, k_BKSH, where, start, stop, seen):
    """Of the queries [start, stop) and the keys [0, seen), with -1e30 added where a query may not look.

    Every token sees itself, so no row is masked as a whole.
    """
    q_BKGCH, k_BKSH = q_BKGTH[:, :, :, start:stop], k_BKSH[:, :, :seen]
    wide = jnp.promote_types(q_BKGCH.dtype, jnp.float32)
    segment_BC1, index_BC1 = (x[:, start:stop, None] for x in where[:2])
    segment_B1S, index_B1S = (x[:, None, :seen] for x in where[2:])
    mask_BCS = jnp.where((segment_BC1 == segment_B1S) & (index_BC1 >= index_B1S), 0, wide.type(-1e30))
    score_BKRS = jnp.einsum("BKRH,BKSH->BKRS", _rows(q_BKGCH), k_BKSH, preferred_element_type=wide)
    return score_BKRS.reshape(*q_BKGCH.shape[:-1], seen) + mask_BCS[:, None, None]
