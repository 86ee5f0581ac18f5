"""Attention in float64 numpy, of each sequence alone or by a mask, with its gradients; written from the papers."""

import numpy as np


def alone(q_BTNH, k_BTKH, v_BTKV, segment_BT, dout_BTNV, sinks_N=None, *, window=None, chunk=None, scale=None,
          softcap=None, bidirectional=False):  # fmt: skip
    """(out, dq, dk, dv, dsinks or None) of packed rows.

    score = c tanh(scale q k / c) with a softcap c (Gemma 2, arXiv:2408.00118), scale q k without. A token sees those of
    its sequence up to itself, at most `window` of them (arXiv:2004.05150), in the same chunk only (Llama 4);
    bidirectional, as many after it. A sink is one more column of the softmax, without a value (gpt-oss,
    arXiv:2508.10925).
    """
    segment_BT = np.asarray(segment_BT)
    same_BTT = segment_BT[:, :, None] == segment_BT[:, None, :]
    index_BT = (same_BTT & np.tri(segment_BT.shape[1], k=-1, dtype=bool)).sum(-1)
    i, j = index_BT[:, :, None], index_BT[:, None, :]
    sees_BTT = same_BTT & (True if bidirectional else j <= i) & limits(i, j, window, chunk)
    return masked(q_BTNH, k_BTKH, v_BTKV, sees_BTT, dout_BTNV, sinks_N, scale=scale, softcap=softcap)


def limits(i, j, window=None, chunk=None):
    """Whether windows and chunks let a query at i see a key at j, both counted from the start of their sequence."""
    return (window is None or abs(i - j) < window) & (chunk is None or i // chunk == j // chunk)


def masked(q_BTNH, k_BSKH, v_BSKV, sees_BTS, dout_BTNV, sinks_N=None, *, scale=None, softcap=None):
    """`alone` for queries that each see the keys of a mask, at least one."""
    q, k, v, dout = (np.float64(x) for x in (q_BTNH, k_BSKH, v_BSKV, dout_BTNV))
    N, K, H = q.shape[2], k.shape[2], q.shape[3]
    scale = H**-0.5 if scale is None else scale
    out, dq, dk, dv, dsinks = (np.zeros(shape) for shape in (dout.shape, q.shape, k.shape, v.shape, N))
    for b, sees in enumerate(sees_BTS):
        for n in range(N):
            g = n // (N // K)
            product = scale * q[b, :, n] @ k[b, :, g].T
            score = product if softcap is None else softcap * np.tanh(product / softcap)
            sink = np.full((len(sees), 1), -np.inf if sinks_N is None else np.float64(sinks_N[n]))
            logits = np.concatenate([np.where(sees, score, -np.inf), sink], 1)
            p = np.exp(logits - logits.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            out[b, :, n] = p[:, :-1] @ v[b, :, g]
            dp = np.concatenate([dout[b, :, n] @ v[b, :, g].T, np.zeros_like(sink)], 1)
            ds = p * (dp - (p * dp).sum(-1, keepdims=True))
            dsinks[n] += ds[:, -1].sum()
            ds = ds[:, :-1] * (1 if softcap is None else np.cosh(product / softcap) ** -2) * scale
            dq[b, :, n] = ds @ k[b, :, g]
            dk[b, :, g] += ds.T @ q[b, :, n]
            dv[b, :, g] += p[:, :-1].T @ dout[b, :, n]
    return out, dq, dk, dv, None if sinks_N is None else dsinks
