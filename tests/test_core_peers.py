"""The newer losses beside those of other libraries on equal numbers, in 64 bits: their formulas, written anew in numpy,
and where they differ, as the table of docs/algorithms.md says."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areax.core import advantages, divergence, losses, packing
from areax.core.logprobs import from_hidden
from areax.rollout.types import Sample

pytestmark = pytest.mark.slow
SIZES = (6, 9, 8)  # tokens of three samples
TOOL, ERROR, USER = 1, 2, 3
SAID = ([0, 0, 0, 3, 3, 0], [0, 0, 1, 1, 1, 1, 0, 0, 0], [0] * 8)  # what the environment said
MASKS = ([0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0, 1, 1, 1], [0] + [1] * 7)  # what the policy sampled


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def numbers(seed, spread=0.5):
    """Log-probabilities of each token of each sample, which a batch holds in fp32."""
    rng = np.random.default_rng(seed)
    return [-np.float32(np.abs(rng.normal(1, spread, n)) + 1e-3).astype(float) for n in SIZES]


BEHAVIOUR, NOW, TEACHER = numbers(1), numbers(8), numbers(3)


def samples(rewards):
    made = []
    for i, n in enumerate(SIZES):
        mask = np.array(MASKS[i], bool)
        arrays = {"teacher": TEACHER[i], "now": NOW[i], "observation": np.array(SAID[i], np.int8)}
        made.append(
            Sample(
                tokens=np.arange(n, dtype=np.int32), mask=mask, logp=np.where(mask, BEHAVIOUR[i], 0),
                version=np.where(mask, 0, -1), turn=np.zeros(n, np.int32), rewards=((n - 1, rewards[i]),), group=0,
                prompt=0, sample=i, rollout=i, arrays={name: ("target", x) for name, x in arrays.items()},
            )
        )  # fmt: skip
    return made


def learnt(spec, rewards=(0.0, 0.0, 0.0), stale=True):
    """(loss, its gradient for the log-probability of each token of each sample), the weights at `NOW`, or where it was
    sampled."""
    rows = samples(rewards)
    to = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    batch = jax.tree.map(to, packing.pack(rows, 16, rows=2))
    now = batch.target["now"] if stale else batch.logp_BT
    out = lambda logp: types.SimpleNamespace(logp_BT=logp, entropy_BT=-logp, value_BT=None, aux={})
    ready = jax.tree.map(lambda x: x[0], spec.prepare(batch, out(now)))
    loss, slope = jax.value_and_grad(lambda logp: spec.loss(out(logp), ready)[0])(now[0])
    return float(loss), packing.unpack(slope[None], batch, rows)


def chosen(kinds):
    return [np.isin(said, kinds) for said in SAID]


# -- ECHO ----------------------------------------------------------------------------------------


def echo(kinds=("tool", "error", "user"), coef=0.05):
    loss, slope = learnt(losses.GRPO(observation={"coef": coef, "kinds": kinds}))
    return loss - learnt(losses.GRPO())[0], slope


def test_echo_has_the_mean_of_prime_rl():
    """Cross-entropy of a role's tokens times its alpha, over the number of all such tokens in the batch."""
    for kinds, roles, alpha in ((("tool", "error"), [TOOL, ERROR], 0.1), (("user",), [USER], 0.05)):
        there = chosen(roles)
        wanted = -alpha * sum(x[w].sum() for x, w in zip(NOW, there, strict=True)) / sum(w.sum() for w in there)
        loss, slope = echo(kinds, alpha)
        np.testing.assert_allclose(loss, wanted, rtol=1e-12)
        for got, w in zip(slope, there, strict=True):
            np.testing.assert_allclose(got[w], -alpha / sum(w.sum() for w in there), rtol=1e-12)


def test_prime_rl_weighs_roles_without_weighing_their_mean():
    """Two alphas have one denominator there: here they are the one coefficient of a mean over both kinds."""
    alpha, there = {USER: 0.05, TOOL: 0.1}, chosen([USER, TOOL])
    weights = [np.array([alpha.get(kind, 0) for kind in said]) for said in SAID]
    theirs = -sum((w * x).sum() for w, x in zip(weights, NOW, strict=True)) / sum(w.sum() for w in there)
    assert abs(echo(("tool", "user"))[0] / theirs - 1) > 0.2


def test_echo_has_the_token_mean_of_skyrl_and_not_the_mean_over_sequences_of_rllm():
    there = chosen([TOOL, ERROR, USER])
    sums = np.array([-x[w].sum() for x, w in zip(NOW, there, strict=True)])
    counts = np.array([w.sum() for w in there])
    skyrl = 0.05 * sums.sum() / (counts.sum() + 1e-3)
    np.testing.assert_allclose(echo()[0], skyrl, rtol=1.1e-3 / counts.sum())
    says = counts > 0
    rllm = 0.05 * (sums[says] / counts[says]).sum() / says.sum()
    assert abs(echo()[0] / rllm - 1) > 0.02


# -- a teacher's number per token ---------------------------------------------------------------


TAUGHT = losses.GRPO(advantage={"teacher": 1.0}, correction={"proximal": "recompute", "cap": np.inf})


def test_a_teacher_in_the_advantage_has_the_gradient_of_prime_rls_opsd():
    """(teacher - policy) x ratio to the sampler, over all tokens; theirs drops tokens that have lost more than 0.2 of
    probability, and adds 1e-3 log(ratio)^2."""
    count, dropped = sum(map(sum, MASKS)), 0
    for slope, mask, old, now, teacher in zip(learnt(TAUGHT)[1], MASKS, BEHAVIOUR, NOW, TEACHER, strict=True):
        m, ratio = np.array(mask, bool), np.exp(now - old)
        ours = -(teacher - now) * ratio / count
        np.testing.assert_allclose(slope[m], ours[m], rtol=1e-9)
        far = np.exp(now) - np.exp(old) < -0.2
        theirs = np.where(far, 0, ours) + 2e-3 * (now - old) / count
        rest = m & ~far
        np.testing.assert_allclose(slope[rest], theirs[rest], atol=2e-3 * np.abs(now - old).max() / count)
        dropped += int((m & far).sum())
    assert dropped


def test_a_teacher_in_the_advantage_has_the_gradient_of_trls_sampled_tokens():
    """stopgrad(policy - teacher) x log policy, a mean over completions of the mean over their tokens."""
    by_sequence = losses.GRPO(advantage={"teacher": 1.0}, denominator="sequence")
    for spec, share in ((by_sequence, lambda m: 1 / m.sum() / 3), (TAUGHT, lambda m: 1 / sum(map(sum, MASKS)))):
        for slope, mask, old, teacher in zip(learnt(spec, stale=False)[1], MASKS, BEHAVIOUR, TEACHER, strict=True):
            m = np.array(mask, bool)
            np.testing.assert_allclose(slope[m], ((old - teacher) * share(m))[m], rtol=1e-9)


# -- a teacher's likeliest tokens ----------------------------------------------------------------


def trl(student, teacher, k, alpha, *, by, tail):
    """TRL's SDPO: both over `by`'s k likeliest tokens, and one outcome for the others or none; [C]."""
    own, its = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (student, teacher))
    ids = np.argsort(-(own if by == "student" else its), -1)[:, :k]
    S, T = (np.take_along_axis(np.exp(x), ids, -1) for x in (own, its))
    rest = lambda P: np.concatenate([P, 1 - P.sum(-1, keepdims=True)], -1) if tail else P / P.sum(-1, keepdims=True)
    S, T = rest(S), rest(T)
    kl = lambda p, q: (p * np.log(p / q)).sum(-1)
    if alpha in (0, 1):
        return kl(S, T) if alpha else kl(T, S)
    M = (1 - alpha) * S + alpha * T
    return (1 - alpha) * kl(S, M) + alpha * kl(T, M)


@pytest.mark.parametrize("kind, alpha", [("forward", 0), ("js", 0.5), ("reverse", 1)])
def test_likeliest_tokens_are_the_teachers_with_a_tail(kind, alpha):
    student, teacher = 2 * np.random.default_rng(4).normal(size=(2, 7, 12))
    ids, logp = divergence.teacher_top(jnp.asarray(teacher), 4)
    got = divergence.top(jnp.asarray(student), ids, logp, kind=kind)
    np.testing.assert_allclose(got, trl(student, teacher, 4, alpha, by="teacher", tail=True), rtol=1e-10)
    for by, tail in (("student", True), ("student", False)):  # the latter is its default
        assert np.abs(got / trl(student, teacher, 4, alpha, by=by, tail=tail) - 1).max() > 0.1
    np.testing.assert_allclose(
        divergence.top(jnp.asarray(student), *divergence.teacher_top(jnp.asarray(teacher), 12), kind=kind),
        trl(student, teacher, 12, alpha, by="student", tail=False), rtol=1e-10,
    )  # fmt: skip


# -- sampling masks ------------------------------------------------------------------------------


def test_a_sampling_mask_renormalises_as_in_slime_and_prime_rl():
    """The log-softmax of logits / temperature over what was kept; a token without a record keeps all in prime-rl, and
    in miles is certain if the environment wrote it."""
    hidden, head = (np.random.default_rng(i).normal(size=(n, 5)) for i, n in ((5, 4), (6, 11)))
    kept = np.array([[0, 3, 7, -1], [2, -1, -1, -1], [1, 4, 9, 10], [-1, -1, -1, -1]])
    target, logits = np.array([3, 2, 10, 6]), hidden @ head.T / 0.7
    got = from_hidden(*map(jnp.asarray, (hidden, head, target)), temperature=0.7, kept_AK=jnp.asarray(kept))[0]
    for value, row, ids, t in zip(got, logits, kept, target, strict=True):
        among = row[ids[ids >= 0]] if (ids >= 0).any() else row
        np.testing.assert_allclose(value, row[t] - np.logaddexp.reduce(among), rtol=1e-9, atol=1e-12)
    assert abs(float(got[1])) < 1e-12 and float(got[3]) < -0.1


# -- MaxRL ---------------------------------------------------------------------------------------


def test_maxrl_divides_by_the_mean_as_in_prime_rl_and_but_for_an_epsilon_in_skyrl():
    """In a group of one SkyRL's advantage is the reward."""
    reward, group = np.array([1.0, 0, 0, 1, 0, 0, 0.5, 1.0]), np.array([0, 0, 0, 0, 1, 1, 2, 3])
    got = advantages.group(jnp.asarray(reward[None]), jnp.asarray(group[None]), jnp.arange(8)[None], std="mean")[0]
    prime, skyrl = np.zeros(8), np.zeros(8)
    for g in range(4):
        at, mean = group == g, reward[group == g].mean()
        prime[at] = (reward[at] - mean) / mean if mean > 0 else 0
        skyrl[at] = (reward[at] - mean) / (mean + 1e-6) if at.sum() > 1 else reward[at]
    np.testing.assert_allclose(got, prime, rtol=1e-12)
    np.testing.assert_allclose(got[:6], skyrl[:6], rtol=3e-6)
    assert not np.any(got[6:]) and np.all(skyrl[6:])


# -- binary KL -----------------------------------------------------------------------------------


def bernoulli(logp, logq, eps=1e-8):
    p, q = (np.clip(np.exp(x), eps, 1 - eps) for x in (logp, logq))
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def test_dppo_has_the_gradient_of_verl():
    """A ratio, cut off where the token moved away from what sampled it by more than a bound, to the side of A."""
    rewards, bound = (2.0, -1.0, 0.5), 0.02
    spec = losses.DPPO(
        surrogate="dppo_kl", binary_kl_low=bound, binary_kl_high=bound, tv_coef=0.0, advantage={"std": "none"},
        correction={"proximal": "behaviour"},
    )  # fmt: skip
    cut, count = 0, sum(map(sum, MASKS))
    for i, slope in enumerate(learnt(spec, rewards)[1]):
        A, m = rewards[i] - np.mean(rewards), np.array(MASKS[i], bool)
        p, q = np.exp(NOW[i]), np.exp(BEHAVIOUR[i])
        moved = q * (BEHAVIOUR[i] - NOW[i]) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
        keep = (moved <= bound) | (p <= q if A > 0 else p >= q)
        wanted = -A * np.minimum(p / q, 20) * keep / count
        np.testing.assert_allclose(slope[m], wanted[m], rtol=1e-9, atol=1e-15)
        cut += int((m & ~keep).sum())
    assert 0 < cut < count


def test_kpop_masks_the_tokens_of_areal():
    """And leaves them in the denominator, unless `count_masked` is False."""
    rewards, bound = (2.0, -1.0, 0.5), 0.02
    both = lambda new, old: np.maximum(bernoulli(new, old), bernoulli(old, new))
    keep = [np.array(m, bool) & (both(*x) <= bound) for m, *x in zip(MASKS, NOW, BEHAVIOUR, strict=True)]
    count, left = sum(map(sum, MASKS)), sum(k.sum() for k in keep)
    for counted, total in ((True, count), (False, left)):
        spec = losses.GRPO(
            advantage={"std": "none"}, correction={"binary_kl": bound, "cap": np.inf, "count_masked": counted}
        )
        for i, slope in enumerate(learnt(spec, rewards)[1]):
            wanted = -(rewards[i] - np.mean(rewards)) * np.exp(NOW[i] - BEHAVIOUR[i]) * keep[i] / total
            np.testing.assert_allclose(slope, wanted, rtol=1e-9, atol=1e-15)
    assert 0 < left < count
