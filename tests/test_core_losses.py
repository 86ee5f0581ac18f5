"""Supervised fine-tuning against float64, and what objectives say when something is missing."""

import functools
import math
import re
import types
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import losses, metrics, options, packing, policy, preference, token_losses
from areax.core.advantages import Advantage
from areax.core.corrections import Correction
from areax.core.entropy import Entropy
from areax.core.kl import KL
from areax.core.observation import Observation
from areax.core.shaping import Shaping
from areax.rollout.types import Sample


def samples(seed=0, groups=5, size=4):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(groups * size):
        n, m = int(rng.integers(4, 20)), 3
        out.append(
            Sample(
                tokens=rng.integers(0, 50, n).astype(np.int32),
                mask=np.arange(n) >= m,
                logp=np.where(np.arange(n) >= m, rng.normal(-1, 0.5, n), 0).astype(np.float32),
                version=np.where(np.arange(n) >= m, 3, -1).astype(np.int32),
                turn=np.zeros(n, np.int32),
                rewards=((n - 1, float(rng.integers(0, 3))),),
                group=i // size,
                sample=i,
                rollout=i,
            )
        )
    return out


def scores_like(batch, seed=1, spread=0.3):
    """Random 'current' log-probabilities near the behaviour's."""
    rng = np.random.default_rng(seed)
    logp = batch.logp_BT + rng.normal(0, spread, batch.logp_BT.shape).astype(np.float32)
    return types.SimpleNamespace(logp_BT=jnp.asarray(logp), entropy_BT=jnp.asarray(np.abs(logp)))


def test_sft_is_the_token_mean():
    rows = samples()
    batch = packing.pack(rows, 32, rows=2)
    now = scores_like(batch)
    got, report = losses.SFT().loss(now, losses.SFT().prepare(batch))
    own = packing.unpack(now.logp_BT, batch, rows)
    want = -np.mean(np.concatenate([x[s.mask].astype(np.float64) for x, s in zip(own, rows, strict=True)]))
    np.testing.assert_allclose(float(got), want, rtol=1e-5)
    np.testing.assert_allclose(metrics.to_dict(report)["nll"], want, rtol=1e-5)


def test_masked_tokens_do_not_matter_to_sft():
    batch = packing.pack(samples(), 32, rows=2)
    now, spec = scores_like(batch), losses.SFT()
    junk = jnp.where(batch.mask_BT, 0, jnp.nan)

    def gradient(extra):
        out = lambda x: types.SimpleNamespace(logp_BT=x, entropy_BT=now.entropy_BT + extra)
        return jax.value_and_grad(lambda x: spec.loss(out(x), spec.prepare(batch))[0])(now.logp_BT + extra)

    for a, b in zip(gradient(0 * batch.logp_BT), gradient(junk), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_objective_lists_the_fields_it_needs():
    with pytest.raises(ValueError, match="needs scores"):
        losses.GRPO().prepare(packing.pack(samples(), 32))
    with pytest.raises(ValueError, match="needs ref_BT"):
        losses.GRPO(kl=dict(coef=0.1), correction=dict(proximal="behaviour")).prepare(packing.pack(samples(), 32))
    assert "clip(r, 1 - 0.2, 1 + 0.28)" in str(losses.GRPO())


def clipped(low, high):
    return lambda r: min(max(r, low), high)


# loss of a token from p, q, its weight and its advantage, in Python floats
TOKEN_LOSSES = {
    "cross_entropy": (token_losses.cross_entropy, lambda p, q, w, A: -w * p),
    "importance_sampling": (token_losses.importance_sampling, lambda p, q, w, A: -math.exp(p - q) * A),
    "ppo": (
        token_losses.ppo,
        lambda p, q, w, A: -min(math.exp(p - q) * A, clipped(0.8, 1.2)(math.exp(p - q)) * A),
    ),
    "cispo": (
        functools.partial(token_losses.cispo, low=0.9, high=1.1),
        lambda p, q, w, A: -clipped(0.9, 1.1)(math.exp(p - q)) * p * A,
    ),
    "dro": (
        functools.partial(token_losses.dro, beta=0.3),
        lambda p, q, w, A: -(p * A - 0.15 * (p - q) ** 2),
    ),
}


def with_arrays(rows, seed=3):
    rng = np.random.default_rng(seed)
    draw = lambda s: ("target", rng.normal(size=len(s.tokens)).astype(np.float32))
    return [s.replace(arrays={"weights": draw(s), "advantages": draw(s)}) for s in rows]


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_token_losses_are_their_formulas_summed_over_the_learnt_tokens(name, reduce):
    function, formula = TOKEN_LOSSES[name]
    rows = with_arrays(samples())
    batch = packing.pack(rows, 32, rows=2)
    spec, now = losses.PerToken(function, reduce=reduce), scores_like(batch)
    got, report = spec.loss(now, spec.prepare(batch))
    own = packing.unpack(now.logp_BT, batch, rows)
    values = [
        formula(float(p), float(q), float(w), float(A))
        for x, s in zip(own, rows, strict=True)
        for p, q, w, A, m in zip(x, s.logp, s.arrays["weights"][1], s.arrays["advantages"][1], s.mask, strict=True)
        if m
    ]
    want = {"sum": sum(values), "mean": sum(values) / len(values)}[reduce]
    np.testing.assert_allclose(float(got), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(metrics.numbers(report)["token_loss"], sum(values) / len(values), rtol=1e-4, atol=1e-6)


def test_gspo_has_the_ratio_of_the_sequence_and_the_gradient_of_the_token():
    """Values and gradients by a loop over sequences in float64."""
    rng = np.random.default_rng(4)
    rows = [
        s.replace(arrays=s.arrays | {"sequence_ratio_mask": ("target", rng.integers(0, 2, len(s.tokens)))})
        for s in with_arrays(samples())
    ]
    batch = packing.pack(rows, 32, rows=2)
    spec = losses.PerToken(functools.partial(token_losses.gspo, low=0.9, high=1.1), reduce="sum")
    now = scores_like(batch)
    total = lambda x: spec.loss(types.SimpleNamespace(logp_BT=x, entropy_BT=-x), spec.prepare(batch))[0]
    got, slope = jax.value_and_grad(total)(now.logp_BT)
    want = 0.0
    for p, dp, s in zip(*(packing.unpack(x, batch, rows) for x in (now.logp_BT, slope)), rows, strict=True):
        inside = (np.asarray(s.arrays["sequence_ratio_mask"][1]) != 0) & (np.arange(len(p)) > 0)
        gap = (np.where(s.mask, p, 0) - s.logp).astype(np.float64)
        r = math.exp(gap[inside].mean()) if inside.any() else 1.0
        for t in np.flatnonzero(s.mask):
            A = float(s.arrays["advantages"][1][t])
            gains = r * A, min(max(r, 0.9), 1.1) * A
            want -= min(gains)
            np.testing.assert_allclose(dp[t], -r * A if gains[0] < gains[1] or 0.9 < r < 1.1 else 0, atol=1e-4)
    np.testing.assert_allclose(float(got), want, rtol=1e-5)


def test_tokens_of_advantage_0_and_tokens_off_the_mask_have_no_gradient_whatever_their_ratio():
    rows = [s.replace(arrays={"advantages": ("target", 0 * s.logp)}, logp=s.logp - 1e4) for s in samples()]
    batch = packing.pack(rows, 32, rows=2)
    junk = jnp.where(batch.mask_BT, -1.0, jnp.nan)
    for function in (token_losses.importance_sampling, token_losses.ppo, token_losses.cispo):
        spec = losses.PerToken(function, reduce="sum")
        loss = lambda x, spec=spec: spec.loss(types.SimpleNamespace(logp_BT=x, entropy_BT=-x), spec.prepare(batch))[0]
        value, slope = jax.value_and_grad(loss)(junk)
        assert value == 0 and not np.any(slope)


def test_a_function_of_ones_own_is_a_loss():
    def unlikelihood(logp_BT, batch):
        """-log(1 - pi)."""
        return -jnp.log1p(-jnp.exp(logp_BT))

    rows = samples()
    batch, spec = packing.pack(rows, 32, rows=2), losses.PerToken(unlikelihood)
    now = scores_like(batch).logp_BT - 2
    got, _ = spec.loss(types.SimpleNamespace(logp_BT=now, entropy_BT=now), spec.prepare(batch))
    own = packing.unpack(now, batch, rows)
    want = [-np.log1p(-np.exp(np.float64(x[s.mask]))) for x, s in zip(own, rows, strict=True)]
    np.testing.assert_allclose(float(got), np.mean(np.concatenate(want)), rtol=1e-5)
    assert "minimise sum_t w_t f_t / sum_t w_t\n  f = -log(1 - pi)." in str(spec)
    assert hash(spec) == hash(losses.PerToken(unlikelihood))


def test_a_function_that_is_no_loss_per_token_is_refused():
    batch = packing.pack(samples(), 32)
    now = scores_like(batch)
    with pytest.raises(ValueError, match=r"function must return a loss per token, \(.*\), got \(\)"):
        losses.PerToken(lambda logp_BT, batch: jnp.mean(logp_BT)).loss(now, batch)
    with pytest.raises(ValueError, match="PerToken: reduce must be mean or sum, got none"):
        losses.PerToken(token_losses.cross_entropy, reduce="none")
    with pytest.raises(ValueError, match="PerToken: function must be f"):
        losses.PerToken("cross_entropy")
    with pytest.raises(ValueError, match="samples need an array 'advantages', got"):
        losses.PerToken(token_losses.ppo).loss(now, batch)


def test_the_types_of_options_are_those_of_the_fields():
    """Field by field; a part may be given whole, or by single fields."""
    pairs = {
        Shaping: options.ShapingOptions, Advantage: options.AdvantageOptions, Correction: options.CorrectionOptions,
        KL: options.KLOptions, Entropy: options.EntropyOptions,
        Observation: options.ObservationOptions, policy.Policy: options.PolicyOptions,
        preference.Preference: options.PreferenceOptions,
    }  # fmt: skip
    for fields, named in pairs.items():
        wanted = {name: hint | pairs[hint] if hint in pairs else hint for name, hint in get_type_hints(fields).items()}
        assert list(get_type_hints(named).items()) == list(wanted.items()), named.__name__


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"clip_hihg": 0.3}, TypeError, "GRPO: there is no option clip_hihg; did you mean clip_high?"),
        ({"kl": {"coeff": 0.1}}, TypeError, "GRPO: kl: there is no option coeff; did you mean coef?"),
        ({"kl": 0.1}, ValueError, "GRPO: kl must be a mapping of its options or of type KL, got 0.1"),
    ],
)
def test_an_option_that_a_preset_does_not_have_is_named(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        losses.GRPO(**options)
    with pytest.raises(TypeError, match="^DPO: there is no option bta; did you mean beta\\?$"):
        losses.DPO(bta=0.1)
