"""Score centering (arXiv:2609.20807) against distributions over the whole vocabulary in float64, and other people's
formula for the same numbers."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from areax.core import centering, losses, metrics, packing
from areax.rollout.types import Sample

V, BEHAVIOUR = 11, {"proximal": "behaviour"}
OBJECTIVES = {
    "clipped": losses.GRPO(clip_low=0.1, clip_high=0.2, score_centering=True, correction=BEHAVIOUR),
    "vanilla": losses.REINFORCE(score_centering=True, correction=BEHAVIOUR),
    "truncated": losses.CISPO(clip_low=1.0, clip_high=0.3, score_centering=True, correction=BEHAVIOUR),  # TIS at 1.3
    "soft": losses.SAPO(score_centering=True, correction=BEHAVIOUR),
}


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def log_softmax(z):
    return z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)


def samples(K, same=False):
    """Four rollouts of two prompts with the sampler's K likeliest tokens, and what the trainer's logits are there."""
    rng, made, logits = np.random.default_rng(0), [], []
    for i in range(4):
        n = 5 + i
        z = rng.normal(0, 1.5, (n, V))
        q = log_softmax(z + (0 if same else rng.normal(0, 0.5, (n, V))))
        tokens = np.array([rng.choice(V, p=np.exp(row)) for row in q])
        ids = np.argsort(-q, 1)[:, :K]
        top = {"sampler_ids": ids.astype(np.int32), "sampler_logp": np.take_along_axis(q, ids, 1)}
        mask = np.arange(n) >= 2
        made.append(
            Sample(
                tokens=tokens.astype(np.int32), mask=mask, logp=np.where(mask, q[np.arange(n), tokens], 0),
                version=np.zeros(n, np.int32), turn=np.zeros(n, np.int32), rewards=((n - 1, (1.0, 0.25, 0.0, 2.0)[i]),),
                group=i // 2, prompt=i // 2, sample=i, rollout=i,
                arrays={name: ("target", x) for name, x in top.items()},
            )
        )  # fmt: skip
        logits.append(z)
    return made, logits


def slopes(spec, made, logits, rows=1):
    """(loss, gradient by each row's logits, at the token that they predict), the metrics."""
    wide = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    batch = jax.tree.map(wide, packing.pack(made, 16, rows=rows))
    given = [s.replace(arrays={"z": ("target", z)}) for s, z in zip(made, logits, strict=True)]
    z_MBTV = wide(packing.pack(given, 16, rows=rows).target["z"])
    ready = spec.prepare(batch)

    def loss(z_MBTV):
        total, reports = 0.0, []
        for m in range(len(z_MBTV)):
            one = jax.tree.map(lambda x: x[m], ready)  # noqa: B023
            flat = z_MBTV[m].reshape(-1, V)
            ids, target = one.target["sampler_ids"], one.target_BT
            extra = centering.logp_of(flat, target.reshape(-1), ids.reshape(len(flat), -1)).reshape(ids.shape)
            logp = jnp.take_along_axis(jax.nn.log_softmax(z_MBTV[m]), target[..., None], -1)[..., 0]
            value, report = spec.loss(types.SimpleNamespace(logp_BT=logp, entropy_BT=-logp, extra=extra), one)
            total += value
            reports.append(report)
        return total, functools.reduce(metrics.merge_trees, reports)

    (value, report), slope = jax.value_and_grad(loss, has_aux=True)(z_MBTV)
    columns = [packing.unpack(slope[..., v], batch, made) for v in range(V)]
    own = [np.stack(rows, 1) for rows in zip(*columns, strict=True)]
    return float(value), own, packing.unpack(ready.adv_BT, batch, made), report


def reference(spec, made, logits, adv):
    """minus the mean over tokens (or sequences) of f(r) A grad log p(y) - E_q~[f(p / q~) A grad log p], q~ over all V
    tokens: q at those reported, rho p elsewhere."""
    tokens, out = sum(int(s.mask.sum()) for s in made), []
    for s, z, A in zip(made, logits, adv, strict=True):
        x = torch.tensor(z, requires_grad=True)
        p, total = torch.log_softmax(x, -1), 0.0
        for t in np.flatnonzero(s.mask):
            ids, q = s.arrays["sampler_ids"][1][t], s.arrays["sampler_logp"][1][t]
            now = p[t].detach().numpy()
            rest = lambda x: max(1 - np.exp(x).sum(), 1e-6)
            all_q = np.log(rest(q)) - np.log(rest(now[ids])) + now
            all_q[ids] = q
            share = {"token": 1 / tokens, "sequence": 1 / s.mask.sum() / 4, "sequence_sum": 1 / 4}[spec.denominator]
            f = np.array([weight(spec, a, A[t]) for a in now - all_q])
            total = total - share * A[t] * (weight(spec, now[s.tokens[t]] - s.logp[t], A[t]) * p[t, s.tokens[t]])
            total = total + share * A[t] * (torch.tensor(np.exp(all_q) * f) * p[t]).sum()
        out.append(torch.autograd.grad(total, x)[0].numpy())
    return out


def weight(spec, log_r, A):
    """f(r) of the gradient f(r) A grad log p."""
    r = np.exp(log_r)
    if spec.surrogate == "score":
        return 1.0
    if spec.surrogate == "cispo":
        return min(max(r, 1 - spec.clip_low), 1 + spec.clip_high)
    if spec.surrogate == "clip":
        return 0.0 if (A > 0 and r > 1 + spec.clip_high) or (A < 0 and r < 1 - spec.clip_low) else r
    tau = spec.tau_pos if A > 0 else spec.tau_neg
    s = 1 / (1 + np.exp(-tau * (r - 1)))
    return 4 * s * (1 - s) * r


@pytest.mark.sweep
@pytest.mark.parametrize("K", [4, 1, V])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_sums_over_the_whole_vocabulary(name, K):
    spec, (made, logits) = OBJECTIVES[name], samples(K)
    _, got, adv, report = slopes(spec, made, logits)
    wanted = reference(spec, made, logits, adv)
    for a, b, s in zip(got, wanted, made, strict=True):
        np.testing.assert_allclose(a, b * s.mask[:, None], atol=1e-6)  # log-probabilities are packed in float32
    assert max(np.abs(b).max() for b in wanted) > 1e-3
    heads = np.concatenate([np.exp(s.arrays["sampler_logp"][1][s.mask]).sum(1) for s in made])
    np.testing.assert_allclose(float(report["sampler_mass"].sum) / len(heads), heads.mean(), rtol=1e-6)
    _, several, _, _ = slopes(spec, [*made[2:], *made[:2]], [*logits[2:], *logits[:2]], rows=2)
    for a, b in zip([*several[2:], *several[:2]], got, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tokens_whose_reports_are_no_numbers_are_left_out(name):
    """One that is learnt and one of the prompt: all gradients are numbers, and that of the learnt one is 0."""
    made, logits = samples(4)
    for t in (1, 3):
        made[0].arrays["sampler_logp"][1][t, 1] = np.nan
    _, got, _, report = slopes(OBJECTIVES[name], made, logits)
    assert all(np.isfinite(x).all() for x in got) and not got[0][3].any() and got[0][4].any()
    assert float(report["unusable_fraction"].sum) == 1


def test_what_sampler_and_trainer_compute_alike_changes_nothing():
    made, logits = samples(4, same=True)
    plain = losses.REINFORCE(correction=BEHAVIOUR)
    for a, b in zip(slopes(OBJECTIVES["vanilla"], made, logits)[1], slopes(plain, made, logits)[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_mean_update_under_the_sampler_is_0(name):
    """Of a token of constant advantage, drawn from q: its expectation, over all tokens that may be drawn."""
    spec, rng = OBJECTIVES[name], np.random.default_rng(1)
    p, q = log_softmax(rng.normal(0, 1, V)), log_softmax(rng.normal(0, 1, V))
    f = np.array([weight(spec, a, -0.7) for a in p - q])
    score = np.eye(V) - np.exp(p)  # grad log p(v) by the logits
    mean = np.asarray(slope_of(spec, p, q))
    drawn = (np.exp(q) * f * -0.7) @ score
    assert np.abs(drawn).max() > 1e-3
    np.testing.assert_allclose(mean, drawn, atol=1e-9)


def slope_of(spec, p, q):
    """Gradient of `expected` by the logits, at advantage -0.7."""
    table = lambda log: np.vectorize(lambda a: -0.7 * weight(spec, a, -0.7))(log)
    own = jnp.asarray(table(p - q))[None, None]
    slope = lambda log_BTL: own if log_BTL.shape[-1] == V else jnp.full((1, 1, 1), -0.7 * weight(spec, 0.0, -0.7))
    f = lambda z: centering.expected(slope, jax.nn.log_softmax(z)[None, None], jnp.asarray(q)[None, None])[0, 0]
    return jax.grad(f)(jnp.asarray(p))


def test_the_term_is_that_of_vime():
    """`score_centering_correction` of vllm-project/vime, written anew: alone, and with weights min(p / q, 2)."""
    rng = np.random.default_rng(2)
    p = log_softmax(rng.normal(0, 1.5, (6, V)))[:, :5]
    q = log_softmax(rng.normal(0, 1.5, (6, V)))[:, :5]
    rho = np.maximum(1 - np.exp(q).sum(1), 1e-6) / np.maximum(1 - np.exp(p).sum(1), 1e-6)
    for f in (lambda r: 1 + 0 * r, lambda r: np.minimum(r, 2.0)):
        theirs = ((np.exp(q) * f(np.exp(p - q)) - (rho * f(1 / rho))[:, None] * np.exp(p)) * p).sum(1)
        slope = lambda log, f=f: jnp.asarray(f(np.exp(np.asarray(log))))
        got = centering.expected(slope, jnp.asarray(p)[None], jnp.asarray(q)[None])[0]
        np.testing.assert_allclose(got, theirs, rtol=1e-12)


def test_what_score_centering_cannot_do_is_refused():
    for make, words in (
        (lambda: losses.GRPO(score_centering=True), 'score_centering must be False unless .*proximal "behaviour"'),
        (
            lambda: losses.DPPO(score_centering=True),
            "score_centering must be False unless the surrogate is score, clip",
        ),
        (lambda: losses.GSPO(score_centering=True, correction=BEHAVIOUR), 'the ratio "token"'),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    spec, (made, _) = OBJECTIVES["vanilla"], samples(3)
    bare = packing.pack([s.replace(arrays={}) for s in made], 16, rows=1)
    with pytest.raises(ValueError, match=r'score_centering needs target\["sampler_ids"\] and "sampler_logp", from gen'):
        spec.prepare(bare)
    ready = jax.tree.map(lambda x: x[0], spec.prepare(jax.tree.map(jnp.asarray, packing.pack(made, 16, rows=1))))
    out = types.SimpleNamespace(logp_BT=ready.logp_BT, entropy_BT=ready.logp_BT, extra=None)
    with pytest.raises(
        ValueError, match="score_centering needs log-probabilities of sampler_ids, .* got None; use models"
    ):
        spec.loss(out, ready)
    assert "gain = A log pi, minus its mean under the policy that sampled (score centering)" in str(spec)
    assert spec.corrects and not losses.REINFORCE(correction=BEHAVIOUR).corrects
