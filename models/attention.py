"""Causal attention over packed rows: query chunks over only the keys they may see; no [T, T] array is held."""

import jax
import jax.numpy as jnp

from ..core.shapes import shaped


@shaped
def causal(q_BTNH, k_BTKH, v_BTKH, segment_BT, index_BT, *, chunk: int = 128):
    """Grouped-query attention in which a token sees the tokens of its own segment up to itself.

    Tokens of a segment stand next to each other in order, so a chunk of queries needs no key behind it. Each chunk is
    rematerialised in the backward pass: memory is linear in T. Padding (segment 0) attends to padding. Softmax in fp32
    or wider; scores are scaled by H^-1/2.

    Returns:
      out_BTNH, in q's dtype.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    # (batch, head)-major operands make plain batched matmuls.
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4) * H**-0.5
    k_BKTH, v_BKTH = (x.transpose(0, 2, 1, 3) for x in (k_BTKH, v_BTKH))
    rows = jax.checkpoint(_chunk)
    out = []
    for start in range(0, T, chunk):
        stop = min(start + chunk, T)
        here = slice(start, stop)
        out.append(
            rows(
                q_BKGTH[:, :, :, here], k_BKTH[:, :, :stop], v_BKTH[:, :, :stop],
                segment_BT[:, here], index_BT[:, here], segment_BT[:, :stop], index_BT[:, :stop],
            )
        )  # fmt: skip
    out_BKGTH = jnp.concatenate(out, axis=3) if len(out) > 1 else out[0]
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _chunk(q_BKGCH, k_BKSH, v_BKSH, segment_BC, index_BC, segment_BS, index_BS):
    B, K, G, C, H = q_BKGCH.shape
    wide = jnp.promote_types(q_BKGCH.dtype, jnp.float32)
    sees_BCS = (segment_BC[:, :, None] == segment_BS[:, None]) & (index_BC[:, :, None] >= index_BS[:, None])
    # Query heads of one kv head are further rows of the same matmul.
    q_BKRH = q_BKGCH.reshape(B, K, G * C, H)
    score_BKRS = jnp.einsum("BKRH,BKSH->BKRS", q_BKRH, k_BKSH, preferred_element_type=wide)
    score_BKGCS = score_BKRS.reshape(B, K, G, C, -1)
    score_BKGCS = jnp.where(sees_BCS[:, None, None], score_BKGCS, -1e30)
    prob_BKGCS = jax.nn.softmax(score_BKGCS, -1).astype(v_BKSH.dtype)
    out = jnp.einsum("BKRS,BKSH->BKRH", prob_BKGCS.reshape(B, K, G * C, -1), v_BKSH)
    return out.reshape(B, K, G, C, H)
