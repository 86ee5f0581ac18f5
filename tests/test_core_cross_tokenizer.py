"""Distillation across tokenizers: divergences over two vocabularies in float64, and rows of spans against forward
passes of each text alone."""

import types
import warnings
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_core_teacher_rows as same
import tiny
import torch

from areax import models
from areax.core import advantages, corrections, divergence, losses, metrics, packing, teacher_rows
from areax.models import frozen
from areax.rollout.types import Completion, sampled, supervised

V, W, LENGTH = 64, 48, 32
COMMON = np.array([[1, 5, 9, 33, 2], [4, 0, 9, 40, 17]])  # ids of the student's 64 and the teacher's 48 tokens


def logits(seed=0, rows=6):
    rng = np.random.default_rng(seed)
    return 2 * rng.normal(size=(rows, V)), 2 * rng.normal(size=(rows, W))


def softmax(x, temperature=1.0):
    e = np.exp(x / temperature)
    return e / e.sum(-1, keepdims=True)


def kl(p, q):
    return sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))


def by_definition(s, t, kind, beta):
    """Of one position: probabilities of common tokens and of all others in one."""
    s, t = (np.append(x[ids], 1 - x[ids].sum()) for x, ids in ((s, COMMON[0]), (t, COMMON[1])))
    m = beta * t + (1 - beta) * s
    return {"forward": kl(t, s), "reverse": kl(s, t), "js": beta * kl(t, m) + (1 - beta) * kl(s, m)}[kind]


@pytest.mark.parametrize("kind, beta, temperature", [("forward", 0.5, 1), ("reverse", 0.5, 2), ("js", 0.3, 1)])
def test_a_divergence_over_common_tokens(kind, beta, temperature):
    own, theirs = logits()
    wanted = [
        by_definition(s, t, kind, beta)
        for s, t in zip(softmax(own, temperature), softmax(theirs, temperature), strict=True)
    ]
    how = dict(kind=kind, beta=beta, temperature=temperature)
    with jax.enable_x64(True):
        got = divergence.common(jnp.asarray(own), jnp.asarray(theirs), COMMON, **how)
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
        # The likeliest tokens of the teacher, here all of them: those without a counterpart are among the others.
        ids, logp = divergence.teacher_top(jnp.asarray(theirs), W, temperature)
        to_own = np.full(W, -1)
        to_own[COMMON[1]] = COMMON[0]
        some = divergence.top_common(jnp.asarray(own), jnp.asarray(to_own)[ids], logp, **how)
        np.testing.assert_allclose(some, wanted, rtol=1e-12)
    narrow = [jnp.asarray(x, jnp.float32) for x in (own, theirs)]
    np.testing.assert_allclose(divergence.common(*narrow, COMMON, **how), wanted, atol=1e-6)
    _, pull = jax.vjp(lambda x: divergence.common(x, narrow[1], COMMON, **how), narrow[0])
    one, other = pull(jnp.ones(6))[0], jax.grad(lambda x: divergence.top_common(
        x, jnp.asarray(to_own)[ids], jnp.asarray(logp, jnp.float32), **how).sum())(narrow[0])  # fmt: skip
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_fewer_of_the_teachers_tokens_are_a_lower_bound():
    own, theirs = (jnp.asarray(x, jnp.float32) for x in logits(1))
    to_own = np.full(W, -1)
    to_own[COMMON[1]] = COMMON[0]
    whole = divergence.common(own, theirs, COMMON, kind="reverse")
    for k in (1, 7, 20):
        ids, logp = divergence.teacher_top(theirs, k)
        some = divergence.top_common(own, jnp.asarray(to_own)[ids], logp, kind="reverse")
        assert (some <= whole + 1e-6).all() and (some >= -1e-6).all()


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_of_equal_vocabularies_it_is_that_of_whole_distributions(kind):
    own, _ = logits()
    theirs, every = logits(1)[0], np.stack([np.arange(V)] * 2)
    own, theirs = (jnp.asarray(x, jnp.float32) for x in (own, theirs))
    plain, pull = jax.vjp(lambda x: divergence.full(x, theirs, kind=kind), own)
    got, pulled = jax.vjp(lambda x: divergence.common(x, theirs, every, kind=kind), own)
    np.testing.assert_allclose(got, plain, atol=1e-6)
    np.testing.assert_allclose(pulled(jnp.ones(6))[0], pull(jnp.ones(6))[0], atol=1e-6)
    assert (divergence.unmatched(own, theirs, every) == 0).all()
    ids, logp = divergence.teacher_top(theirs, 9)
    some = [f(own, ids, logp, kind=kind) for f in (divergence.top, divergence.top_common)]
    np.testing.assert_allclose(*some, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_other_tokens_are_compared_by_rank(temperature):
    """ULD, arXiv:2402.12030, equation 5, of the tokens that only one of both has."""
    own, theirs = logits()
    rest = [np.delete(softmax(x, temperature), ids, 1) for x, ids in ((own, COMMON[0]), (theirs, COMMON[1]))]
    wanted = []
    for s, t in zip(*rest, strict=True):
        s, t = sorted(s, reverse=True), sorted(t, reverse=True)
        t += [0] * (len(s) - len(t))
        wanted.append(sum(abs(a - b) for a, b in zip(s, t, strict=True)))
    with jax.enable_x64(True):
        one = partial(divergence.unmatched, common_2K=COMMON, temperature=temperature)
        np.testing.assert_allclose(one(jnp.asarray(own), jnp.asarray(theirs)), wanted, rtol=1e-12)
        # The other way round the shorter list is the student's.
        back = divergence.unmatched(jnp.asarray(theirs), jnp.asarray(own), COMMON[::-1], temperature)
        np.testing.assert_allclose(back, wanted, rtol=1e-12)
    assert not np.isnan(jax.grad(lambda x: one(x, jnp.asarray(theirs, jnp.float32)).sum())(jnp.float32(own))).any()


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.3, 0.5])
def test_the_parts_are_those_of_trl(beta):
    """GOLD's hybrid loss of spans of one token: the matched part lacks the outcome of all others, the unmatched part is
    the same; both are means over positions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gold.gold_trainer import ULDLoss
    own, theirs = logits()
    names = "crossentropy_weight distillation_weight student_temperature teacher_temperature skip_student_eos".split()
    options = dict.fromkeys([f"uld_{name}" for name in [*names, "skip_teacher_eos"]], 1.0)
    config = types.SimpleNamespace(
        **options, use_extended_uld=True, uld_use_hybrid_loss=True, uld_hybrid_matched_weight=1.0,
        uld_hybrid_unmatched_weight=1.0, uld_token_merge_strategy="bayesian", beta=beta,
    )  # fmt: skip
    loss = ULDLoss(config)
    loss._vocab_mapping = dict(zip(*COMMON[::-1].tolist(), strict=True))
    loss._teacher_matched_ids, loss._student_matched_ids = {*COMMON[1].tolist()}, {*COMMON[0].tolist()}
    loss.mapping_tensor = torch.full((W,), -1)
    loss.mapping_tensor[COMMON[1]] = torch.tensor(COMMON[0])
    s, t = softmax(own), softmax(theirs)
    leaf = torch.tensor(s, requires_grad=True)
    loss._compute_hybrid_uld_loss(leaf, torch.tensor(t))
    a, b = (1 - x[:, ids].sum(1) for x, ids in ((s, COMMON[0]), (t, COMMON[1])))
    m = beta * b + (1 - beta) * a
    others = beta * b * np.log(b / m) + (1 - beta) * a * np.log(a / m)
    with jax.enable_x64(True):
        got = divergence.common(jnp.asarray(own), jnp.asarray(theirs), COMMON, kind="js", beta=beta)
        np.testing.assert_allclose((got - others).mean(), loss.last_matched_loss.detach(), rtol=1e-9)
        by_rank = divergence.unmatched(jnp.asarray(own), jnp.asarray(theirs), COMMON)
        np.testing.assert_allclose(by_rank.mean(), loss.last_unmatched_loss.detach(), rtol=1e-9)


# -- rows ----------------------------------------------------------------------------------------


@cache
def samples():
    """Completions in spans of 1 to 3 tokens of student and teacher; the first two spans are exact."""
    rng, made = np.random.default_rng(0), []
    pieces = [[(1, 1), (1, 1), (2, 1), (0, 0), (1, 3)], [(1, 1), (1, 1)], [(1, 1), (1, 1), (3, 2), (1, 2), (1, 1)]]
    for i, counts in enumerate(pieces):
        own, theirs = (sum(each) for each in zip(*counts, strict=True))
        s = supervised(rng.integers(0, V, 3), rng.integers(0, V, own + 1), group=i, sample=i, rollout=i)
        read, before = rng.integers(0, W, 5 + i + theirs + 1).astype(np.int32), 5 + i
        numbers, span = np.zeros(len(s.tokens), np.int32), np.zeros(len(read), np.int32)
        at, there = 3, before
        for number, (n, m) in enumerate([c for c in counts if c != (0, 0)], 1):
            numbers[at : at + n], span[there : there + m] = number, number
            at, there = at + n + (number == 2), there + m + (number == 2)  # one of each is in none
        single = [np.bincount(x, minlength=numbers.max() + 1) == 1 for x in (numbers, span)]
        exact = (numbers > 0) & single[0][numbers] & single[1][numbers]
        arrays = {"teacher_span": ("target", numbers), "teacher_exact": ("target", exact)}
        made.append(s.replace(reading=(read, span), arrays=arrays))
    return made


@cache
def model(vocab, seed=0):
    config = models.config_from_hf({**same.HF, "vocab_size": vocab})
    return config, tiny.weights(models.table(config), 0.5, seed)


def alone(vocab, seed, tokens):
    """log softmax of each position in float64, of a text alone."""
    config, params = model(vocab, seed)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        row = jnp.asarray(np.pad(tokens, (0, 24 - len(tokens))))[None]
        return np.asarray(jax.nn.log_softmax(models.forward(wide, row, config=config)[0]))[: len(tokens)]


def test_the_sum_over_a_span_is_at_its_first_token():
    config, params = model(W, 1)
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), packing.pack(samples(), LENGTH, rows=2))
    score = jax.jit(partial(models.score, config=config, learnt_only=True))
    got_BT = np.asarray(teacher_rows.of_spans(score(params, teacher_rows.of(batch)).logp_BT, batch))
    for b, j in np.argwhere(batch.sample_BJ >= 0):
        s = samples()[batch.sample_BJ[b, j]]
        (read, span), numbers = s.reading, s.arrays["teacher_span"][1]
        logp = alone(W, 1, read)
        wanted = np.zeros(len(s.tokens) - 1)
        for number in range(1, numbers.max() + 1):
            of = np.flatnonzero(span == number)
            wanted[np.flatnonzero(numbers == number)[0] - 1] = logp[of - 1, read[of]].sum()
        here = np.flatnonzero(batch.segment_BT[b] == j + 1)[:-1]
        np.testing.assert_allclose(got_BT[b, here], wanted, atol=1e-5)
    told = packing.pack(samples(), LENGTH, rows=2)
    assert told.trie is None and teacher_rows.BACK in told.input
    with pytest.raises(ValueError, match="all samples need a reading if any has, got some without"):
        bare = samples()[1].replace(reading=())
        packing.pack([samples()[0], bare.replace(rollout=9)], LENGTH, rows=2)


def test_a_span_shares_its_log_ratio():
    """A_t = sum over the span of log teacher - log policy, at each of its tokens; the mean of these outside, and where
    a token of it is not learnt; 0 where the teacher's number is none."""
    rng = np.random.default_rng(1)
    made, wanted = [], []
    for i, s in enumerate(samples()):
        n, numbers = len(s.tokens), s.arrays["teacher_span"][1]
        logp, first = -rng.random(n).astype(np.float32), {int(k): int((numbers == k).argmax()) for k in numbers if k}
        teacher = np.zeros(n, np.float32)
        teacher[[*first.values()]] = -2 * rng.random(len(first))
        if i == 0:
            teacher[first[3]] = np.nan  # of a server: the span of several tokens teaches nothing
        done = Completion(s.tokens[3:].tolist(), logp[3:].tolist(), [0] * (n - 3), "stop")
        arrays = {**s.arrays, "teacher": ("target", teacher)}
        made.append(sampled(s.tokens[:3], done, temperature=1.0, rollout=i, group=i, arrays=arrays))
        sums = {k: teacher[at] - logp[numbers == k].sum() for k, at in first.items()}
        lost = np.isnan(teacher)[3:]
        wanted.append((np.array([sums.get(int(k), np.nan) for k in numbers[3:]]), lost))
    spec = losses.Policy(
        advantage=advantages.Advantage(mean="none", std="none", teacher=0.5),
        correction=corrections.Correction(proximal="behaviour"),
    )
    batch = jax.tree.map(jnp.asarray, packing.pack(made, LENGTH, rows=2))
    ready, mean = spec.prepare(batch), np.nanmean(np.concatenate([each for each, _ in wanted]))
    for got, (each, lost) in zip(packing.unpack(np.asarray(ready.adv_BT), batch, made), wanted, strict=True):
        each = np.where(np.isnan(each), mean, each)
        np.testing.assert_allclose(got[3:], 0.5 * np.where(lost, 0, each), atol=1e-6)
    one = jax.tree.map(lambda x: x[0], ready)
    report = metrics.to_dict(spec.loss(types.SimpleNamespace(logp_BT=one.logp_BT, entropy_BT=one.logp_BT), one)[1])
    counts = [(s.arrays["teacher_span"][1][3:] == 0, np.isnan(s.arrays["teacher"][1][3:])) for s in made]
    unaligned, lost = (np.concatenate(x) for x in zip(*counts, strict=True))
    np.testing.assert_allclose(report["unaligned_fraction"], unaligned[~lost].mean(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 7])
def test_the_loss_is_that_of_each_text_alone(top_k):
    (config, params), (its, weights) = model(V), model(W, 1)
    spec = losses.Distill("js", beta=0.3, top_k=top_k, sft_coef=0.2, uld_coef=0 if top_k else 0.5)
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), packing.pack(samples(), LENGTH, rows=2))
    score = partial(frozen.score, objective=spec, config=config, teacher_config=its, run=models.Run(), common_2K=COMMON)
    total, report = spec.loss(score(params, batch, weights), spec.prepare(batch))
    report, found, nll, count = metrics.to_dict(report), [], [], 0
    for s in samples():
        (read, span), numbers, exact = s.reading, *(s.arrays[f"teacher_{x}"][1] for x in ("span", "exact"))
        own, theirs, count = alone(V, 0, s.tokens), alone(W, 1, read), count + s.mask.sum()
        nll += [-own[t - 1, s.tokens[t]] for t in np.flatnonzero(s.mask)]
        for t in np.flatnonzero(exact):
            p, q = np.exp(own[t - 1]), np.exp(theirs[int((span == numbers[t]).argmax()) - 1])
            ids = COMMON
            if top_k:
                ids = COMMON[:, np.isin(COMMON[1], np.argsort(-q)[:top_k])]
            x, y = (np.append(x[i], 1 - x[i].sum()) for x, i in ((p, ids[0]), (q, ids[1])))
            m = 0.3 * y + 0.7 * x
            one = 0.3 * kl(y, m) + 0.7 * kl(x, m)
            rest = [sorted(np.delete(z, i), reverse=True) for z, i in ((p, COMMON[0]), (q, COMMON[1]))]
            rest[1] += [0] * (len(rest[0]) - len(rest[1]))
            found.append(one + (0 if top_k else 0.5 * np.abs(np.subtract(*rest)).sum()))
    np.testing.assert_allclose(total, (sum(found) + 0.2 * sum(nll)) / count, rtol=1e-5)
    np.testing.assert_allclose(report["divergence"], np.mean(found), rtol=1e-5)
    np.testing.assert_allclose(report["compared_fraction"], len(found) / count, rtol=1e-6)
    assert 0 < report["unaligned_fraction"] < 1 - report["compared_fraction"]


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 5])
def test_equal_tokenizers_have_the_loss_of_one(top_k):
    """Value and gradient."""
    (config, params), (_, weights) = model(V), model(V, 1)
    plain = [supervised([1, 2, 3], np.random.default_rng(i).integers(0, V, 4 + i), rollout=i) for i in range(3)]
    spec, every = losses.Distill("reverse", top_k=top_k), np.stack([np.arange(V)] * 2)

    def crossed(s):
        span = np.maximum(np.arange(len(s.tokens), dtype=np.int32) - 2, 0)
        arrays = {"teacher_span": ("target", span), "teacher_exact": ("target", span > 0)}
        return s.replace(reading=(s.tokens, span), arrays=arrays)

    def value(params, made, **more):
        batch = jax.tree.map(lambda x: jnp.asarray(x[0]), packing.pack(made, LENGTH, rows=2))
        score = partial(frozen.score, objective=spec, config=config, teacher_config=config, run=models.Run(), **more)
        return spec.loss(score(params, batch, weights), spec.prepare(batch))[0]

    one = jax.value_and_grad(value)(params, plain)
    other = jax.value_and_grad(partial(value, common_2K=every))(params, [*map(crossed, plain)])
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * max(1.0, float(np.abs(a).max())))


def test_what_only_two_tokenizers_have_is_refused_for_one():
    (config, params), spec = model(V), losses.Distill("reverse", uld_coef=0.5)
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), packing.pack(samples(), LENGTH, rows=2))
    score = partial(frozen.score, params, config=config, teacher_config=config, run=models.Run())
    with pytest.raises(ValueError, match="needs common_2K and a batch with teacher_span, got only one"):
        score(batch, objective=losses.Distill())
    alone = jax.tree.map(lambda x: jnp.asarray(x[0]), packing.pack([supervised([1], [2, 3])], LENGTH, rows=2))
    with pytest.raises(ValueError, match="needs common_2K and a batch with teacher_span, got only one"):
        score(alone, objective=losses.Distill(), common_2K=COMMON)
    with pytest.raises(ValueError, match="uld_coef is for a teacher with another tokenizer, got 0.5"):
        score(alone, objective=spec)
    with pytest.raises(ValueError, match="top_k must be 0 with uld_coef"):
        losses.Distill(top_k=3, uld_coef=0.5)
    assert "+ 0.5 sum_i |p_i - q_i|" in str(spec)
