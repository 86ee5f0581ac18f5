"""Policy objectives against slow float64 loops from the papers, and the properties that all of them have."""

import dataclasses
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.core import losses, metrics, packing
from areax.rollout.types import Sample

GOLDEN = Path(__file__).parent / "data" / "objectives.txt"
PRESETS = {name: preset() for name, preset in losses.POLICIES.items()}
# Of each option values that no preset has.
VARIANTS = {
    "behaviour": losses.GRPO(proximal="behaviour"),
    "batch statistics": losses.GRPO(mean="batch", std="batch", ddof=0),
    "leave one out of the batch": losses.GRPO(mean="batch", std="none", leave_one_out=True),
    "dual clip": losses.GRPO(dual_clip=1.5),
    "ratio cap": losses.GRPO(ratio_cap=1.4),
    "sequence token": losses.GSPO(ratio="sequence_token", clip_low=0.1, clip_high=0.2),
    "sequence clip": losses.GSPO(clip_low=0.1, clip_high=0.2),
    "soft": losses.SAPO(tau_pos=2.0, tau_neg=5.0),
    "narrow geometric": losses.GMPO(clip_low=0.1, clip_high=0.2),
    "bounded cispo": losses.CISPO(clip_low=0.2, clip_high=0.1),
    "truncated weights": losses.GRPO(weight_action="truncate", weight_cap=1.1),
    "masked on both sides": losses.GRPO(weight_low=0.8, weight_cap=1.25),
    "weights of sequences": losses.GRPO(weight="sequence", weight_cap=2.0),
    "geometric weights": losses.GRPO(weight="geometric", weight_low=0.9, weight_cap=1.1),
    "a mean over rollouts": losses.GRPO(denominator="rollout"),
    "a mean over prompts": losses.GRPO(denominator="prompt"),
    **{name: losses.GRPO(kl_coef=0.1, kl_estimator=name) for name in ("k1", "k2", "k3")},
}
EVERY = PRESETS | VARIANTS


def samples(seed=0, groups=4, size=4, nan=(5,), split=True):
    """Groups of rollouts with rewards, one of them unscorable, one in two rows, one group all equal."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(groups * size):
        reward = np.nan if i in nan else 1.0 if i // size == 1 else float(rng.integers(0, 3))
        for weight in (0.25, 0.75) if split and i == 2 else (1.0,):
            n = int(rng.choice([5, 9, 14]))
            mask = (np.arange(n) >= 3) & (rng.random(n) < 0.9)
            out.append(
                Sample(
                    tokens=rng.integers(0, 50, n).astype(np.int32), mask=mask,
                    logp=np.where(mask, rng.normal(-1, 0.5, n), 0).astype(np.float32),
                    version=np.where(mask, 3, -1).astype(np.int32), turn=np.zeros(n, np.int32),
                    rewards=((n - 1, reward),), group=i // size, prompt=i // size, sample=len(out), rollout=i,
                    weight=weight,
                )
            )  # fmt: skip
    return out


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def packed(rows, count=2):
    """A Batch in float64; few shapes, for each is compiled operation by operation."""
    to = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    return jax.tree.map(to, packing.pack(rows, 32, rows=count))


def near(batch, seed, spread=0.3):
    """Log-probabilities of a policy near the one that sampled."""
    logp_MBT = np.asarray(batch.logp_BT, np.float64)
    return jnp.asarray(logp_MBT + np.random.default_rng(seed).normal(0, spread, logp_MBT.shape))


def out(logp_BT):
    return types.SimpleNamespace(logp_BT=logp_BT, entropy_BT=jnp.abs(logp_BT), aux={})


def value_and_gradient(spec, batch, prox, now, ref=None):
    ready = spec.prepare(batch.replace(ref_BT=ref), out(prox))
    return jax.value_and_grad(lambda logp: spec.loss(out(logp), ready)[0])(now)


@pytest.mark.parametrize("name", EVERY)
def test_value_and_gradient_are_those_of_the_papers(name):
    spec, rows = EVERY[name], samples()
    batch = packed(rows)
    prox, now, ref = (near(batch, seed) for seed in (1, 2, 3))
    got, gradient = value_and_gradient(spec, batch, prox, now, ref)
    own = lambda x: [np.asarray(one, np.float64) for one in packing.unpack(x, batch, rows)]
    options = types.SimpleNamespace(**dataclasses.asdict(spec), eps=1e-6)
    wanted, slopes = oracles.policy(rows, own(prox), own(now), own(ref), options=options)
    assert abs(float(got) - wanted) <= 1e-9 * max(1, abs(wanted))
    assert max(np.abs(s).max() for s in slopes) > 1e-4
    for a, b in zip(own(gradient), slopes, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", EVERY)
def test_microbatches_rows_and_order_do_not_matter(name):
    """The sum over microbatches of any packing of any order is the same, and so are the metrics."""
    spec, rows = EVERY[name], samples(seed=3)
    rng, told = np.random.default_rng(0), []
    moves = {s.sample: rng.normal(0, 0.2, (3, len(s.tokens))) for s in rows}
    for order, count in ((rows, 2), ([rows[i] for i in rng.permutation(len(rows))], 4)):
        moved = lambda s, k: s.replace(logp=np.where(s.mask, s.logp + moves[s.sample][k], 0))
        batch, others = packed(order, count), [packed([moved(s, k) for s in order], count) for k in range(3)]
        prox, now, ref = (other.logp_BT for other in others)
        ready = spec.prepare(batch.replace(ref_BT=ref), out(prox))
        total, merged = 0.0, None
        for m in range(len(now)):
            loss, report = spec.loss(out(now[m]), jax.tree.map(lambda x, m=m: x[m], ready))
            total, merged = total + float(loss), report if merged is None else metrics.merge_trees(merged, report)
        told.append({"loss": total, **metrics.to_dict(merged)})
    for key, value in told[0].items():
        if not isinstance(value, dict):
            np.testing.assert_allclose(told[1][key], value, rtol=1e-6, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("name", PRESETS)
def test_at_ratio_1_every_gradient_is_that_of_reinforce(name):
    spec, rows = PRESETS[name], samples()
    batch = packed(rows)
    now = batch.logp_BT
    gradient = value_and_gradient(spec, batch, now, now)[1]
    plain = dataclasses.replace(spec, surrogate="score", ratio="token", clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(gradient, value_and_gradient(plain, batch, now, now)[1], atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_bad_numbers_teach_nothing_and_are_counted(name):
    """A behaviour log-probability that is not finite takes its token out; junk off the mask is never seen."""
    spec, rows = EVERY[name], samples()
    at = int(np.flatnonzero(rows[0].mask)[0])
    broken = [rows[0].replace(logp=np.where(np.arange(len(rows[0].mask)) == at, -np.inf, rows[0].logp)), *rows[1:]]
    without = [rows[0].replace(mask=rows[0].mask & (np.arange(len(rows[0].mask)) != at)), *rows[1:]]
    results = []
    for data in (without, broken):
        batch, clean = packed(data), packed(rows)
        junk = jnp.where(batch.mask_BT, 0, jnp.nan) if data is broken else 0.0
        prox, now, ref = (near(clean, seed) + junk for seed in (1, 2, 3))
        results.append(value_and_gradient(spec, batch, prox, now, ref))
        report = spec.loss(out(now), spec.prepare(batch.replace(ref_BT=ref), out(prox)))[1]
        learnt = sum(int(s.mask.sum()) for s in rows if not np.isnan(s.reward))
        wanted = 1 / learnt if data is broken else 0.0
        np.testing.assert_allclose(metrics.to_dict(report)["unusable_fraction"], wanted, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", PRESETS)
def test_a_current_policy_that_is_not_finite_is_not_hidden(name):
    spec, batch = PRESETS[name], packed(samples())
    prox, now = (near(batch, seed) for seed in (1, 2))
    ready = spec.prepare(batch, out(prox))
    at = np.argwhere((np.asarray(ready.weight_BT) > 0) & (np.asarray(ready.adv_BT) != 0))[0]
    assert not np.isfinite(spec.loss(out(now.at[tuple(at)].set(jnp.nan)), ready)[0])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", ["no tokens", "groups of one", "equal rewards", "all unscorable"])
def test_nothing_to_learn_is_finite(name, kind):
    rows = samples(nan=range(16) if kind == "all unscorable" else ())
    if kind == "no tokens":
        rows = [s.replace(mask=np.zeros_like(s.mask)) for s in rows]
    if kind == "groups of one":
        rows = [s.replace(group=i) for i, s in enumerate(rows)]
    if kind == "equal rewards":
        rows = [s.replace(rewards=((len(s.tokens) - 1, 1.0),)) for s in rows]
    spec, batch = PRESETS[name], packed(rows)
    loss, gradient = value_and_gradient(spec, batch, near(batch, 1), near(batch, 2))
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    if kind in ("no tokens", "all unscorable") or spec.mean != "none":
        assert loss == 0 and not np.any(gradient)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 0.9), st.floats(1.1, 3.0), st.sampled_from(["token", "geometric"]))
def test_a_bound_on_the_weight_acts_on_its_own_side(low, high, level):
    """Just inside the ratio counts, just outside it does not."""
    one = Sample(
        tokens=np.arange(4, dtype=np.int32), mask=np.arange(4) >= 1, logp=np.full(4, -1.0, np.float32),
        version=np.zeros(4, np.int32), turn=np.zeros(4, np.int32), rewards=((3, 1.0),),
    )  # fmt: skip
    batch = packed([one] * 20)
    spec = losses.REINFORCE(weight=level, weight_low=low, weight_cap=high)
    for ratio, kept in ((low * 0.999, False), (low * 1.001, True), (high * 0.999, True), (high * 1.001, False)):
        ready = spec.prepare(batch, out(batch.logp_BT + np.log(ratio)))
        weight = np.asarray(ready.weight_BT)[np.asarray(ready.mask_BT)]
        assert (weight > 0).all() == kept and (weight > 0).any() == kept


def test_limits():
    """Bounds far away are no bounds; a coefficient of 0 is no term."""
    batch = packed(samples())
    prox, now, ref = (near(batch, seed) for seed in (1, 2, 3))
    at = lambda spec: value_and_gradient(spec, batch, prox, now, ref)
    free = at(losses.GRPO(clip_low=1.0, clip_high=1e9, weight_cap=1e9))
    for spec in (
        losses.GRPO(clip_low=1.0, clip_high=1e9, weight_action="truncate", weight_cap=1e9),
        losses.GRPO(clip_low=1.0, clip_high=1e9, weight_cap=1e9, dual_clip=1e9, ratio_cap=1e9),
        losses.GRPO(clip_low=1.0, clip_high=1e9, weight_cap=1e9, kl_coef=1e-300),
    ):
        for a, b in zip(at(spec), free, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)
    long = losses.DrGRPO(denominator_tokens=10), losses.DrGRPO(denominator="sequence_sum", denominator_tokens=0)
    for a, b in zip(at(long[0]), at(long[1]), strict=True):
        np.testing.assert_allclose(10 * a, b, atol=1e-12)


def test_weights_and_proximal_policy_carry_no_gradient():
    batch = packed(samples())
    prox, now = (near(batch, seed) for seed in (1, 2))
    batch = batch.replace(ref_BT=now)
    for spec in EVERY.values():
        assert not np.any(
            jax.grad(lambda prox, spec=spec: spec.loss(out(now), spec.prepare(batch, out(prox)))[0])(prox)
        )


def test_objectives_print_their_formula():
    """What each preset optimises, as tests/data/objectives.txt has it."""
    assert "\n\n".join(map(str, PRESETS.values())) + "\n" == GOLDEN.read_text()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: losses.GRPO(clip_low=2.0), "GRPO: clip_low must be between 0 and 1, got 2.0"),
        (lambda: losses.DAPO(dual_clip=0.5), "DAPO: dual_clip must be 0, or above 1"),
        (lambda: losses.SAPO(dual_clip=3.0), "SAPO: dual_clip must be 0, or above 1 with surrogate"),
        (lambda: losses.CISPO(ratio="sequence"), 'CISPO: ratio must be "token" unless'),
        (lambda: losses.DrGRPO(denominator_tokens=0), "denominator_tokens must be above 0"),
        (lambda: losses.OPO(leave_one_out=True), "length_weighted must be False with leave_one_out"),
        (
            lambda: losses.GRPO(surrogate="clop"),
            "surrogate must be one of score, clip, cispo, sapo, geometric, got clop",
        ),
        (
            lambda: losses.GRPO(denominator="tokens"),
            "denominator must be one of token, sequence, sequence_sum, constant",
        ),
        (lambda: losses.GRPO(weight_low=1.5), "weight_low must be between 0 and 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
