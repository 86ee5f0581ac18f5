"""Which samples of older weights count: every bound on its own side, and M2PO's set by brute force."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import losses, packing
from areax.rollout.types import Sample

INF = float("inf")


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def kept(correction, log_ratio, reward=1.0, order=None, rows=4):
    """Whether each token of samples has a weight, when log (proximal / behaviour) is that, [samples][tokens]."""
    samples = [
        Sample(
            tokens=np.arange(len(x) + 1, dtype=np.int32), mask=np.arange(len(x) + 1) >= 1,
            logp=np.full(len(x) + 1, -1.0, np.float32), version=np.zeros(len(x) + 1, np.int32),
            turn=np.zeros(len(x) + 1, np.int32), rewards=((len(x), reward),), group=i, prompt=i, sample=i, rollout=i,
            arrays={"x": ("target", np.array([0, *x], np.float64))},
        )
        for i, x in enumerate(log_ratio)
    ]  # fmt: skip
    samples = [samples[i] for i in (range(len(samples)) if order is None else order)]
    batch = jax.tree.map(jnp.asarray, packing.pack(samples, 16, rows=rows))
    prox = batch.logp_BT + batch.target["x"]
    spec = losses.REINFORCE(correction={"cap": INF} | correction)
    ready = spec.prepare(batch, types.SimpleNamespace(logp_BT=prox, entropy_BT=-prox, aux={}))
    own = packing.unpack(ready.weight_BT, batch, samples)
    own = {s.sample: (x[1:] > 0).tolist() for s, x in zip(samples, own, strict=True)}
    return [own[i] for i in range(len(own))]


LOW, HIGH, E = 0.6, 1.7, 1e-6


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "statistic, over",
    [
        (s, o)
        for s in ("ratio", "k1", "k2", "k3")
        for o in ("token", "sum", "mean", "max")
        if s != "ratio" or o != "sum"
    ],
)
def test_a_mask_flips_at_its_bound_on_the_ratio(statistic, over):
    """Just inside the ratio counts, just outside it does not; k2 and k3 know no lower bound."""
    sided = statistic in ("ratio", "k1")
    # One token at the ratio and the others at 1; all at it for a mean.
    make = lambda r: [np.log(r)] * 3 if over == "mean" else [0.0, np.log(r), 0.0]
    ratios = {HIGH * (1 - E): True, HIGH * (1 + E): False, LOW * (1 + E): True, LOW * (1 - E): not sided}
    spec = dict(mask=statistic, mask_over=over, mask_low=LOW if sided else 0.0, mask_high=HIGH)
    got = kept(spec, [make(r) for r in ratios])
    for tokens, inside in zip(got, ratios.values(), strict=True):
        assert tokens == ([True, inside, True] if over == "token" else [inside] * 3)


@pytest.mark.sweep
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_bound_on_the_weight_acts_on_its_own_side(level):
    make = lambda r: [np.log(r)] * 3 if level == "geometric" else [0.0, np.log(r), 0.0]
    ratios = {HIGH * (1 - E): True, HIGH * (1 + E): False, LOW * (1 + E): True, LOW * (1 - E): False}
    got = kept(dict(level=level, low=LOW, cap=HIGH), [make(r) for r in ratios])
    for tokens, inside in zip(got, ratios.values(), strict=True):
        assert tokens == ([True, inside, True] if level == "token" else [inside] * 3)


def test_veto_and_drift_flip_at_their_bounds():
    low = [[0.0, np.log(0.01 * (1 + e)), 0.0] for e in (E, -E, E, -E)]
    assert kept(dict(veto=0.01), low) == [[True] * 3, [False] * 3] * 2
    far = [[0.0, -0.3 * (1 + e), 0.0] for e in (-E, E, -E)]  # a mean of 0.1
    far.append([0.5, 0.5])  # likelier than it was
    assert kept(dict(drift=0.1), far, reward=-1.0) == [[True] * 3, [False] * 3, [True] * 3, [True] * 2]
    assert kept(dict(drift=0.1), far, reward=1.0) == [[True] * 3] * 3 + [[True] * 2]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.01, 0.04, 0.2, 1.0])
def test_the_second_moment_keeps_the_largest_set_within_its_bound(bound):
    """No set of more tokens has a mean of squares within the bound; microbatches and order do not matter."""
    rng = np.random.default_rng(int(bound * 100))
    log_ratio = [rng.normal(0, 0.4, n).tolist() for n in (4, 1, 5)]
    squares = np.concatenate(log_ratio) ** 2
    got = kept(dict(second_moment=bound), log_ratio)
    flat = np.concatenate(got)
    assert not flat.any() or squares[flat].mean() <= bound
    within = [n for n in range(1, 11) for s in itertools.combinations(squares, n) if np.mean(s) <= bound]
    assert flat.sum() == max(within, default=0)
    assert flat.all() or squares[flat].max(initial=0) < squares[~flat].min()
    assert kept(dict(second_moment=bound), log_ratio, order=[2, 0, 1], rows=1) == got
