"""Attention over tries in float64 numpy, by a mask of each token's ancestors, and random tries to run it on."""

import numpy as np


def random_tries(rng, length, *, branch=40, stop=0.2, padding=0.1):
    """(until_T, position_T, real_T) of a row: tries with nodes of at most `branch` tokens, one-token nodes among them,
    and padding (not real) between nodes."""
    until_T, position_T, real_T = np.arange(1, length + 1), np.zeros(length, int), np.zeros(length, bool)
    path, at = [], 0
    while at < length:
        if rng.random() < padding:
            at += int(rng.integers(1, 9))  # padding belongs to no path
            continue
        # A node begins behind any token of the current path, or a trie anew.
        path = [] if rng.random() < stop else path[: int(rng.integers(0, len(path) + 1))]
        for place in range(at, min(length, at + int(rng.integers(1, branch + 1)))):
            position_T[place], real_T[place] = len(path), True
            path.append(place)
            until_T[path] = place + 1
            at = place + 1
    return until_T, position_T, real_T


def attention(q_BTNH, k_BSKH, v_BSKV, place_BT, position_BT, until_BS, position_BS, dout_BTNV, sinks_N=None, *,
              window=None, chunk=None, scale=None, softcap=None):  # fmt: skip
    """(out, dq, dk, dv, dsinks or None): a query at place p sees key j iff j <= p < until_j, in depth at most `window`
    tokens back (arXiv:2004.05150), in the same chunk only (Llama 4)."""
    q, k, v, dout = (np.float64(x) for x in (q_BTNH, k_BSKH, v_BSKV, dout_BTNV))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    k, v = (x.repeat(group, 2) for x in (k, v))
    place, depth = (np.asarray(x)[:, :, None] for x in (place_BT, position_BT))
    until, own, j = np.asarray(until_BS)[:, None], np.asarray(position_BS)[:, None], np.arange(k.shape[1])
    sees = (j <= place) & (place < until)
    if window is not None:
        sees &= depth - own < window
    if chunk is not None:
        sees &= depth // chunk == own // chunk
    product = scale * np.einsum("btnh,bsnh->bnts", q, k)
    score = product if softcap is None else softcap * np.tanh(product / softcap)
    sink = np.full((q.shape[2], 1, 1), -np.inf) if sinks_N is None else np.float64(sinks_N)[:, None, None]
    score = np.where(sees[:, None], score, -np.inf)
    top = np.maximum(score.max(-1, keepdims=True), sink)
    total = np.exp(score - top).sum(-1, keepdims=True) + np.exp(sink - top)
    p = np.exp(score - top) / total
    out = np.einsum("bnts,bsnv->btnv", p, v)
    dp = np.einsum("btnv,bsnv->bnts", dout, v)
    inner = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - inner) * (1 if softcap is None else np.cosh(product / softcap) ** -2) * scale
    heads = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)
    dsinks = None if sinks_N is None else -(np.exp(sink - top) / total * inner).sum((0, 2, 3))
    return (
        out, np.einsum("bnts,bsnh->btnh", ds, k), heads(np.einsum("bnts,btnh->bsnh", ds, q)),
        heads(np.einsum("bnts,btnv->bsnv", p, dout)), dsinks,
    )  # fmt: skip
