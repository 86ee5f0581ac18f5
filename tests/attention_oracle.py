"""Attention of each sequence alone, in float64 numpy, with its gradients; written from the papers."""

import numpy as np


def alone(q_BTNH, k_BTKH, v_BTKV, segment_BT, dout_BTNV, sinks_N=None, *, window=None, chunk=None, scale=None,
          softcap=None, bidirectional=False):  # fmt: skip
    """(out, dq, dk, dv, dsinks or None) of packed rows.

    score = c tanh(scale q k / c) with a softcap c (Gemma 2, arXiv:2408.00118), scale q k without. A token sees those of
    its sequence up to itself, at most `window` of them (arXiv:2004.05150), in the same chunk only (Llama 4);
    bidirectional, as many after it. A sink is one more column of the softmax, without a value (gpt-oss,
    arXiv:2508.10925).
    """
    q, k, v, dout = (np.float64(x) for x in (q_BTNH, k_BTKH, v_BTKV, dout_BTNV))
    N, K, H = q.shape[2], k.shape[2], q.shape[3]
    scale = H**-0.5 if scale is None else scale
    out, dq, dk, dv, dsinks = (np.zeros(shape) for shape in (dout.shape, q.shape, k.shape, v.shape, N))
    for b, segment_T in enumerate(np.asarray(segment_BT)):
        for s in np.unique(segment_T):
            own = np.flatnonzero(segment_T == s)
            i, j = np.meshgrid(np.arange(len(own)), np.arange(len(own)), indexing="ij")
            sees = j <= i
            if bidirectional:
                sees[:] = True
            if window is not None:
                sees &= abs(i - j) < window
            if chunk is not None:
                sees &= i // chunk == j // chunk
            for n in range(N):
                g = n // (N // K)
                product = scale * q[b, own, n] @ k[b, own, g].T
                score = product if softcap is None else softcap * np.tanh(product / softcap)
                sink = np.full((len(own), 1), -np.inf if sinks_N is None else np.float64(sinks_N[n]))
                logits = np.concatenate([np.where(sees, score, -np.inf), sink], 1)
                p = np.exp(logits - logits.max(-1, keepdims=True))
                p /= p.sum(-1, keepdims=True)
                out[b, own, n] = p[:, :-1] @ v[b, own, g]
                dp = np.concatenate([dout[b, own, n] @ v[b, own, g].T, np.zeros_like(sink)], 1)
                ds = p * (dp - (p * dp).sum(-1, keepdims=True))
                dsinks[n] += ds[:, -1].sum()
                ds = ds[:, :-1] * (1 if softcap is None else np.cosh(product / softcap) ** -2) * scale
                dq[b, own, n] = ds @ k[b, own, g]
                dk[b, own, g] += ds.T @ q[b, own, n]
                dv[b, own, g] += p[:, :-1].T @ dout[b, own, n]
    return out, dq, dk, dv, None if sinks_N is None else dsinks
