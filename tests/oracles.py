"""Policy-gradient objectives in float64, from the papers: loops over samples and tokens, the gradient by autograd."""

import math
from types import SimpleNamespace

import numpy as np
import torch


def policy(
    rows, prox, now, ref=None, *, options, values=None, teacher=None, entropy=None, before=None, version=0, chosen=None,
    squares=None,
):  # fmt: skip
    """Minus the weighted gain, plus the KL penalty, less the bonus for entropy, all to be minimised.

    The proximal policy stands between behaviour and current policy (decoupled PPO, arXiv:2110.00641; AReaL,
    arXiv:2505.24298).

    Args:
      rows: `Sample`s.
      prox, now, ref, teacher: log-probability of each token of each row under the proximal, current, reference policy
        and the teacher.
      options: a `Policy`, or anything with its attributes.
      values: value of the state that each token was sampled in.
      entropy, before: entropy of the distribution each token was drawn from, under the current policy and before the
        update.
      version: of the weights to be updated.
      squares: sum of the squared probabilities of the distribution that each token was drawn from, before the update.
      chosen: with clip_cov, {(row, token)} that was drawn; without, all candidates.

    Returns:
      loss, [its gradient with respect to now[i]], and where entropies are given [with respect to entropy[i]].
    """
    o = options
    x, h = leaves(now), leaves(entropy if entropy is not None else now)
    mu = [wide(row.logp) for row in rows]
    old = {"recompute": prox, "behaviour": mu}.get(o.correction.proximal)
    old = interpolated(rows, mu, now, version) if old is None else [wide(one) for one in old]
    shaped = shape(rows, o)
    use = learnt(rows, o, shaped, mu, ref, teacher)
    A, _ = advantages(rows, o, shaped, use, old, ref, values, teacher, (prox, squares))
    rho = [{t: old[i][t] - mu[i][t] for t in use[i]} for i in range(len(rows))]
    kept = correct(rows, o.correction, rho, A, use, mu)
    w = weights(rho, o.correction, use, kept)
    counted = [[t for t in use[i] if o.correction.count_masked or kept[i][t]] for i in range(len(rows))]
    share = shares(rows, counted, o)
    low = o.entropy.floor == 0 or not any(use) or mean_of(before, use) < o.entropy.floor
    cov = covariance(x, A, use)
    loss = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        at = use[i]
        if not at:
            continue
        for t, gain_t in zip(at, gains(i, at, x[i], old[i], A[i], o, cov, chosen, use), strict=True):
            if kept[i][t] and w[i][t] > 0:
                loss = loss - share[i] * w[i][t] * gain_t
        for t in counted[i]:
            if o.kl.coef and o.kl.place == "loss":
                if (
                    o.kl.over == "sequence"
                ):  # A*-PO (arXiv:2505.20686): (log pi(y) / reference(y))^2 / 2, in equal parts
                    term = (x[i][at] - torch.tensor(wide(ref[i])[at])).sum() ** 2 / 2 / len(at)
                else:
                    term = kl(x[i][t], wide(ref[i])[t], o.kl.estimator)
                loss = loss + o.kl.coef * share[i] * term * (torch.exp(x[i][t] - mu[i][t]) if o.kl.ratio else 1)
            if o.entropy.coef and low:
                kind = o.entropy.classes[row.arrays["token_class"][1][t]] if o.entropy.classes else 1.0
                loss = loss - o.entropy.coef * kind * share[i] * h[i][t]
    if o.observation.coef:  # ECHO (arXiv:2605.24517): the mean over what the environment said, whatever the rewards
        seen = [(i, t) for i, row in enumerate(rows) for t in observed(row, o.observation.kinds)]
        loss = loss - o.observation.coef * sum(x[i][t] for i, t in seen) / max(len(seen), 1)
    if not loss.requires_grad:
        slopes = [[np.zeros(one.shape) for one in v] for v in (x, h)]
        return (0.0, slopes[0]) if entropy is None else (0.0, *slopes)
    grad = lambda v: [g.numpy() for g in torch.autograd.grad(loss, v, allow_unused=True, materialize_grads=True,
                                                             retain_graph=True)]  # fmt: skip
    return (loss.item(), grad(x)) if entropy is None else (loss.item(), grad(x), grad(h))


def wide(x):
    return np.asarray(x, np.float64)


def leaves(x):
    return [torch.tensor(wide(one), requires_grad=True) for one in x]


def steps(row):
    """Tokens that were sampled; nothing predicts the first of a row."""
    return [t for t in range(1, len(row.tokens)) if row.mask[t]]


def observed(row, kinds):
    """Tokens that the environment said, of these kinds."""
    kind = row.arrays["observation"][1]
    chosen = {1 + ["tool", "error", "user"].index(name) for name in kinds}
    return [t for t in range(1, len(row.tokens)) if kind[t] in chosen and not row.mask[t]]


def mean_of(x, use):
    return np.mean([x[i][t] for i in range(len(use)) for t in use[i]])


def learnt(rows, o, shaped, mu, ref, teacher):
    """[tokens of each row that are learnt]: sampled, scorable, finite, and not cut off where that is filtered."""
    out = []
    for i, row in enumerate(rows):
        dead = math.isnan(shaped[row.rollout]) or (o.shaping.truncated != "keep" and cut_off(rows, row.rollout))
        finite = lambda t, i=i: (
            math.isfinite(mu[i][t])
            and (not o.kl.coef or math.isfinite(ref[i][t]))
            and (not o.advantage.teacher or math.isfinite(teacher[i][t]))
        )
        out.append([] if dead else [t for t in steps(row) if finite(t)])
    return out


# -- rewards and advantages ----------------------------------------------------------------------


def cut_off(rows, rollout):
    return any(row.finish == "length" for row in rows if row.rollout == rollout)


def bounded(R, s):
    return min(max((R + s.bias) * s.scale, s.low), s.high)


def shape(rows, o):
    """{rollout: shaped reward}; NaN = unscorable. The penalty of length is that of DAPO (arXiv:2503.14476)."""
    out, s = {}, o.shaping
    for row in rows:
        mine = [other for other in rows if other.rollout == row.rollout]
        parts = [row.components[name] for name in o.advantage.components]
        parts += [row.components[o.advantage.mean]] if o.advantage.mean in PER_SAMPLE else []
        if any(math.isnan(one.reward) for one in mine) or any(math.isnan(p) for p in parts):
            out[row.rollout] = math.nan
            continue
        R, n = bounded(row.reward, s), sum(len(steps(one)) for one in mine)
        if s.overlong_tokens:
            start = s.overlong_tokens - s.overlong_buffer
            over = 1.0 if n >= s.overlong_tokens else 0.0 if n <= start else (n - start) / s.overlong_buffer
            R -= s.overlong_penalty * over
        if any(one.finish != "stop" for one in mine):
            R -= s.unfinished_penalty
        out[row.rollout] = math.nan if s.truncated == "drop" and cut_off(rows, row.rollout) else R
    return out


def token_rewards(row, shaped, scale):
    """Scaled rewards of the sampled tokens: of the last one at or before the index, else the first; what else the
    shaping adds at the end."""
    own = steps(row)
    out = dict.fromkeys(own, 0.0)
    for index, value in row.rewards:
        before = [t for t in own if t <= index]
        out[before[-1] if before else own[0]] += scale * value
    out[own[-1]] += shaped - scale * row.reward
    return out


def advantages(rows, o, shaped, use, old, ref, values, teacher, probabilities=None):
    """([{token: advantage}], [{token: what a critic learns}]) of the scorable rows.

    GAE arXiv:1506.02438; discounted returns, whitened over tokens: REINFORCE++ (arXiv:2501.03262); rewards compared
    part by part: GDPO (arXiv:2601.05242); KL in the reward: arXiv:1909.08593.
    """
    a = o.advantage
    penalty = [dict.fromkeys(steps(row), 0.0) for row in rows]
    if o.kl.coef and o.kl.place == "reward":
        for i in range(len(rows)):
            for t in use[i]:
                penalty[i][t] = o.kl.coef * float(kl(torch.tensor(old[i][t]), float(ref[i][t]), o.kl.estimator))
    total = {k: R - sum(sum(penalty[i].values()) for i, row in enumerate(rows) if row.rollout == k)
             for k, R in shaped.items()}  # fmt: skip
    if a.components:
        coefs = a.component_weights or [1.0] * len(a.components)
        parts = [compare(rows, o, use, {row.rollout: row.components[name] if not math.isnan(total[row.rollout])
                                        else math.nan for row in rows}) for name in a.components]  # fmt: skip
        whole = {k: sum(c * part[0][k] for c, part in zip(coefs, parts, strict=True)) for k in parts[0][0]}
    else:
        whole, baseline = compare(rows, o, use, total)
    if a.whiten == "rollout":
        whole = dict(zip(whole, whitened(list(whole.values()), a), strict=True))
    given = {i: token_rewards(row, shaped[row.rollout], o.shaping.scale) for i, row in enumerate(rows)
             if steps(row) and not math.isnan(shaped[row.rollout])}  # fmt: skip
    given = {i: {t: r - penalty[i][t] for t, r in own.items()} for i, own in given.items()}
    state = by_state(rows, a, given) if a.state_coef else {}
    energy = by_energy(rows, a, given, *probabilities) if a.mean == "optimal_token" else {}
    A, targets = [], []
    for i, row in enumerate(rows):
        A.append({})
        targets.append({})
        own = steps(row)
        if math.isnan(shaped[row.rollout]) or not own:
            continue
        if a.credit == "rollout":
            A[i] = {t: whole[row.rollout] + a.state_coef * state.get((i, t), 0.0) for t in own}
            continue
        r = [given[i][t] for t in own]
        if a.credit == "gae":
            v = [float(values[i][t]) for t in own]
            adaptive = max(1 - 1 / (a.lam_alpha * len(own)), 0) if a.lam_alpha else a.lam  # VAPO (arXiv:2504.05118)
            raw = gae(r, v, a.gamma, adaptive)
            targets[i] = {t: A_t + v_t for t, A_t, v_t in zip(own, raw, v, strict=True)}
        elif energy:
            raw = [energy[i, t] for t in own]
        else:
            raw = [G - baseline[row.rollout] for G in returns(r, a.gamma)]
        A[i] = dict(zip(own, raw, strict=True))
    if a.whiten == "token":
        flat = [(i, t) for i in range(len(rows)) for t in use[i]]
        for (i, t), white in zip(flat, whitened([A[i][t] for i, t in flat], a), strict=True):
            A[i][t] = white
    if a.teacher:
        for i in range(len(rows)):
            for t in use[i]:
                A[i][t] += a.teacher * (float(teacher[i][t]) - old[i][t])
    return A, targets


PER_SAMPLE = "greedy", "moving", "optimal_value"


def turns(row):
    """[tokens of each turn]: runs of sampled tokens of one state."""
    out, state = [], row.arrays["state"][1]
    for t in steps(row):
        if out and out[-1][-1] == t - 1 and state[t] == state[t - 1]:
            out[-1].append(t)
        else:
            out.append([t])
    return out


def by_state(rows, a, given):
    """{(row, token): (G - mean) / (s + eps) of its turn among the group's turns of its state}, G the discounted rewards
    of the turns from it on (GiGPO, arXiv:2505.10978, equations 5 to 7)."""
    G, among = {}, {}
    for i in given:
        made = turns(rows[i])
        for k, at in enumerate(made):
            G[i, k] = sum(a.state_gamma**j * sum(given[i][t] for t in each) for j, each in enumerate(made[k:]))
            if number := int(rows[i].arrays["state"][1][at[0]]):
                among.setdefault((rows[i].group, number), []).append((i, k))
    out = {}
    for members in among.values():
        values = [G[one] for one in members]
        s = spread(values, a.ddof) + a.eps if a.std == "group" else 1.0
        for i, k in members:
            adv = 0.0 if len({*values}) == 1 else (G[i, k] - sum(values) / len(values)) / s
            out |= {(i, t): adv for t in turns(rows[i])[k]}
    return out


def by_energy(rows, a, given, prox, squares):
    """{(row, token): G_t - sum G_t W_t / sum W_t over the group's rows with a t-th sampled token} (OTB,
    arXiv:2602.07078)."""
    G, W, among = {}, {}, {}
    for i, own in given.items():
        total = 0.0
        for n, (t, after) in enumerate(zip(own, returns([*own.values()], a.gamma), strict=True)):
            total += 1 - 2 * math.exp(prox[i][t]) + squares[i][t]
            G[i, t], W[i, t] = after, total
            among.setdefault((rows[i].group, n), []).append((i, t))
    out = {}
    for members in among.values():
        mean = sum(W[one] * G[one] for one in members) / sum(W[one] for one in members)
        out |= {one: 0.0 if len({G[x] for x in members}) == 1 else G[one] - mean for one in members}
    return out


def compare(rows, o, use, reward):
    """{rollout: (R - b) / (s + eps)}, {its b} of the scorable rollouts, each counted once.

    GRPO (arXiv:2402.03300); without deviation Dr. GRPO (arXiv:2503.20783); leave_one_out RLOO (arXiv:2402.14740);
    length_weighted OPO (arXiv:2505.23585); greedy ReMax (arXiv:2310.10505); moving RAE (arXiv:2506.24119);
    optimal_value A*-PO (arXiv:2505.20686). Without degrees of freedom the deviation is
    0. With nothing to compare the advantage is 0, and the baseline the reward.
    """
    a, group, length, greedy = o.advantage, {}, {}, {}
    reward = {k: R for k, R in reward.items() if not math.isnan(R)}
    for i, row in enumerate(rows):
        if row.rollout in reward:
            group[row.rollout] = row.group
            length[row.rollout] = length.get(row.rollout, 0) + len(use[i])
            if a.mean in PER_SAMPLE:
                greedy[row.rollout] = bounded(row.components[a.mean], o.shaping)
    out, baseline = {}, {}
    for k in reward:
        scopes = {"group": [j for j in reward if group[j] == group[k]], "batch": list(reward)}
        baseline[k] = 0.0
        if a.mean in scopes:
            scope = scopes[a.mean]
            among = [j for j in scope if not (a.leave_one_out and j == k)]
            count = {j: length[j] if a.length_weighted else 1 for j in among}
            if len({reward[j] for j in scope}) == 1 or sum(count.values()) == 0:
                out[k], baseline[k] = 0.0, reward[k]
                continue
            baseline[k] = sum(count[j] * reward[j] for j in among) / sum(count.values())
        if a.mean in PER_SAMPLE:
            baseline[k] = greedy[k]
        out[k] = reward[k] - baseline[k]
        if a.std == "mean":  # MaxRL (arXiv:2602.02710)
            out[k] = out[k] / baseline[k] if baseline[k] > 0 else 0.0
            continue
        if a.std in scopes and len({reward[j] for j in scopes[a.std]}) == 1:
            out[k] = 0.0
            continue
        if a.std != "none":
            out[k] /= spread([reward[j] for j in scopes[a.std]], a.ddof) + a.eps
    return out, baseline


def spread(values, ddof):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - ddof, 1))


def whitened(values, a):
    if not values:
        return []
    mean, s = sum(values) / len(values), spread(values, a.ddof)
    return [(v - mean) / (s + a.eps) for v in values]


def gae(rewards, values, gamma, lam):
    """A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t over the steps of an episode, which ends
    behind the last (arXiv:1506.02438)."""
    out, ahead, value = [], 0.0, 0.0
    for r, v in reversed(list(zip(rewards, values, strict=True))):
        ahead, value = r + gamma * value - v + gamma * lam * ahead, v
        out.append(ahead)
    return out[::-1]


def returns(rewards, gamma):
    """sum_k gamma^k r_(t+k)."""
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def critic(rows, use, now, before, targets, clip):
    """Mean over the learnt tokens of 1/2 max((V - R)^2, (V_old + clip(V - V_old) - R)^2), and its gradient."""
    x = leaves(now)
    share = shares(rows, use, SimpleNamespace(denominator="token", denominator_tokens=0))
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(len(rows)):
        for t in use[i]:
            far = (x[i][t] - targets[i][t]) ** 2
            if clip:
                near = (before[i][t] + clamp(x[i][t] - before[i][t], -clip, clip) - targets[i][t]) ** 2
                far = most(far, near)
            loss = loss + share[i] * far / 2
    return loss.item(), [g.numpy() for g in torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)]


# -- corrections ---------------------------------------------------------------------------------


def interpolated(rows, mu, now, version):
    """log mu + a / (a + 1) (log pi - log mu) for a token a versions old, as A-3PO (arXiv:2512.06547) has it if the
    current policy is one version ahead of the weights to be updated."""
    out = [np.zeros(len(row.tokens)) for row in rows]
    for i, row in enumerate(rows):
        for t in steps(row):
            a = max(version - int(row.version[t]), 0)
            if math.isfinite(mu[i][t]):
                out[i][t] = mu[i][t] + a / (a + 1) * (float(now[i][t]) - mu[i][t])
    return out


def weights(rho, c, use, kept):
    """[{token: weight}]; truncated as in arXiv:1802.01561, masked outside of the bounds as in IcePop."""
    out = []
    for i, at in enumerate(use):
        whole = sum(rho[i][t] for t in at)
        level = {"token": lambda t, i=i: rho[i][t], "sequence": lambda t, whole=whole: whole,
                 "geometric": lambda t, whole=whole, at=at: whole / len(at)}[c.level]  # fmt: skip
        out.append({})
        for t in at:
            w = 1.0 if c.proximal == "behaviour" else math.exp(level(t))
            inside = c.low <= w <= c.cap
            if c.proximal != "behaviour":
                w = {"mask": w if inside else 0.0, "truncate": min(w, c.cap), "clip": min(max(w, c.low), c.cap)}[
                    c.action
                ]
            out[i][t] = w
    left = [[t for t in at if kept[i][t]] for i, at in enumerate(use)]
    if c.normalise and any(left):
        mean = mean_of(out, left)
        out = [{t: w / mean for t, w in one.items()} for one in out]
    return out


def correct(rows, c, rho, A, use, mu):
    """[{token: whether no mask leaves it out}]."""
    stat = {
        "ratio": lambda r: r,
        "k1": math.log,
        "k2": lambda r: math.log(r) ** 2 / 2,
        "k3": lambda r: r - 1 - math.log(r),
    }
    kept = [dict.fromkeys(at, True) for at in use]
    for i, at in enumerate(use):
        if not at:
            continue
        ratio = {t: math.exp(rho[i][t]) for t in at}
        if c.mask != "none":
            f = stat[c.mask]
            high = f(c.mask_high) if c.mask_high < math.inf else math.inf
            low = -math.inf if c.mask in ("k2", "k3") or c.mask_low == 0 else f(c.mask_low)
            s = {t: f(ratio[t]) for t in at}
            for t in at:
                over = {"token": [s[t]], "sum": [sum(s.values())], "mean": [sum(s.values()) / len(s)],
                        "max": [max(s.values()), min(s.values())]}[c.mask_over]  # fmt: skip
                kept[i][t] &= all(low <= one <= high for one in over)
        if c.veto and min(ratio.values()) < c.veto:
            kept[i] = dict.fromkeys(at, False)
        if c.binary_kl:  # KPop
            for t in at:
                q, p = (min(math.exp(v), math.exp(-1e-6)) for v in (mu[i][t], mu[i][t] + rho[i][t]))
                kept[i][t] = kept[i][t] and max(binary_kl(p, q), binary_kl(q, p)) <= c.binary_kl
        if c.drift and -sum(rho[i][t] for t in at) / len(at) > c.drift:
            kept[i] = {t: kept[i][t] and A[i][t] >= 0 for t in at}
    if c.second_moment:
        left = sorted((rho[i][t] ** 2, i, t) for i in range(len(use)) for t in use[i] if kept[i][t])
        while left and sum(one[0] for one in left) / len(left) > c.second_moment:
            _, i, t = left.pop()
            kept[i][t] = False
    return kept


def shares(rows, counted, o):
    """What each learnt token of a row counts for; 0 for rows that learn nothing.

    token: DAPO (arXiv:2503.14476), over the batch; sequence: GRPO (arXiv:2402.03300); constant: Dr. GRPO
    (arXiv:2503.20783).
    """
    count = [len(at) for at in counted]
    live = [i for i in range(len(rows)) if count[i]]
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


# -- surrogates ----------------------------------------------------------------------------------


def ratios(x, old, o):
    """r of each learnt token; sequence and sequence_token: GSPO and GSPO-token (arXiv:2507.18071)."""
    s, p = torch.exp((x - old).mean()), torch.exp((x - old).sum())
    return {
        "token": torch.exp(x - old),
        "sequence": s.expand(len(x)),
        "sequence_token": s.detach() * torch.exp(x - x.detach()),
        "product": p.expand(len(x)),
    }[o.ratio]


def covariance(x, A, use):
    """{(row, token): (log pi - mean)(A - mean)} over all learnt tokens (arXiv:2505.22617)."""
    at = [(i, t) for i in range(len(use)) for t in use[i]]
    if not at:
        return {}
    logp = {(i, t): float(x[i][t].detach()) for i, t in at}
    mean_logp, mean_A = sum(logp.values()) / len(at), sum(A[i][t] for i, t in at) / len(at)
    return {(i, t): (logp[i, t] - mean_logp) * (A[i][t] - mean_A) for i, t in at}


def gains(i, at, x, old, A, o, cov, chosen, use):
    """Gain of each learnt token of sample i.

    geometric: GMPO (arXiv:2507.20673), whose clipping range is in log space. clip_cov and kl_cov: arXiv:2505.22617.
    """
    x, old, A = x[at], torch.tensor(old[at]), [A[t] for t in at]
    if o.surrogate == "geometric":
        out = []
        for A_t in A:
            total = 0.0
            for d, A_s in zip(x - old, A, strict=True):
                c = clamp(d, -o.clip_low, o.clip_high)
                total = total + (least(d, c) if A_s >= 0 else most(d, c))
            out.append(torch.exp(total / len(x)) * A_t)
        return out
    out = [gain(*one, o) for one in zip(x, ratios(x, old, o), A, old, strict=True)]
    number = max(int(o.cov_fraction * sum(len(one) for one in use)), 1)
    if o.surrogate == "clip_cov":
        for n, t in enumerate(at):
            candidate = o.cov_low < cov[i, t] < o.cov_high and not is_clipped(torch.exp(x[n] - old[n]), A[n], o)
            if candidate and (chosen is None or (i, t) in chosen):
                out[n] = torch.zeros((), dtype=torch.float64)
    if o.surrogate == "kl_cov":
        largest = sorted(cov, key=cov.get)[-number:]
        for n, t in enumerate(at):
            if (i, t) in largest:
                out[n] = out[n] - o.cov_coef * torch.abs(x[n] - old[n])
    return out


def is_clipped(r, A, o):
    return bool(r * A > clamp(r, 1 - o.clip_low, 1 + o.clip_high) * A)


def gain(x, r, A, old, o):
    """Gain of one token.

    clip: PPO (arXiv:1707.06347), ratio_cap the upper bound of the unclipped ratio (INTELLECT-2, arXiv:2505.07291),
    dual_clip arXiv:1912.09729; score: REINFORCE; cispo: MiniMax-M1 (arXiv:2506.13585); sapo: arXiv:2511.20347; vespo:
    arXiv:2602.10693; dppo: arXiv:2602.04879, whose mask takes the token out.
    """
    clipped = clamp(r, 1 - o.clip_low, 1 + o.clip_high)
    if o.surrogate in ("clip", "clip_cov"):
        u = (least(r, torch.full_like(r, o.ratio_cap)) if o.ratio_cap > 0 else r) * A
        g = least(u, clipped * A)
        return most(g, torch.full_like(g, o.dual_clip * A)) if o.dual_clip > 0 and A < 0 else g
    if o.surrogate == "score":
        return A * x
    if o.surrogate in ("ratio", "kl_cov"):
        return r * A
    if o.surrogate == "cispo":
        return clipped.detach() * A * x
    if o.surrogate == "sapo":
        tau = o.tau_pos if A > 0 else o.tau_neg
        return 4 / tau * torch.sigmoid(tau * (r - 1)) * A
    if o.surrogate == "vespo":
        k, lam = o.vespo_pos if A >= 0 else o.vespo_neg
        W = float(r.detach())
        return W**k * math.exp(lam * (1 - W)) * A * x
    if o.surrogate == "dppo":
        moved = float((torch.exp(x) - torch.exp(old)).detach())
        far = (A > 0 and moved > o.tv_high) or (A < 0 and moved < -o.tv_low)
        return (0.0 if far else r * A) - o.tv_coef * torch.log(r) ** 2
    if o.surrogate == "dppo_kl":
        pi, before = (min(float(torch.exp(torch.as_tensor(v)).detach()), math.exp(-1e-6)) for v in (x, old))
        bound = o.binary_kl_high if A > 0 else o.binary_kl_low
        far = binary_kl(before, pi) > bound and (pi - before) * A > 0
        return (0.0 if far else r * A) - o.tv_coef * torch.log(r) ** 2
    raise ValueError(f"no surrogate {o.surrogate!r}")


def binary_kl(p, q):
    """KL(p || q) of the events that a token is drawn, or not (arXiv:2602.04879)."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def kl(x, ref, estimator):
    """k1, k2, k3 of one token, for samples of the current policy (k3 in GRPO, arXiv:2402.03300); k3_k2 has the value of
    k3 and the gradient of k2."""
    d = x - ref
    k1, k2, k3 = d, d**2 / 2, torch.exp(-d) - 1 + d
    return {"k1": k1, "k2": k2, "k3": k3, "k3_k2": k2 + (k3 - k2).detach()}[estimator]


def clamp(x, low, high):
    return most(least(x, torch.full_like(x, high)), torch.full_like(x, low))


def least(a, b):
    """The lesser of two scalars; of equals the first, gradient included."""
    return a if a <= b else b


def most(a, b):
    """The greater of two scalars; of equals the first, gradient included."""
    return a if a >= b else b
