"""Policy objectives against slow float64 loops from the papers, and the properties that all of them have."""

import copy
import dataclasses
import functools
import math
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import thinned

from areax.adapters.tracking import run_dir
from areax.core import losses, metrics, observation, packing, policy, surrogates
from areax.core.critic import Critic
from areax.rollout.chat import observations
from areax.rollout.types import Sample

GOLDEN = Path(__file__).parent / "data" / "objectives.txt"
PRESETS = {name: preset() for name, preset in losses.POLICIES.items()}
INF = math.inf
PARTS = ("correct", "format", "greedy", "moving", "optimal_value")
VERSION = 4  # of the weights to be updated; tokens are up to 3 versions older


def adv(preset=losses.GRPO, **options):
    return preset(advantage=options)


def shaped(**options):
    return losses.GRPO(shaping=options)


def fix(**options):
    return losses.GRPO(correction={"cap": INF} | options)


def kl(**options):
    return losses.GRPO(kl={"coef": 0.1} | options)


# Of each option values that no preset has.
VARIANTS = {
    "bias and scale": shaped(bias=-0.5, scale=4.0),
    "bounded rewards": shaped(low=0.5, high=1.0),
    "over-long": shaped(overlong_tokens=8, overlong_buffer=4, overlong_penalty=0.5),
    "over-long at once": shaped(overlong_tokens=6),
    "unfinished": shaped(unfinished_penalty=0.5),
    "cut off: mask": shaped(truncated="mask"),
    "cut off: drop": shaped(truncated="drop"),
    "all shaping": shaped(
        bias=1.0, scale=0.5, high=1.0, overlong_tokens=9, overlong_buffer=3, unfinished_penalty=0.25, truncated="mask"
    ),
    "shaped returns": losses.ReinforcePlusPlus(
        shaping=dict(scale=2.0, unfinished_penalty=0.5), advantage=dict(gamma=0.9)
    ),
    "shaped greedy": losses.ReMax(shaping=dict(bias=0.5, scale=2.0, high=4.0)),
    "batch statistics": adv(mean="batch", std="batch", ddof=0),
    "leave one out of the batch": adv(mean="batch", std="none", leave_one_out=True),
    "leave one out, with deviation": adv(leave_one_out=True),
    "wide eps": adv(eps=0.5),
    "divided by the mean": adv(std="mean"),
    "divided by a mean that may be negative": losses.GRPO(shaping=dict(bias=-1.0), advantage=dict(std="mean")),
    "weighted by length over the batch": adv(losses.OPO, mean="batch"),
    "greedy, with deviation": adv(mean="greedy"),
    "whitened tokens": adv(std="none", whiten="token"),
    "whitened rollouts": adv(std="none", whiten="rollout"),
    "discounted returns": adv(losses.ReinforcePlusPlus, gamma=0.9, whiten="none"),
    "returns against the group": adv(losses.ReinforcePlusPlus, gamma=0.9, mean="group"),
    "gae": adv(losses.PPO, gamma=0.95, lam=0.8, whiten="none"),
    "gae by length": adv(losses.PPO, gamma=0.95, lam_alpha=0.2, whiten="none"),
    "gae, whitened without freedom": adv(losses.PPO, ddof=0, eps=0.1),
    "components": adv(components=("correct", "format")),
    "weighted components": adv(components=("correct", "format"), component_weights=(1.0, 0.25), whiten="rollout"),
    "moving averages": adv(mean="moving", std="none", moving_decay=0.5),
    "optimal values": adv(losses.REINFORCE, mean="optimal_value"),
    "optimal advantage": losses.REINFORCE(
        advantage=dict(mean="optimal_value"), kl=dict(coef=0.1, estimator="k2", over="sequence")
    ),
    "optimal tokens": adv(losses.ReinforcePlusPlus, mean="optimal_token", whiten="none"),
    "optimal tokens, discounted": adv(losses.ReinforcePlusPlus, mean="optimal_token", gamma=0.9),
    "states": adv(state_coef=1.0),
    "states without deviation": adv(state_coef=0.5, state_gamma=0.8, std="none"),
    "states, shaped": losses.GRPO(
        advantage=dict(state_coef=2.0), shaping=dict(scale=2.0, unfinished_penalty=0.5, truncated="mask")
    ),
    "teacher": adv(teacher=0.3),
    "teacher alone": adv(losses.REINFORCE, teacher=1.0, whiten="token"),
    "behaviour": losses.GRPO(correction=dict(proximal="behaviour")),
    "interpolated": fix(proximal="interpolate"),
    "interpolated, truncated": fix(proximal="interpolate", action="truncate", cap=1.1),
    "truncated weights": fix(action="truncate", cap=1.1),
    "clipped weights": fix(action="clip", low=0.8, cap=1.1),
    "masked on both sides": fix(low=0.8, cap=1.25),
    "masked, not counted": fix(low=0.8, cap=1.25, count_masked=False),
    "weights of sequences": fix(level="sequence", cap=2.0),
    "weights of sequences, truncated": fix(level="sequence", action="truncate", cap=2.0),
    "geometric weights": fix(level="geometric", low=0.9, cap=1.1),
    "normalised": fix(normalise=True),
    "normalised, truncated": fix(normalise=True, action="truncate", cap=1.1),
    "normalised, masked": fix(normalise=True, low=0.8, cap=1.25),
    "veto": fix(veto=0.75),
    "veto, not counted": fix(veto=0.75, count_masked=False),
    "veto, a mean over sequences": losses.GSPO(correction=dict(veto=0.75, count_masked=False)),
    "drift": fix(drift=0.02),
    "binary kl": fix(binary_kl=0.02),
    "binary kl, not counted": fix(binary_kl=0.02, second_moment=0.03, count_masked=False),
    "second moment": fix(second_moment=0.03),
    "second moment, not counted": fix(second_moment=0.03, count_masked=False),
    **{
        f"mask {name} over {over}": fix(mask=name, mask_over=over, mask_low=low, mask_high=high, **more)
        for name, over, low, high, more in [
            ("ratio", "token", 0.8, 1.25, {}),
            ("ratio", "mean", 0.95, 1.1, {}),
            ("ratio", "max", 0.6, 1.6, {}),
            ("k1", "token", 0.7, 1.5, dict(count_masked=False)),
            ("k1", "sum", 0.5, 2.0, {}),
            ("k1", "mean", 0.9, 1.1, {}),
            ("k1", "max", 0.5, 1.5, {}),
            ("k2", "token", 0.0, 1.3, {}),
            ("k2", "sum", 0.0, 1.8, {}),
            ("k2", "mean", 0.0, 1.3, {}),
            ("k2", "max", 0.0, 1.8, {}),
            ("k3", "token", 0.0, 1.4, {}),
            ("k3", "sum", 0.0, 1.6, {}),
            ("k3", "mean", 0.0, 1.3, dict(count_masked=False)),
            ("k3", "max", 0.0, 1.7, {}),
        ]
    },
    "product": losses.GRPO(ratio="product"),
    "sequence token": losses.GSPO(ratio="sequence_token", clip_low=0.1, clip_high=0.2),
    "sequence clip": losses.GSPO(clip_low=0.1, clip_high=0.2),
    "ratio": losses.GRPO(surrogate="ratio"),
    "ratio of sequences": losses.GRPO(surrogate="ratio", ratio="sequence"),
    "dual clip": losses.GRPO(dual_clip=1.5),
    "ratio cap": losses.GRPO(ratio_cap=1.4),
    "soft": losses.SAPO(tau_pos=2.0, tau_neg=5.0),
    "narrow geometric": losses.GMPO(clip_low=0.1, clip_high=0.2),
    "bounded cispo": losses.CISPO(clip_low=0.2, clip_high=0.1),
    "vespo of tokens": losses.VESPO(ratio="token", vespo_pos=(1.0, 2.0), vespo_neg=(2.0, 0.5)),
    "all of clip-cov": losses.ClipCov(cov_fraction=1.0, cov_low=0.1, cov_high=0.6),
    "much of kl-cov": losses.KLCov(cov_fraction=0.3, cov_coef=0.5),
    "narrow dppo": losses.DPPO(tv_low=0.02, tv_high=0.03, tv_coef=0.1),
    "dppo from the weights before": losses.DPPO(tv_low=0.05, tv_high=0.05, correction=dict(proximal="recompute")),
    "dppo by kl": losses.DPPO(surrogate="dppo_kl", binary_kl_low=0.01, binary_kl_high=0.02, tv_coef=0.1),
    "dppo by kl from the weights before": losses.DPPO(surrogate="dppo_kl", correction=dict(proximal="recompute")),
    "a mean over rollouts": losses.GRPO(denominator="rollout"),
    "a mean over prompts": losses.GRPO(denominator="prompt"),
    **{f"kl {name}": kl(estimator=name) for name in ("k1", "k2", "k3", "k3_k2")},
    **{f"kl {name} by ratio": kl(estimator=name, ratio=True) for name in ("k1", "k3")},
    **{f"kl {name} in rewards": kl(estimator=name, place="reward") for name in ("k1", "k2", "k3")},
    "kl in returns": losses.ReinforcePlusPlus(kl=dict(coef=0.1, estimator="k1", place="reward")),
    "kl in gae": losses.PPO(kl=dict(coef=0.1, estimator="k1", place="reward")),
    "kl of what a mask leaves": losses.GRPO(kl=dict(coef=0.1), correction=dict(veto=0.75)),
    "kl of what is counted": losses.GRPO(kl=dict(coef=0.1), correction=dict(veto=0.75, count_masked=False)),
    "entropy": losses.GRPO(entropy=dict(coef=0.1)),
    "entropy below its floor": losses.GRPO(entropy=dict(coef=0.1, floor=2.0)),
    "entropy above its floor": losses.GRPO(entropy=dict(coef=0.1, floor=0.5)),
    "entropy by class": losses.GRPO(entropy=dict(coef=0.1, classes=(1.0, 0.0, 0.25))),
    "observations": losses.GRPO(observation=dict(coef=0.05)),
    "observations of two kinds": losses.GSPO(observation=dict(coef=0.5, kinds=("user", "tool"))),
    "entropy of sequences": losses.GSPO(entropy=dict(coef=0.1), correction=dict(level="token", low=0.8, cap=1.25)),
}
EVERY = PRESETS | VARIANTS
# Chosen by what a microbatch holds, as stated: the same over one microbatch only.
OF_A_MICROBATCH = {name for name, spec in EVERY.items() if spec.surrogate in ("clip_cov", "kl_cov")}


def samples(seed=0, groups=4, size=4, nan=(5,), split=True):
    """Groups of rollouts with rewards, one unscorable, one in two rows, one group all equal.

    Some have tokens of tools in between and rewards on the way; all bring a teacher, classes of tokens and kinds of
    observations.
    """
    rng = np.random.default_rng(seed)
    out = []
    for i in range(groups * size):
        reward = np.nan if i in nan else 1.0 if i // size == 1 else float(rng.integers(0, 3))
        parts = {"correct": float(rng.integers(0, 2)), "format": float(rng.integers(0, 3)) / 2, "greedy": 0.5}
        parts |= {"moving": i / 16, "optimal_value": 0.25 + i % 4 / 2}
        for weight in (0.25, 0.75) if split and i == 2 else (1.0,):
            n = int(rng.choice([5, 9, 14]))
            mask = (np.arange(n) >= 3) & (rng.random(n) < 0.9)
            early = float(rng.integers(0, 2)) / 2 if n > 5 and i // size != 1 else 0.0
            arrays = {
                "teacher": ("target", rng.normal(-1, 0.5, n).astype(np.float32)),
                "token_class": ("target", rng.integers(0, 3, n).astype(np.int32)),
                "observation": ("target", (np.arange(n) * (i + 1) % 5 % 4).astype(np.int8)),
                "state": ("target", ((np.arange(n) // 4 + i % 2) % 4).astype(np.int32)),
            }
            out.append(
                Sample(
                    tokens=rng.integers(0, 50, n).astype(np.int32), mask=mask,
                    logp=np.where(mask, rng.normal(-1, 0.5, n), 0).astype(np.float32),
                    version=np.where(mask, rng.integers(1, VERSION + 1, n), -1).astype(np.int32),
                    turn=np.zeros(n, np.int32), rewards=((4, early), (n - 1, reward - early)), components=parts,
                    finish=("stop", "stop", "stop", "length", "abort")[int(rng.integers(5)) if i != 5 else 0],
                    group=i // size, prompt=i // size, sample=len(out), rollout=i, weight=weight, arrays=arrays,
                )
            )  # fmt: skip
    return out


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def packed(rows, count=8):
    """A Batch in float64; few shapes, for each is compiled operation by operation."""
    to = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    batch = jax.tree.map(to, packing.pack(rows, 32, rows=count, components=PARTS))
    return batch.with_scalars(version=jnp.asarray(VERSION))


def near(rows, seed, spread=0.3):
    """Log-probabilities of a policy near the one that sampled, at each sample's own indices."""
    rng = [np.random.default_rng((seed, s.sample)) for s in rows]
    return [s.logp + r.normal(0, spread, len(s.tokens)) for s, r in zip(rows, rng, strict=True)]


def positive(rows, seed):
    return [np.abs(x) for x in near(rows, seed)]


class Case:
    """Rows, what every policy says of them, and the same packed."""

    def __init__(self, rows, count=8):
        self.rows, self.batch = rows, packed(rows, count)
        self.prox, self.now, self.ref = (near(rows, seed) for seed in (1, 2, 3))
        self.values, self.before, self.entropy = near(rows, 4), positive(rows, 5), positive(rows, 6)
        self.squares = [x + 2 * np.exp(p) for x, p in zip(positive(rows, 7), self.prox, strict=True)]
        self.placed, self.found = {}, {}

    def but(self, **changes):
        other = copy.copy(self)
        vars(other).update(changes, placed={}, found={})
        return other

    def put(self, name):
        """Values at each sample's own indices to where a batch has them."""
        if name not in self.placed:
            own = zip(self.rows, getattr(self, name), strict=True)
            rows = [s.replace(arrays={"x": ("target", np.asarray(x))}) for s, x in own]
            x = packing.pack(rows, 32, rows=self.batch.token_BT.shape[1]).target["x"]
            self.placed[name] = jnp.asarray(x, jnp.float64)
        return self.placed[name]

    def scores(self):
        return out(self.put("prox"), self.put("before"), extra=self.put("squares"))

    def prepare(self, spec):
        ready = self.batch.replace(ref_BT=self.put("ref"), value_BT=self.put("values"))
        return spec.prepare(ready, self.scores())

    def learnt(self, spec):
        """((loss, metrics), the loss's gradient with respect to log-probabilities and entropies)."""
        if spec not in self.found:
            ready = self.prepare(spec)

            def loss(logp, entropy):
                parts = [spec.loss(out(logp[m], entropy[m]), part(ready, m)) for m in range(len(logp))]
                return sum(value for value, _ in parts), functools.reduce(metrics.merge_trees, (it for _, it in parts))

            both = jax.value_and_grad(loss, (0, 1), has_aux=True)
            self.found[spec] = both(self.put("now"), self.put("entropy"))
        return self.found[spec]

    def gradient(self, spec):
        """Loss, and its gradient with respect to log-probabilities and entropies."""
        (loss, _), slopes = self.learnt(spec)
        return loss, slopes

    def report(self, spec):
        """The loss, and the metrics as a log has them."""
        loss, report = self.learnt(spec)[0]
        return {"loss": float(loss), **metrics.to_dict(report)}

    def own(self, x):
        return packing.unpack(x, self.batch, self.rows)

    def oracle(self, spec):
        return oracles.policy(
            self.rows, self.prox, self.now, self.ref, options=spec, values=self.values,
            teacher=[s.arrays["teacher"][1] for s in self.rows], entropy=self.entropy, before=self.before,
            version=VERSION, squares=self.squares,
        )  # fmt: skip


def out(logp_BT, entropy_BT=None, value_BT=None, extra=None):
    entropy_BT = jnp.abs(logp_BT) if entropy_BT is None else entropy_BT
    return types.SimpleNamespace(logp_BT=logp_BT, entropy_BT=entropy_BT, value_BT=value_BT, extra=extra, aux={})


def part(tree, m):
    """Microbatch m; sliced by numpy, where JAX would compile a program for each shape."""
    slice_ = lambda x: x[m] if isinstance(x, jax.core.Tracer) else jnp.asarray(np.asarray(x)[m])
    return jax.tree.map(slice_, tree)


def compare(case, spec):
    got, slopes = case.gradient(spec)
    wanted, *wanted_slopes = case.oracle(spec)
    assert abs(float(got) - wanted) <= 1e-9 * max(1, abs(wanted)), (float(got), wanted)
    for mine, theirs in zip(slopes, wanted_slopes, strict=True):
        for a, b in zip(case.own(mine), theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
    return wanted_slopes


@pytest.fixture(scope="module")
def case():
    with jax.enable_x64(True):
        return Case(samples())


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*PRESETS, *thinned(VARIANTS, 3, pytest.mark.slow)])
def test_value_and_gradient_match_the_papers(name, case):
    slopes = compare(case, EVERY[name])
    assert max(np.abs(s).max() for s in slopes[0]) > 1e-4
    if EVERY[name].entropy.coef:
        assert (max(np.abs(s).max() for s in slopes[1]) > 1e-4) == (name != "entropy above its floor")


@pytest.fixture(scope="module")
def packings():
    """The rows of `case` in another order, and in that order over several microbatches."""
    rows = samples()
    order = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    with jax.enable_x64(True):
        return Case(order), Case(order, 4)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", thinned(EVERY, 5, pytest.mark.wide))
def test_the_loss_does_not_depend_on_microbatching_rows_or_order(name, case, packings):
    """The sum over microbatches of any packing of any order is the same, and so are the metrics."""
    spec, (whole, several) = EVERY[name], packings
    other = whole if name in OF_A_MICROBATCH else several
    ready, now, entropy = other.prepare(spec), other.put("now"), other.put("entropy")
    values, reports = zip(*(spec.loss(out(now[m], entropy[m]), part(ready, m)) for m in range(len(now))), strict=True)
    total, merged = sum(map(float, values)), functools.reduce(metrics.merge_trees, reports)
    told = case.report(spec), {"loss": total, **metrics.to_dict(merged)}
    np.testing.assert_allclose(told[1]["loss"], told[0]["loss"], rtol=1e-9, atol=1e-9)
    for key, value in told[0].items():
        if not isinstance(value, dict):
            np.testing.assert_allclose(told[1][key], value, rtol=1e-5, atol=1e-8, err_msg=key)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.sampled_from([name for name in EVERY if name not in OF_A_MICROBATCH]),
    st.integers(0, 10**6),
)
def test_any_rows_in_any_packing(name, seed):
    """Of rows drawn at random: loss, and each sample's own gradient, whatever the order and the microbatches."""
    spec, rows = EVERY[name], samples(seed)
    order = np.random.default_rng(seed).permutation(len(rows))
    with jax.enable_x64(True):
        one, other = Case(rows), Case([rows[i] for i in order], 4)
        (a, mine), (b, theirs) = one.gradient(spec), other.gradient(spec)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
        mine, theirs = one.own(mine[0]), other.own(theirs[0])
    for at, i in enumerate(order):
        np.testing.assert_allclose(theirs[at], mine[i], rtol=1e-7, atol=1e-10)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", PRESETS)
def test_at_ratio_1_every_gradient_equals_reinforce(name, case):
    spec, at_one = PRESETS[name], same_policies(case)
    parts = {name: getattr(spec, name) for name in BESIDE_THE_RATIO}
    plain = policy.Policy(surrogate="score", **parts)
    if spec.surrogate == "clip_cov":  # but for the tokens without gradient
        spec = dataclasses.replace(spec, cov_low=50.0, cov_high=51.0)
    got, wanted = at_one.gradient(spec)[1][0], at_one.gradient(plain)[1][0]
    assert np.abs(wanted).max() > 1e-5
    np.testing.assert_allclose(got, wanted, atol=1e-12)


BESIDE_THE_RATIO = ("shaping", "advantage", "correction", "denominator", "denominator_tokens", "kl", "entropy")


def same_policies(case):
    """The case as it is when nothing has moved since it was sampled."""
    return case.but(prox=[s.logp for s in case.rows], now=[s.logp for s in case.rows])


BROKEN = """whitened tokens, gae, components, interpolated, normalised, weights of sequences, drift, second moment, mask
k1 over mean, product, much of kl-cov, a mean over prompts, kl k3 by ratio, entropy by class""".replace(
    "\n", " "
).split(", ")


def broken(rows, what):
    """The first learnt tokens of two rows with a log-probability that is not finite."""
    out = list(rows)
    for i, bad in ((0, -np.inf), (3, np.nan)):
        s = rows[i]
        at = np.arange(len(s.tokens)) == np.flatnonzero(s.mask)[0]
        if what == "behaviour":
            out[i] = s.replace(logp=np.where(at, bad, s.logp))
        if what == "teacher":
            teacher = np.where(at, bad, s.arrays["teacher"][1])
            out[i] = s.replace(arrays={**s.arrays, "teacher": ("target", teacher)})
    return out


NON_FINITE = [
    *[("teacher", "teacher"), ("teacher alone", "teacher")],
    *[(name, "reference") for name, spec in VARIANTS.items() if spec.kl.coef],
    *[(name, "behaviour") for name in (*PRESETS, *BROKEN)],
]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name, what", thinned(NON_FINITE, 2, pytest.mark.slow))
def test_non_finite_inputs_are_masked_and_counted(name, what, case):
    """Tokens that are not finite are taken out, by loops too; junk off the mask is never seen."""
    spec, rows = EVERY[name], broken(case.rows, what)
    bad = case.but(rows=rows, batch=packed(rows))
    lost = [np.argmax(s.mask) if i in (0, 3) else -1 for i, s in enumerate(rows)]
    junk = lambda x, fill: [np.where(s.mask, v, fill) for s, v in zip(rows, x, strict=True)]
    bad.prox, bad.now, bad.ref = (junk(x, np.nan) for x in (case.prox, case.now, case.ref))
    if what == "reference":
        bad.ref = [np.where(np.arange(len(v)) == at, np.inf, v) for v, at in zip(bad.ref, lost, strict=True)]
    compare(bad, spec)
    report = bad.report(spec)
    learnt = oracles.learnt(
        case.rows, spec, oracles.shape(case.rows, spec), [s.logp for s in case.rows], case.ref,
        [s.arrays["teacher"][1] for s in case.rows],
    )  # fmt: skip
    taken = sum(bool(learnt[i]) for i in (0, 3))
    np.testing.assert_allclose(report["unusable_fraction"], taken / sum(map(len, learnt)), rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PRESETS)
def test_a_current_policy_that_is_not_finite_is_not_hidden(name, case):
    spec, ready = PRESETS[name], case.prepare(PRESETS[name])
    at = np.argwhere((np.asarray(ready.weight_BT) > 0) & (np.asarray(ready.adv_BT) != 0))[0]
    now = case.put("now").at[tuple(at)].set(jnp.nan)
    assert not np.isfinite(spec.loss(out(now[0]), part(ready, 0))[0])


@functools.cache
def nothing_to_learn(kind):
    rows = samples(nan=range(16) if kind == "all unscorable" else ())
    if kind == "no tokens":
        rows = [s.replace(mask=np.zeros_like(s.mask)) for s in rows]
    if kind == "groups of one":
        rows = [s.replace(group=i) for i, s in enumerate(s for s in rows if s.weight == 1)]
    if kind == "equal rewards":
        rows = [s.replace(rewards=((len(s.tokens) - 1, 1.0),)) for s in rows]
    return Case(rows)


KINDS = ["no tokens", "groups of one", "equal rewards", "all unscorable"]
# Of each preset one kind in `make test`, in turn; the others under `wide`.
NOTHING = [(name, KINDS[(i + k) % 4]) for i, name in enumerate(PRESETS) for k in range(4)]


@pytest.mark.sweep
@pytest.mark.parametrize("name, kind", thinned(NOTHING, 4, pytest.mark.wide))
def test_nothing_to_learn_is_finite(name, kind):
    spec = PRESETS[name]
    loss, slopes = nothing_to_learn(kind).gradient(spec)
    assert np.isfinite(loss) and np.isfinite(slopes[0]).all()
    penalty = spec.surrogate in ("kl_cov", "dppo")  # holds without advantages too
    if kind in ("no tokens", "all unscorable") or (spec.advantage.mean in ("group", "batch") and not penalty):
        assert not np.any(slopes[0])


@pytest.mark.slow
def test_limits(case):
    """Bounds far away are no bounds; a coefficient of 0 is no term."""
    far = dict(clip_low=1.0, clip_high=1e9)
    free = case.gradient(losses.GRPO(**far, correction=dict(cap=1e9)))
    for spec in (
        losses.GRPO(**far, correction=dict(action="truncate", cap=INF)),
        losses.GRPO(**far, correction=dict(action="clip", cap=INF)),
        losses.GRPO(**far, correction=dict(cap=INF, mask="k1", mask_low=1e-9, mask_high=1e9, drift=1e9, veto=1e-9)),
        losses.GRPO(**far, correction=dict(cap=INF, second_moment=1e9)),
        losses.GRPO(**far, correction=dict(cap=INF), dual_clip=1e9, ratio_cap=1e9),
        losses.GRPO(**far, correction=dict(cap=INF), kl=dict(coef=1e-300)),
        losses.GRPO(**far, correction=dict(cap=INF), entropy=dict(coef=1e-300)),
        losses.GRPO(surrogate="ratio", correction=dict(cap=INF)),
        losses.DPPO(tv_low=1.0, tv_high=1.0, tv_coef=0.0, correction=dict(proximal="recompute", cap=INF)),
        losses.KLCov(cov_coef=0.0, correction=dict(cap=INF)),
    ):
        for a, b in zip(jax.tree.leaves(case.gradient(spec)), jax.tree.leaves(free), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)
    long = losses.DrGRPO(denominator_tokens=10), losses.DrGRPO(denominator="sequence_sum", denominator_tokens=0)
    for a, b in zip(*(jax.tree.leaves(case.gradient(spec)) for spec in long), strict=True):
        np.testing.assert_allclose(10 * a, b, atol=1e-12)
    here = same_policies(case)
    vespo, plain = losses.VESPO(), losses.GRPO(surrogate="score", correction=dict(proximal="behaviour"))
    for a, b in zip(*(jax.tree.leaves(here.gradient(spec)) for spec in (vespo, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)  # phi(1) = 1


@pytest.mark.slow
def test_gae_with_a_zero_critic_equals_the_returns(case):
    blank = case.but(values=[0 * v for v in case.values])
    a, b = blank.prepare(losses.PPO(advantage=dict(lam=1.0))), blank.prepare(losses.ReinforcePlusPlus())
    np.testing.assert_allclose(a.adv_BT, b.adv_BT, atol=1e-12)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e38])
def test_a_value_that_is_not_finite_costs_its_sequence_alone(bad, case):
    spec = losses.PPO(advantage=dict(whiten="none"))
    last = [np.flatnonzero(row.mask)[-1] for row in case.rows]
    values = [np.array(v, np.float64) for v in case.values]
    values[0][last[0]] = bad
    right, wrong = case.prepare(spec), case.but(values=values).prepare(spec)
    lost, kept = np.asarray(wrong.target["unusable_BT"]), np.asarray(wrong.target["kept_BT"])
    assert lost.sum() == case.rows[0].mask.sum() and not (kept & lost).any()
    assert np.isfinite(wrong.adv_BT).all() and np.isfinite(wrong.return_BT).all()
    np.testing.assert_allclose(wrong.adv_BT[kept], right.adv_BT[kept])


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["GRPO", "GSPO", "M2PO", "KLCov", "PPO", "normalised", "teacher", "drift"])
def test_weights_and_proximal_policy_carry_no_gradient(name, case):
    now, entropy = case.put("now")[0], case.put("entropy")[0]
    batch = case.batch.replace(ref_BT=case.put("ref"), value_BT=case.put("values"))

    def loss(prox):
        ready = EVERY[name].prepare(batch, out(prox, case.put("before")))
        return EVERY[name].loss(out(now, entropy), part(ready, 0))[0]

    assert not np.any(jax.grad(loss)(case.put("prox")))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.5, 0.05, 0.0])
def test_the_critic_loss_regresses_on_the_returns(clip, case):
    spec, critic = losses.PPO(advantage=dict(gamma=0.95)), Critic(clip=clip)
    mu = [np.asarray(s.logp, np.float64) for s in case.rows]
    shaped = oracles.shape(case.rows, spec)
    use = oracles.learnt(case.rows, spec, shaped, mu, None, None)
    targets = oracles.advantages(case.rows, spec, shaped, use, case.prox, None, case.values, None)[1]
    ready, moved = part(critic.prepare(case.prepare(spec)), 0), near(case.rows, 4, 0.5)
    got, slope = jax.value_and_grad(lambda v: critic.loss(out(v, value_BT=v), ready)[0])(
        case.but(moved=moved).put("moved")[0]
    )
    wanted, slopes = oracles.critic(case.rows, use, moved, case.values, targets, clip)
    np.testing.assert_allclose(got, wanted, rtol=1e-9)
    for a, b in zip(case.own(slope[None]), slopes, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [1e-4, 0.05])
def test_clip_cov_samples_the_stated_number_of_candidates(fraction, case):
    """What is drawn is a part of what a fraction of 1 takes, and of the stated number."""
    plain = dict(advantage=dict(mean="none", std="none"), shaping=dict(bias=0.5))  # no advantage of 0
    bounds = dict(cov_low=0.1, cov_high=0.6) | plain
    slope = lambda spec: np.concatenate(case.own(case.gradient(spec)[1][0]))
    clipped = slope(losses.GRPO(clip_high=0.2, **plain))
    candidates = (slope(losses.ClipCov(cov_fraction=1.0, **bounds)) == 0) & (clipped != 0)
    drawn = slope(losses.ClipCov(cov_fraction=fraction, **bounds))
    taken = (drawn == 0) & (clipped != 0)
    learnt = int((case.prepare(losses.GRPO()).weight_BT > 0).sum())
    assert taken.sum() == max(int(fraction * learnt), 1) < candidates.sum()
    assert not np.any(taken & ~candidates)
    np.testing.assert_allclose(drawn[~taken], clipped[~taken], atol=1e-12)


@pytest.mark.parametrize("part_of", ["components", "greedy"])
def test_a_part_of_the_reward_that_is_nan_is_an_unscorable_rollout(part_of, case):
    spec = losses.ReMax() if part_of == "greedy" else EVERY["components"]
    name = "greedy" if part_of == "greedy" else "format"
    nan = lambda s: s.replace(components={**s.components, name: math.nan}) if s.rollout == 9 else s
    rows = [nan(s) for s in case.rows]
    compare(case.but(rows=rows, batch=packed(rows)), spec)


def test_vespo_weights_vanish_for_far_off_policy_sequences(case):
    """phi goes to 0 on both sides, also where W itself has no floating-point number."""
    for far in (-800.0, 800.0):
        now = [case.now[0] + far * case.rows[0].mask, *case.now[1:]]
        loss, slopes = case.but(now=now).gradient(losses.VESPO())
        assert np.isfinite(loss) and np.isfinite(slopes[0]).all()
        np.testing.assert_allclose(case.own(slopes[0])[0], 0, atol=1e-15)


@pytest.mark.slow
def test_a_function_of_ones_own_is_a_surrogate(case):
    """Used without a name, each surrogate gives what it gives by its name; it reads any option, with any ratio."""
    for name, options in (("clip", dict(dual_clip=3.0, ratio="sequence")), ("sapo", dict(tau_pos=2.0)), ("score", {})):
        own = surrogates.SURROGATES[name].gain
        both = (case.gradient(losses.GRPO(surrogate=surrogate, **options)) for surrogate in (name, own))
        for a, b in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_array_equal(a, b)
    bounded = functools.partial(lambda spec, now, most: (jnp.minimum(now.ratio_BT, most) * now.adv_BT, None), most=0.5)
    small = case.gradient(losses.GRPO(surrogate=bounded, clip_low=7.0))[1][0]
    assert 0 < np.abs(small).sum() < np.abs(case.gradient(losses.GRPO(surrogate="ratio"))[1][0]).sum()


def test_a_function_of_ones_own_is_printed_with_its_first_line():
    def mine(spec, now):
        """r A {at last}.

        And more."""
        return now.ratio_BT * now.adv_BT, None

    assert "gain = r A {at last}.\n" in str(losses.GRPO(surrogate=mine))
    assert run_dir.plain(losses.GRPO(surrogate=mine))["surrogate"].endswith("first_line.<locals>.mine")


def test_a_function_that_returns_no_pair_is_refused(case):
    with pytest.raises(ValueError, match=r"GRPO: surrogate must return \(gain_BT, cut_BT or None\) of .*, got \("):
        case.gradient(losses.GRPO(surrogate=lambda spec, now: now.adv_BT))
    with pytest.raises(ValueError, match=r"GRPO: surrogate must return \(gain_BT, cut_BT or None\) of .*, got \("):
        case.gradient(losses.GRPO(surrogate=lambda spec, now: (now.adv_BT, jnp.zeros(3))))


def test_objectives_print_their_formula():
    """What each preset optimises, as tests/data/objectives.txt has it."""
    assert "\n\n".join(map(str, PRESETS.values())) + "\n" == GOLDEN.read_text()


def test_observations_need_an_array_and_are_in_the_formula(case):
    spec = losses.GRPO(observation={"coef": 0.05, "kinds": ("tool",)})
    assert "  + 0.05 log pi of observations (tool), mean over their tokens in the batch" in str(spec).split("\n")
    assert observation.KINDS == observations.KINDS
    chosen = [x for s, x in zip(case.rows, case.now, strict=True) for x in x[oracles.observed(s, ("tool",))]]
    assert case.report(spec)["observation_nll"] == pytest.approx(-np.mean(chosen), rel=1e-5)
    bare = packed([s.replace(arrays={}) for s in case.rows])
    with pytest.raises(
        ValueError, match=r'Observation: coef 0.05 needs target\["observation"\], got the arrays \[\]; '
    ):
        spec.prepare(bare, case.scores())


def test_what_advantages_need_is_said(case):
    bare = packed([s.replace(arrays={}) for s in case.rows])
    with pytest.raises(
        ValueError, match=r'advantages: state_coef 1 needs target\["state"\], got the arrays \[\]; take a'
    ):
        EVERY["states"].prepare(bare, case.scores())
    with pytest.raises(ValueError, match="mean optimal_token needs scores of models.score.per_chunk=advantages.squar"):
        EVERY["optimal tokens"].prepare(case.batch, out(case.put("prox")))
    assert EVERY["optimal tokens"].needs_scores and not EVERY["states"].advantage.by_reward
    text = str(EVERY["states without deviation"])
    assert (
        "A = (R - mean of the group) + 0.5 (G - mean of G in the group's turns of the same state), G = sum of" in text
    )


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: losses.GRPO(clip_low=2.0), "GRPO: clip_low must be between 0 and 1, got 2.0"),
        (lambda: losses.DAPO(dual_clip=0.5), "DAPO: dual_clip must be 0, or above 1"),
        (lambda: losses.SAPO(dual_clip=3.0), "SAPO: the surrogate sapo does not use dual_clip, got 3.0"),
        (lambda: losses.CISPO(ratio="sequence"), "CISPO: the surrogate cispo does not use ratio, got sequence"),
        (lambda: losses.DrGRPO(denominator_tokens=0), "denominator_tokens must be above 0"),
        (lambda: adv(losses.OPO, leave_one_out=True), "length_weighted must be False with leave_one_out"),
        (lambda: adv(std="mean", mean="batch"), 'std must be group, batch or none unless mean is "group", got mean'),
        (lambda: adv(std="mean", leave_one_out=True), 'leave_one_out must be False with std "mean"'),
        (lambda: adv(gamma=0.9), 'gamma must be 1 with credit "rollout"'),
        (lambda: adv(lam_alpha=0.05), 'lam_alpha must be 0 unless credit is "gae", got 0.05'),
        (lambda: adv(losses.PPO, mean="group"), 'mean must be none with credit "gae"'),
        (lambda: losses.GRPO(surrogate="clop"), "surrogate must be one of score, ratio, clip"),
        (lambda: losses.GRPO(surrogate=3), "dppo_kl, or a function, got 3"),
        (
            lambda: losses.GRPO(denominator="tokens"),
            "denominator must be one of token, sequence, sequence_sum, constant",
        ),
        (lambda: fix(low=1.5), "low must be between 0 and 1"),
        (lambda: fix(mask="ratio", mask_over="sum"), 'mask_over must be token, mean or max with "ratio"'),
        (lambda: fix(mask="k3", mask_low=0.5), "mask_low must be 0 with k2 and k3"),
        (lambda: fix(binary_kl=-1.0), "binary_kl must be at least 0, got -1.0"),
        (lambda: losses.DPPO(binary_kl_low=0.1), "DPPO: the surrogate dppo does not use binary_kl_low, got 0.1"),
        (lambda: fix(proximal="interpolate", binary_kl=0.5), 'proximal must be "recompute" with masks'),
        (lambda: fix(proximal="interpolate", veto=0.5), 'proximal must be "recompute" with masks'),
        (lambda: fix(proximal="behaviour", veto=0.5), 'proximal must be "recompute" with a weight or a mask'),
        (lambda: kl(place="reward", ratio=True), 'ratio must be False with place "reward"'),
        (lambda: losses.GRPO(entropy=dict(classes=(1.0,))), "classes must be empty without a coef"),
        (lambda: losses.GRPO(observation=dict(coef=-1.0)), "Observation: coef must be at least 0 and finite, got -1.0"),
        (
            lambda: losses.GRPO(observation=dict(coef=1.0, kinds=("tools",))),
            "Observation: kinds must be one or several of tool, error, user, got",
        ),
        (lambda: losses.GRPO(observation=dict(kinds=("tool",))), "kinds must be left out without a coef"),
        (lambda: adv(mean="moving"), 'std must be none with mean "moving", got group'),
        (lambda: adv(mean="optimal_token"), 'mean must be another one unless credit is "return", got optimal_token'),
        (lambda: adv(moving_decay=0.5), 'moving_decay must be left out unless mean is "moving", got 0.5'),
        (lambda: adv(value_temperature=0.1), 'value_temperature must be left out unless mean is "optimal_value"'),
        (lambda: adv(state_coef=1.0, std="batch"), 'state_coef must be 0 unless credit is "rollout" and std group or'),
        (lambda: adv(losses.PPO, state_coef=1.0), 'state_coef must be 0 unless credit is "rollout"'),
        (lambda: adv(state_gamma=0.5), "state_gamma must be left out without a state_coef, got 0.5"),
        (lambda: kl(over="sequence"), 'over must be token unless the estimator is k2 and the place "loss"'),
        (
            lambda: losses.DAPO(advantage=dict(state_coef=1.0)),
            'advantage must be with credit "rollout", mean "group", no components',
        ),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
