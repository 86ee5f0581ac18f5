"""Policy-gradient objectives in float64, from the papers: loops over samples and tokens, the gradient by autograd."""

import math
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch


def policy(rows, prox, now, ref=None, *, options) -> tuple[float, list[np.ndarray]]:
    """Minus the weighted gain, plus the KL penalty: (loss to minimise, [its gradient with respect to now[i]]).

    The proximal policy stands between behaviour and current policy (decoupled PPO, arXiv:2110.00641; AReaL,
    arXiv:2505.24298).

    Args:
      rows: `Sample`s; mask, logp, reward, group, rollout, prompt and weight are read.
      prox, now, ref: log-probability of each token of each row under the proximal, current, reference policy.
      options: a mapping or a namespace.
    """
    o = SimpleNamespace(**options) if isinstance(options, Mapping) else options
    leaves = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in now]
    advantage, share = advantages(rows, o), shares(rows, o)
    loss = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        if share[i] == 0:
            continue
        learnt = np.flatnonzero(row.mask)
        mu = np.asarray(row.logp, np.float64)[learnt]
        old = mu if o.proximal == "behaviour" else np.asarray(prox[i], np.float64)[learnt]
        x = leaves[i][learnt]
        w = np.ones(len(learnt)) if o.proximal == "behaviour" else weights(old - mu, o)
        for w_t, gain_t in zip(w, gains(x, torch.tensor(old), advantage[row.rollout], o), strict=True):
            loss = loss - share[i] * float(w_t) * gain_t
        if o.kl_coef:
            for x_t, ref_t in zip(x, np.asarray(ref[i], np.float64)[learnt], strict=True):
                loss = loss + o.kl_coef * share[i] * kl(x_t, float(ref_t), o.kl_estimator)
    if not loss.requires_grad:
        return 0.0, [np.zeros(x.shape) for x in leaves]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.item(), [g.numpy() for g in grads]


def advantages(rows, o):
    """{rollout: (R - b) / (s + eps)} over the scorable rollouts, each counted once.

    GRPO (arXiv:2402.03300); without deviation Dr. GRPO (arXiv:2503.20783); leave_one_out RLOO (arXiv:2402.14740);
    length_weighted OPO (arXiv:2505.23585). Without degrees of freedom the deviation is 0.
    """
    reward, group, length = {}, {}, {}
    for row in rows:
        if not math.isnan(row.reward):
            reward[row.rollout], group[row.rollout] = row.reward, row.group
            length[row.rollout] = length.get(row.rollout, 0) + int(np.sum(row.mask))
    out = {}
    for k in reward:
        scopes = {"group": [j for j in reward if group[j] == group[k]], "batch": list(reward), "none": []}
        scope, baseline = scopes[o.mean], 0.0
        if o.mean != "none":
            among = [j for j in scope if not (o.leave_one_out and j == k)]
            count = {j: length[j] if o.length_weighted else 1 for j in among}
            if len({reward[j] for j in scope}) == 1 or sum(count.values()) == 0:
                out[k] = 0.0
                continue
            baseline = sum(count[j] * reward[j] for j in among) / sum(count.values())
        out[k] = reward[k] - baseline
        if o.std != "none":
            values = [reward[j] for j in scopes[o.std]]
            mean = sum(values) / len(values)
            variance = sum((v - mean) ** 2 for v in values) / max(len(values) - o.ddof, 1)
            out[k] /= math.sqrt(variance) + o.eps
    return out


def shares(rows, o):
    """What each learnt token of a row counts for; 0 for rows that are unscorable or learn nothing.

    token: DAPO (arXiv:2503.14476), over the batch; sequence: GRPO (arXiv:2402.03300); constant: Dr. GRPO
    (arXiv:2503.20783).
    """
    count = [int(np.sum(row.mask)) for row in rows]
    live = [i for i, row in enumerate(rows) if count[i] and not math.isnan(row.reward)]
    sequences, tokens = sum(rows[i].weight for i in live), sum(rows[i].weight * count[i] for i in live)
    out = [0.0] * len(rows)
    for i in live:
        if o.denominator in ("prompt", "rollout"):
            ids = {j: getattr(rows[j], o.denominator) for j in live}
            whole = sum(rows[j].weight * count[j] for j in live if ids[j] == ids[i]) * len(set(ids.values()))
        else:
            constant = o.denominator_tokens * sequences
            wholes = dict(token=tokens, sequence=count[i] * sequences, sequence_sum=sequences, constant=constant)
            whole = wholes[o.denominator]
        out[i] = rows[i].weight / whole
    return out


def weights(log_rho, o):
    """Importance weight of each learnt token, proximal over behaviour policy; truncated as in arXiv:1802.01561."""
    n = len(log_rho)
    level = {"token": log_rho, "sequence": np.full(n, log_rho.sum()), "geometric": np.full(n, log_rho.mean())}
    w = np.exp(level[o.weight])
    return {
        "mask": np.where((o.weight_low <= w) & (w <= o.weight_cap), w, 0.0),
        "truncate": np.minimum(w, o.weight_cap),
    }[o.weight_action]


def ratios(x, old, o):
    """r of each learnt token; sequence and sequence_token: GSPO and GSPO-token (arXiv:2507.18071)."""
    s = torch.exp((x - old).mean())
    return {
        "token": torch.exp(x - old),
        "sequence": s.expand(len(x)),
        "sequence_token": s.detach() * torch.exp(x - x.detach()),
    }[o.ratio]


def gains(x, old, A, o):
    """Gain of each learnt token of one sample.

    geometric: GMPO (arXiv:2507.20673), whose clipping range is in log space.
    """
    if o.surrogate != "geometric":
        return [gain(x_t, r_t, A, o) for x_t, r_t in zip(x, ratios(x, old, o), strict=True)]
    total = 0.0
    for d in x - old:
        c = clip(d, -o.clip_low, o.clip_high)
        total = total + (least(d, c) if A >= 0 else most(d, c))
    return [torch.exp(total / len(x)) * A] * len(x)


def gain(x, r, A, o):
    """Gain of one token.

    clip: PPO (arXiv:1707.06347), ratio_cap the upper bound of the unclipped ratio (INTELLECT-2, arXiv:2505.07291),
    dual_clip arXiv:1912.09729; score: REINFORCE; cispo: MiniMax-M1 (arXiv:2506.13585); sapo: arXiv:2511.20347.
    """
    clipped = clip(r, 1 - o.clip_low, 1 + o.clip_high)
    if o.surrogate == "clip":
        u = (least(r, torch.full_like(r, o.ratio_cap)) if o.ratio_cap > 0 else r) * A
        g = least(u, clipped * A)
        return most(g, torch.full_like(g, o.dual_clip * A)) if o.dual_clip > 0 and A < 0 else g
    if o.surrogate == "score":
        return A * x
    if o.surrogate == "cispo":
        return clipped.detach() * A * x
    if o.surrogate == "sapo":
        tau = o.tau_pos if A > 0 else o.tau_neg
        return 4 / tau * torch.sigmoid(tau * (r - 1)) * A
    raise ValueError(f"no surrogate {o.surrogate!r}")


def kl(x, ref, estimator):
    """k1, k2, k3 of one token, for samples of the current policy (k3 in GRPO, arXiv:2402.03300)."""
    d = x - ref
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]


def clip(x, low, high):
    return most(least(x, torch.full_like(x, high)), torch.full_like(x, low))


def least(a, b):
    """The lesser of two scalars; of equals the first, gradient included."""
    return a if a <= b else b


def most(a, b):
    """The greater of two scalars; of equals the first, gradient included."""
    return a if a >= b else b
