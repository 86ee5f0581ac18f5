"""Prints the formula of an objective: the quantity that it maximises, one line per part."""

import math

from . import surrogates

PROXIMAL = {
    "recompute": "the policy before the update",
    "interpolate": "the policy between the sampling one and pi by the token's age",
    "behaviour": "the policy that sampled",
}
RATIOS = {
    "token": "",
    "sequence": ", geometric mean over the sequence",
    "sequence_token": ", of the sequence in value, of the token in gradient",
    "product": ", product over the sequence",
}
LEVELS = {"token": "", "sequence": ", product over the sequence", "geometric": ", geometric mean over the sequence"}
STATISTICS = {"ratio": "w", "k1": "log w", "k2": "log(w)^2 / 2", "k3": "w - 1 - log w"}
SHARES = {
    "token": "1 / learnt tokens of the batch",
    "sequence": "1 / (tokens of the sequence x sequences)",
    "sequence_sum": "1 / sequences",
    "constant": "1 / ({tokens} x sequences)",
    "rollout": "1 / (tokens of the rollout x rollouts)",
    "prompt": "1 / (tokens of the prompt's samples x prompts)",
}


def of(p) -> str:
    """The formula of a `Policy` as text: what it maximises, its symbols, and where it differs from the paper."""
    prox = PROXIMAL[p.correction.proximal]
    lines = [f"gain = {_gain(p)}", *_reward(p.shaping, p.kl, prox), f"A = {_advantage(p.advantage, prox)}"]
    if p.surrogate != "score":
        lines.append(f"r = pi / {PROXIMAL[p.correction.proximal]}{RATIOS[p.ratio]}")
    lines += [*_weight(p.correction), f"share = {SHARES[p.denominator].format(tokens=p.denominator_tokens)}"]
    if not p.correction.count_masked:
        lines[-1] += ", masked tokens excluded"
    lines += _terms(p.kl, p.entropy, p.observation)
    if p.note:
        lines.append(f"not as in the paper: {p.note}")
    return "\n".join([f"{p.name}: maximise sum_t share_t w_t gain_t", *map("  {}".format, lines)])


def _gain(p) -> str:
    gain = surrogates.of(p).formula.format(**vars(p), prox=PROXIMAL[p.correction.proximal])
    if p.ratio_cap:
        gain = gain.replace("min(r A", f"min(min(r, {p.ratio_cap:g}) A")
    gain += f", at least {p.dual_clip:g} A if A < 0" if p.dual_clip else ""
    return gain + (", minus its mean under the policy that sampled (score centering)" if p.score_centering else "")


def _reward(s, kl, prox: str) -> list[str]:
    reward = "reward" if s.bias == 0 else f"(reward + {s.bias:g})"
    reward += "" if s.scale == 1 else f" x {s.scale:g}"
    if (s.low, s.high) != (-math.inf, math.inf):
        reward = f"clip({reward}, {s.low:g}, {s.high:g})"
    if s.overlong_tokens:
        buffer = max(s.overlong_buffer, 1)
        reward += f" - {s.overlong_penalty:g} clip((tokens - {s.overlong_tokens - buffer}) / {buffer}, 0, 1)"
    if s.unfinished_penalty:
        reward += f" - {s.unfinished_penalty:g} if unfinished"
    if kl.coef and kl.place == "reward":
        reward += f" - {_coefficient(kl)} sum_t {kl.estimator}({prox}, reference)"
    lines = [] if reward == "reward" else [f"R = {reward}"]
    if s.truncated != "keep":
        counts = "and from the baseline" if s.truncated == "drop" else "but count in the baseline"
        lines.append(f"rollouts truncated at the length limit are excluded from the loss {counts}")
    if s.dynamic_sampling:
        lines.append("groups with equal rewards are resampled")
    return lines


def _advantage(a, prox: str) -> str:
    if a.credit == "gae":
        lam = f"1 - 1 / ({a.lam_alpha:g} tokens of the sequence), at least 0" if a.lam_alpha else f"{a.lam:g}"
        text = f"sum of (gamma lambda)^k delta_(t+k), delta = r + gamma V' - V, gamma = {a.gamma:g}, lambda = {lam}"
    else:
        kind = "length-weighted mean" if a.length_weighted else "mean of the others" if a.leave_one_out else "mean"
        of = {
            "group": f"{kind} of the group",
            "batch": f"{kind} of the batch",
            "none": "",
            "greedy": "R of greedy decoding",
            "moving": "moving average of R of the seat",
            "optimal_value": f"{a.value_temperature:g} log mean of exp(reference_rewards / {a.value_temperature:g})",
            "optimal_token": "mean of the group at this token, weighted by sum_(s<=t) 1 - 2 pi_s + sum of pi_s^2",
        }
        returns = "sum of r_(t+k)" if a.gamma == 1 else f"sum of {a.gamma:g}^k r_(t+k)"
        reward = "R" if a.credit == "rollout" else returns
        text = f"({reward} - {of[a.mean]})" if a.mean != "none" else reward
        if a.std == "mean":
            text += " / mean of the group, 0 if that is not above 0"
        elif a.std != "none":
            text += f" / (standard deviation of the {a.std} + eps)"
        if a.components:
            weights = a.component_weights or (1.0,) * len(a.components)
            parts = " + ".join(f"{w:g} {name}" for w, name in zip(weights, a.components, strict=True))
            text = f"{parts}, each {text}"
        if a.state_coef:
            spread = " / (standard deviation of these + eps)" if a.std == "group" else ""
            text += f" + {a.state_coef:g} (G - mean of G in the group's turns of the same state){spread}"
            text += f", G = sum of {a.state_gamma:g}^k r of the k-th turn from this one on"
    text += "" if a.whiten == "none" else f", whitened over the {a.whiten}s of the batch"
    return text + (f", plus {a.teacher:g} log(teacher / {prox})" if a.teacher else "")


def _weight(c) -> list[str]:
    if c.proximal == "behaviour":
        return ["w = 1"]
    bound = {
        "mask": f"0 outside [{c.low:g}, {c.cap:g}]",
        "truncate": f"at most {c.cap:g}",
        "clip": f"clipped to [{c.low:g}, {c.cap:g}]",
    }[c.action]
    prox = PROXIMAL[c.proximal] if c.proximal == "recompute" else "that policy"
    text = f"w = {prox} / the policy that sampled{LEVELS[c.level]}, {bound}, for samples older than the weights"
    lines = [text + (", divided by its mean over the batch" if c.normalise else "")]
    if c.mask != "none":
        unit = "tokens" if c.mask_over == "token" else f"sequences by the {c.mask_over}"
        low = f"[{c.mask_low:g}, {c.mask_high:g}]" if c.mask in ("ratio", "k1") else f"that of {c.mask_high:g}"
        where = "outside" if c.mask in ("ratio", "k1") else "above"
        lines.append(f"left out: {unit} of {STATISTICS[c.mask]} {where} {low}, stated as w")
    if c.veto:
        lines.append(f"left out: sequences with a token of w below {c.veto:g}")
    if c.drift:
        lines.append(f"left out: sequences of A < 0 whose mean log w is below -{c.drift:g}")
    if c.binary_kl:
        lines.append(f"left out: tokens whose binary KL, of w's two policies in either order, is above {c.binary_kl:g}")
    if c.second_moment:
        lines.append(f"left out: tokens of largest log(w)^2 until its mean is at most {c.second_moment:g}")
    return lines


def _terms(kl, entropy, observation) -> list[str]:
    lines = []
    if kl.coef and kl.place == "loss":
        times = "pi / the policy that sampled x " if kl.ratio else ""
        whole = " of the sequence / its tokens" if kl.over == "sequence" else ""
        lines.append(f"- {_coefficient(kl)} {times}{kl.estimator}(pi, reference){whole}")
    if entropy.coef:
        floor = f" while its mean is below {entropy.floor:g}" if entropy.floor else ""
        classes = f", by class of token x {entropy.classes}" if entropy.classes else ""
        lines.append(f"+ {entropy.coef:g} entropy{floor}{classes}")
    if observation.coef:
        kinds = ", ".join(observation.kinds)
        lines.append(f"+ {observation.coef:g} log pi of observations ({kinds}), mean over their tokens in the batch")
    return lines


def _coefficient(kl) -> str:
    return f"{kl.coef:g}" + (f" (moving towards {kl.target:g} nats)" if kl.target else "")
